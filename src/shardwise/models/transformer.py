"""The dense Transformer language models of GSPMD's Tables 2 to 4, in a pipeline or not.

The layers, their seven annotations and the strategies are `nn.transformer`'s.  Here are the paper's
sizes (`PAPER`), and the pipeline (3.3): stages lie on a mesh axis of their own, and where there are no
stages, in the embedding and in the logits, that axis is one more of the batch (Figure 2).

    config = Config(TransformerConfig(layers=4), Pipeline(stages=2, microbatches=4))
    params = init(config, jax.random.key(0))
    f = sw.spmd(partial(loss, config, annotate=sw.annotate), mesh=sw.device_mesh({"l": 2, "x": 2, "y": 2}))
    value = f(params, tokens)

On one device `loss(config, params, tokens)` is the same number.

Letters of shapes: B batch, S sequence, M model, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from shardwise.models.paper import Row
from shardwise.nn import transformer
from shardwise.nn.strategies import descend
from shardwise.nn.transformer import (
    LAYER_TENSORS,
    Annotate,
    Array,
    Params,
    Shard,
    TransformerConfig,
    identity,
)
from shardwise.nn.transformer import STRATEGIES as STRATEGIES
from shardwise.nn.transformer import spec as spec
from shardwise.pipeline import pipeline

WEIGHTS = LAYER_TENSORS[:4]
AXES = ("l", "x", "y")
"""What the mesh's axes are called: stages (only of a pipeline), batch, model."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How the layers are cut into stages, and the batch into microbatches.

    Attributes:
      stages: devices along the stage axis.
      microbatches: of equal size; the batch is a multiple of them.
      schedule: "gpipe": a stage is a run of layers; "circular": layers are dealt round robin.
      rounds: of a circular schedule, runs of layers of one device; None: one layer each.
    """

    stages: int
    microbatches: int
    schedule: str = "gpipe"
    rounds: int | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the layers, and the pipeline they are in, if any."""

    layers: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    pipeline: Pipeline | None = None

    def __post_init__(self) -> None:
        if self.pipeline and not self.layers.scan:
            raise ValueError("the layers of a pipeline are stacked: scan must be True")


def init(config: Config, key: Array) -> Params:
    """Random float32 parameters, as `nn.transformer.init`: the same with a pipeline as without."""
    return transformer.init(config.layers, key)


def abstract_params(config: Config) -> Params:
    """The parameters as `ShapeDtypeStruct`s."""
    return transformer.abstract_params(config.layers)


def parameter_count(config: Config) -> int:
    """All parameters, embedding and norms included."""
    return sum(math.prod(p.shape) for p in jax.tree.leaves(abstract_params(config)))


def logits(
    config: Config,
    params: Params,
    tokens: Array,
    annotate: Annotate = identity,
    strategy: str = "final",
    axes: tuple[str, str, str] = AXES,
) -> Array:
    """Float32 logits [B, S, V] of the next token at every position of `tokens` [B, S]."""
    inside, outside = sharders(config, annotate, strategy, axes)
    embedding, unembedding = transformer.tables(config.layers, outside, params)
    h = transformer.embed(config.layers, outside, embedding, tokens)
    if config.pipeline is None:
        h = transformer.layers(config.layers, inside, params["layers"], h)
    else:
        layer = functools.partial(transformer.layer, config.layers, inside)
        p = config.pipeline
        h = outside(
            pipeline(
                transformer.checkpointed(config.layers, layer),
                params["layers"],
                h,
                axis=axes[0],
                num_stages=p.stages,
                num_microbatches=p.microbatches,
                schedule=p.schedule,
                rounds=p.rounds,
                annotate=annotate,
            ),
            "bsm",
        )
    return transformer.unembed(outside, unembedding, params["norm"], h)


def loss(
    config: Config,
    params: Params,
    tokens: Array,
    annotate: Annotate = identity,
    strategy: str = "final",
    axes: tuple[str, str, str] = AXES,
) -> Array:
    """Mean cross entropy, in nats, of predicting tokens [B, S] from the tokens before them."""
    scores = logits(config, params, tokens, annotate, strategy, axes)
    return transformer.next_token_loss(scores, tokens)


def sharders(
    config: Config, annotate: Annotate, strategy: str = "final", axes: tuple[str, str, str] = AXES
) -> tuple[Shard, Shard]:
    """What annotates tensors inside the layers, and what does so outside of them.

    Outside a pipeline's stages the stage axis holds batch too.
    """
    l, x, y = axes
    batch = (l, x) if config.pipeline else x

    def inside(value: Array, tensor: str) -> Array:
        return annotate(value, spec(strategy, tensor, (x, y)))

    def outside(value: Array, tensor: str) -> Array:
        return annotate(value, spec(strategy, tensor, (batch, y)))

    return inside, outside


def parameter_specs(
    config: Config, strategy: str = "final", axes: tuple[str, str, str] = AXES
) -> Params:
    """Each parameter where its annotation wants it: a tree of PartitionSpec like `init`'s.

    The layers' stack lies on the stage axis of a pipeline; norms are whole (but for their stages).
    """
    l, x, y = axes
    lead = l if config.pipeline else None
    layers = {n: P(lead, *spec(strategy, n, (x, y))) for n in WEIGHTS}
    layers |= {"attention_norm": P(lead), "ffn_norm": P(lead)}
    batch = (l, x) if config.pipeline else x
    table = spec(strategy, "embedding", (batch, y))
    out = {"embedding": table, "layers": layers, "norm": P()}
    return out if config.layers.tied else out | {"unembedding": table}


def sgd_step(
    config: Config,
    params: Params,
    tokens: Array,
    annotate: Annotate = identity,
    strategy: str = "final",
    axes: tuple[str, str, str] = AXES,
    rate: float = 0.1,
) -> tuple[Params, Array]:
    """One step of plain gradient descent: (new parameters, loss before the step)."""

    def objective(params: Params) -> Array:
        return loss(config, params, tokens, annotate, strategy, axes)

    return descend(objective, params, rate)


# ---- the paper's ---------------------------------------------------------------------------------

SEQUENCE = 1024
"""Not in the paper; the only power of two that gives Table 2's utilisation (and the authors' code's)."""

_COMMON = (
    "sequences of 1024 tokens, vocabulary 32000, tied (the authors' code; the paper has neither)",
    "feed-forward of two matrices (no gate), GELU: what Table 3's sizes and 16B parameters allow",
)
_WIDE = (*_COMMON, "128 heads of 256 (the paper prints M and H; 64B leaves N D = 4 M)")


def _config(layers: int, remat: str, wide: int = 0, pipeline: Pipeline | None = None) -> Config:
    """`wide` 0: Table 3's and 4's sizes; 1: Table 2's; 2: twice as wide."""
    sizes: dict[str, Any] = {"model": 4096, "hidden": 16384, "heads": 64, "head_dim": 128}
    if wide:
        sizes = {"model": 8192 * wide, "hidden": 65536 * wide, "heads": 128 * wide, "head_dim": 256}
    return Config(
        TransformerConfig(layers=layers, vocab=32000, remat=remat, dtype="bfloat16", **sizes),
        pipeline,
    )


def _table2() -> dict[str, Row[Config]]:
    rows = {
        # name: layers, mesh, batch, published, what is assumed of the batch
        "64b_128": (32, (8, 16), 64, (64, 15.3, 5.74, 0.627), ()),
        "64b_512": (32, (16, 32), 256, (64, None, None, None), ("mesh 16 x 32",)),
        "64b_2048": (32, (32, 64), 1024, (64, 15.56, 6.30, None), ()),
        "128b_2048": (64, (32, 64), 512, (128, 14.0, 6.31, None), ("batch 512",)),
        "256b_2048": (128, (32, 64), 256, (256, 12.9, 6.71, None), ()),
        "512b_2048": (256, (32, 64), 128, (512, 13.6, 7.64, 0.475), ()),
        "1t_2048": (
            128, (32, 64), 128, (1024, 15.8, 12.66, 0.556),
            ("batch 128", "M, H and N twice the others' (the paper: four times the parameters)"),
        ),
    }  # fmt: skip
    names = ("params", "memory GB", "step s", "utilisation")
    return {
        name: Row(
            "Table 2", _config(layers, "dots", 2 if name.startswith("1t") else 1),
            dict(zip(AXES[1:], mesh, strict=True)), batch, _given(names, figures),
            (*_WIDE, *assumed),
        )
        for name, (layers, mesh, batch, figures, assumed) in rows.items()
    }  # fmt: skip


def _table3() -> dict[str, Row[Config]]:
    rows = {
        (4, 16): (12.4, 3.56, 0.394), (16, 4): (13.8, 3.10, 0.457), (8, 16): (None, 3.43, 0.405),
        (16, 8): (None, 3.37, 0.417), (8, 32): (None, 5.71, 0.271), (32, 8): (None, 3.36, 0.413),
    }  # fmt: skip
    names = ("memory GB", "step s", "utilisation")
    assumed = (*_COMMON, "0.75 sequences a core, which makes Table 4's 24 % come out")
    return {
        f"16b_{x}x{y}": Row(
            "Table 3", _config(64, "dots"), {"x": x, "y": y}, x * y * 3 // 4,
            {"params": 16.0, **_given(names, figures)}, assumed,
        )
        for (x, y), figures in rows.items()
    }  # fmt: skip


def _table4() -> dict[str, Row[Config]]:
    rows = (
        ((2, 16, 8), 16, 64, (24.0, 0.462, 0.056, 0.223)),
        ((4, 16, 4), 16, 64, (22.3, 0.580, 0.148, 0.213)),
        ((4, 16, 4), 32, 32, (22.2, 0.518, 0.080, 0.217)),
        ((8, 16, 2), 32, 32, (23.4, 0.548, 0.165, 0.222)),
        ((8, 8, 4), 32, 32, (23.7, 0.555, 0.161, 0.206)),
    )
    names = ("step s", "utilisation", "bubbles", "recompute")
    out = {}
    for mesh, count, size, figures in rows:
        config = _config(64, "full", pipeline=Pipeline(mesh[0], count))
        out[f"16b_{'x'.join(map(str, mesh))}_{count}"] = Row(
            "Table 4", config, dict(zip(AXES, mesh, strict=True)), count * size,
            {"params": 16.0, **_given(names, figures)},
            (*_COMMON, "the backward pass recomputes a layer from its input"),
        )  # fmt: skip
    return out


def _given(names: tuple[str, ...], figures: tuple[float | None, ...]) -> dict[str, float]:
    return {n: float(f) for n, f in zip(names, figures, strict=True) if f is not None}


PAPER: dict[str, Row[Config]] = {**_table2(), **_table3(), **_table4()}
"""Tables 2, 3 and 4, row by row; weights float32, activations bfloat16."""
