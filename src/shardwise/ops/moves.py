"""What slice, pad, concatenate and rev have in common: the two kinds of rule for a dim they change.

    tied    a -> a    both sides are split over the same atoms; rows move between devices (halo.py)
    apart   a -> b    a slice cuts what each device owns of its rows, zeros elsewhere: a partial
                      result; a pad or a concatenate cuts its block out of whole operands

Dims that are not changed, and changed dims that are not split, are local as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax import lax

from shardwise.halo import row_bytes
from shardwise.ops.registry import LocalContext
from shardwise.program import Eqn

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


def moved_dims(ctx: LocalContext, dims: Iterable[int]) -> list[int]:
    """Those of `dims` along which rows move between devices."""
    return [d for d in dims if is_tied(ctx, d) and split(ctx, d)[0]]


def by_growth(ctx: LocalContext, dims: Iterable[int]) -> list[int]:
    """Dims in the order to move them in: those that shrink the block most come first."""
    before, after = ctx.local_in(0), ctx.local_out()
    return sorted(dims, key=lambda d: after[d] / max(before[d], 1))


def before(ctx: LocalContext, moved: Iterable[int]) -> list[int]:
    """The block when all dims but `moved` are done: what slices move, they move last."""
    done, todo = list(ctx.local_out()), ctx.local_in(0)
    for d in moved:
        done[d] = todo[d]
    return done


def empty(ctx: LocalContext) -> bool:
    return 0 in ctx.local_out()


def zeros(ctx: LocalContext, dtype: Any) -> Any:
    return lax.full(ctx.local_out(), 0, dtype)


def bytes_sent(
    ctx: LocalContext,
    eqn: Eqn,
    dims: Iterable[int],
    rows_of: Callable[[int], int],
    shape: Sequence[int] | None = None,
) -> float:
    """The price of moving `dims` one after the other, in the order of `by_growth`.

    Args:
      rows_of: dim -> the rows one device sends for it.
      shape: the block before the first move; by default that of operand 0.
    """
    if empty(ctx):
        return 0.0
    total, block = 0, list(ctx.local_in(0) if shape is None else shape)
    for d in by_growth(ctx, dims):
        total += rows_of(d) * row_bytes(block, d, eqn.invars[0].itemsize)
        block[d] = ctx.local_out()[d]
    return float(total)
