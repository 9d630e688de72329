"""A decoder-only Transformer language model, and GSPMD's three ways to shard it (section 5.1).

The model is plain functions over a pytree of arrays and knows nothing of devices.  What it knows is
*where an annotation belongs*: it calls `annotate(x, spec)` on seven tensors of each layer (four
weights, three activations) and on the embedding and the logits.  What a call does is the caller's
choice: nothing (one device), `shardwise.annotate`, or jax's `with_sharding_constraint`.

    config = TransformerConfig(layers=2, model=128)
    params = init(config, jax.random.key(0))
    step = sw.spmd(partial(sgd_step, config, annotate=sw.annotate, strategy="final"), mesh=mesh)
    params, value = step(params, tokens)

A strategy (Table 1) is a `dims_mapping` for each tensor: which mesh axis a dim is split over, -1
for none.  Moving from one strategy to another changes data, never the model.

Letters of shapes: B batch, S sequence, M model, H hidden, N heads, D head dim, V vocabulary,
L layers.  Order comes from the causal mask alone; there is no position embedding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise.nn.strategies import Axes, descend, spec_of

Array = jax.Array
Params = dict[str, Any]
Annotate = Callable[[Array, P], Array]
Shard = Callable[[Array, str], Array]

X, Y = 0, 1  # mesh axes: X is the data (batch) axis, Y the model axis

_WEIGHTS = {
    "w_qkv": (X, Y, -1),  # M N D
    "w_o": (Y, -1, X),  # N D M
    "w_in": (X, Y),  # M H
    "w_out": (Y, X),  # H M
}

STRATEGIES: dict[str, dict[str, tuple[int, ...]]] = {
    # M on X, and H and N on Y, in every tensor: no weight is gathered; the batch is whole.
    "attempt1": {
        **_WEIGHTS,
        "bsm": (-1, -1, X),
        "bsnd": (-1, -1, Y, -1),
        "bsh": (-1, -1, Y),
        "embedding": (Y, X),
        "logits": (-1, -1, Y),
    },
    # Activations on the batch: X is data parallelism, and weights are gathered over X on demand.
    "attempt2": {
        **_WEIGHTS,
        "bsm": (X, -1, -1),
        "bsnd": (X, -1, Y, -1),
        "bsh": (X, -1, Y),
        "embedding": (-1, Y),
        "logits": (X, -1, Y),
    },
    # M of the activations on Y as well: everything that lives long is split over both axes.
    "final": {
        **_WEIGHTS,
        "bsm": (X, -1, Y),
        "bsnd": (X, -1, Y, -1),
        "bsh": (X, -1, Y),
        "embedding": (-1, Y),
        "logits": (X, -1, Y),
    },
}
"""Strategy -> tensor -> dims mapping (GSPMD Table 1; the embedding as in the authors' code)."""

LAYER_TENSORS = ("w_qkv", "w_o", "w_in", "w_out", "bsm", "bsnd", "bsh")
"""The seven tensors of a layer that carry an annotation."""
TENSORS = (*LAYER_TENSORS, "embedding", "logits")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and choices of the model.

    Attributes:
      layers, model, hidden, heads, head_dim, vocab: L, M, H, N, D, V; `head_dim=None` is M / N.
      scan: stack the layers' weights on a leading dim and `lax.scan` over them; else unroll.
      remat: what the backward pass recomputes: None nothing, "full" the whole layer, "dots" all but
        the products of a weight (attention's own products are recomputed).
      dtype: of activations and of the weights' use; the weights themselves are float32.
      tied: the logits use the embedding; else a matrix of their own.
      activation: "gelu" or "relu".
    """

    layers: int = 2
    model: int = 128
    hidden: int = 512
    heads: int = 4
    vocab: int = 256
    head_dim: int | None = None
    scan: bool = True
    remat: str | None = None
    dtype: str = "float32"
    tied: bool = True
    activation: str = "gelu"

    def __post_init__(self) -> None:
        for name in ("layers", "model", "hidden", "heads", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.head_dim is None and self.model % self.heads:
            raise ValueError(
                f"{self.heads} heads do not divide a model of {self.model}: give head_dim"
            )
        if self.remat not in (None, "full", "dots"):
            raise ValueError(f"remat is None, 'full' or 'dots', not {self.remat!r}")
        if self.activation not in ("gelu", "relu"):
            raise ValueError(f"activation is 'gelu' or 'relu', not {self.activation!r}")

    @property
    def depth_per_head(self) -> int:
        return self.head_dim or self.model // self.heads


def spec(strategy: str, tensor: str, axes: Axes = ("x", "y")) -> P:
    """The annotation of a tensor under a strategy, with the mesh's names for X and Y.

    `w_qkv` and `bsnd` hold queries, keys and values in one array, so their specs start with None.
    """
    found = spec_of(STRATEGIES, strategy, tensor, axes, TENSORS) or ()
    return P(None, *found) if tensor in ("w_qkv", "bsnd") else P(*found)


def identity(x: Array, spec: P) -> Array:
    """The annotation hook of a one-device run."""
    return x


def layer_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's parameters."""
    m, h, n, d = config.model, config.hidden, config.heads, config.depth_per_head
    return {
        "attention_norm": (m,),
        "w_qkv": (3, m, n, d),
        "w_o": (n, d, m),
        "ffn_norm": (m,),
        "w_in": (m, h),
        "w_out": (h, m),
    }


def init(config: TransformerConfig, key: Array) -> Params:
    """Random float32 parameters; the same values whether layers are stacked or a list.

    Returns:
      {"embedding": [V, M], "layers": ..., "norm": [M]} and, untied, "unembedding": [V, M].
      "layers" is one dict of stacked arrays [L, ...] when `config.scan`, else a list of L dicts.
    """
    k_embed, k_out, k_layers = jax.random.split(key, 3)
    layers = [_init_layer(config, k) for k in jax.random.split(k_layers, config.layers)]
    scale = config.model**-0.5
    shape = (config.vocab, config.model)
    params: Params = {
        "embedding": scale * jax.random.normal(k_embed, shape),
        "layers": jax.tree.map(lambda *w: jnp.stack(w), *layers) if config.scan else layers,
        "norm": jnp.ones((config.model,)),
    }
    if not config.tied:
        params["unembedding"] = scale * jax.random.normal(k_out, shape)
    return params


def _init_layer(config: TransformerConfig, key: Array) -> Params:
    shapes = layer_shapes(config)
    # What a layer adds to the residual starts small, so that deep models start well.
    residual = (2 * config.layers) ** -0.5
    heads_dim = config.heads * config.depth_per_head
    scales = {
        "w_qkv": config.model**-0.5,
        "w_o": residual * heads_dim**-0.5,
        "w_in": config.model**-0.5,
        "w_out": residual * config.hidden**-0.5,
    }
    keys = dict(zip(scales, jax.random.split(key, len(scales)), strict=True))
    return {
        name: scales[name] * jax.random.normal(keys[name], shape)
        if name in scales
        else jnp.ones(shape)
        for name, shape in shapes.items()
    }


def abstract_params(config: TransformerConfig) -> Params:
    """The parameters as `ShapeDtypeStruct`s: for planning a model that need not fit anywhere."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    shapes = layer_shapes(config)
    stacked = {name: array(config.layers, *shape) for name, shape in shapes.items()}
    listed = [{name: array(*shape) for name, shape in shapes.items()} for _ in range(config.layers)]
    table = array(config.vocab, config.model)
    params: Params = {
        "embedding": table,
        "layers": stacked if config.scan else listed,
        "norm": array(config.model),
    }
    return params if config.tied else params | {"unembedding": table}


def rms_norm(x: Array, scale: Array) -> Array:
    """x / sqrt(mean(x^2)) * scale over the last dim, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention over [B, S, N, D]; scores and softmax in float32."""
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k, preferred_element_type=jnp.float32)
    scores = scores * q.shape[-1] ** -0.5
    seq = q.shape[1]
    query = lax.broadcasted_iota(jnp.int32, (seq, seq), 0)
    past = lax.broadcasted_iota(jnp.int32, (seq, seq), 1) <= query
    probs = jax.nn.softmax(jnp.where(past, scores, -1e30), axis=-1).astype(v.dtype)
    return jnp.einsum("bnqk,bknd->bqnd", probs, v)


def layer(config: TransformerConfig, shard: Shard, p: Params, h: Array) -> Array:
    """One pre-norm layer: h [B, S, M] -> [B, S, M].  Every call of `shard` is one of the seven."""
    act = jax.nn.gelu if config.activation == "gelu" else jax.nn.relu
    weight = {
        name: shard(p[name], name).astype(h.dtype) for name in ("w_qkv", "w_o", "w_in", "w_out")
    }
    x = rms_norm(h, p["attention_norm"])
    qkv = shard(jnp.einsum("bsm,cmnd->cbsnd", x, weight["w_qkv"]), "bsnd")
    h = h + jnp.einsum("bsnd,ndm->bsm", attention(qkv[0], qkv[1], qkv[2]), weight["w_o"])
    x = rms_norm(h, p["ffn_norm"])
    hidden = act(shard(jnp.einsum("bsm,mh->bsh", x, weight["w_in"]), "bsh"))
    return shard(h + jnp.einsum("bsh,hm->bsm", hidden, weight["w_out"]), "bsm")


def tables(config: TransformerConfig, shard: Shard, params: Params) -> tuple[Array, Array]:
    """The embedding and the unembedding [V, M], which may be one, annotated."""
    embedding = shard(params["embedding"], "embedding")
    return embedding, embedding if config.tied else shard(params["unembedding"], "embedding")


def embed(config: TransformerConfig, shard: Shard, embedding: Array, tokens: Array) -> Array:
    """Rows of the embedding: tokens [B, S] -> [B, S, M]."""
    return shard(embedding.astype(config.dtype)[tokens], "bsm")


def checkpointed(config: TransformerConfig, body: Callable[..., Array]) -> Callable[..., Array]:
    """`body` (a layer), recomputed in the backward pass as `config.remat` says."""
    if not config.remat:
        return body
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(
        body, prevent_cse=not config.scan, policy=policy if config.remat == "dots" else None
    )


def layers(config: TransformerConfig, shard: Shard, params: Any, h: Array) -> Array:
    """All layers, `params["layers"]` of `init`: h [B, S, M] -> [B, S, M]."""
    body = checkpointed(config, functools.partial(layer, config, shard))
    if config.scan:
        return lax.scan(lambda h, p: (body(p, h), None), h, params)[0]
    for p in params:
        h = body(p, h)
    return h


def unembed(shard: Shard, unembedding: Array, norm: Array, h: Array) -> Array:
    """Float32 scores of every token: h [B, S, M] -> [B, S, V]."""
    h, table = rms_norm(h, norm), unembedding.astype(h.dtype)
    scores = jnp.einsum("bsm,vm->bsv", h, table, preferred_element_type=jnp.float32)
    return shard(scores, "logits")


def logits(
    config: TransformerConfig,
    params: Params,
    tokens: Array,
    annotate: Annotate = identity,
    strategy: str = "final",
    axes: tuple[str, str] = ("x", "y"),
) -> Array:
    """Float32 logits [B, S, V] of the next token at every position of `tokens` [B, S]."""

    def shard(x: Array, tensor: str) -> Array:
        return annotate(x, spec(strategy, tensor, axes))

    embedding, unembedding = tables(config, shard, params)
    h = layers(config, shard, params["layers"], embed(config, shard, embedding, tokens))
    return unembed(shard, unembedding, params["norm"], h)


def loss(
    config: TransformerConfig,
    params: Params,
    tokens: Array,
    annotate: Annotate = identity,
    strategy: str = "final",
    axes: tuple[str, str] = ("x", "y"),
) -> Array:
    """Mean cross entropy, in nats, of predicting tokens [B, S] from the tokens before them."""
    return next_token_loss(logits(config, params, tokens, annotate, strategy, axes), tokens)


def next_token_loss(scores: Array, tokens: Array) -> Array:
    """Mean cross entropy, in nats, of scores [B, S, V]: each of the token after its own [B, S]."""
    target = jnp.roll(tokens, -1, axis=1)[..., None]
    # Picking the target's score with a comparison, not a gather, keeps a split V where it is.
    is_target = lax.broadcasted_iota(tokens.dtype, scores.shape, 2) == target
    picked = jnp.sum(jnp.where(is_target, scores, 0.0), axis=-1)
    nats = jax.nn.logsumexp(scores, axis=-1) - picked
    batch, seq = tokens.shape
    known = lax.broadcasted_iota(jnp.int32, (batch, seq), 1) < seq - 1  # the last has no next token
    return jnp.sum(jnp.where(known, nats, 0.0)) / (batch * (seq - 1))


def sgd_step(
    config: TransformerConfig,
    params: Params,
    tokens: Array,
    annotate: Annotate = identity,
    strategy: str = "final",
    axes: tuple[str, str] = ("x", "y"),
    rate: float = 0.1,
) -> tuple[Params, Array]:
    """One step of plain gradient descent: (new parameters, loss before the step)."""

    def objective(params: Params) -> Array:
        return loss(config, params, tokens, annotate, strategy, axes)

    return descend(objective, params, rate)
