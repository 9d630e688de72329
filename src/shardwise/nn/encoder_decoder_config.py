"""Sizes and sharding strategies of the translation Transformer, and the paper's own (GShard Table 1).

Depth is counted as GShard counts it: a model of 36 layers has 18 in each stack, of which every
other one, 9, has experts, so that 2048 experts a layer are 36864 in all.
"""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec as P

from shardwise.nn import moe
from shardwise.nn.gating import GatingConfig
from shardwise.nn.strategies import spec_of

X, Y = 0, 1  # mesh axes: X holds batch, groups and experts; Y heads and hidden units


@dataclasses.dataclass(frozen=True)
class TranslationConfig:
    """Sizes and choices of the model.

    Attributes:
      encoder_layers, decoder_layers: of each stack; a multiple of `moe_every`.
      model, hidden, heads, head_dim: M, H, N, D; `head_dim=None` is M / N.
      source_vocab, target_vocab: token 0 is padding in both.
      experts: E of every MoE layer; 0 makes the dense model, in which the layers that would have
        experts have `dense_width` times the hidden units.
      dense_width: 2 is the computation of a token that goes to two experts.
      moe_every: the last of so many layers has experts (GShard: 2).
      groups: G, into which the tokens of a batch are cut, each with its own capacity; a multiple
        of the devices that the batch is split over.
      gating: of the MoE layers; None is GShard's, with Lingvo's scale of the auxiliary loss.
      dispatch: "einsum" or "gather", as in `nn.moe`.
      aux_weight: of each MoE layer's auxiliary loss in the loss (Lingvo's value; GShard prints none).
      dropout: of inputs, residuals and attention weights (GShard: 0.1).
      label_smoothing: probability spread over the vocabulary.
      dtype: of activations and of the weights' use; weights, gating and softmax are float32.
      scan: stack the layers' weights and `lax.scan` over groups of `moe_every` layers; else unroll.
      remat: what the backward pass recomputes of such a group: None, "full", or "dots" (all but
        products of a weight without a batch dim).
      tied: the logits use the target embedding; else a matrix of their own.
    """

    encoder_layers: int = 2
    decoder_layers: int = 2
    model: int = 128
    hidden: int = 512
    heads: int = 4
    head_dim: int | None = None
    source_vocab: int = 8192
    target_vocab: int = 8192
    experts: int = 8
    dense_width: int = 2
    moe_every: int = 2
    groups: int = 8
    gating: GatingConfig | None = None
    dispatch: str = "einsum"
    aux_weight: float = 0.01
    dropout: float = 0.1
    label_smoothing: float = 0.0
    dtype: str = "float32"
    scan: bool = True
    remat: str | None = None
    tied: bool = True

    def __post_init__(self) -> None:
        sizes = "encoder_layers decoder_layers model hidden heads source_vocab target_vocab"
        for name in [*sizes.split(), "moe_every", "groups", "dense_width"]:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("encoder_layers", "decoder_layers"):
            if getattr(self, name) % self.moe_every:
                raise ValueError(f"{name} must be a multiple of moe_every={self.moe_every}")
        if self.head_dim is None and self.model % self.heads:
            raise ValueError(
                f"{self.heads} heads do not divide a model of {self.model}: give head_dim"
            )
        if self.experts < 0:
            raise ValueError(f"experts must not be negative: {self.experts}")
        if self.gating is not None and self.gating.experts != self.experts:
            raise ValueError(f"gating has {self.gating.experts} experts, the model {self.experts}")
        for name in ("dropout", "label_smoothing"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        if self.remat not in (None, "full", "dots"):
            raise ValueError(f"remat is None, 'full' or 'dots', not {self.remat!r}")

    @property
    def depth_per_head(self) -> int:
        return self.head_dim or self.model // self.heads

    @property
    def moe(self) -> moe.MoeConfig:
        """Of the MoE layers."""
        gating = self.gating or GatingConfig(self.experts, aux_scaled=True)
        return moe.MoeConfig(
            self.model, self.hidden, gating, dispatch=self.dispatch, dtype=self.dtype
        )


def _paper(experts: int, layers: int) -> TranslationConfig:
    return TranslationConfig(
        encoder_layers=layers // 2, decoder_layers=layers // 2, model=1024, hidden=8192, heads=16,
        head_dim=128, source_vocab=64_000, target_vocab=32_000, experts=experts, groups=experts,
        remat="full" if layers > 12 else None,
    )  # fmt: skip


PAPER: dict[str, TranslationConfig] = {
    f"moe_{experts}e_{layers}l": _paper(experts, layers)
    for experts, layers in (
        (2048, 36), (2048, 12), (512, 36), (512, 12), (128, 36), (128, 12), (2048, 60),
    )
}  # fmt: skip
"""GShard Table 1, by experts in a layer and layers in all (appendix A.2 for the other sizes)."""


STRATEGIES: dict[str, dict[str, tuple[int, ...]]] = {
    # GShard: batch, groups and experts on one axis, in its own annotations and no more.
    "gshard": {"tokens": (X, -1), "bsm": (X, -1, -1)},
    # The same, said of the experts' weights only.
    "weights": {"tokens": (X, -1)},
    # GSPMD 5.4: experts and batch on X; heads, hidden units and vocabularies on Y.
    "hybrid": {
        "tokens": (X, -1),
        "w_q": (-1, Y, -1),  # M N D
        "w_qkv": (-1, -1, Y, -1),  # 3 M N D
        "w_kv": (-1, -1, Y, -1),  # 2 M N D
        "w_o": (Y, -1, -1),  # N D M
        "w_in": (-1, Y),  # M H
        "w_out": (Y, -1),  # H M
        "bsm": (X, -1, -1),
        "bsnd": (X, -1, Y, -1),
        "bsh": (X, -1, Y),
        "embedding": (Y, -1),  # V M
        "logits": (X, -1, Y),
    },
}
"""Strategy -> tensor -> dims mapping; a tensor without one is left to completion.  The MoE layer's
are `moe.STRATEGIES` of the same names."""


def spec(strategy: str, tensor: str, axes: tuple[str, ...] = ("x", "y")) -> P | None:
    """The annotation of a tensor under a strategy, or None where it has none.

    Args:
      axes: the mesh's names for X and Y.

    Raises:
      ShardingError: no such strategy.
    """
    return spec_of(STRATEGIES, strategy, tensor, axes)
