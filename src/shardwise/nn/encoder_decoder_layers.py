"""The layers of the translation model, and the parameters of each.

Letters of shapes: B batch, S positions (T of the target), M model, H hidden, N heads, D head dim,
V vocabulary, L blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise.nn import moe
from shardwise.nn.attention import attend, dropout, sinusoids
from shardwise.nn.encoder_decoder_config import TranslationConfig, X, spec
from shardwise.nn.gating import regroup, ungroup
from shardwise.nn.transformer import identity as identity
from shardwise.nn.transformer import rms_norm

Array = jax.Array
Params = dict[str, Any]

PAD = 0


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What annotates the model's tensors, and those of its MoE layers.

    Attributes:
      annotate: called as `annotate(x, spec)` on each tensor that the strategy has a spec for.
      axes: the mesh's names for X and, where the strategy splits over two axes, Y.
    """

    annotate: Callable[[Array, P], Array] = identity
    strategy: str = "gshard"
    axes: tuple[str, ...] = ("x", "y")

    @property
    def splits(self) -> bool:
        return self.annotate is not identity

    def __call__(self, x: Array, tensor: str) -> Array:
        wanted = spec(self.strategy, tensor, self.axes)
        return x if wanted is None else self.annotate(x, wanted)

    def moe(self, x: Array, tensor: str) -> Array:
        wanted = moe.spec(self.strategy, tensor, self.axes)
        return x if wanted is None else self.annotate(x, wanted)


ONE_DEVICE = Hooks()


# -- parameters -------------------------------------------------------------------------------------


def layer_shapes(config: TranslationConfig, decoder: bool, last: bool) -> dict[str, Any]:
    """Shapes of one layer's parameters, without experts.

    Args:
      decoder: with attention to the source.
      last: of its block: the layer that has experts, or is wide in the dense model.
    """
    m, n, d = config.model, config.heads, config.depth_per_head
    h = config.hidden * config.dense_width if last and not config.experts else config.hidden
    shapes: dict[str, Any] = {"attention_norm": (m,), "w_qkv": (3, m, n, d), "w_o": (n, d, m)}
    if decoder:
        shapes |= {"cross_norm": (m,), "w_q": (m, n, d), "w_kv": (2, m, n, d), "w_co": (n, d, m)}
    shapes["ffn_norm"] = (m,)
    return shapes if last and config.experts else shapes | {"w_in": (m, h), "w_out": (h, m)}


def init_block(config: TranslationConfig, decoder: bool, key: Array) -> list[Params]:
    keys = jax.random.split(key, config.moe_every)
    return [init_layer(config, decoder, i == config.moe_every - 1, k) for i, k in enumerate(keys)]


def init_layer(config: TranslationConfig, decoder: bool, last: bool, key: Array) -> Params:
    # What a layer adds to the residual starts small, so that deep models start well.
    layers = config.decoder_layers if decoder else config.encoder_layers
    residual = (2 * layers) ** -0.5
    k_moe, *keys = jax.random.split(key, 8)
    params: Params = {}
    for name, shape in layer_shapes(config, decoder, last).items():
        if len(shape) == 1:
            params[name] = jnp.ones(shape)
            continue
        inputs = {"w_o": shape[0] * shape[1], "w_co": shape[0] * shape[1], "w_out": shape[0]}
        scale = inputs.get(name, config.model) ** -0.5 * (residual if name in inputs else 1.0)
        params[name] = scale * jax.random.normal(keys.pop(), shape)
    if last and config.experts:
        experts = moe.init(config.moe, k_moe)
        params["moe"] = experts | {"w_out": residual * experts["w_out"]}
    return params


# -- layers ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pass:
    """What every layer of one forward pass shares.

    Attributes:
      train: dropout, random routing and the training capacity.
    """

    config: TranslationConfig
    shard: Hooks
    train: bool

    def drop(self, x: Array, key: Array | None) -> Array:
        return dropout(x, self.config.dropout, key if self.train else None)

    def weight(self, p: Params, name: str, tensor: str | None = None) -> Array:
        return self.shard(p[name], tensor or name).astype(self.config.dtype)


def self_attention(run: Pass, p: Params, h: Array, mask: Array, key: Array | None) -> Array:
    """h [B, S, M] plus attention to itself."""
    k_weights, k_out = split_key(key, 2)
    q, k, v = project_qkv(run, p, h)
    rate = run.config.dropout if run.train else 0.0
    return add_heads(run, p, "w_o", h, attend(q, k, v, mask, rate, k_weights), k_out)


def project_qkv(run: Pass, p: Params, h: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values [B, S, N, D] of normed h [B, S, M]."""
    x = rms_norm(h, p["attention_norm"])
    qkv = jnp.einsum("bsm,cmnd->cbsnd", x, run.weight(p, "w_qkv"))
    q, k, v = (run.shard(qkv[i], "bsnd") for i in range(3))
    return q, k, v


def project_kv(run: Pass, p: Params, memory: Array) -> tuple[Array, Array]:
    """Keys and values [B, S, N, D] of the encoder's output [B, S, M]."""
    kv = jnp.einsum("bsm,cmnd->cbsnd", memory, run.weight(p, "w_kv"))
    return run.shard(kv[0], "bsnd"), run.shard(kv[1], "bsnd")


def cross_attention(
    run: Pass, p: Params, h: Array, kv: tuple[Array, Array], mask: Array, key: Array | None
) -> Array:
    """h [B, T, M] plus attention to the source's keys and values [B, S, N, D]."""
    k_weights, k_out = split_key(key, 2)
    x = rms_norm(h, p["cross_norm"])
    q = run.shard(jnp.einsum("bsm,mnd->bsnd", x, run.weight(p, "w_q")), "bsnd")
    rate = run.config.dropout if run.train else 0.0
    return add_heads(run, p, "w_co", h, attend(q, *kv, mask, rate, k_weights), k_out)


def add_heads(
    run: Pass, p: Params, name: str, h: Array, heads: Array, key: Array | None = None
) -> Array:
    """h [B, S, M] plus what attention's heads [B, S, N, D] say."""
    out = jnp.einsum("bsnd,ndm->bsm", heads, run.weight(p, name, "w_o"))
    return run.shard(h + run.drop(out, key), "bsm")


def feed_forward(
    run: Pass, p: Params, h: Array, valid: Array, key: Array | None
) -> tuple[Array, Any]:
    """h [B, S, M] plus the feed-forward layer, and an MoE layer's statistics (else None).

    Args:
      valid: bool [B, S], False at padding, which no expert takes.
    """
    k_gate, k_out = split_key(key, 2)
    x = rms_norm(h, p["ffn_norm"])
    stats = None
    if "moe" in p:
        y, stats = experts(run, p["moe"], x, valid, k_gate)
    else:
        hidden = jnp.einsum("bsm,mh->bsh", x, run.weight(p, "w_in"))
        hidden = jax.nn.relu(run.shard(hidden, "bsh"))
        y = jnp.einsum("bsh,hm->bsm", hidden, run.weight(p, "w_out"))
    return run.shard(h + run.drop(y, k_out), "bsm"), stats


def experts(
    run: Pass, p: Params, x: Array, valid: Array, key: Array | None
) -> tuple[Array, dict[str, Array]]:
    """The MoE layer on x [B, S, M], its tokens cut into groups.

    Returns:
      y [B, S, M], and `GatingStats` as a dict with "sequence_overflow" [B]: how many of a sequence's
      tokens no expert took.
    """
    (batch, length, _), config = x.shape, run.config
    groups, grouped_valid = regroup(x, config.groups, valid)
    y, stats = moe.layer(
        config.moe, p, groups, key=key, train=run.train, valid=grouped_valid, shard=run.shard.moe,
        axis=run.shard.axes[X] if config.dispatch == "gather" and run.shard.splits else None,
    )  # fmt: skip
    y = ungroup(y, batch, length)
    lost = valid & ~jnp.any(y != 0, axis=-1)  # the layer's promise: no expert, then y = 0
    return y, {**vars(stats), "sequence_overflow": jnp.sum(lost, axis=1, dtype=jnp.float32)}


def split_key(key: Array | None, count: int) -> list[Any]:
    """`count` keys, or Nones."""
    return [None] * count if key is None else list(jax.random.split(key, count))


# -- around the layers -------------------------------------------------------------------------------


def over_blocks(
    config: TranslationConfig, body: Callable[..., Any], h: Array, blocks: Any, extra: Any
) -> tuple[Array, Any]:
    """h and the stacked second results of `h, out = body(h, block, extra)` over a stack's blocks.

    Args:
      blocks: stacked or a list, as `config.scan` says.
      extra: a tree of arrays [L, ...], or None.
    """
    if config.scan:
        return lax.scan(lambda h, x: body(h, *x), h, (blocks, extra))
    outs = []
    for i, block in enumerate(blocks):
        h, out = body(h, block, jax.tree.map(lambda x, i=i: x[i], extra))
        outs.append(out)
    return h, jax.tree.map(lambda *x: jnp.stack(x), *outs)


def embed(run: Pass, params: Params, name: str, tokens: Array, at: Array, key: Any) -> Array:
    """Tokens [B, S] at positions `at` (int, broadcast against them) -> [B, S, M], dropped out."""
    config = run.config
    table = run.shard(params[name], "embedding").astype(config.dtype)
    h = table[tokens] * config.model**0.5 + sinusoids(at, config.model).astype(config.dtype)
    return run.shard(run.drop(h, key), "bsm")


def logits(run: Pass, params: Params, h: Array) -> Array:
    """Float32 logits [B, T, V] of normed h [B, T, M]."""
    name = "target_embedding" if run.config.tied else "unembedding"
    table = run.shard(params[name], "embedding").astype(h.dtype)
    scores = jnp.einsum("btm,vm->btv", h, table, preferred_element_type=jnp.float32)
    return run.shard(scores, "logits")
