"""The mixture-of-experts language models of GSPMD's Tables 6 (sparse) and 7 (hybrid).

A decoder of layers of which every other one has experts (GShard's), over `nn`'s layers: attention, a
feed-forward network or `nn.moe.layer`.  Sparse: an expert fits a device, and one mesh axis holds batch and
experts.  Hybrid (5.4, Figure 8b): an expert is itself split, experts and batch over X, hidden units and
heads over Y; the weights outside the experts lie as the dense model's.

    config = Config(layers=4, model=64, hidden=128, heads=4, experts=8, groups=8)
    params = init(config, jax.random.key(0))
    value = loss(config, params, tokens, key=jax.random.key(1))

Letters of shapes: B batch, S sequence, M model, V vocabulary, E experts, L blocks (of two layers).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardwise.models.paper import Row
from shardwise.nn import encoder_decoder_layers as blocks
from shardwise.nn import moe
from shardwise.nn.attention import causal
from shardwise.nn.encoder_decoder_config import TranslationConfig, X, Y
from shardwise.nn.strategies import descend, spec_of
from shardwise.nn.transformer import (
    Annotate,
    Array,
    Params,
    identity,
    next_token_loss,
    unembed,
)

STRATEGIES: dict[str, dict[str, tuple[int, ...]]] = {
    # GShard's annotations in the layers with experts, and the batch.
    "gshard": {"bsm": (X, -1, -1), "logits": (X, -1, -1)},
    # Figure 8b; outside the experts Table 1's 2D finalized.
    "hybrid": {
        "w_qkv": (-1, X, Y, -1),  # 3 M N D
        "w_o": (Y, -1, X),  # N D M
        "w_in": (X, Y),  # M H
        "w_out": (Y, X),  # H M
        "bsm": (X, -1, Y),
        "bsnd": (X, -1, Y, -1),
        "bsh": (X, -1, Y),
        "embedding": (-1, Y),  # V M
        "logits": (X, -1, Y),
    },
}
"""Strategy -> tensor -> dims mapping (-1: whole); the experts' tensors: `nn.moe.STRATEGIES`, same names."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and choices.

    Attributes:
      layers: a multiple of 2; every second has experts.
      model, hidden, heads, head_dim, vocab: M, H (of experts too), N, D, V; `head_dim=None`: M / N.
      experts: E; `groups`: G, into which the tokens of a batch are cut, each with its own capacity.
      aux_weight: of the experts' auxiliary losses in the loss.
      dtype: of activations and of the weights' use; remat: None or "full", of a block of two layers.
    """

    layers: int = 4
    model: int = 128
    hidden: int = 512
    heads: int = 4
    head_dim: int | None = None
    vocab: int = 256
    experts: int = 8
    groups: int = 8
    aux_weight: float = 0.01
    dtype: str = "float32"
    remat: str | None = None

    @property
    def blocks(self) -> TranslationConfig:
        """What `nn`'s layers read."""
        return TranslationConfig(
            encoder_layers=self.layers, decoder_layers=2, model=self.model, hidden=self.hidden,
            heads=self.heads, head_dim=self.head_dim, experts=self.experts, groups=self.groups,
            dtype=self.dtype, dropout=0.0, remat=self.remat,
        )  # fmt: skip


def spec(strategy: str, tensor: str, axes: tuple[str, ...] = ("x", "y")) -> P | None:
    """The annotation of a tensor outside the experts under a strategy, or None.

    Raises:
      ShardingError: no such strategy.
    """
    return spec_of(STRATEGIES, strategy, tensor, axes)


@dataclasses.dataclass(frozen=True)
class Hooks(blocks.Hooks):
    """What annotates the tensors; those of the experts as `nn.moe` says."""

    def __call__(self, x: Array, tensor: str) -> Array:
        wanted = spec(self.strategy, tensor, self.axes)
        return x if wanted is None else self.annotate(x, wanted)


def init(config: Config, key: Array) -> Params:
    """Random float32 parameters: {"embedding": [V, M], "blocks": stacked [L, ...], "norm": [M]}."""
    k_embed, k_blocks = jax.random.split(key)
    block = functools.partial(blocks.init_block, config.blocks, False)
    scale = config.model**-0.5
    return {
        "embedding": scale * jax.random.normal(k_embed, (config.vocab, config.model)),
        "blocks": jax.vmap(block)(jax.random.split(k_blocks, config.layers // 2)),
        "norm": jnp.ones((config.model,)),
    }


def abstract_params(config: Config) -> Params:
    """The parameters as `ShapeDtypeStruct`s."""
    return jax.eval_shape(functools.partial(init, config), jax.random.key(0))


def parameter_count(config: Config) -> int:
    """All parameters, embedding and norms included."""
    return sum(math.prod(p.shape) for p in jax.tree.leaves(abstract_params(config)))


def loss(
    config: Config,
    params: Params,
    tokens: Array,
    key: Array | None = None,
    annotate: Annotate = identity,
    strategy: str = "gshard",
    axes: tuple[str, ...] = ("x", "y"),
    train: bool = True,
) -> Array:
    """Mean cross entropy in nats of predicting tokens [B, S], plus the experts' auxiliary losses.

    Args:
      key: of random routing; needed to train.
    """
    stack = config.blocks
    shard = Hooks(annotate, strategy, axes)
    run = blocks.Pass(stack, shard, train)
    past, valid = causal(tokens.shape[1]), jnp.ones(tokens.shape, bool)

    def block(h: Array, layers: list[Params], key: Array | None) -> tuple[Array, Any]:
        stats = None
        for p, k in zip(layers, blocks.split_key(key, len(layers)), strict=True):
            h = blocks.self_attention(run, p, h, past, None)
            h, stats = blocks.feed_forward(run, p, h, valid, k)
        return h, stats["aux_loss"] if stats else None

    if config.remat:
        block = jax.checkpoint(block, prevent_cse=False)
    table = shard(params["embedding"], "embedding")
    h = shard(table.astype(config.dtype)[tokens], "bsm")
    keys = None if key is None else jax.random.split(key, config.layers // 2)
    h, aux = blocks.over_blocks(stack, block, h, params["blocks"], keys)
    scores = unembed(shard, table, params["norm"], h)
    return next_token_loss(scores, tokens) + config.aux_weight * jnp.sum(aux)


def sgd_step(
    config: Config,
    params: Params,
    tokens: Array,
    seed: Array,
    annotate: Annotate = identity,
    strategy: str = "gshard",
    axes: tuple[str, ...] = ("x", "y"),
    rate: float = 0.01,
) -> tuple[Params, Array]:
    """One step of plain gradient descent, routing drawn from `seed`: (new parameters, loss)."""

    def objective(params: Params) -> Array:
        return loss(config, params, tokens, jax.random.key(seed), annotate, strategy, axes)

    return descend(objective, params, rate)


def parameter_specs(
    config: Config, strategy: str = "gshard", axes: tuple[str, ...] = ("x", "y")
) -> Params:
    """Each parameter where its annotation wants it: a tree of PartitionSpec like `init`'s."""

    def of(path: Any, value: Any) -> P:
        names = [k.key for k in path if hasattr(k, "key")]
        name, expert = names[-1], "moe" in names
        if expert and name == "gate":
            return P()
        # GShard's annotations leave the experts' weights to completion; as arguments they lie so.
        wanted = spec(strategy, name, axes) if not expert else (
            moe.spec(strategy, name, axes) or P(axes[X])
        )  # fmt: skip
        if wanted is None:
            return P()
        return P(None, *wanted) if "blocks" in names else wanted

    return jax.tree_util.tree_map_with_path(of, abstract_params(config))


# ---- the paper's ---------------------------------------------------------------------------------

SEQUENCE = 1024

_COMMON = (
    "sequences of 1024 tokens, vocabulary 32000",
    "two experts a token, capacity 2 S / E, random routing (GShard)",
    "the backward pass recomputes blocks of two layers",
)
_SPARSE = (
    *_COMMON, "36 layers, M 1024, H 8192, 16 heads of 128 (GShard's, which give 577B)",
)  # fmt: skip
_HYBRID = (
    *_COMMON, "M 8192 (GLaM's), D 128, 12 layers: M x layers = 98304 gives all four counts",
    "a sequence is a group; outside the experts Table 1's finalized strategy",
)  # fmt: skip


def _sparse(experts: int, figures: tuple[float, ...], params: float | None) -> Row[Config]:
    config = Config(
        layers=36, model=1024, hidden=8192, heads=16, head_dim=128, vocab=32000, experts=experts,
        groups=experts, dtype="bfloat16", remat="full",
    )  # fmt: skip
    names = ("memory GB", "step s", "utilisation", "all-to-all")
    published: dict[str, float] = {} if params is None else {"params": params}
    published.update(zip(names, figures, strict=True))
    return Row(
        "Table 6", config, {"x": experts}, 4 * experts, published, _SPARSE,
    )  # fmt: skip


def _hybrid(
    params: float, sizes: tuple[int, int, int], y: int, batch: int, figures: tuple[float, ...]
) -> Row[Config]:
    experts, hidden, heads = sizes
    config = Config(
        layers=12, model=8192, hidden=hidden, heads=heads, head_dim=128, vocab=32000,
        experts=experts, groups=batch, dtype="bfloat16", remat="full",
    )  # fmt: skip
    published = dict(zip(("memory GB", "step s", "utilisation"), figures, strict=True))
    return Row(
        "Table 7", config, {"x": experts, "y": y}, batch, {"params": params, **published}, _HYBRID
    )


PAPER: dict[str, Row[Config]] = {
    "sparse_32": _sparse(32, (10.8, 0.98, 0.582, 0.02), 10.0),
    "sparse_128": _sparse(128, (11.2, 1.01, 0.498, 0.06), None),
    "sparse_512": _sparse(512, (11.2, 1.10, 0.498, 0.09), None),
    "sparse_2048": _sparse(2048, (11.6, 1.51, 0.468, 0.11), 577.0),
    "hybrid_33b": _hybrid(33.0, (8, 32768, 128), 4, 32, (12.3, 2.12, 0.553)),
    "hybrid_57b": _hybrid(57.0, (16, 32768, 128), 8, 128, (12.9, 2.19, 0.502)),
    "hybrid_420b": _hybrid(420.0, (32, 131072, 512), 16, 128, (11.9, 2.08, 0.508)),
    "hybrid_804b": _hybrid(804.0, (64, 131072, 512), 32, 512, (8.5, 1.92, 0.538)),
}
"""Tables 6 and 7, row by row; weights float32, activations bfloat16."""


def strategy_of(row: Row[Config]) -> str:
    """The strategy of a row of the paper."""
    return "hybrid" if "y" in row.mesh else "gshard"
