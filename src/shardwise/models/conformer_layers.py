"""The parts of a Conformer layer (Gulati et al., arXiv 2005.08100), and its parameters.

    x + 1/2 FFN, + attention, + convolution, + 1/2 FFN, layer norm

Letters of shapes: B batch, T frames, M model, H hidden, N heads, D head dim, K kernel rows.
`valid` is bool [B, T]: frames that are of the utterance.  What is not valid holds numbers that reach no
valid frame: attention does not look there, and the convolution and its norm find zeros.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from shardwise.models.conformer_config import Array, ConformerConfig, Params, Shard
from shardwise.nn.attention import MASKED, dropout, sinusoids

State = dict[str, Array]
Keys = list[Array] | list[None]


def layer_shapes(config: ConformerConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's parameters, `part.name`."""
    m, h, k = config.model, config.hidden, config.kernel
    n, d = config.heads, config.depth_per_head
    shapes: dict[str, tuple[int, ...]] = {}
    for ffn in ("ffn1", "ffn2"):
        shapes |= {f"{ffn}.w_in": (m, h), f"{ffn}.b_in": (h,)}
        shapes |= {f"{ffn}.w_out": (h, m), f"{ffn}.b_out": (m,)}
    shapes |= {"attention.w_qkv": (3, m, n, d), "attention.w_o": (n, d, m), "attention.b_o": (m,)}
    if config.position == "relative":
        shapes |= {"attention.w_position": (m, n, d)}
        shapes |= {"attention.u_content": (n, d), "attention.u_position": (n, d)}
    shapes |= {"conv.w_gate": (2, m, m), "conv.b_linear": (m,), "conv.b_gate": (m,)}
    shapes |= {"conv.w_depth": (k, m), "conv.b_depth": (m,)}
    shapes |= {"conv.w_point": (m, m), "conv.b_point": (m,)}
    for norm in ("ffn1", "attention", "conv", "conv_inner", "ffn2", "last"):
        shapes |= {f"{norm}.scale": (m,), f"{norm}.shift": (m,)}
    return shapes


def init_layer(config: ConformerConfig, key: Array) -> Params:
    """Random float32 parameters of a layer, one flat dict."""
    m, h = config.model, config.hidden
    # What a layer adds to the residual starts small, so that deep models start well.
    residual = (2 * config.layers) ** -0.5
    out = residual * (config.heads * config.depth_per_head) ** -0.5
    scales = {
        "w_in": m**-0.5, "w_out": residual * h**-0.5, "w_qkv": m**-0.5, "w_o": out,
        "w_position": m**-0.5, "u_content": 0.02, "u_position": 0.02, "w_gate": m**-0.5,
        "w_depth": config.kernel**-0.5, "w_point": residual * m**-0.5,
    }  # fmt: skip
    params: Params = {}
    for i, (name, shape) in enumerate(layer_shapes(config).items()):
        last = name.split(".")[-1]
        if last in scales:
            params[name] = scales[last] * jax.random.normal(jax.random.fold_in(key, i), shape)
        else:
            params[name] = jnp.ones(shape) if last == "scale" else jnp.zeros(shape)
    return params


def init_layer_state(config: ConformerConfig) -> State:
    """Running statistics of a layer's batch norm: mean and variance, [M]."""
    return {"mean": jnp.zeros(config.model), "variance": jnp.ones(config.model)}


def layer_norm(x: Array, p: Params, name: str) -> Array:
    """Layer norm over the last dim, computed in float32."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * p[f"{name}.scale"] + p[f"{name}.shift"]).astype(x.dtype)


def split_key(key: Array | None, parts: int) -> Keys:
    return [None] * parts if key is None else list(jax.random.split(key, parts))


def feed_forward(
    config: ConformerConfig, shard: Shard, p: Params, x: Array, keys: Keys, name: str
) -> Array:
    """Norm, linear to H, swish, linear to M: [B, T, M] -> [B, T, M]."""
    w_in = shard(p[f"{name}.w_in"], "w_in").astype(x.dtype)
    w_out = shard(p[f"{name}.w_out"], "w_out").astype(x.dtype)
    y = layer_norm(x, p, name)
    y = shard(jnp.einsum("btm,mh->bth", y, w_in), "bth") + p[f"{name}.b_in"].astype(x.dtype)
    y = dropout(jax.nn.swish(y), config.dropout, keys[0])
    y = jnp.einsum("bth,hm->btm", y, w_out) + p[f"{name}.b_out"].astype(x.dtype)
    return dropout(y, config.dropout, keys[1])


def relative_scores(q: Array, r: Array) -> Array:
    """q_i . r_(i-j) for all i and j (Dai et al., arXiv 1901.02860, appendix B).

    Args:
      q: [B, T, N, D].
      r: [2T-1, N, D], of distances T-1 down to 1-T.

    Returns:
      float32 [B, N, T, T].
    """
    s = jnp.einsum("btnd,rnd->bntr", q, r, preferred_element_type=jnp.float32)
    b, n, t, _ = s.shape
    # Row i wants entries T-1-i .. 2T-2-i: read with rows one entry longer, each starts one earlier.
    s = jnp.pad(s, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(b, n, 2 * t, t)[:, :, 1:]
    return s.reshape(b, n, t, 2 * t - 1)[..., :t]


def attention(
    config: ConformerConfig, shard: Shard, p: Params, x: Array, valid: Array, keys: Keys
) -> Array:
    """Self-attention over the valid frames: [B, T, M] -> [B, T, M]; scores and softmax in float32."""
    w_qkv = shard(p["attention.w_qkv"], "w_qkv").astype(x.dtype)
    w_o = shard(p["attention.w_o"], "w_o").astype(x.dtype)
    y = layer_norm(x, p, "attention")
    q, k, v = shard(jnp.einsum("btm,cmnd->cbtnd", y, w_qkv), "btnd")
    if config.position == "relative":
        t = x.shape[1]
        w = shard(p["attention.w_position"], "w_position").astype(x.dtype)
        distances = sinusoids(jnp.arange(t - 1, -t, -1), config.model).astype(x.dtype)
        content, position = (p[f"attention.u_{u}"].astype(x.dtype) for u in ("content", "position"))
        scores = jnp.einsum("bqnd,bknd->bnqk", q + content, k, preferred_element_type=jnp.float32)
        scores += relative_scores(q + position, jnp.einsum("rm,mnd->rnd", distances, w))
    else:
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(valid[:, None, None, :], scores * q.shape[-1] ** -0.5, MASKED)
    probs = dropout(jax.nn.softmax(scores, axis=-1).astype(x.dtype), config.dropout, keys[0])
    y = jnp.einsum("bqnd,ndm->bqm", jnp.einsum("bnqk,bknd->bqnd", probs, v), w_o)
    return dropout(y + p["attention.b_o"].astype(x.dtype), config.dropout, keys[1])


def convolution(
    config: ConformerConfig, shard: Shard, p: Params, x: Array, valid: Array, keys: Keys,
    state: State | None, train: bool,
) -> tuple[Array, State | None]:  # fmt: skip
    """Norm, gated linear unit, depthwise convolution over frames, norm, swish, linear.

    Returns:
      [B, T, M], and the running statistics after this batch (None where there are none).
    """
    w_gate = shard(p["conv.w_gate"], "w_gate").astype(x.dtype)
    w_depth = shard(p["conv.w_depth"], "w_depth").astype(x.dtype)
    w_point = shard(p["conv.w_point"], "w_point").astype(x.dtype)
    y = layer_norm(x, p, "conv")
    linear, gate = jnp.einsum("btm,gmc->gbtc", y, w_gate)
    linear, gate = (
        linear + p["conv.b_linear"].astype(x.dtype),
        gate + p["conv.b_gate"].astype(x.dtype),
    )
    y = shard(linear * jax.nn.sigmoid(gate), "btc")
    y = jnp.where(valid[..., None], y, jnp.zeros((), y.dtype))
    y = depthwise(y, w_depth) + p["conv.b_depth"].astype(x.dtype)
    if config.norm == "batch":
        y, state = batch_norm(config, y, p, valid, state, train)
    else:
        y = layer_norm(y, p, "conv_inner")
    y = jnp.einsum("btc,cm->btm", shard(jax.nn.swish(y), "btc"), w_point)
    return dropout(y + p["conv.b_point"].astype(x.dtype), config.dropout, keys[0]), state


def depthwise(x: Array, w: Array) -> Array:
    """Each channel convolved with its own kernel, frames outside being zeros: [B, T, M], [K, M]."""
    return lax.conv_general_dilated(
        x, w[:, None, :], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[-1],
    )  # fmt: skip


def batch_norm(
    config: ConformerConfig, x: Array, p: Params, valid: Array, state: State | None, train: bool
) -> tuple[Array, State | None]:
    """Batch norm over the valid frames, in training; by the running statistics otherwise."""
    y = x.astype(jnp.float32)
    running = init_layer_state(config) if state is None else state
    now = running
    if train:
        weight = valid[..., None].astype(jnp.float32)
        count = jnp.maximum(jnp.sum(weight), 1.0)
        mean = jnp.sum(y * weight, axis=(0, 1)) / count
        now = {"mean": mean, "variance": jnp.sum(jnp.square(y - mean) * weight, (0, 1)) / count}
    y = (y - now["mean"]) * lax.rsqrt(now["variance"] + 1e-6)
    y = y * p["conv_inner.scale"] + p["conv_inner.shift"]
    keep = config.momentum if train else 1.0
    after = jax.tree.map(lambda a, b: keep * a + (1.0 - keep) * lax.stop_gradient(b), running, now)
    return y.astype(x.dtype), None if state is None else after


def layer(
    config: ConformerConfig, shard: Shard, p: Params, x: Array, valid: Array,
    state: State | None = None, key: Array | None = None, train: bool = True,
) -> tuple[Array, State | None]:  # fmt: skip
    """One Conformer layer: [B, T, M] -> [B, T, M], and its running statistics."""
    keys = split_key(key, 7)
    with_parts = functools.partial(feed_forward, config, shard, p)
    x = x + 0.5 * with_parts(x, keys[:2], "ffn1")
    x = x + attention(config, shard, p, x, valid, keys[2:4])
    y, state = convolution(config, shard, p, x, valid, keys[4:5], state, train)
    x = x + y
    x = x + 0.5 * with_parts(x, keys[5:], "ffn2")
    return shard(layer_norm(x, p, "last"), "btm"), state
