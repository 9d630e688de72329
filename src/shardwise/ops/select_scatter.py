"""Select and scatter: what a window op's gradient adds to the row that each window selected.

A device's rows may have been selected by any window that holds one of them.  It fetches those windows'
values, and all rows that they hold, runs them like one device would, ties included, and keeps what
came to its own rows.  What came to others they find out themselves: nothing is sent back.

    windows of 3 at stride 2 over 8 rows on x=2: the windows that hold rows 4 to 7 begin at rows 2, 4
    and 6; device 1 fetches the first one's value, and rows 2 and 3
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from jax import lax

from shardwise import _jax_primitives
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import Device, cut, exchange, row_bytes
from shardwise.messages import Ints, Rows, overlaps
from shardwise.ops.reduce import identity
from shardwise.ops.reduce_window import trivial, window_dims
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.ops.sliding import Split, WindowDim
from shardwise.program import Eqn
from shardwise.rounds import Plan, plan_exchange

_P = _jax_primitives.lax_primitives("windowed_reductions")
_ADD, _ANY = _P["select_and_scatter_add"], _P["select_and_scatter"]


@rule(_ADD, level="dims")
def _select_and_scatter_add(eqn: Eqn) -> tuple[FactorRule, ...]:
    """`i w, i w -> i w  special=w`, or `whole=w`; linear in what is scattered."""
    b = RuleBuilder()
    dims = b.factors(eqn.outvars[0].shape)
    slid = [d for d, w in zip(dims, window_dims(eqn), strict=True) if not trivial(w)]
    rules = [b.build([dims, dims], [dims], special=slid, linear=((0,),))]
    if slid:
        rules.append(b.build([dims, dims], [dims], whole=slid, linear=((0,),), variant="whole"))
    return tuple(rules)


@rule(_ANY, level="dims")
def _select_and_scatter(eqn: Eqn) -> FactorRule:
    """`i w, i w, () -> i w  whole=w`: of functions that we know nothing of."""
    b = RuleBuilder()
    dims = b.factors(eqn.outvars[0].shape)
    slid = [d for d, w in zip(dims, window_dims(eqn), strict=True) if not trivial(w)]
    return b.build([dims, dims, []], [dims], whole=slid)


@dataclasses.dataclass(frozen=True, eq=False)
class _Fetch:
    """What a device needs along one dim: the windows that hold its rows, and the rows these hold.

    Attributes:
      windows, rows: the exchanges of both.
      own: by device, where its own rows begin among those fetched.
    """

    windows: Plan
    rows: Plan
    own: Ints


@functools.lru_cache(maxsize=1024)
def _fetch(rows: Split, windows: Split, w: WindowDim) -> _Fetch:
    lo = rows.steps(1)
    hi = lo + rows.count
    first = np.maximum(0, -(-(lo + w.low - w.size + 1) // w.stride))
    last = np.minimum(windows.size - 1, (hi - 1 + w.low) // w.stride)
    count = max(1, int((last - first)[hi > lo].max(initial=0)) + 1)
    span = (count - 1) * w.stride + w.size
    start = first * w.stride - w.low
    return _Fetch(_plan(windows, first, count), _plan(rows, start, span), lo - start)


def _plan(held: Split, first: Ints, length: int) -> Plan:
    """Rows [first, first + length) to every device."""
    have = Rows.blocks(held.shards, held.block, held.size)
    want = Rows(first, first + length, np.zeros(held.shards, np.int64))
    return plan_exchange(have, want, held.block, length, overlaps(have, want))


def _fetches(ctx: LocalContext, eqn: Eqn) -> dict[int, _Fetch]:
    source, operand = ctx.ins
    return {
        d: _fetch(Split.of(operand, d, ctx.mesh), Split.of(source, d, ctx.mesh), w)
        for d, w in enumerate(window_dims(eqn))
        if not trivial(w) and operand.sharding.axes[d]
    }


@local(_ADD)
def _select_and_scatter_add_local(ctx: LocalContext, eqn: Eqn, source: Any, operand: Any) -> Any:
    fetches = _fetches(ctx, eqn)
    largest = eqn.params["select_prim"] is lax.ge_p
    outside = identity("max" if largest else "min", operand.dtype)
    padding = list(eqn.params["padding"])
    for d, f in fetches.items():
        atoms = ctx.ins[1].sharding.axes[d]
        source = exchange(source, d, atoms, f.windows, 0)
        operand = exchange(operand, d, atoms, f.rows, outside)
        padding[d] = (0, 0)
    out = eqn.primitive.bind(source, operand, **{**eqn.params, "padding": tuple(padding)})
    for d, f in fetches.items():
        start = Device(ctx.ins[1].sharding.axes[d]).at(f.own)
        bounds = (int(f.own.min()), int(f.own.max()))
        out = cut(out, d, start, ctx.local_out()[d], 0, bounds)
    return out


@comm(_ADD)
def _select_and_scatter_add_comm(ctx: LocalContext, eqn: Eqn) -> float:
    """The windows' values and their rows, dim after dim."""
    total = 0.0
    blocks = [list(ctx.local_in(i)) for i in (0, 1)]
    for d, f in _fetches(ctx, eqn).items():
        for v, block, plan in zip(eqn.invars, blocks, (f.windows, f.rows), strict=True):
            total += plan.rows * row_bytes(block, d, v.itemsize)
            block[d] = plan.length
    return total if all(math.prod(b) for b in blocks) else 0.0
