"""Attention of several heads under any mask, positions as sinusoids, and dropout.

Letters of shapes: B batch, Q queries, K keys, N heads, D head dim, M model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

MASKED = -1e30  # a score that softmax turns into zero, and finite: a row of nothing else is no NaN


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """x with each entry zeroed with probability `rate` and the others scaled up by 1/(1 - rate).

    Args:
      key: None for no dropout.
    """
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), jnp.zeros((), x.dtype))


def attend(
    q: Array, k: Array, v: Array, mask: Array, rate: float = 0.0, key: Array | None = None
) -> Array:
    """Attention of q [B, Q, N, D] to k, v [B, K, N, D]; scores and softmax in float32.

    Args:
      mask: bool, broadcast against [B, N, Q, K]: True where a query may look.
      rate, key: dropout of the attention weights.

    Returns:
      [B, Q, N, D].
    """
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * q.shape[-1] ** -0.5, MASKED)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bnqk,bknd->bqnd", dropout(probs, rate, key), v)


def causal(length: int) -> Array:
    """bool [1, 1, Q, K]: a position sees itself and those before it."""
    query = lax.broadcasted_iota(jnp.int32, (1, 1, length, length), 2)
    return lax.broadcasted_iota(jnp.int32, (1, 1, length, length), 3) <= query


def sinusoids(positions: Array, model: int) -> Array:
    """float32 [..., M]: sines, then cosines, of wavelengths from 2 pi to 20000 pi (Vaswani 2017, 3.5).

    Args:
      positions: int [...], also traced.
    """
    half = (model + 1) // 2
    scale = jnp.exp(-jnp.log(10_000.0) * jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angles = positions[..., None].astype(jnp.float32) * scale
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[..., :model]
