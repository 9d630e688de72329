"""`sort`: of a split dim by columns (`sort_columns`), of whole operands, or where another dim is split.

    columns    i s, i s -> i s, i s  special=s     every element moves about twice
    whole      i w, i w -> i s, i s  whole=w       operands gathered; each device keeps its block

The second is less where few devices or few elements are concerned, or where what is sorted along is
made on the spot: an argsort's positions are.  With the dim whole, its axes may split another one: an
all-to-all there and one back.
"""

from __future__ import annotations

import math
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import cut
from shardwise.ops.moves import empty
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.ops.sort_columns import Columns, sort_columns
from shardwise.program import Eqn

ranked_p = jex.Primitive("sort")
"""A sort whose last key counts along the sorted dim (`ranking`): no two elements are equal."""
ranked_p.multiple_results = True


@ranked_p.def_impl
def _ranked(*xs: Any, dimension: int, num_keys: int, is_stable: bool) -> Any:
    return lax.sort(xs, dimension=dimension, num_keys=num_keys, is_stable=is_stable)


@ranked_p.def_abstract_eval
def _ranked_types(*avals: Any, **_: Any) -> Any:
    return list(avals)


@rule(lax.sort_p, ranked_p)
def _sort(eqn: Eqn) -> list[FactorRule]:
    count, d = len(eqn.invars), eqn.params["dimension"]
    b = RuleBuilder()
    dims = b.factors(eqn.invars[0].shape)
    columns = b.build([dims] * count, [dims] * count, special=[dims[d]], variant="columns")
    b = RuleBuilder()
    outs = b.factors(eqn.invars[0].shape)
    ins = [*outs[:d], b.factor(b.sizes[d]), *outs[d + 1 :]]
    whole = b.build([ins] * count, [outs] * count, whole=[ins[d]], variant="whole")
    return [columns, whole]


@local(lax.sort_p, ranked_p)
def _sort_local(ctx: LocalContext, eqn: Eqn, *xs: Any) -> Any:
    d, keys = eqn.params["dimension"], eqn.params["num_keys"]
    given, atoms = ctx.ins[0].sharding.axes[d], ctx.outs[0].sharding.axes[d]
    if empty(ctx):
        return list(xs)
    if given:
        narrow = [x.astype(_CARRIED.get(x.dtype, x.dtype)) for x in xs]
        ys = sort_columns(narrow, d, keys, given, _columns(ctx, eqn))
        return [y.astype(x.dtype) for x, y in zip(xs, ys, strict=True)]
    ys = lax.sort_p.bind(*xs, **eqn.params)
    if atoms:
        n = ctx.local_out()[d]
        last = (ctx.mesh.size(atoms) - 1) * n
        ys = [cut(y, d, ctx.block_index(atoms) * n, n, 0, (0, last)) for y in ys]
    return ys


# Integers narrower than a byte travel as bytes.
_CARRIED = {jnp.dtype(jnp.int4): jnp.int8, jnp.dtype(jnp.uint4): jnp.uint8}


def _columns(ctx: LocalContext, eqn: Eqn) -> Columns:
    d = eqn.params["dimension"]
    layout = ctx.ins[0]
    return Columns(
        ctx.mesh.size(layout.sharding.axes[d]), ctx.local_in(0)[d], layout.shape[d], _ties(eqn)
    )


def _ties(eqn: Eqn) -> bool:
    """Whether elements with equal keys can be told apart: by other operands, or as -0.0 and 0.0."""
    if eqn.primitive is ranked_p:
        return False
    others = len(eqn.invars) > eqn.params["num_keys"]
    return others or any(jnp.issubdtype(v.dtype, jnp.inexact) for v in eqn.invars)


@comm(lax.sort_p, ranked_p)
def _sort_comm(ctx: LocalContext, eqn: Eqn) -> float:
    d = eqn.params["dimension"]
    if not ctx.ins[0].sharding.axes[d] or empty(ctx):
        return 0.0
    rows = math.prod(n for e, n in enumerate(ctx.local_in(0)) if e != d)
    return rows * _columns(ctx, eqn).sent(sum(v.itemsize for v in eqn.invars))
