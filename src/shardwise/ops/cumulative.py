"""Cumulative sum, product, max, min and logsumexp.

A split scanned dim is scanned by block: each device scans its own, and what the earlier blocks add
up to reaches it in log2(P) permutes of one row (a Hillis-Steele scan of the block totals), where
gathering the totals would take P - 1 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import Device
from shardwise.ops.reduce import identity
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn


class _Monoid(NamedTuple):
    combine: Callable[[Any, Any], Any]
    op: str  # whose identity it has

    def identity(self, dtype: Any) -> Any:
        return identity(self.op, dtype)


_KINDS = {
    lax.cumsum_p: _Monoid(lax.add, "sum"),
    lax.cumprod_p: _Monoid(lax.mul, "prod"),
    lax.cummax_p: _Monoid(lax.max, "max"),
    lax.cummin_p: _Monoid(lax.min, "min"),
    lax.cumlogsumexp_p: _Monoid(jnp.logaddexp, "max"),
}


@rule(*_KINDS, level="dims")
def _cumulative(eqn: Eqn) -> FactorRule:
    """`i s -> i s  special=s`."""
    b = RuleBuilder()
    dims = b.factors(eqn.invars[0].shape)
    return b.build(
        [dims],
        [dims],
        special=[dims[eqn.params["axis"]]],
        linear=((0,),) if eqn.primitive is lax.cumsum_p else (),
    )


@local(*_KINDS)
def _cumulative_local(ctx: LocalContext, eqn: Eqn, x: Any) -> Any:
    axis, monoid = eqn.params["axis"], _KINDS[eqn.primitive]
    reverse = eqn.params["reverse"]
    if reverse:  # padding lies at the end: only a scan from there meets it before the data
        x = ctx.mask(x, ctx.ins[0], axis, monoid.identity(x.dtype))
    y = eqn.primitive.bind(x, **eqn.params)
    if not steps(ctx, axis):
        return y
    end = 0 if reverse else y.shape[axis] - 1
    total = lax.slice_in_dim(y, end, end + 1, axis=axis)
    before = _earlier(ctx, axis, monoid, total, reverse)
    return monoid.combine(jnp.broadcast_to(before, y.shape), y)


def steps(ctx: LocalContext, axis: int) -> int:
    """Permutes needed: doubling reaches over the blocks that hold anything."""
    layout = ctx.ins[0]
    if not layout.sharding.axes[axis]:
        return 0
    blocks = -(-layout.shape[axis] // max(1, layout.local_shape(ctx.mesh)[axis]))
    return max(0, blocks - 1).bit_length()


def _earlier(ctx: LocalContext, axis: int, monoid: _Monoid, total: Any, reverse: bool) -> Any:
    """The combination of the totals of all blocks before this device's (after it, if `reverse`).

    After step k, `run` combines the last 2**k totals up to this block and `before` those of them
    that are not its own; one message extends both.
    """
    atoms = ctx.ins[0].sharding.axes[axis]
    count = ctx.mesh.size(atoms)
    place = ctx.block_index(atoms)
    place = count - 1 - place if reverse else place
    before, run = None, total
    rounds = steps(ctx, axis)
    for step in range(rounds):
        reach = 1 << step
        pairs = [(i, i + reach) for i in range(count - reach)]
        got = Device(atoms).receive(run, [(b, a) for a, b in pairs] if reverse else pairs)
        if monoid.op != "sum":  # a device that is sent nothing receives zeros
            got = jnp.where(place >= reach, got, monoid.identity(got.dtype))
        before = got if before is None else monoid.combine(got, before)
        if step + 1 < rounds:
            run = monoid.combine(got, run)
    return before


@comm(*_KINDS)
def _cumulative_comm(ctx: LocalContext, eqn: Eqn) -> float:
    """One row of the block for each permute."""
    shape = list(ctx.local_in(0))
    shape[eqn.params["axis"]] = 1
    rows = 1
    for n in shape:
        rows *= n
    return float(steps(ctx, eqn.params["axis"]) * rows * eqn.invars[0].itemsize)
