"""Reductions over dims: sum, prod, max, min, and, or, xor.

A split reduced dim leaves a pending reduction of the same kind; padding is replaced by the
operation's identity first.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn

KINDS = {
    lax.reduce_sum_p: "sum",
    lax.reduce_prod_p: "prod",
    lax.reduce_max_p: "max",
    lax.reduce_min_p: "min",
    lax.reduce_and_p: "and",
    lax.reduce_or_p: "or",
    lax.reduce_xor_p: "xor",
}


def identity(op: str, dtype: Any) -> Any:
    """The value that does not change a reduction: 0 for sum, -inf (or the least number) for max."""
    if op in ("sum", "or", "xor"):
        return np.zeros((), dtype)
    if op == "prod":
        return np.ones((), dtype)
    if op == "and":
        return np.invert(np.zeros((), dtype))
    if dtype == np.dtype(bool):
        return np.array(op == "min")
    if jnp.issubdtype(dtype, jnp.inexact):
        infinity = np.array(-np.inf if op == "max" else np.inf).astype(dtype)
        if not np.isnan(infinity.astype(np.float32)):
            return infinity
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype)
    return np.array(info.min if op == "max" else info.max, dtype)


@rule(*KINDS, level="reduce")
def _reduce(eqn: Eqn) -> FactorRule:
    """`i j -> i  sum=j`."""
    b = RuleBuilder()
    (x,) = eqn.invars
    dims, axes = b.factors(x.shape), eqn.params["axes"]
    op = KINDS[eqn.primitive]
    return b.build(
        [dims],
        [[d for i, d in enumerate(dims) if i not in axes]],
        reduced={dims[i]: op for i in axes},
        linear=((0,),) if op == "sum" else (),
    )


@local(*KINDS)
def _reduce_local(ctx: LocalContext, eqn: Eqn, x: Any) -> Any:
    op = KINDS[eqn.primitive]
    for dim in eqn.params["axes"]:
        if ctx.ins[0].uneven(dim):
            x = ctx.mask(x, ctx.ins[0], dim, identity(op, x.dtype))
    params = dict(eqn.params)
    if "out_sharding" in params:
        params["out_sharding"] = None
    return eqn.primitive.bind(x, **params)
