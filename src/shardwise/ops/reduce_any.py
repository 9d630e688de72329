"""The generic `reduce`, of any number of operands and any body.

A body that is one known operation leaves a pending reduction, like the primitives of `reduce.py`. Of
any other, each device reduces its own block, and the few results are gathered and reduced again. Nobody
says what its identity is, so that padding cannot be masked by a value: each number carries a flag,
whether it counts, and what does not count is passed over.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise import _jax
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.indexing import is_first
from shardwise.ops.reduce import identity
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn

_MONOIDS = {
    "add": "sum",
    "mul": "prod",
    "max": "max",
    "min": "min",
    "and": "and",
    "or": "or",
    "xor": "xor",
}


def monoid_of(eqn: Eqn) -> str | None:
    """The reduction a generic `reduce` of one operand does, if its body is one known operation."""
    jaxpr, _ = _jax.open_jaxpr(eqn.params["jaxpr"])
    if len(eqn.outvars) != 1 or len(jaxpr.eqns) != 1:
        return None
    (step,) = jaxpr.eqns
    given, taken = set(map(id, jaxpr.invars)), set(map(id, step.invars))
    if given != taken or step.outvars[0] is not jaxpr.outvars[0]:
        return None
    op = _MONOIDS.get(step.primitive.name)
    if eqn.outvars[0].dtype == bool:
        return {"max": "or", "min": "and"}.get(op or "", op)
    return op


@rule(lax.reduce_p, level="reduce")
def _reduce(eqn: Eqn) -> FactorRule:
    """`i j, i j, (), () -> i, i  special=j`; where the body is a known reduction, say `max=j`."""
    count = len(eqn.outvars)
    b = RuleBuilder()
    dims = b.factors(eqn.invars[0].shape)
    axes = eqn.params["dimensions"]
    over = [dims[i] for i in axes]
    op = monoid_of(eqn)
    return b.build(
        [dims] * count + [[]] * count,
        [[d for i, d in enumerate(dims) if i not in axes]] * count,
        reduced=dict.fromkeys(over, op) if op else {},
        special=[] if op else over,
    )


@local(lax.reduce_p)
def _reduce_local(ctx: LocalContext, eqn: Eqn, *xs: Any) -> Any:
    """The initial value counts once: devices but the first start from the identity."""
    op = monoid_of(eqn)
    atoms = [a for i in eqn.params["dimensions"] for a in ctx.ins[0].sharding.axes[i]]
    if op and atoms:
        x, start = xs
        for dim in eqn.params["dimensions"]:
            x = ctx.mask(x, ctx.ins[0], dim, identity(op, x.dtype))
        xs = x, jnp.where(is_first(ctx, atoms), start, identity(op, start.dtype))
    elif atoms:
        return _any(ctx, eqn, xs)
    return eqn.primitive.bind(*xs, **eqn.params)


def _any(ctx: LocalContext, eqn: Eqn, xs: Any) -> list[Any]:
    """Reduce the block, then gather and reduce the blocks' results, one split dim after the other."""
    count = len(eqn.outvars)
    blocks, starts = xs[:count], xs[count:]
    layout, dims = ctx.ins[0], eqn.params["dimensions"]
    run = _jax.as_function(eqn.params["jaxpr"])

    def step(a: Any, b: Any) -> Any:
        return run(*a, *b)

    counts = jnp.ones(blocks[0].shape, bool)
    for dim in dims:
        counts = ctx.mask(counts, layout, dim, False)
    results = _reduced(step, starts, blocks, counts, dims)
    for dim in dims:
        atoms, size = layout.sharding.axes[dim], blocks[0].shape[dim]
        if atoms:
            ys = [lax.all_gather(y, atoms) for y in results]
            full = jnp.arange(ctx.mesh.size(atoms)) * size < layout.shape[dim]
            full = lax.broadcast_in_dim(full, ys[0].shape, (0,))
            results = _reduced(step, starts, ys, full, (0,))
    if any(layout.shape[d] == 0 for d in dims):
        return [jnp.broadcast_to(a, y.shape) for a, y in zip(starts, results, strict=True)]
    # Not one more `reduce`, over a dim of size 1: XLA drops the initial value of those.
    for _ in range(results[0].ndim):
        step = jax.vmap(step, in_axes=(None, 0))
    return list(step(starts, results))


def _reduced(step: Any, starts: Any, xs: Any, counts: Any, dims: tuple[int, ...]) -> list[Any]:
    """A reduction of those entries that count, the initial values not among them."""

    def flagged(a: Any, b: Any) -> Any:
        (*a, a_counts), (*b, b_counts) = a, b
        both = step(a, b)
        out = [
            lax.select(a_counts & b_counts, c, lax.select(a_counts, x, y))
            for c, x, y in zip(both, a, b, strict=True)
        ]
        return (*out, a_counts | b_counts)

    out = lax.reduce((*xs, counts), (*starts, jnp.asarray(False)), flagged, dims)
    return list(out[:-1])


@comm(lax.reduce_p)
def _reduce_comm(ctx: LocalContext, eqn: Eqn) -> float:
    """All-gathers of one result a device, for each split dim."""
    if monoid_of(eqn):
        return 0.0
    shards = [ctx.mesh.size(ctx.ins[0].sharding.axes[d]) for d in eqn.params["dimensions"]]
    each = sum(math.prod(ctx.local_out(i)) * v.itemsize for i, v in enumerate(eqn.outvars))
    return float(each * sum(n - 1 for n in shards))
