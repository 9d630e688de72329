"""Primitives that only rename, add or drop dims: broadcast, transpose, squeeze."""

from __future__ import annotations

from typing import Any

from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn


@rule(lax.broadcast_in_dim_p, level="broadcast")
def _broadcast_in_dim(eqn: Eqn) -> FactorRule:
    """`i -> i j`: new dims, and dims of size 1 made larger, belong to the result only."""
    x, (y,) = eqn.invars[0], eqn.outvars
    b = RuleBuilder()
    out = b.factors(y.shape)
    where = eqn.params["broadcast_dimensions"]
    operand = [out[j] if x.shape[i] == y.shape[j] else None for i, j in enumerate(where)]
    return b.build([operand], [out], linear=((0,),))


@local(lax.broadcast_in_dim_p)
def _broadcast_in_dim_local(ctx: LocalContext, eqn: Eqn, x: Any, *_: Any) -> Any:
    return lax.broadcast_in_dim(x, ctx.local_out(), eqn.params["broadcast_dimensions"])


@rule(lax.transpose_p, level="dims")
def _transpose(eqn: Eqn) -> FactorRule:
    """`i j k -> j k i` for the permutation given."""
    b = RuleBuilder()
    dims = b.factors(eqn.invars[0].shape)
    return b.build([dims], [[dims[i] for i in eqn.params["permutation"]]], linear=((0,),))


@rule(lax.squeeze_p, level="dims")
def _squeeze(eqn: Eqn) -> FactorRule:
    """`i 1 -> i`."""
    b = RuleBuilder()
    x = eqn.invars[0]
    dims = [None if i in eqn.params["dimensions"] else b.factor(s) for i, s in enumerate(x.shape)]
    return b.build([dims], [[d for d in dims if d is not None]], linear=((0,),))
