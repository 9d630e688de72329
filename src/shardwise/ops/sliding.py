"""Sliding windows along one split dim: what each device reads, and how it gets there (GSPMD A.2).

A window op reads its operand at sums of coordinates.  Window o, at tap k, reads position

    o * stride + k * dilation - low

of the operand dilated by `base`: row i lies at position i * base, between rows there are holes, and
outside them padding.  Any one of the three may be split.  `sliding` finds the rows that each
device's block of windows and taps reads, and plans how they come (`halo.exchange`):

    rows and windows split alike    a halo: rows come from the neighbours, or from further away
    rows and taps split alike       likewise; every device then has one term of each result
    rows whole                      every device cuts what it reads

and says what window the primitive is to slide over the local block, for it to be the local result.
Where the first row read lies at another distance from the first position on every device (of the
paper's three cases of base dilation, the two in which no one padding fits all), the block is dilated
first, and cut at a place that depends on the device.

The windows that hold given rows are found with it too: they are the rows of a dim that is dilated by
the stride, read by windows of the span at stride 1 (`holders`).

    4 windows of 3 at stride 2, padded by 1, over 8 rows on x=2
    device 0 reads rows -1..4, device 1 rows 3..8: a permute of one row down; -1 is fill
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.halo import Device, cut, exchange, pad_dim, row_bytes
from shardwise.mesh import MeshAxes
from shardwise.messages import Ints, Rows, overlaps
from shardwise.rounds import Plan, Start, plan_exchange
from shardwise.sharding import Layout


@dataclasses.dataclass(frozen=True)
class Split:
    """A dim of `size` in blocks of `block` over `atoms` (none: one block, which is the dim)."""

    size: int
    block: int
    atoms: tuple[str, ...] = ()
    shards: int = 1

    @staticmethod
    def whole(size: int) -> Split:
        return Split(size, size)

    @staticmethod
    def of(layout: Layout, dim: int, mesh: MeshAxes) -> Split:
        atoms = layout.sharding.axes[dim]
        return Split(layout.shape[dim], layout.local_shape(mesh)[dim], atoms, mesh.size(atoms))

    @property
    def uneven(self) -> bool:
        return self.block * self.shards != self.size

    @property
    def count(self) -> Ints:
        """How many of a block's rows are not padding."""
        return np.clip(self.size - np.arange(self.shards) * self.block, 0, self.block)

    def steps(self, stride: int) -> Ints:
        """Where every block begins, its rows `stride` apart."""
        return np.arange(self.shards, dtype=np.int64) * self.block * stride


@dataclasses.dataclass(frozen=True)
class WindowDim:
    """A window along one dim; `base` and `dilation` are the spacing of rows and of taps.

    Attributes:
      size: taps; `stride`: from window to window.
      low, high: padding, of the dilated dim; negative to leave positions out.
    """

    size: int
    stride: int = 1
    low: int = 0
    high: int = 0
    base: int = 1
    dilation: int = 1

    @property
    def span(self) -> int:
        """Positions from a window's first tap to its last."""
        return (self.size - 1) * self.dilation + 1

    def holders(self) -> WindowDim:
        """The window in which row i of the dim reads the windows that may hold it (base 1)."""
        return WindowDim(self.span, 1, self.span - 1 - self.low, 0, self.stride, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Sliding:
    """How the block that a device slides over is made, and the window to slide over it.

    Attributes:
      window: over the local block: its taps, padding and base dilation.
      block: rows of the local block, before it is dilated here if it is.
      length: positions that the local windows cover, padding included.
      base: spacing of the operand's rows.
      source: the operand's dim; `plan`: the exchange along it (None: nothing moves).
      atoms: what `start` and `phase` depend on, major first.
      start: row of what the exchange gives, or of the block, where the local block begins; None
        where it is that.
      phase: positions before the local block's first row; a table where it differs by device: then, and
        where only holes are read, the block is dilated here and `window` is for that.
      reads: per device of `source` (one, if it is not split) the rows read, from and to, as if there
        were rows everywhere.
    """

    window: WindowDim
    block: int
    length: int
    base: int
    source: Split
    plan: Plan | None = None
    atoms: tuple[str, ...] = ()
    start: Start | None = None
    phase: Start = 0
    reads: tuple[Ints, Ints] = (np.zeros(0), np.zeros(0))

    @property
    def rows(self) -> int:
        """Rows one device sends; times `row_bytes`, the price."""
        return self.plan.rows if self.plan else 0

    @property
    def made(self) -> Any:
        """A key: where it is equal, the same becomes of a block (`slide`), whatever slides over it."""
        plan = self.plan
        if plan is None or plan.method != "rounds" or self.start is not None:
            return self
        return plan.steps, plan.fills, plan.length


@functools.lru_cache(maxsize=4096)
def sliding(source: Split, window: WindowDim, result: Split, taps: Split | None = None) -> Sliding:
    """Plan the local block of a window op along one dim.

    Args:
      source: the operand's dim.  If it is split, then as `result` or as `taps` is.
      window: the whole op's.
      result: the windows; `taps`: the window's own dim, whole unless given.  Taps that are padding
        count for nothing: the caller has set them to zero.
    """
    taps = taps or Split.whole(window.size)
    if not (source.atoms or result.atoms or taps.atoms):
        length = window.low + (source.size - 1) * window.base + 1 + window.high
        return Sliding(window, source.size, length, window.base, source, phase=window.low)
    runs = [(result, window.stride), (taps, window.dilation)]
    tied = next((r for r in runs if source.atoms and r[0].atoms == source.atoms), None)
    if source.atoms and not tied:
        raise ValueError(f"{source} must be split as {result} or {taps} is, or not at all")
    free = [r for r in runs if r is not tied and r[0].atoms]
    length = sum((s.block - 1) * step for s, step in runs) + 1
    first = np.zeros(1, np.int64) - window.low
    plan, have, head = None, source.size, np.zeros(1, np.int64)
    if tied:
        first = tied[0].steps(tied[1]) - window.low
        plan, head = _exchange(source, window.base, first, tied, runs, taps.uneven)
        have = plan.length
    begin = first[:, None]
    for split, step in free:
        begin = (begin[..., None] + split.steps(step)).reshape(len(first), -1)
    row = -(-begin // window.base)
    phase = row * window.base - begin
    block = max(1, int((-(-(length - phase) // window.base)).max()))
    start = _table(row - head[:, None])
    local = dataclasses.replace(window, size=taps.block)
    phase = _table(phase)
    if isinstance(phase, int) and phase < length:
        high = length - (phase + (block - 1) * window.base + 1)
        local = dataclasses.replace(local, low=phase, high=high)
    else:
        local = dataclasses.replace(local, low=0, high=0, base=1)
    stays = isinstance(start, int) and start == 0 and block == have
    ends = head + have if tied else row[:, 0] + block
    return Sliding(
        local, block, length, window.base, source, plan,
        (*source.atoms, *(a for s, _ in free for a in s.atoms)),
        None if stays else start, phase, (row[:, 0], ends),
    )  # fmt: skip


def _table(values: Ints) -> Start:
    values = values.reshape(-1)
    return int(values[0]) if (values == values[0]).all() else values


def _exchange(
    source: Split, base: int, first: Ints, tied: Any, runs: Sequence[Any], exact: bool
) -> tuple[Plan, Ints]:
    """The plan by which a device gets all rows that its block of the tied dim reads.

    Args:
      first: the first position read, by device.
      tied: of `runs` (a dim, the distance of its steps) the one split as `source` is.
      exact: rows that no one needs must be fill all the same (they meet taps that are padding: zero,
        and zero times junk may be NaN).

    Returns:
      The plan, and the row with which its result begins, by device.
    """
    split, step = tied
    others = sum((s.block * s.shards - 1) * d for s, d in runs if s is not split)
    needed = sum((s.size - 1) * d for s, d in runs if s is not split)
    lo = -(-first // base)
    ahead = lo * base - first
    length = max(1, int((-(-((split.block - 1) * step + others + 1 - ahead) // base)).max()))
    last = first + (split.count - 1) * step + needed
    hi = np.where(split.count > 0, last // base + 1, lo)
    plan = _plan(source, tuple(lo.tolist()), tuple(np.clip(hi, lo, lo + length).tolist()), length)
    if exact:
        short = bool((plan.cover[1] < length).any())
        plan = dataclasses.replace(plan, fills=(plan.fills[0], plan.fills[1] or short))
    return plan, lo


@functools.lru_cache(maxsize=4096)
def _plan(source: Split, lo: tuple[int, ...], hi: tuple[int, ...], length: int) -> Plan:
    """One plan for whoever reads the same rows, so that what it receives can be told to be the same."""
    wanted = Rows(np.array(lo), np.array(hi), np.zeros(source.shards, np.int64))
    held = Rows.blocks(source.shards, source.block, source.size)
    return plan_exchange(held, wanted, source.block, length, overlaps(held, wanted))


# ---- several dims ----------------------------------------------------------------------------


def _order(shape: Sequence[int], dims: Mapping[int, Sliding]) -> list[int]:
    """Dims in the order to move them in: those that shrink the block most come first."""
    return sorted(dims, key=lambda d: dims[d].block / max(shape[d], 1))


def slide(
    x: Any, dims: Mapping[int, Sliding], fill: Any = 0, received: dict[Any, Any] | None = None
) -> Any:
    """The local block to slide over: `dims` of a local operand moved, `fill` where there are no rows.

    The primitive, run on it with the windows of `dims`, gives this device's block of the result.

    Args:
      fill: a scalar; a number if `received` is given.
      received: what was received of this very block before (`LocalContext.received`); added to.
    """
    received = {} if received is None else received
    done: list[Any] = []  # what has become of the block so far
    for d in _order(x.shape, dims):
        s = dims[d]
        if s.plan:
            of_this = received.setdefault((tuple(done), d), {})
            x = exchange(x, d, s.source.atoms, s.plan, fill, of_this)
        done.append((d, s.made, fill))
        if s.start is not None:
            bounds = (int(np.min(s.start)), int(np.max(s.start)))
            x = cut(x, d, Device(s.atoms).at(s.start), s.block, fill, bounds)
    for d, s in dims.items():
        if s.window.base != s.base:
            x = _dilate(x, d, s, fill)
    return x


def _dilate(x: Any, dim: int, s: Sliding, fill: Any) -> Any:
    """The block with the holes between its rows, cut where the device's first window begins."""
    bounds = (-int(np.max(s.phase)), -int(np.min(s.phase)))
    x = pad_dim(x, dim, 0, 0, fill, s.base - 1)
    return cut(x, dim, -Device(s.atoms).at(s.phase), s.length, fill, bounds)


def sliding_bytes(
    shape: Sequence[int],
    dims: Mapping[int, Sliding],
    itemsize: int,
    received: Mapping[Any, Any] | None = None,
) -> float:
    """Bytes one device sends in `slide` of a local block of this shape, `received` being at hand."""
    block, total, received = list(shape), 0, received or {}
    done: list[Any] = []
    for d in _order(shape, dims):
        s = dims[d]
        if s.plan:
            of_this = received.get((tuple(done), d), {})
            at_hand = sum(step.rows for step in s.plan.steps if step.pairs and step in of_this)
            total += (s.rows - at_hand) * row_bytes(block, d, itemsize)
        done.append((d, s.made, 0))
        block[d] = s.block
    return float(total)
