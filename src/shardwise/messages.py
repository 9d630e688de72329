"""Which rows go from which device to which, and in what rounds: the first part of `halo.py`.

One dim is cut over P devices.  What a device *holds* of it and what it *wants* of it are intervals
of one shared coordinate (`Rows`); where they overlap, rows must travel (`Messages`).  A round is
one collective-permute: every device sends at most one message and receives at most one, and all
travel at the length of the longest.  So rounds are colours of a bipartite graph whose edges are
messages, and their price is the sum over colours of the longest message.

    held    |0 1 2 3|4 5 6 7|        shards of a dim of 8
    wanted  |1 2 3 4|5 6 7  |        x[1:]: one row goes from device 1 to device 0

Everything here is numpy, O(messages); nothing depends on JAX or on the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

Ints = np.ndarray
Table = dict[int, dict[int, int]]  # device -> colour -> message


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Device p holds or wants rows [lo[p], hi[p]) of a shared coordinate, from local row at[p] on.

    Empty where hi <= lo.  Rows held are disjoint between devices; rows wanted may overlap.
    """

    lo: Ints
    hi: Ints
    at: Ints

    @staticmethod
    def blocks(shards: int, block: int, size: int, first: int = 0, at: int = 0) -> Rows:
        """A dim of `size` rows in blocks; its row 0 is row `first` of the coordinate."""
        lo = np.arange(shards, dtype=np.int64) * block
        hi = np.minimum(lo + block, size)
        return Rows(lo + first, np.maximum(lo, hi) + first, np.full(shards, at, np.int64))

    @staticmethod
    def windows(
        shards: int, stride: int, offset: int, length: int, limit: int | None = None
    ) -> Rows:
        """Device p wants [stride*p + offset, ... + length), cut at `limit` where there is one."""
        lo = np.arange(shards, dtype=np.int64) * stride + offset
        hi = lo + length if limit is None else np.clip(lo + length, lo, max(limit, 0))
        return Rows(lo, np.maximum(lo, hi), np.zeros(shards, np.int64))

    @property
    def shards(self) -> int:
        return len(self.lo)

    @property
    def count(self) -> Ints:
        return np.maximum(self.hi - self.lo, 0)

    def tiled(self, block: int) -> int | None:
        """c when local row i of device p is row c + p*block + i for every p, else None."""
        base = (self.lo - self.at - np.arange(self.shards) * block)[self.count > 0]
        return int(base[0]) if len(base) and (base == base[0]).all() else None


@dataclasses.dataclass(frozen=True, eq=False)
class Messages:
    """Rows [src_off, src_off + length) of device src become rows [dst_off, ...) of device dst."""

    src: Ints
    dst: Ints
    src_off: Ints
    dst_off: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.src)

    def pick(self, which: Ints) -> Messages:
        return Messages(*(getattr(self, f.name)[which] for f in dataclasses.fields(self)))

    @staticmethod
    def join(parts: Sequence[Messages]) -> Messages:
        names = [f.name for f in dataclasses.fields(Messages)]
        return Messages(*(np.concatenate([getattr(m, n) for m in parts]) for n in names))


def overlaps(held: Rows, wanted: Rows) -> Messages:
    """The messages by which every device gets those of its wanted rows that some device holds."""
    order = np.flatnonzero(held.count)
    order = order[np.argsort(held.lo[order], kind="stable")]
    lo, hi = held.lo[order], held.hi[order]
    first = np.searchsorted(hi, wanted.lo, "right")
    last = np.searchsorted(lo, wanted.hi, "left")
    count = np.where(wanted.count > 0, np.maximum(last - first, 0), 0)
    dst = np.repeat(np.arange(wanted.shards), count)
    k = np.repeat(first, count) + np.arange(len(dst)) - np.repeat(np.cumsum(count) - count, count)
    src = order[k]
    a = np.maximum(lo[k], wanted.lo[dst])
    b = np.minimum(hi[k], wanted.hi[dst])
    return Messages(
        src, dst, a - held.lo[src] + held.at[src], a - wanted.lo[dst] + wanted.at[dst], b - a
    )


# ---- colouring -------------------------------------------------------------------------------


def repeats(*keys: Ints) -> Ints:
    """How many equal keys come before each entry: 0 for the first of its kind, 1 for the second."""
    if not len(keys[0]):
        return np.zeros(0, np.int64)
    order = np.lexsort(keys[::-1])
    cols = np.stack([k[order] for k in keys])
    new = np.r_[True, (cols[:, 1:] != cols[:, :-1]).any(0)]
    start = np.flatnonzero(new)
    out = np.empty(len(order), np.int64)
    out[order] = np.arange(len(order)) - np.repeat(start, np.diff(np.r_[start, len(order)]))
    return out


def is_matching(m: Messages, colour: Ints) -> bool:
    """Whether within each colour every device sends at most once and receives at most once."""
    return not (repeats(colour, m.src).any() or repeats(colour, m.dst).any())


def edge_colouring(src: Ints, dst: Ints, length: Ints) -> Ints:
    """Colours with as few rounds as possible: the largest number of messages at one device.

    König's theorem by alternating paths.  Long messages come first and take the lowest colour that
    is free at both ends, so that messages of like length share rounds.
    """
    ends = (src.tolist(), dst.tolist())
    at: tuple[Table, Table] = ({}, {})
    colour = [0] * len(ends[0])
    for e in np.argsort(-length, kind="stable").tolist():
        u, v = at[0].setdefault(ends[0][e], {}), at[1].setdefault(ends[1][e], {})
        degree = max(len(u), len(v)) + 1
        c = next((c for c in range(degree) if c not in u and c not in v), None)
        if c is None:
            c = next(c for c in range(degree) if c not in u)
            d = next(d for d in range(degree) if d not in v)
            _flip(at, ends, colour, ends[1][e], c, d)
        colour[e] = c
        u[c] = v[c] = e
    return np.array(colour, np.int64)


def _flip(
    at: tuple[Table, Table],
    ends: tuple[list[int], list[int]],
    colour: list[int],
    device: int,
    c: int,
    d: int,
) -> None:
    """Swap colours c and d along the path of messages that starts at receiver `device` with c."""
    side, path = 1, []
    while (e := at[side][device].get(c if len(path) % 2 == 0 else d)) is not None:
        path.append(e)
        side = 1 - side
        device = ends[side][e]
    for e in path:
        for s in (0, 1):
            at[s][ends[s][e]].pop(colour[e], None)
    for e in path:
        colour[e] = d if colour[e] == c else c
        for s in (0, 1):
            at[s][ends[s][e]][colour[e]] = e
