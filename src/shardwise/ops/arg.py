"""argmax and argmin.

Over a split dim each device finds its own best, and two small all-reduces find which is the global
one: the best value, then the lowest global position that has it.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn


@rule(lax.argmax_p, lax.argmin_p, level="reduce")
def _arg(eqn: Eqn) -> FactorRule:
    """`i j -> i  special=j`: the result is whole, not a pending reduction."""
    b = RuleBuilder()
    dims = b.factors(eqn.invars[0].shape)
    axes = eqn.params["axes"]
    return b.build(
        [dims],
        [[d for i, d in enumerate(dims) if i not in axes]],
        special=[dims[i] for i in axes],
    )


@local(lax.argmax_p, lax.argmin_p)
def _arg_local(ctx: LocalContext, eqn: Eqn, x: Any) -> Any:
    (axis,) = eqn.params["axes"]
    atoms = ctx.ins[0].sharding.axes[axis]
    if not atoms:
        return eqn.primitive.bind(x, **eqn.params)
    rank = _rank(x, smallest=eqn.primitive is lax.argmin_p)
    # Padding ranks last, and where data does too the lower position wins: that of data.
    rank = ctx.mask(rank, ctx.ins[0], axis, jnp.iinfo(rank.dtype).min)
    position = _position_dtype(ctx.ins[0].shape[axis])
    best = lax.reduce_max(rank, (axis,))
    here = lax.argmax(rank, axis, position)
    here = here + ctx.block_index(atoms).astype(position) * position(x.shape[axis])
    wins = best == lax.pmax(best, atoms)
    index = lax.pmin(jnp.where(wins, here, jnp.iinfo(position).max), atoms)
    return index.astype(eqn.params["index_dtype"])


def _rank(x: Any, smallest: bool) -> Any:
    """Integers in the order of argmax (or argmin): NaN first of all, -0.0 equal to 0.0.

    A maximum of integers is the same on every backend; that of floats is not, where NaN is met.
    They are int32 or int64 (uint32, uint64), which every backend's all-reduce takes.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        narrow = x.dtype == bool or jnp.iinfo(x.dtype).bits < 32
        rank = x.astype(jnp.int32) if narrow else x
        return ~rank if smallest else rank
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = jnp.int64 if x.dtype.itemsize == 8 else jnp.int32
    x = jnp.where(x == 0, np.zeros((), x.dtype), x)
    bits = lax.bitcast_convert_type(x, wide)
    # A negative float's magnitude grows downwards: flip all but its sign.
    rank = jnp.where(bits < 0, bits ^ wide(jnp.iinfo(wide).max), bits)
    return jnp.where(jnp.isnan(x), jnp.iinfo(wide).max, ~rank if smallest else rank)


def _position_dtype(size: int) -> Any:
    return np.int64 if size > np.iinfo(np.int32).max else np.int32


@comm(lax.argmax_p, lax.argmin_p)
def _arg_comm(ctx: LocalContext, eqn: Eqn) -> float:
    """Two all-reduces, of a rank and of a position for every result."""
    (axis,) = eqn.params["axes"]
    shards = ctx.mesh.size(ctx.ins[0].sharding.axes[axis])
    position = np.dtype(_position_dtype(ctx.ins[0].shape[axis]))
    each = max(4, eqn.invars[0].itemsize) + position.itemsize
    return 2 * math.prod(ctx.local_out()) * each * (shards - 1) / shards
