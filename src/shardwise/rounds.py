"""`Plan`: how one exchange of rows is carried out, chosen by the rows a device sends.

Messages become *steps*.  A step copies a window of the local block, on the same device or through
one collective-permute, to a place in the result.  Where a window starts is one number for all
devices (a uniform shift: GSPMD 4.3's halo exchange) or a small table indexed by the device (the
windows of blocks of another size).  A window may carry rows nobody asked for; the plan finds out
whether a later step overwrites them, and masks them only where not.

An exchange of many messages per device is done by one collective instead: gather the dim and cut
the window, or put what one holds into zeros of the whole result and reduce-scatter.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from shardwise.messages import Ints, Messages, Rows, edge_colouring, is_matching, repeats

# More collective-permutes than this in one exchange are not worth the rows they may save.
MAX_ROUNDS = 16
# How many times a block what a device holds for a while may measure (gather, scatter).
MAX_GROWTH = 8
# Messages for which the fewest rounds are searched for (some 10 microseconds each).
MAX_COLOURED = 1 << 14

Start = int | Ints  # one start for all devices, or one for each


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """Copy a window of `rows` rows of the local source to the result, through a permute or not.

    Attributes:
      pairs: (source, destination) devices of the permute; empty for a local copy.
      take: where the window starts in the source block, by the sending device.
      put: where it starts in the result, by the receiving device; where a device receives nothing,
        past the result's end, or anything when `put` is one number.
      lo, hi: the part of the window that was asked for, by the receiving device.
      mask: whether the rest of the window must be kept from the result.
    """

    rows: int
    pairs: tuple[tuple[int, int], ...]
    take: Start
    put: Start
    lo: Ints
    hi: Ints
    mask: bool = False

    @property
    def whole_or_nothing(self) -> bool:
        """Whether every device asked for the whole window or for nothing of it."""
        return not self.lo.any() and bool(np.isin(self.hi, (0, self.rows)).all())

    def placed(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Per device, in the result: start and end of the window, and of what was asked for."""
        put = np.broadcast_to(self.put, self.lo.shape)
        return put, put + self.rows, put + self.lo, put + self.hi


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """One exchange along a dim over `shards` devices.

    Attributes:
      method: "rounds" (the steps), "gather" or "scatter".
      block, length: rows of a device's source and of its result.
      rows: rows one device sends, ring convention.
      steps: the copies, in order ("rounds").
      cover: per device the interval of result rows that some device held; the rest is fill.
      fills: whether rows before, and rows after, the covered ones must be filled.
      start: "gather": the gathered row at which device p's result begins; "scatter": the local row
        that is row 0 of the whole result.
      span: "gather": first and last + 1 of the gathered rows that hold data.
      clear: "scatter": per device the interval of its rows that hold data, when the rest of its
        block must be cleared.
    """

    method: str
    shards: int
    block: int
    length: int
    rows: int
    steps: tuple[Step, ...] = ()
    cover: tuple[Ints, Ints] = (np.zeros(0), np.zeros(0))
    fills: tuple[bool, bool] = (False, False)
    start: Start = 0
    span: tuple[int, int] = (0, 0)
    clear: tuple[Ints, Ints] | None = None

    @property
    def side_by_side(self) -> list[tuple[int, Step]] | None:
        """Steps in order of place, if each has one place for all devices and they do not touch."""
        placed = [(s.put, s) for s in self.steps if isinstance(s.put, int)]
        placed.sort(key=lambda p: p[0])
        ends = [0, *(n for put, s in placed for n in (put, put + s.rows)), self.length]
        apart = len(placed) == len(self.steps) > 0 and ends == sorted(ends)
        return placed if apart else None


def plan_exchange(held: Rows, wanted: Rows, block: int, length: int, m: Messages) -> Plan:
    """The cheapest plan by which devices that hold `held` get the rows `wanted`.

    Args:
      block, length: rows of a device's source and result blocks, with what is not held or wanted.
      m: the messages, `overlaps(held, wanted)`.
    """
    found = colour_messages(m.pick(m.src != m.dst))
    shards, room = wanted.shards, MAX_GROWTH * max(block, length)
    draft = Plan("rounds", shards, block, length, found.rows, (), *_coverage(m, wanted))
    others = []
    if shards * block <= room and held.tiled(block) is not None:
        others.append(by_gather(draft, held, wanted))
    if shards * length <= room and wanted.tiled(length) is not None:
        others.append(by_scatter(draft, held, wanted))
    other = min(others, key=lambda p: p.rows, default=None)
    if other and (found.rounds > MAX_ROUNDS or (other.rows, 1) < (found.rows, found.rounds)):
        return other
    return plan_rounds(m, wanted, block, length, found)


def plan_rounds(
    m: Messages, wanted: Rows, block: int, length: int, found: Colouring | None = None
) -> Plan:
    """The plan that sends messages as they are; `found` colours those between devices."""
    shards, found = wanted.shards, found or colour_messages(m.pick(m.src != m.dst))
    make = functools.partial(_steps, shards=shards, block=block, length=length)
    local = m.src == m.dst
    colour = found.colour
    if found.fixed:
        local &= ~_free_riders(m, local)
        colour = by_displacement(m.pick(~local))
    mine = m.pick(local)
    steps = make(m.pick(~local), colour, found.fixed)
    alike, each = by_displacement(mine), repeats(mine.dst)
    if is_matching(mine, alike) and alike.max(initial=0) <= each.max(initial=0):
        steps += make(mine, alike, True)
    else:
        steps += make(mine, each, False)
    steps.sort(key=lambda s: float(np.mean(np.broadcast_to(s.put, shards)[s.hi > s.lo])))
    cover, fills = _coverage(m, wanted)
    few = len(steps) <= 2 * MAX_ROUNDS  # with more, masking costs less than finding out
    steps = [
        dataclasses.replace(s, mask=not few or _leaves_junk(s, steps[i + 1 :], cover))
        for i, s in enumerate(steps)
    ]
    return Plan("rounds", shards, block, length, found.rows, tuple(steps), cover, fills)


@dataclasses.dataclass(frozen=True, eq=False)
class Colouring:
    """Rounds for messages between devices.

    Attributes:
      colour: the round of each message; `rounds` how many there are.
      fixed: whether the windows of a round start alike on all devices.
      rows: what one device sends.
    """

    colour: Ints
    fixed: bool
    rows: int
    rounds: int


def by_displacement(m: Messages) -> Ints:
    """One colour for all messages that move by the same number of rows within the block."""
    return np.unique(m.src_off - m.dst_off, return_inverse=True)[1].reshape(-1)


def colour_messages(m: Messages) -> Colouring:
    """The cheapest of four colourings of messages between devices.

    By displacement: uniform shifts.  By the distance between the devices.  In turn, which needs the
    fewest rounds when both sides are intervals in one order.  And with the fewest rounds whatever
    the messages are, tried only while nothing else reaches what the busiest device must send or
    receive anyway.
    """
    if not len(m):
        return Colouring(m.src, False, 0, 0)
    most = max(np.bincount(m.src).max(), np.bincount(m.dst).max())
    distance = m.dst - m.src
    options = [(np.arange(len(m)) % most, False)]
    if (alike := by_displacement(m)).max() < MAX_ROUNDS:
        options.append((alike, True))
    pairs = distance * (2 * len(m)) + repeats(m.src, m.dst)
    options.append((np.unique(pairs, return_inverse=True)[1].reshape(-1), False))
    found = [_price(m, c, fixed) for c, fixed in options if is_matching(m, c)]
    busiest = max(np.bincount(m.src, m.length).max(), np.bincount(m.dst, m.length).max())
    open_ = min(f.rows for f in found) > busiest
    if open_ and len(m) <= MAX_COLOURED and most <= MAX_ROUNDS:
        found.append(_price(m, edge_colouring(m.src, m.dst, m.length), False))
    return min(found, key=lambda f: (f.rows, f.rounds, not f.fixed))


def _price(m: Messages, colour: Ints, fixed: bool) -> Colouring:
    """A colouring with what it sends; a `fixed` window spans all messages of its round."""
    n = int(colour.max()) + 1
    if fixed:
        lo, hi = np.full(n, np.iinfo(np.int64).max), np.zeros(n, np.int64)
        np.minimum.at(lo, colour, m.src_off)
        np.maximum.at(hi, colour, m.src_off + m.length)
        return Colouring(colour, True, int((hi - lo).sum()), n)
    longest = np.zeros(n, np.int64)
    np.maximum.at(longest, colour, m.length)
    return Colouring(colour, False, int(longest.sum()), n)


def _free_riders(m: Messages, local: Ints) -> Ints:
    """The local messages that lie in the window of a uniform permute: it may carry them as well.

    Reversing an odd number of blocks leaves the middle one in place, for instance.
    """
    colour = by_displacement(m)
    riders = local & np.isin(colour, colour[~local])
    both, theirs = m.pick(~local | riders), m.pick(~local)
    colour = by_displacement(both)
    if not is_matching(both, colour):
        return np.zeros_like(local)
    grown = _price(both, colour, True).rows > _price(theirs, by_displacement(theirs), True).rows
    return np.zeros_like(local) if grown else riders


def _steps(
    m: Messages, colour: Ints, fixed: bool, *, shards: int, block: int, length: int
) -> list[Step]:
    order = np.argsort(colour, kind="stable")
    cuts = np.flatnonzero(np.diff(colour[order])) + 1
    groups = np.split(order, cuts) if len(m) else []
    return [_step(m.pick(g), fixed, shards, block, length) for g in groups]


def _step(m: Messages, fixed: bool, shards: int, block: int, length: int) -> Step:
    low, high = int(m.src_off.min()), int((m.src_off + m.length).max())
    rows = high - low if fixed else int(m.length.max())
    # One window serves every sender where it can; otherwise each has its own, inside its block.
    start = m.src_off * 0 + low if high - low <= rows else np.minimum(m.src_off, block - rows)
    into = m.src_off - start
    pairs = (
        () if (m.src == m.dst).all() else tuple(zip(m.src.tolist(), m.dst.tolist(), strict=True))
    )
    lo, hi = np.zeros(shards, np.int64), np.zeros(shards, np.int64)
    lo[m.dst], hi[m.dst] = into, into + m.length
    put = m.dst_off - into
    alike = (put == put[0]).all() and (fixed or len(m) == shards)
    return Step(
        rows, pairs, _table(shards, m.src, start, int(start[0])),
        int(put[0]) if alike else _table(shards, m.dst, put, length), lo, hi,
    )  # fmt: skip


def _table(shards: int, where: Ints, values: Ints, default: int) -> Start:
    table = np.full(shards, default, np.int64)
    table[where] = values
    return int(table[0]) if (table == table[0]).all() else table


def _coverage(m: Messages, wanted: Rows) -> tuple[tuple[Ints, Ints], tuple[bool, bool]]:
    """The rows of each result block that messages cover, and at which ends wanted rows lack."""
    lo, hi = np.full(wanted.shards, np.iinfo(np.int64).max), np.zeros(wanted.shards, np.int64)
    np.minimum.at(lo, m.dst, m.dst_off)
    np.maximum.at(hi, m.dst, m.dst_off + m.length)
    lo = np.minimum(lo, hi)
    before = (lo > wanted.at) & (hi > lo)
    after = hi < wanted.at + wanted.count
    return (lo, hi), (bool(before.any()), bool(after.any()))


def _leaves_junk(step: Step, later: list[Step], cover: tuple[Ints, Ints]) -> bool:
    """Whether a step puts rows that were not asked for where covered rows must stand at the end."""
    start, end, lo, hi = step.placed()
    spans = [s.placed()[2:] for s in later]
    for a, b in ((start, lo), (hi, end)):
        a, b = np.maximum(a, cover[0]), np.minimum(b, cover[1])
        for _ in spans:  # what later steps write properly, in whatever order, does not matter
            for left, right in spans:
                a = np.where((left <= a) & (a < right), right, a)
        if (a < b).any():
            return True
    return False


def by_gather(rounds: Plan, held: Rows, wanted: Rows) -> Plan:
    """The same exchange by one all-gather, when blocks held follow each other."""
    first = held.tiled(rounds.block) or 0
    full = held.count > 0
    span = (int(held.lo[full].min()) - first, int(held.hi[full].max()) - first)
    start = wanted.lo - wanted.at - first - span[0]
    return dataclasses.replace(
        rounds, method="gather", rows=(rounds.shards - 1) * rounds.block, steps=(),
        start=_table(rounds.shards, np.arange(rounds.shards), start, 0), span=span,
    )  # fmt: skip


def by_scatter(rounds: Plan, held: Rows, wanted: Rows) -> Plan:
    """The same exchange by one reduce-scatter, when blocks wanted follow each other."""
    first = wanted.tiled(rounds.length) or 0
    start = np.where(held.count > 0, held.at - held.lo + first, rounds.block)
    tiled = held.tiled(rounds.block) is not None
    return dataclasses.replace(
        rounds, method="scatter", rows=(rounds.shards - 1) * rounds.length, steps=(),
        start=start, clear=None if tiled else (held.at, held.at + held.count),
    )  # fmt: skip
