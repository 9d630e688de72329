"""`dynamic_slice` and `dynamic_update_slice`: movement to and from a place known only at run time.

Starts are clamped against the whole dim, as on one device, whatever the devices hold.  For a dim
that is changed and split:

    apart   a -> b          dynamic_slice: each device gives the rows it owns: a partial result
            a, - -> a       dynamic_update_slice: each device writes those of the whole update's
                            rows that are its own: no communication
    tied    a -> a          rows move by the start (`halo.shift`), or by one reduce-scatter or
            a, a -> a       all-gather of what is smaller

A start that is written into the program is a static slice or pad.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import (
    cut,
    exchange,
    iota_of,
    row_bytes,
    rows_at,
    shift,
    shift_rows,
    sum_scatter,
    where,
    window_plan,
)
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
from shardwise.ops.slice import slice_plan, slice_rules
from shardwise.program import Eqn, Lit, Var
from shardwise.rounds import MAX_GROWTH, Plan


def changed_dims(eqn: Eqn) -> list[int]:
    """The dims of which less than all is sliced or updated."""
    part = eqn.outvars[0] if eqn.primitive is lax.dynamic_slice_p else eqn.invars[1]
    return [d for d, n in enumerate(eqn.invars[0].shape) if part.shape[d] != n]


def clamped(start: Any, most: int) -> Any:
    """A start of any integer type, clamped to [0, most] in its own type, as int32."""
    start = jnp.asarray(start)
    dtype = start.dtype
    most = min(most, int(jnp.iinfo(dtype).max))
    return lax.clamp(np.zeros((), dtype), start, np.asarray(most, dtype)).astype(jnp.int32)


def known(start: Var, most: int) -> int | None:
    """The clamped start when it is written into the program."""
    return min(max(int(start.value), 0), most) if isinstance(start, Lit) else None


@dataclasses.dataclass(frozen=True)
class Move:
    """How the rows of one tied dim find their place.

    Attributes:
      method: "static" (the plan alone), "shift" (and the plan, to blocks of another size; before
        the shift for an update, after it for a slice), "scatter" or "gather" (no plan needed).
      rows: what one device sends.
    """

    method: str
    rows: int
    plan: Plan


# ---- dynamic_slice ---------------------------------------------------------------------------


@rule(lax.dynamic_slice_p)
def _dynamic_slice(eqn: Eqn) -> list[FactorRule]:
    return slice_rules(eqn, changed_dims(eqn), scalars=len(eqn.invars) - 1)


@functools.lru_cache(maxsize=4096)
def slice_move(
    shards: int, block: int, size: int, length: int, out: int, start: int | None
) -> Move:
    """How `length` rows of a split dim, from a run-time start on, become blocks of `out` rows."""
    if start is not None:
        plan = slice_plan(shards, block, size, start, 1, length, out)[2]
        return Move("static", plan.rows, plan)
    plan = window_plan(shards, block, length, (out, 0), out, length)
    moves = [Move("shift", shift_rows(block, size - length) + plan.rows, plan)]
    if shards * out <= MAX_GROWTH * max(block, out):
        moves.append(Move("scatter", (shards - 1) * out, plan))
    return min(reversed(moves), key=lambda m: m.rows)


def _slice_move(ctx: LocalContext, eqn: Eqn, d: int) -> Move:
    size, length = eqn.invars[0].shape[d], eqn.outvars[0].shape[d]
    return slice_move(
        ctx.mesh.size(split(ctx, d)[0]), ctx.local_in(0)[d], size, length, ctx.local_out()[d],
        known(eqn.invars[1 + d], size - length),
    )  # fmt: skip


@local(lax.dynamic_slice_p)
def _dynamic_slice_local(ctx: LocalContext, eqn: Eqn, x: Any, *starts: Any) -> Any:
    if empty(ctx):
        return zeros(ctx, x.dtype)
    changed = changed_dims(eqn)
    moved = moved_dims(ctx, changed)
    reach = {d: eqn.invars[0].shape[d] - eqn.outvars[0].shape[d] for d in changed}
    at = {d: clamped(starts[d], reach[d]) for d in changed}
    here = [d for d in changed if not any(split(ctx, d))]
    if here:
        first = [at.get(d, np.int32(0)) if d in here else np.int32(0) for d in range(x.ndim)]
        sizes = [eqn.outvars[0].shape[d] if d in here else n for d, n in enumerate(x.shape)]
        x = lax.dynamic_slice(x, first, sizes, allow_negative_indices=False)
    for d in changed:
        if d not in here and d not in moved:
            x = _slice_apart(ctx, x, d, at[d], reach[d])
    for d in by_growth(ctx, moved):
        x = _slice_tied(ctx, x, d, at[d], reach[d], _slice_move(ctx, eqn, d))
    return x


def _slice_apart(ctx: LocalContext, x: Any, d: int, at: Any, reach: int) -> Any:
    """The rows of my block of the result that my block of the operand has, zeros elsewhere."""
    mine, theirs = split(ctx, d)
    block, rows = ctx.local_in(0)[d], ctx.local_out()[d]
    low, high = 0, reach
    if mine:
        at, low = at - ctx.block_index(mine) * block, low - (ctx.mesh.size(mine) - 1) * block
    if theirs:
        at, high = at + ctx.block_index(theirs) * rows, high + (ctx.mesh.size(theirs) - 1) * rows
    return cut(x, d, at, rows, 0, (low, high))


def _slice_tied(ctx: LocalContext, x: Any, d: int, at: Any, reach: int, move: Move) -> Any:
    atoms, block, out = split(ctx, d)[0], x.shape[d], ctx.local_out()[d]
    if move.method == "scatter":
        shards = ctx.mesh.size(atoms)
        bounds = (-(shards - 1) * block, reach)
        whole = cut(x, d, at - ctx.block_index(atoms) * block, shards * out, 0, bounds)
        return sum_scatter(whole, d, atoms)
    if move.method == "shift":
        x = shift(x, d, atoms, ctx.mesh, at, reach)
    return exchange(x, d, atoms, move.plan)


@comm(lax.dynamic_slice_p)
def _dynamic_slice_comm(ctx: LocalContext, eqn: Eqn) -> float:
    moved = moved_dims(ctx, changed_dims(eqn))
    return bytes_sent(ctx, eqn, moved, lambda d: _slice_move(ctx, eqn, d).rows, before(ctx, moved))


# ---- dynamic_update_slice --------------------------------------------------------------------


@rule(lax.dynamic_update_slice_p)
def _dynamic_update_slice(eqn: Eqn) -> list[FactorRule]:
    """A small update is best whole on every device; one of half the dim or more keeps its split."""
    x, update = eqn.invars[:2]
    changed = changed_dims(eqn)
    orders = [
        (TIED, APART) if 2 * update.shape[d] >= x.shape[d] else (APART, TIED) for d in changed
    ]
    rules = []
    for kinds in choices(orders):
        b = RuleBuilder()
        dims = b.factors(x.shape)
        part, apart = list(dims), [d for d, k in zip(changed, kinds, strict=True) if k == APART]
        for d in apart:
            part[d] = b.factor(update.shape[d])
        rules.append(
            b.build(
                [dims, part, *[[]] * x.rank], [dims], special=[dims[d] for d in changed],
                whole=[part[d] for d in apart], linear=[[0, 1]], variant=" ".join(kinds),
            )
        )  # fmt: skip
    return rules


@functools.lru_cache(maxsize=4096)
def update_move(
    shards: int, block: int, size: int, length: int, part: int, start: int | None
) -> Move:
    """How an update of `length` rows in blocks of `part` reaches the blocks it is written to."""
    if start is not None:
        plan = window_plan(shards, part, length, (block, -start), block)
        return Move("static", plan.rows, plan)
    plan = window_plan(shards, part, length, (block, 0), block, length)
    moves = [Move("shift", shift_rows(block, size - length) + plan.rows, plan)]
    if shards * part <= MAX_GROWTH * max(block, part):
        moves.append(Move("gather", (shards - 1) * part, plan))
    return min(reversed(moves), key=lambda m: m.rows)


def _update_move(ctx: LocalContext, eqn: Eqn, d: int) -> Move:
    size, length = eqn.invars[0].shape[d], eqn.invars[1].shape[d]
    return update_move(
        ctx.mesh.size(split(ctx, d)[1]), ctx.local_out()[d], size, length, ctx.local_in(1)[d],
        known(eqn.invars[2 + d], size - length),
    )  # fmt: skip


def _moved_updates(ctx: LocalContext, eqn: Eqn) -> list[int]:
    return [d for d in changed_dims(eqn) if ctx.ins[1].sharding.axes[d]]


@local(lax.dynamic_update_slice_p)
def _dynamic_update_slice_local(
    ctx: LocalContext, eqn: Eqn, x: Any, update: Any, *starts: Any
) -> Any:
    if 0 in update.shape or empty(ctx):
        return x
    starts_at, masks = [np.int32(0)] * x.ndim, []
    for d in changed_dims(eqn):
        reach = eqn.invars[0].shape[d] - eqn.invars[1].shape[d]
        at = clamped(starts[d], reach)
        atoms = split(ctx, d)[1]
        if not atoms:
            starts_at[d] = at
            continue
        move = _update_move(ctx, eqn, d) if d in _moved_updates(ctx, eqn) else None
        begin = ctx.block_index(atoms) * x.shape[d]
        if move and move.method != "gather":
            update = _align(ctx, update, d, at, reach, move)
            row = iota_of(update, d) + (begin - at)
        else:
            if move:
                update = lax.all_gather(update, atoms, axis=d, tiled=True)
                update = rows_at(update, d, 0, eqn.invars[1].shape[d])
            update, row, starts_at[d] = _own_rows(ctx, x, update, d, at, begin, reach)
        masks.append((row >= 0) & (row < eqn.invars[1].shape[d]))
    if masks:
        mask = functools.reduce(operator.and_, masks)
        now = lax.dynamic_slice(x, starts_at, update.shape, allow_negative_indices=False)
        update = where(mask, update, now)
    return lax.dynamic_update_slice(x, update, starts_at, allow_negative_indices=False)


def _own_rows(
    ctx: LocalContext, x: Any, update: Any, d: int, at: Any, begin: Any, reach: int
) -> tuple[Any, Any, Any]:
    """What of a whole update falls into my block: a window of it, the update rows the window stands
    for, and the row of my block it belongs to."""
    rows = min(update.shape[d], x.shape[d])
    first = lax.clamp(np.int32(0), at - begin, np.int32(x.shape[d] - rows))
    offset = first + begin - at
    blocks = ctx.mesh.size(split(ctx, d)[1]) - 1
    bounds = (x.shape[d] - rows - reach, blocks * x.shape[d])
    window = cut(update, d, offset, rows, 0, bounds)
    return window, iota_of(window, d) + offset, first


def _align(ctx: LocalContext, update: Any, d: int, at: Any, reach: int, move: Move) -> Any:
    """A split update moved so that each device holds the rows its own block may take."""
    atoms = split(ctx, d)[1]
    update = exchange(update, d, atoms, move.plan)
    if move.method == "shift":
        update = shift(update, d, atoms, ctx.mesh, at, reach, down=True)
    return update


@comm(lax.dynamic_update_slice_p)
def _dynamic_update_slice_comm(ctx: LocalContext, eqn: Eqn) -> float:
    shape, total = list(ctx.local_in(1)), 0
    if 0 in shape or empty(ctx):
        return 0.0
    for d in changed_dims(eqn):
        if not split(ctx, d)[1]:
            continue
        block, length = ctx.local_out()[d], eqn.invars[1].shape[d]
        if d in _moved_updates(ctx, eqn):
            move = _update_move(ctx, eqn, d)
            total += move.rows * row_bytes(shape, d, eqn.invars[1].itemsize)
            shape[d] = block if move.method != "gather" else min(block, length)
        else:
            shape[d] = min(block, length)
    return float(total)
