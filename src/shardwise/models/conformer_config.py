"""Sizes and sharding strategies of the Conformer, and GSPMD's own (section 5.3, Table 5).

Table 5 says parameters, layers, stages, schedule and microbatches; the text that the models are
narrower than the Transformers of 5.2.  Everything else is silent, and chosen so:

- **M = 3072, H = 4 M.**  A Conformer layer with feed-forward layers of 4 M holds 23 M^2 weights (16 in
  two feed-forward layers, 4 in attention, 3 in the convolution module).  32 layers of M = 3072 are
  6.47 x 2^30 and 64 are 12.95 x 2^30, as printed; no other multiple of 128 comes near.
- **No relative positions, and four frames stacked in place of the convolutional front end**: with a
  projection of relative positions (24 M^2) the counts could not be met, and large Conformers of the time
  (Zhang et al., arXiv 2010.10504) left out both.  From there too: a depthwise kernel of 5.
- **24 heads of 128, 80 mel bands, 512 outputs, layer norm in place of batch norm** in the convolution
  module: the microbatches of the table hold one utterance, too few for statistics of a batch.
- **A mesh of as many devices as stages.**  A microbatch of one utterance cannot be split over data, and
  with weights, gradients and Adam's moments in float32, 3.5 GB each, 8 cores hold 13.9 GB a core of
  6.47B parameters, within the 12.2 to 15.4 GB printed.
- **640 frames after stacking (25.6 s).**  The published times and utilisations come to 560 to 690.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from shardwise.models.paper import Row
from shardwise.nn.strategies import spec_of

Array = jax.Array
Shard = Callable[[Array, str], Array]
Annotate = Callable[[Array, P], Array]
Params = dict[str, Any]

X, Y = 0, 1  # mesh axes: X holds the batch, Y heads, hidden units and channels


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """How the layers are pipelined (GSPMD 3.3): the arguments of `sw.pipeline`.

    Attributes:
      axis: the mesh axis the stages are split over.
      stages, microbatches: how many of each.
      schedule: "gpipe", or "circular" with `rounds` layers, or groups of them, a device.
      dealt: the layers' parameters and state are stored in the order in which the stages of a circular
        schedule have them (`init` makes them so), and need not be moved in every step.
    """

    axis: str = "stage"
    stages: int = 1
    microbatches: int = 1
    schedule: str = "gpipe"
    rounds: int = 1
    dealt: bool = False


@dataclasses.dataclass(frozen=True)
class ConformerConfig:
    """Sizes and choices of the model.

    Attributes:
      layers, model, heads, head_dim: L, M, N, D; `head_dim=None` is M / N.
      expansion: H / M of the feed-forward layers (Gulati et al.: 4).
      kernel: rows of the depthwise convolution (Gulati et al.: 32).
      features, vocab: F, bands of a frame, and V, outputs of the head; 0 is CTC's blank.
      front_end: "conv", two convolutions of 3x3 with a stride of 2, or "stack", four frames stacked and
        projected.  Both make one frame of four.
      channels: of the convolutional front end; None is M.
      position: "relative" (Transformer-XL, as Gulati et al.) or "none".
      norm: within the convolution module: "batch" (Gulati et al.), over the valid frames of a
        microbatch, with running statistics for inference; or "layer", over a frame's channels.
      momentum: of the running statistics, what an old value keeps.
      dropout: of residuals, hidden units and attention weights (Gulati et al.: 0.1).
      dtype: of activations and of the weights' use; weights, norms and softmax are float32.
      remat: what the backward pass recomputes of a layer (of a stage, where pipelined): None, "full", or
        "dots" (all but products of a weight without a batch dim).
      pipelined: None for a loop over all layers.
    """

    layers: int = 2
    model: int = 64
    heads: int = 4
    head_dim: int | None = None
    expansion: int = 4
    kernel: int = 15
    features: int = 80
    vocab: int = 32
    front_end: str = "conv"
    channels: int | None = None
    position: str = "relative"
    norm: str = "layer"
    momentum: float = 0.99
    dropout: float = 0.1
    dtype: str = "float32"
    remat: str | None = None
    pipelined: Pipelined | None = None

    def __post_init__(self) -> None:
        for name in ["layers", "model", "heads", "expansion", "kernel", "features", "vocab"]:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.head_dim is None and self.model % self.heads:
            raise ValueError(
                f"{self.heads} heads do not divide a model of {self.model}: give head_dim"
            )
        for name, known in {
            "front_end": ("conv", "stack"),
            "position": ("relative", "none"),
            "norm": ("batch", "layer"),
            "remat": (None, "full", "dots"),
        }.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is one of {', '.join(map(repr, known))}, not {getattr(self, name)!r}"
                )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout}")

    @property
    def depth_per_head(self) -> int:
        return self.head_dim or self.model // self.heads

    @property
    def hidden(self) -> int:
        return self.expansion * self.model


ASSUMED = (
    "M 3072, H 12288 (23 M^2 weights a layer give the printed counts)",
    "24 heads of 128, depthwise kernel of 5, no relative positions, layer norm, 80 bands, 512 outputs",
    "640 frames an utterance after four were stacked to one",
    "a mesh of as many devices as stages; recomputation stage by stage",
    "CTC's loss",
)
PAPER_FRAMES = 640
"""Frames of an utterance after the front end: see above."""


def _row(
    layers: int, stages: int, microbatches: int, rounds: int, **published: float
) -> Row[ConformerConfig]:
    schedule = "gpipe" if rounds == 1 else "circular"
    config = ConformerConfig(
        layers=layers, model=3072, heads=24, head_dim=128, kernel=5, vocab=512, front_end="stack",
        position="none", dropout=0.0, dtype="bfloat16", remat="full",
        pipelined=Pipelined("stage", stages, microbatches, schedule, rounds, dealt=rounds > 1),
    )  # fmt: skip
    figures = {k.replace("_", " "): v for k, v in published.items()}
    return Row("Table 5", config, {"stage": stages}, microbatches, figures, ASSUMED)


PAPER: dict[str, Row[ConformerConfig]] = {
    "6.47B, GPipe, 64x1": _row(32, 8, 64, 1, params=6.47, step_s=8.4, bubbles=0.096),
    "6.47B, GPipe, 16x1": _row(32, 8, 16, 1, params=6.47, step_s=2.8, bubbles=0.299),
    "6.47B, circular, 16x1": _row(32, 8, 16, 4, params=6.47, step_s=2.3, bubbles=0.09),
    "12.95B, GPipe, 128x1": _row(
        64, 16, 128, 1, params=12.95, step_s=18.37, bubbles=0.104, utilisation=0.605
    ),
    "12.95B, GPipe, 32x1": _row(64, 16, 32, 1, params=12.95, bubbles=0.31),
    "12.95B, circular, 32x1": _row(
        64, 16, 32, 4, params=12.95, step_s=4.42, bubbles=0.1, utilisation=0.506
    ),
}
"""Table 5, by parameters, schedule, and microbatches x utterances of each."""


STRATEGIES: dict[str, dict[str, tuple[int, ...]]] = {
    # The batch everywhere.  With X the stages' axis: data parallelism in the front end and the head,
    # stages in between (GSPMD Figure 2).
    "data": {"features": (X, -1, -1), "logits": (X, -1, -1)},
    # Heads, hidden units and channels on Y; activations on the batch.
    "model": {
        "features": (X, -1, -1),
        "w_in": (-1, Y),  # M H
        "w_out": (Y, -1),  # H M
        "w_qkv": (-1, -1, Y, -1),  # 3 M N D
        "w_position": (-1, Y, -1),  # M N D
        "w_o": (Y, -1, -1),  # N D M
        "w_gate": (-1, -1, Y),  # 2 M M
        "w_depth": (-1, Y),  # K M
        "w_point": (Y, -1),  # M M
        "bth": (X, -1, Y),
        "btnd": (-1, X, -1, Y, -1),
        "btc": (X, -1, Y),
        "btm": (X, -1, -1),
        "logits": (X, -1, -1),
    },
}
"""Strategy -> tensor -> dims mapping.  No annotation names the stages: `sw.pipeline` makes its own."""


def spec(strategy: str, tensor: str, axes: tuple[str, ...] = ("x", "y")) -> P | None:
    """The annotation of a tensor under a strategy, or None where it has none.

    Args:
      axes: the mesh's names for X and Y.

    Raises:
      ShardingError: no such strategy.
    """
    return spec_of(STRATEGIES, strategy, tensor, axes)


def sharder(annotate: Annotate, strategy: str, axes: tuple[str, ...] = ("x", "y")) -> Shard:
    """The hook the model takes, from `sw.annotate` (or jax's constraint) and a strategy."""

    def shard(value: Array, name: str) -> Array:
        s = spec(strategy, name, axes)
        return value if s is None else annotate(value, s)

    return shard


def one_device(value: Array, name: str) -> Array:
    """The hook of a one-device run."""
    return value
