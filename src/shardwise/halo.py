"""Realignment: code that moves rows of one split dim between devices (GSPMD 4.3, halo exchange).

`exchange` carries out a static `Plan`; `window` is the plan for windows at a fixed stride, which
a slice, a pad or a convolution needs; `shift` moves by an amount known only at run time.  All of it
is for one dim, split over a tuple of atoms, inside `shard_map`: several split dims are moved one
after the other.

    x[1:], 8 rows over 2:   device 0 keeps 1 2 3 and gets 4 from device 1: one permute of one row

Every start of a dynamic slice or update is in range by construction: blocks are padded or starts
clipped first, and what must not be seen is masked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise import _jax, messages
from shardwise.mesh import MeshAxes
from shardwise.messages import Rows
from shardwise.rounds import Plan, Start, Step, plan_exchange

Axes = Sequence[str]


def row_bytes(shape: Sequence[int], dim: int, itemsize: int) -> int:
    """Bytes of one row of `dim` of a local block."""
    n = itemsize
    for d, s in enumerate(shape):
        n *= 1 if d == dim else s
    return n


# ---- windows of a local array ----------------------------------------------------------------


def rows_at(x: Any, dim: int, start: Any, rows: int) -> Any:
    """Rows [start, start + rows) of `dim`; the caller knows that they exist."""
    if rows == x.shape[dim]:
        return x
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + rows, axis=dim)
    sizes = (*x.shape[:dim], rows, *x.shape[dim + 1 :])
    return lax.dynamic_slice(x, _starts(x, dim, start), sizes, allow_negative_indices=False)


def put_at(x: Any, piece: Any, dim: int, start: Any) -> Any:
    """`x` with `piece` written at `start` of `dim`; the caller knows that it fits."""
    return lax.dynamic_update_slice(x, piece, _starts(x, dim, start), allow_negative_indices=False)


def _starts(x: Any, dim: int, start: Any) -> list[Any]:
    zero = np.int32(0)
    return [jnp.asarray(start, jnp.int32) if d == dim else zero for d in range(x.ndim)]


def pad_dim(x: Any, dim: int, low: int, high: int, fill: Any = 0, interior: int = 0) -> Any:
    if not (low or high or interior):
        return x
    config = [(low, high, interior) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.asarray(fill, x.dtype), config)


def cut(
    x: Any, dim: int, start: Any, rows: int, fill: Any = 0, bounds: tuple[int, int] | None = None
) -> Any:
    """Rows [start, start + rows) of `dim` of a local array, `fill` where there are none.

    Args:
      start: any number; or, when the device decides it, one within `bounds` (both included).
    """
    n = x.shape[dim]
    if isinstance(start, int):
        start = min(max(start, -rows), n)
        bounds = (start, start)
    lo, hi = (min(max(b, -rows), n) for b in bounds or (-rows, n))
    low, high = max(0, -lo), max(0, hi + rows - n)
    if isinstance(start, int):
        return rows_at(pad_dim(x, dim, low, high, fill), dim, start + low, rows)
    if bounds != (lo, hi):
        start = lax.clamp(np.int32(lo), start, np.int32(hi))
    if (low or high) and 2 * rows < n:  # pad a few rows rather than the block
        first = lax.clamp(np.int32(0), start, np.int32(n - rows))
        few = rows_at(x, dim, first, rows)
        return rows_at(pad_dim(few, dim, rows, rows, fill), dim, start - first + rows, rows)
    x = pad_dim(x, dim, low, high, fill)
    return rows_at(x, dim, start + low if low else start, rows)


def all_to_all(x: Any, atoms: Axes, dim: int = 0) -> Any:
    """Part i of `dim` to device i over `atoms`; what comes, in the parts' places.

    XLA's CPU compiler sends the parts as a tuple and takes it that all have one layout.  Where one of them
    became a constant, or took the layout of what it was computed from, it crashed, or read memory that
    nobody wrote.  Behind a barrier they are parts of one value.  For the same reason no dim is split
    while another is joined: callers bring the parts to one dim.  It makes a kernel of every part it cuts,
    sooner where that is a run of numbers than where it is a block.
    """
    if _jax.tracing_platform() == "cpu":
        x = lax.optimization_barrier(x)
        if math.prod(x.shape[:dim]) == 1:
            return lax.all_to_all(x.reshape(-1), atoms, 0, 0, tiled=True).reshape(x.shape)
    return lax.all_to_all(x, atoms, dim, dim, tiled=True)


def iota_of(x: Any, dim: int) -> Any:
    """Positions along `dim`, shaped to broadcast against `x`."""
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    return lax.broadcasted_iota(jnp.int32, shape, dim)


def where(mask: Any, x: Any, y: Any) -> Any:
    """`x` where `mask`, else `y` (like `x`, or a scalar); the mask broadcasts, or is a scalar."""
    if getattr(mask, "ndim", 0):
        mask = lax.broadcast_in_dim(mask, x.shape, range(x.ndim))
    if not getattr(y, "ndim", 0):
        y = lax.broadcast(jnp.asarray(y, x.dtype), x.shape)
    return lax.select(mask, x, y)


class Device:
    """This device's place among the blocks of a dim that is split over `atoms`, major first."""

    def __init__(self, atoms: Axes):
        self.atoms = tuple(atoms)

    @functools.cached_property
    def index(self) -> Any:
        return lax.axis_index(self.atoms)

    def at(self, table: Start) -> Any:
        """This device's entry of a table of all devices, as an int32 scalar."""
        if isinstance(table, int):
            return table
        values = jnp.asarray(np.asarray(table, np.int32))
        entry = lax.dynamic_slice(values, (self.index,), (1,), allow_negative_indices=False)
        return lax.squeeze(entry, (0,))

    def receive(self, x: Any, pairs: Iterable[tuple[int, int]]) -> Any:
        """One collective-permute of (source, destination) pairs; zeros where nothing is sent.

        `lax.ppermute` numbers devices in mesh order, in whatever order it is given the axes.
        """
        sizes = jax.sharding.get_abstract_mesh().shape
        order = [a for a in sizes if a in self.atoms] or list(self.atoms)
        if tuple(order) != self.atoms:
            grid = np.arange(math.prod(sizes[a] for a in order)).reshape([sizes[a] for a in order])
            number = grid.transpose([order.index(a) for a in self.atoms]).reshape(-1).tolist()
            pairs = [(number[s], number[d]) for s, d in pairs]
        return lax.ppermute(x, tuple(order), tuple(pairs))


# ---- static exchange -------------------------------------------------------------------------


def exchange(
    x: Any, dim: int, atoms: Axes, plan: Plan, fill: Any = None,
    received: dict[Step, Any] | None = None,
) -> Any:  # fmt: skip
    """Carry out a plan on a local block.

    Args:
      x: the local block, `plan.block` rows along `dim`.
      atoms: what `dim` is split over, major first; `plan.shards` blocks.
      fill: a scalar for wanted rows that no device held; None leaves them unspecified.
      received: what steps received of this very block before: read, and added to.

    Returns:
      The local block of the result, `plan.length` rows along `dim`.
    """
    device = Device(atoms)
    if plan.method == "gather":
        whole = lax.all_gather(x, device.atoms, axis=dim, tiled=True)
        data = lax.slice_in_dim(whole, *plan.span, axis=dim)
        start, bounds = device.at(plan.start), (int(np.min(plan.start)), int(np.max(plan.start)))
        return cut(data, dim, start, plan.length, 0 if fill is None else fill, bounds)
    if plan.method == "scatter":
        out = _scatter(x, dim, device, plan)
    else:
        out = _run_steps(x, dim, device, plan, {} if received is None else received)
    if fill is None or not any(plan.fills):
        return out
    i, held = iota_of(out, dim), True
    if plan.fills[0]:
        held = i >= device.at(plan.cover[0])
    if plan.fills[1]:
        held &= i < device.at(plan.cover[1])
    return where(held, out, fill)


def _run_steps(x: Any, dim: int, device: Device, plan: Plan, received: dict[Step, Any]) -> Any:
    def piece(step: Step) -> Any:
        if step in received:
            return received[step]
        window = rows_at(x, dim, device.at(step.take), step.rows)
        if not step.pairs:
            return window
        received[step] = device.receive(window, step.pairs)
        return received[step]

    def zeros(rows: int) -> Any:
        return lax.full((*x.shape[:dim], rows, *x.shape[dim + 1 :]), 0, x.dtype)

    if not plan.steps:
        return zeros(plan.length)
    if (placed := plan.side_by_side) is not None:
        parts, end = [], 0
        for put, step in placed:
            parts += [zeros(put - end)] * (put > end) + [piece(step)]
            end = put + step.rows
        parts += [zeros(plan.length - end)] * (plan.length > end)
        return lax.concatenate(parts, dim) if len(parts) > 1 else parts[0]
    lead = max(0, *(-int(np.min(s.put)) for s in plan.steps))
    tail = max(0, *(int(np.max(s.put)) + s.rows - plan.length for s in plan.steps))
    out = None
    for step in plan.steps:
        new, start = piece(step), device.at(step.put)
        if out is None and isinstance(start, int) and not step.mask:
            out = pad_dim(new, dim, lead + start, plan.length + tail - start - step.rows)
            continue
        out = zeros(lead + plan.length + tail) if out is None else out
        start = start + lead if lead else start
        if step.mask:
            new = where(_asked(new, dim, device, step), new, rows_at(out, dim, start, step.rows))
        out = put_at(out, new, dim, start)
    return rows_at(out, dim, lead, plan.length)


def _asked(window: Any, dim: int, device: Device, step: Step) -> Any:
    """Which rows of a step's window were asked for; one predicate where it is all or none."""
    if step.whole_or_nothing:
        return device.at(step.hi) > 0
    i = iota_of(window, dim)
    asked = i < device.at(step.hi)
    return asked & (i >= device.at(step.lo)) if step.lo.any() else asked


def _scatter(x: Any, dim: int, device: Device, plan: Plan) -> Any:
    """What this device holds, in zeros of the whole result; the sum over devices, cut in blocks."""
    if plan.clear is not None:
        i = iota_of(x, dim)
        held = (i >= device.at(plan.clear[0])) & (i < device.at(plan.clear[1]))
        x = where(held, x, 0)
    bounds = (int(np.min(plan.start)), int(np.max(plan.start)))
    whole = cut(x, dim, device.at(plan.start), plan.shards * plan.length, 0, bounds)
    return sum_scatter(whole, dim, device.atoms)


def sum_scatter(x: Any, dim: int, atoms: Axes) -> Any:
    """Reduce-scatter of terms of which at most one is not zero, of any dtype."""
    y = x.astype(jnp.uint8) if x.dtype == bool else x
    return lax.psum_scatter(y, tuple(atoms), scatter_dimension=dim, tiled=True).astype(x.dtype)


@functools.lru_cache(maxsize=4096)
def window_plan(
    shards: int,
    block: int,
    size: int,
    start: tuple[int, int],
    length: int,
    limit: int | None = None,
) -> Plan:
    """The plan by which device p gets rows [a*p + b, a*p + b + length) of a split dim.

    Args:
      shards, block, size: the source: `size` rows in `shards` blocks of `block`.
      start: (a, b).
      limit: rows from this one on are not wanted.
    """
    held = Rows.blocks(shards, block, size)
    wanted = Rows.windows(shards, *start, length, limit)
    return plan_exchange(held, wanted, block, length, messages.overlaps(held, wanted))


def window(
    x: Any, dim: int, atoms: Axes, mesh: MeshAxes, *, block: int, size: int,
    start: tuple[int, int], length: int, fill: Any = None,
) -> Any:  # fmt: skip
    """Rows [a*p + b, a*p + b + length) of a split dim, on device p; `fill` outside the dim.

    Args:
      x: the local block; `dim` has `block` rows of a global `size`, split over `atoms`.
      start: (a, b).
      fill: a scalar, or None to leave rows outside [0, size) unspecified.
    """
    plan = window_plan(mesh.size(atoms), block, size, start, length)
    return exchange(x, dim, atoms, plan, fill)


def window_rows(
    shards: int, *, block: int, size: int, start: tuple[int, int], length: int
) -> int:  # fmt: skip
    """Rows one device sends in `window`; times `row_bytes`, its price."""
    return window_plan(shards, block, size, start, length).rows


# ---- movement by a run-time amount -----------------------------------------------------------


def shift_rows(block: int, reach: int) -> int:
    """Rows one device sends in `shift`."""
    return (reach // block).bit_length() * block + _halo(block, reach)


def _halo(block: int, reach: int) -> int:
    return reach if reach < block else block - 1


def shift(
    x: Any, dim: int, atoms: Axes, mesh: MeshAxes, by: Any, reach: int, down: bool = False
) -> Any:
    """Rows [p*block + by, p*block + by + block) of a split dim, for a run-time `by`.

    Whole blocks move by the binary digits of the distance: for every digit one permute, kept where
    the digit is set.  The rest is one halo from the neighbour.  Rows outside the dim are zeros or
    junk.

    Args:
      by: an int32 scalar in [0, reach], the same on all devices.
      down: move the other way: rows [p*block - by, ...).
    """
    shards, block, device = mesh.size(atoms), x.shape[dim], Device(atoms)

    def from_neighbour(y: Any, distance: int) -> Any:
        step = -distance if down else distance
        pairs = [(p + step, p) for p in range(shards) if 0 <= p + step < shards]
        return device.receive(y, pairs)

    blocks = lax.div(by, jnp.int32(block)) if reach >= block else 0
    for k in range((reach // block).bit_length()):
        moved = from_neighbour(x, 1 << k)
        x = where((blocks >> k) & 1 == 1, moved, x)
    halo = _halo(block, reach)
    if not halo:
        return x
    rest = by - blocks * block
    edge = rows_at(x, dim, block - halo if down else 0, halo)
    both = [from_neighbour(edge, 1), x] if down else [x, from_neighbour(edge, 1)]
    return rows_at(lax.concatenate(both, dim), dim, halo - rest if down else rest, block)
