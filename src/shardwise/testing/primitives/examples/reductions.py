"""Reductions, scans along a dim, order, windows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.testing.primitives.examples.table import bools, example, floats, ints

for _name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"):
    example(_name, "Reductions", functools.partial(getattr(lax, _name), axes=(1,)), floats(5, 3))
for _name in ("reduce_and", "reduce_or"):
    example(_name, "Reductions", functools.partial(getattr(lax, _name), axes=(1,)), bools(5, 3))
example("reduce_xor", "Reductions", lambda x: lax.reduce_xor(x, (1,)), ints(5, 3))
example("argmax", "Reductions", lambda x: lax.argmax(x, 1, np.int32), floats(5, 3))
example("argmin", "Reductions", lambda x: lax.argmin(x, 1, np.int32), floats(5, 3))
example("reduce", "Reductions",
        lambda x, y: lax.reduce((x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)),
        floats(5, 3), floats(5, 3))  # fmt: skip

for _name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    example(_name, "Along a dim", functools.partial(getattr(lax, _name), axis=0), floats(5, 3))

example("sort", "Order", lambda x, y: lax.sort((x, y), dimension=0), floats(7, 3), ints(7, 3))
example("top_k", "Order", lambda x: lax.top_k(x, 2), floats(3, 7))
example("approx_top_k", "Order", lambda x: lax.approx_max_k(x, 2), floats(3, 7))

_WINDOW = ((1, 3), (1, 2), ((0, 0), (1, 1)))
for _name, _init, _op in (
    ("reduce_window_sum", 0.0, lax.add), ("reduce_window_max", -jnp.inf, lax.max),
    ("reduce_window_min", jnp.inf, lax.min),
):  # fmt: skip
    example(_name, "Windows",
            lambda x, i=_init, f=_op: lax.reduce_window(x, i, f, *_WINDOW), floats(3, 9))  # fmt: skip
example("reduce_window", "Windows",
        lambda x: lax.reduce_window(x, 1.0, lax.mul, *_WINDOW), floats(3, 9))  # fmt: skip
example("select_and_scatter_add", "Windows",
        lambda x: jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *_WINDOW).sum())(x),
        floats(3, 9))  # fmt: skip
example("select_and_gather_add", "Windows",
        lambda x, t: jax.jvp(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *_WINDOW), (x,), (t,)),
        floats(3, 9), floats(3, 9))  # fmt: skip


def _select_and_scatter(x: Any, y: Any) -> Any:
    """The gradient of a pooling by any comparison, scattered by any sum."""
    s = jax.ShapeDtypeStruct((), np.float32)
    select, scatter = (jax.make_jaxpr(f)(s, s) for f in (lax.ge, lax.add))
    return lax.select_and_scatter_p.bind(
        x, y, jnp.float32(0), select_jaxpr=select.jaxpr, select_consts=(),
        scatter_jaxpr=scatter.jaxpr, scatter_consts=(), window_dimensions=(1, 2),
        window_strides=(1, 2), padding=((0, 0), (0, 0)),
    )  # fmt: skip


example("select_and_scatter", "Windows", _select_and_scatter, floats(3, 8), floats(3, 4))
