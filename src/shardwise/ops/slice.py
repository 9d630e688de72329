"""`slice`, strided too: rows move to where the result needs them, or stay a partial result."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import Device, cut, exchange
from shardwise.messages import Rows, overlaps
from shardwise.ops.moves import (
    APART,
    TIED,
    before,
    by_growth,
    bytes_sent,
    choices,
    empty,
    moved_dims,
    split,
    zeros,
)
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn
from shardwise.rounds import Plan, Start, plan_exchange


def sliced_dims(eqn: Eqn) -> dict[int, tuple[int, int]]:
    """dim -> (start, stride) of the dims a slice changes."""
    p, x, y = eqn.params, eqn.invars[0], eqn.outvars[0]
    strides = p["strides"] or (1,) * x.rank
    return {
        d: (int(p["start_indices"][d]), int(strides[d]))
        for d in range(x.rank)
        if x.shape[d] != y.shape[d]
    }


def slice_rules(eqn: Eqn, changed: Iterable[int], scalars: int = 0) -> list[FactorRule]:
    """Rules of a slice of `changed` dims, static or dynamic (with so many scalar operands).

    One row is best found where it lies; anything longer keeps its split.
    """
    x, y = eqn.invars[0], eqn.outvars[0]
    changed = list(changed)
    orders = [(APART, TIED) if y.shape[d] <= 1 else (TIED, APART) for d in changed]
    op = "or" if x.dtype == bool else "sum"
    rules = []
    for kinds in choices(orders):
        b = RuleBuilder()
        ins = b.factors(x.shape)
        outs, apart = list(ins), [d for d, k in zip(changed, kinds, strict=True) if k == APART]
        for d in apart:
            outs[d] = b.factor(y.shape[d])
        rules.append(
            b.build(
                [ins, *[[]] * scalars], [outs],
                reduced={ins[d]: op for d in apart},
                special=[f for d in changed for f in {ins[d], outs[d]}],
                linear=[[0]], variant=" ".join(kinds),
            )
        )  # fmt: skip
    return rules


@rule(lax.slice_p)
def _slice(eqn: Eqn) -> list[FactorRule]:
    return slice_rules(eqn, sliced_dims(eqn))


@functools.lru_cache(maxsize=4096)
def slice_plan(
    shards: int, block: int, size: int, start: int, stride: int, length: int, out: int
) -> tuple[Start, int, Plan]:
    """How a split dim is sliced: every device picks its rows, then the picked rows are realigned.

    Args:
      shards, block, size: the source dim.
      length, out: the result's size and block.

    Returns:
      the local row of the first pick (one number or a table), how many rows a device picks at most
      (0: the block is taken as it is), and the plan that moves them.
    """
    edges = np.minimum(np.arange(shards + 1) * block, size)
    picked = np.clip(-((start - edges) // stride), 0, length)  # picks before each edge
    lo, hi = picked[:-1], picked[1:]
    first = np.where(hi > lo, start + stride * lo - np.arange(shards) * block, 0)
    wanted = Rows.windows(shards, out, 0, out, length)
    if stride == 1:
        held = Rows(lo, hi, first)
        return 0, 0, plan_exchange(held, wanted, block, out, overlaps(held, wanted))
    count = int((hi - lo).max())
    held = Rows(lo, hi, np.zeros(shards, np.int64))
    if (first[hi > lo] == first.max()).all():
        first = int(first.max())
    return first, count, plan_exchange(held, wanted, count, out, overlaps(held, wanted))


def _slice_plan(ctx: LocalContext, eqn: Eqn, d: int) -> tuple[Start, int, Plan]:
    start, stride = sliced_dims(eqn)[d]
    (size, n), atoms = (eqn.invars[0].shape[d], eqn.outvars[0].shape[d]), split(ctx, d)[0]
    return slice_plan(
        ctx.mesh.size(atoms), ctx.local_in(0)[d], size, start, stride, n, ctx.local_out()[d]
    )


@local(lax.slice_p)
def _slice_local(ctx: LocalContext, eqn: Eqn, x: Any) -> Any:
    if empty(ctx):
        return zeros(ctx, x.dtype)
    changed, moved = sliced_dims(eqn), moved_dims(ctx, sliced_dims(eqn))
    here = [d for d in changed if not any(split(ctx, d))]
    x = _strided(x, {d: (*changed[d], eqn.outvars[0].shape[d]) for d in here})
    for d in changed:
        if d not in here and d not in moved:
            x = _slice_apart(ctx, x, d, *changed[d])
    for d in by_growth(ctx, moved):
        first, count, plan = _slice_plan(ctx, eqn, d)
        device = Device(split(ctx, d)[0])
        if count:
            span, stride = (count - 1) * changed[d][1] + 1, changed[d][1]
            x = cut(x, d, device.at(first), span, 0, (int(np.min(first)), int(np.max(first))))
            x = _strided(x, {d: (0, stride, count)})
        x = exchange(x, d, device.atoms, plan)
    return x


def _strided(x: Any, dims: dict[int, tuple[int, int, int]]) -> Any:
    """`x` with dims sliced: dim -> (start, stride, number of rows)."""
    if not dims:
        return x
    whole = [(0, 1, n) for n in x.shape]
    start, stride, count = zip(*(dims.get(d, w) for d, w in enumerate(whole)), strict=True)
    limit = [s + k * (n - 1) + 1 for s, k, n in zip(start, stride, count, strict=True)]
    return lax.slice(x, start, limit, stride)


def _slice_apart(ctx: LocalContext, x: Any, d: int, start: int, stride: int) -> Any:
    """The rows of my block of the result that my block of the operand has, zeros elsewhere."""
    mine, theirs = split(ctx, d)
    rows, block = ctx.local_out()[d], ctx.local_in(0)[d]
    at, low, high = start, start, start
    if mine:
        at, low = at - ctx.block_index(mine) * block, low - (ctx.mesh.size(mine) - 1) * block
    if theirs:
        step = stride * rows
        at, high = at + ctx.block_index(theirs) * step, high + (ctx.mesh.size(theirs) - 1) * step
    x = cut(x, d, at, (rows - 1) * stride + 1, 0, (low, high))
    return _strided(x, {d: (0, stride, rows)}) if stride > 1 else x


@comm(lax.slice_p)
def _slice_comm(ctx: LocalContext, eqn: Eqn) -> float:
    moved = moved_dims(ctx, sliced_dims(eqn))
    rows = {d: _slice_plan(ctx, eqn, d)[2].rows for d in moved}
    return bytes_sent(ctx, eqn, moved, rows.__getitem__, before(ctx, moved))
