"""Values made from nothing: iota.  Any split is free: each device makes its own block."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn


@rule(lax.iota_p, level="broadcast")
def _iota(eqn: Eqn) -> FactorRule:
    """`-> i j`: positions along one dim, the same along the others."""
    b = RuleBuilder()
    return b.build([()] * len(eqn.invars), [b.factors(eqn.outvars[0].shape)])


@local(lax.iota_p)
def _iota_local(ctx: LocalContext, eqn: Eqn, *_: Any) -> Any:
    shape, dim = ctx.local_out(), eqn.params["dimension"]
    dtype = eqn.params["dtype"]
    x = lax.broadcasted_iota(dtype, shape, dim)
    axes = ctx.outs[0].sharding.axes[dim]
    if not axes:
        return x
    return x + (ctx.block_index(axes) * jnp.int32(shape[dim])).astype(dtype)
