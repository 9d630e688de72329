"""Data movement with places known when the program is planned: slice, pad, concatenate, rev.

Each has two kinds of rule for a dim that it changes:

    tied    a -> a      both sides are split over the same atoms; rows move between devices (halo.py)
    apart   a -> b      a slice cuts out what each device owns, zeros elsewhere: a partial result;
                        a pad or a concatenate cuts its block of the result from whole operands

Dims that are not changed, and changed dims that are not split, are local as they are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import Device, cut, exchange, iota_of, pad_dim, row_bytes
from shardwise.messages import Messages, Rows, overlaps
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn, Lit
from shardwise.rounds import MAX_ROUNDS, Plan, Start, plan_exchange, plan_rounds

TIED, APART = "tied", "apart"


def choices(orders: Sequence[tuple[str, str]]) -> list[tuple[str, ...]]:
    """The variants of an equation that changes some dims; `orders` has each dim's, better first.

    Every combination for up to two dims; beyond that, all dims alike.
    """
    if len(orders) <= 2:
        return list(itertools.product(*orders))
    first = tuple(o[0] for o in orders)
    return list(dict.fromkeys([first, (TIED,) * len(orders), (APART,) * len(orders)]))


def is_tied(ctx: LocalContext, dim: int, operand: int = 0) -> bool:
    return ctx.rule.operands[operand][dim] == ctx.rule.results[0][dim]


def split(ctx: LocalContext, dim: int, operand: int = 0) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The atoms of a dim of an operand and of the result."""
    return ctx.ins[operand].sharding.axes[dim], ctx.outs[0].sharding.axes[dim]


def by_growth(ctx: LocalContext, dims: Iterable[int]) -> list[int]:
    """Dims in the order to move them in: those that shrink the block most come first."""
    before, after = ctx.local_in(0), ctx.local_out()
    return sorted(dims, key=lambda d: after[d] / max(before[d], 1))


def empty(ctx: LocalContext) -> bool:
    return 0 in ctx.local_out()


def zeros(ctx: LocalContext, dtype: Any) -> Any:
    return lax.full(ctx.local_out(), 0, dtype)


def bytes_sent(
    ctx: LocalContext, eqn: Eqn, dims: Iterable[int], rows_of: Callable[[int], int]
) -> float:
    """The price of moving dims one after the other; `rows_of(dim)` are the rows sent for one."""
    if empty(ctx):
        return 0.0
    shape, total = list(ctx.local_in(0)), 0
    for d in by_growth(ctx, dims):
        total += rows_of(d) * row_bytes(shape, d, eqn.invars[0].itemsize)
        shape[d] = ctx.local_out()[d]
    return float(total)


# ---- slice -----------------------------------------------------------------------------------


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


def _moved(ctx: LocalContext, dims: Iterable[int]) -> list[int]:
    return [d for d in dims if is_tied(ctx, d) and split(ctx, d)[0]]


@local(lax.slice_p)
def _slice_local(ctx: LocalContext, eqn: Eqn, x: Any) -> Any:
    if empty(ctx):
        return zeros(ctx, x.dtype)
    changed, moved = sliced_dims(eqn), _moved(ctx, sliced_dims(eqn))
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
    moved = _moved(ctx, sliced_dims(eqn))
    if empty(ctx):
        return 0.0
    shape = [n if d in moved else m for d, (n, m) in enumerate(_before_after(ctx))]
    total = 0
    for d in by_growth(ctx, moved):
        total += _slice_plan(ctx, eqn, d)[2].rows * row_bytes(shape, d, eqn.invars[0].itemsize)
        shape[d] = ctx.local_out()[d]
    return float(total)


def _before_after(ctx: LocalContext) -> list[tuple[int, int]]:
    return list(zip(ctx.local_in(0), ctx.local_out(), strict=True))


# ---- pad -------------------------------------------------------------------------------------


def padded_dims(eqn: Eqn) -> dict[int, tuple[int, int, int]]:
    """dim -> (low, high, interior) of the dims a pad changes."""
    config = [tuple(int(n) for n in c) for c in eqn.params["padding_config"]]
    sizes = eqn.invars[0].shape
    return {d: c for d, c in enumerate(config) if any(c[:2]) or (c[2] and sizes[d] > 1)}


@rule(lax.pad_p)
def _pad(eqn: Eqn) -> list[FactorRule]:
    """Apart: the operand's dim is whole, and each device cuts its block of the padded dim."""
    (x, value), y = eqn.invars, eqn.outvars[0]
    changed = list(padded_dims(eqn))
    zero = isinstance(value, Lit) and not np.any(np.asarray(value.value))
    rules = []
    orders = [(APART, TIED) if x.shape[d] <= 1 else (TIED, APART) for d in changed]
    for kinds in choices(orders):
        b = RuleBuilder()
        ins = b.factors(x.shape)
        outs, apart = list(ins), [d for d, k in zip(changed, kinds, strict=True) if k == APART]
        for d in apart:
            outs[d] = b.factor(y.shape[d])
        rules.append(
            b.build(
                [ins, []], [outs], special=[outs[d] for d in changed],
                whole=[ins[d] for d in apart],
                linear=[[0]] if zero else [[0, 1]], variant=" ".join(kinds),
            )
        )  # fmt: skip
    return rules


@functools.lru_cache(maxsize=4096)
def pad_plan(
    shards: int, block: int, size: int, low: int, step: int, length: int, out: int
) -> tuple[Start, int, Plan]:
    """How a split dim is padded: each device gets the source rows that fall into its block.

    Args:
      shards, block, size: the source dim.
      step: 1 + interior padding.
      length, out: the result's size and block.

    Returns:
      the result row of a device's first source row (one number or a table), how many source rows it
      gets, and the plan that moves them (with the padding value for those there are none of).
    """
    begin = np.arange(shards) * out - low
    first = -(-begin // step)
    count = (out - 1) // step + 1
    limit = (length - 1 - low) // step + 1
    wanted = Rows(first, np.clip(first + count, first, max(limit, 0)), np.zeros(shards, np.int64))
    held = Rows.blocks(shards, block, size)
    offset = first * step - begin
    plan = plan_exchange(held, wanted, block, count, overlaps(held, wanted))
    return int(offset[0]) if (offset == offset[0]).all() else offset, count, plan


def _pad_plan(ctx: LocalContext, eqn: Eqn, d: int) -> tuple[Start, int, Plan]:
    low, _, interior = padded_dims(eqn)[d]
    (size, n), atoms = (eqn.invars[0].shape[d], eqn.outvars[0].shape[d]), split(ctx, d)[0]
    return pad_plan(
        ctx.mesh.size(atoms), ctx.local_in(0)[d], size, low, interior + 1, n, ctx.local_out()[d]
    )


@local(lax.pad_p)
def _pad_local(ctx: LocalContext, eqn: Eqn, x: Any, value: Any) -> Any:
    if empty(ctx) or 0 in x.shape:
        return jnp.broadcast_to(value, ctx.local_out())
    changed = padded_dims(eqn)
    for d in by_growth(ctx, changed):
        low, high, interior = changed[d]
        rows = ctx.local_out()[d]
        mine, theirs = split(ctx, d)
        if is_tied(ctx, d) and mine:
            offset, _, plan = _pad_plan(ctx, eqn, d)
            device = Device(mine)
            x = exchange(x, d, mine, plan, value)
            if interior:
                bounds = (-int(np.max(offset)), -int(np.min(offset)))
                x = pad_dim(x, d, 0, 0, value, interior)
                x = cut(x, d, -device.at(offset), rows, value, bounds)
        elif theirs:
            x = pad_dim(x, d, 0, 0, value, interior)
            bounds = (-low, (ctx.mesh.size(theirs) - 1) * rows - low)
            x = cut(x, d, ctx.block_index(theirs) * rows - low, rows, value, bounds)
        else:
            x = pad_dim(x, d, low, high, value, interior)
    return x


@comm(lax.pad_p)
def _pad_comm(ctx: LocalContext, eqn: Eqn) -> float:
    if 0 in ctx.local_in(0):
        return 0.0
    moved = set(_moved(ctx, padded_dims(eqn)))
    return bytes_sent(
        ctx, eqn, padded_dims(eqn),
        lambda d: _pad_plan(ctx, eqn, d)[2].rows if d in moved else 0,
    )  # fmt: skip


# ---- concatenate -----------------------------------------------------------------------------


@rule(lax.concatenate_p)
def _concatenate(eqn: Eqn) -> list[FactorRule]:
    """Tied: every operand's dim is split like the result's.  Apart: the operands' are whole."""
    dim, y = eqn.params["dimension"], eqn.outvars[0]
    linear = [range(len(eqn.invars))]
    b = RuleBuilder()
    dims = b.factors(y.shape)
    b.sizes[dim] = max(v.shape[dim] for v in eqn.invars)
    tied = b.build(
        [dims for _ in eqn.invars], [dims], special=[dims[dim]], linear=linear, variant=TIED
    )
    b = RuleBuilder()
    dims = b.factors(y.shape)
    parts = b.factors(v.shape[dim] for v in eqn.invars)
    ins = [[*dims[:dim], f, *dims[dim + 1 :]] for f in parts]
    apart = b.build(ins, [dims], special=[dims[dim]], whole=parts, linear=linear, variant=APART)
    return [tied, apart]


@functools.lru_cache(maxsize=4096)
def concatenate_plans(
    shards: int, blocks: tuple[int, ...], sizes: tuple[int, ...], out: int
) -> tuple[Plan, ...]:
    """One plan that moves all operands at once (cut from their blocks, joined), or one for each.

    Together they share rounds: two of 2048 rows over 8 take 2 rounds of 256 rows.  One for each
    is for operands so small beside the result that one device gets all of them.
    """
    first = np.cumsum([0, *sizes])
    at = np.cumsum([0, *blocks])
    wanted = Rows.windows(shards, out, 0, out, int(first[-1]))
    held = [
        Rows.blocks(shards, b, n, int(first[k]))
        for k, (b, n) in enumerate(zip(blocks, sizes, strict=True))
    ]
    moves = [overlaps(h, wanted) for h in held]
    apart = tuple(
        plan_exchange(h, wanted, b, out, m) for h, b, m in zip(held, blocks, moves, strict=True)
    )
    joined = Messages.join([
        Messages(m.src, m.dst, m.src_off + int(at[k]), m.dst_off, m.length)
        for k, m in enumerate(moves)
    ])  # fmt: skip
    together = plan_rounds(joined, wanted, int(at[-1]), out)
    if len(together.steps) <= MAX_ROUNDS and together.rows <= sum(p.rows for p in apart):
        return (together,)
    return apart


def _concatenate_plans(ctx: LocalContext, eqn: Eqn) -> tuple[Plan, ...]:
    dim = eqn.params["dimension"]
    return concatenate_plans(
        ctx.mesh.size(split(ctx, dim)[1]),
        tuple(ctx.local_in(k)[dim] for k in range(len(eqn.invars))),
        tuple(v.shape[dim] for v in eqn.invars),
        ctx.local_out()[dim],
    )


@local(lax.concatenate_p)
def _concatenate_local(ctx: LocalContext, eqn: Eqn, *xs: Any) -> Any:
    dim, n = eqn.params["dimension"], ctx.local_out()[eqn.params["dimension"]]
    if empty(ctx):
        return zeros(ctx, xs[0].dtype)
    atoms = split(ctx, dim)[1]
    if not atoms:
        return lax.concatenate(xs, dim)
    if not is_tied(ctx, dim):
        bounds = (0, (ctx.mesh.size(atoms) - 1) * n)
        return cut(lax.concatenate(xs, dim), dim, ctx.block_index(atoms) * n, n, 0, bounds)
    plans = _concatenate_plans(ctx, eqn)
    if len(plans) == 1:
        return exchange(lax.concatenate(xs, dim), dim, atoms, plans[0])
    parts = [exchange(x, dim, atoms, p) for x, p in zip(xs, plans, strict=True)]
    out, first = parts[0], 0
    row = iota_of(out, dim) + ctx.block_index(atoms) * n
    for part, v in zip(parts[1:], eqn.invars, strict=False):
        first += v.shape[dim]
        out = jnp.where(row >= first, part, out)
    return out


@comm(lax.concatenate_p)
def _concatenate_comm(ctx: LocalContext, eqn: Eqn) -> float:
    dim = eqn.params["dimension"]
    if empty(ctx) or not is_tied(ctx, dim) or not split(ctx, dim)[1]:
        return 0.0
    rows = sum(p.rows for p in _concatenate_plans(ctx, eqn))
    return float(rows * row_bytes(ctx.local_out(), dim, eqn.outvars[0].itemsize))


# ---- rev -------------------------------------------------------------------------------------


@rule(lax.rev_p)
def _rev(eqn: Eqn) -> FactorRule:
    b = RuleBuilder()
    dims = b.factors(eqn.invars[0].shape)
    special = [dims[d] for d in eqn.params["dimensions"]]
    return b.build([dims], [dims], special=special, linear=[[0]])


@functools.lru_cache(maxsize=4096)
def rev_plan(shards: int, block: int, size: int) -> Plan:
    """How blocks that are reversed already find their place: device p's goes to P-1-p and a bit."""
    edges = np.minimum(np.arange(shards + 1) * block, size)
    lo, hi = size - edges[1:], size - edges[:-1]
    held = Rows(lo, hi, block - (hi - lo))
    wanted = Rows.windows(shards, block, 0, block, size)
    return plan_exchange(held, wanted, block, block, overlaps(held, wanted))


def _rev_plans(ctx: LocalContext, eqn: Eqn) -> dict[int, Plan]:
    x, n = eqn.invars[0], ctx.local_in(0)
    return {
        d: rev_plan(ctx.mesh.size(split(ctx, d)[0]), n[d], x.shape[d])
        for d in eqn.params["dimensions"]
        if split(ctx, d)[0]
    }


@local(lax.rev_p)
def _rev_local(ctx: LocalContext, eqn: Eqn, x: Any) -> Any:
    x = lax.rev(x, eqn.params["dimensions"])
    if not empty(ctx):
        for d, plan in _rev_plans(ctx, eqn).items():
            x = exchange(x, d, split(ctx, d)[0], plan)
    return x


@comm(lax.rev_p)
def _rev_comm(ctx: LocalContext, eqn: Eqn) -> float:
    plans = _rev_plans(ctx, eqn)
    return bytes_sent(ctx, eqn, plans, lambda d: plans[d].rows)
