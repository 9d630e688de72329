"""A small stack of layers and its unpipelined run, for the tests here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw

BATCH, MODEL, HIDDEN = 16, 8, 16


def params(layers: int, seed: int = 0) -> dict[str, jax.Array]:
    k = jax.random.split(jax.random.key(seed), 3)
    return {
        "wi": 0.3 * jax.random.normal(k[0], (layers, MODEL, HIDDEN)),
        "wo": 0.3 * jax.random.normal(k[1], (layers, HIDDEN, MODEL)),
        "scale": 1 + 0.1 * jax.random.normal(k[2], (layers, MODEL)),
    }


def batch(rows: int = BATCH, seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, MODEL))


def layer(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A residual block; its weights split over model, its rows over data."""
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))  # not finite for a row of zeros
    h = jnp.tanh(sw.annotate((y * p["scale"]) @ sw.annotate(p["wi"], P(None, "model")),
                             P("data", "model")))  # fmt: skip
    return sw.annotate(x + h @ sw.annotate(p["wo"], P("model", None)), P("data", None))


def plain(params: Any, x: jax.Array) -> jax.Array:
    """One layer after the other."""
    return lax.scan(lambda h, p: (layer(p, h), None), x, params)[0]


def expected(params: Any, x: Any) -> Any:
    f = lambda p, x: jnp.mean(plain(p, x) ** 2)
    return jax.value_and_grad(f, (0, 1))(params, x)


def same(got: Any, want: Any, tol: float = 1e-5) -> None:
    """Equal but for rounding, in units of each array's largest entry."""

    def leaves(tree: Any) -> list[Any]:
        return jax.tree.leaves(tree, is_leaf=lambda a: isinstance(a, sw.PaddedArray))

    for a, b in zip(leaves(got), leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol * max(1, np.max(np.abs(b))))
