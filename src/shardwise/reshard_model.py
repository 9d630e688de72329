"""What one step of a reshard can do and what it costs: the model under `reshard_search`.

It speaks of *chunks*: runs of mesh atoms that stay together in source and target, so that a mesh of
256x256 is no harder than one of 2x2.  A `State` says on which dim each chunk lies, major first, or
that a reduction over it is pending; chunks not named replicate.  `Problem.hop` is the one place
that knows which pairs of states a single collective connects, and what it costs:

    slice               a dim gets replicated chunks at its minor end; free, no device sends
    all-gather          dims lose chunks from their minor end
    all-to-all          chunks move from minor ends to minor ends of *other* dims, all at once
    reduce-scatter      pending chunks go to minor ends of dims
    all-reduce          pending chunks are reduced everywhere
    collective-permute  any relabelling that keeps every block's shape
    exchange            any relabelling that keeps the block's size: R rounds of permutes, n/R each
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.mesh import MeshAxes
from shardwise.sharding import Axes, Sharding

Chunks = tuple[int, ...]

MAX_ROUNDS = 16  # permutes of one exchange: each is a collective of its own
MAX_EXCHANGE = 1 << 14  # devices x rounds of one exchange: its source-target pairs are static

# Cost is bytes first; among equal bytes the fewest collectives, then the fewest slices.  An
# all-reduce has two phases: it is more than one collective, but less than two.
_UNIT, _COLLECTIVE, _SECOND_PHASE, _SLICE = 1 << 12, 16, 8, 1


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a reshard: a collective, or a free local slice.

    Attributes:
      kind: "slice", "all-gather", "all-to-all", "reduce-scatter", "all-reduce",
        "collective-permute" or "exchange" (`rounds` collective-permutes of a part of the block).
      before, after: the shardings it leads from and to.
      atoms: the mesh atoms it runs over, in the order in which it counts devices.
      bytes: what one device sends, ring convention.
      rounds: number of collective-permutes of an exchange; else 1.
      collectives: (kind, bytes) of what is run: more than one for an exchange; a reduction without
        a collective of its own is an all-gather or an all-to-all with a local reduction.
    """

    kind: str
    before: Sharding
    after: Sharding
    atoms: Axes
    bytes: float
    rounds: int = 1
    collectives: tuple[tuple[str, float], ...] = ()

    def text(self, mesh: MeshAxes) -> str:
        """`all-gather over x: [x, -] -> [-, -], 3072 bytes`: the way reports print it."""
        sent = f", {self.bytes:.0f} bytes" if self.bytes else ""
        times = f" in {self.rounds} rounds" if self.rounds > 1 else ""
        over = mesh.text(self.atoms)
        return (f"{self.kind} over {over}{times}: "
                f"{self.before.text(mesh)} -> {self.after.text(mesh)}{sent}")  # fmt: skip

    def __str__(self) -> str:
        over = ", ".join(self.atoms)
        return f"{self.kind} over ({over}): {self.before.axes} -> {self.after.axes}, {self.bytes:g}"


class State(NamedTuple):
    """Per dim the chunks it is split over, major first; and the chunks pending a reduction."""

    dims: tuple[Chunks, ...]
    partial: Chunks


class Hop(NamedTuple):
    """One step: a single collective (`rounds` of them for an exchange), or a free slice.

    `cost` is bytes sent by one device times `Problem.scale`, not weighted.
    """

    kind: str
    before: State
    after: State
    chunks: Chunks
    cost: int
    rounds: int = 1


@dataclasses.dataclass(frozen=True)
class Problem:
    """A reshard in canonical form; equal problems have equal plans whatever their axes are called.

    Attributes:
      sizes: devices along each chunk.
      weights: what a byte over each chunk costs (integers).
      shape, padded: of the value, as in `Layout`.
      itemsize: bytes of an element.
      native: whether the backend has an all-reduce for the pending reduction's operation.
      startup: what starting a collective is worth, in bytes (an integer, weighted like them).
    """

    sizes: tuple[int, ...]
    weights: tuple[int, ...]
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    itemsize: int
    source: State
    target: State
    native: bool = True
    startup: int = 0

    # ---- sizes -------------------------------------------------------------------------------

    def size(self, chunks: Chunks) -> int:
        """Devices over `chunks`."""
        n = self._size_of.get(chunks)
        if n is None:
            n = self._size_of[chunks] = math.prod(self.sizes[c] for c in chunks)
        return n

    @functools.cached_property
    def _size_of(self) -> dict[Chunks, int]:
        return {}  # the search asks for the same few products all the time

    @functools.cached_property
    def scale(self) -> int:
        """Costs are integers: bytes times this (only an all-reduce divides unevenly)."""
        return self.size(self.source.partial)

    def block(self, dim: int, chunks: Chunks) -> int:
        """Length of a device's block: a whole dim is stored at its own size, unpadded."""
        return self.padded[dim] // self.size(chunks) if chunks else self.shape[dim]

    def fits(self, dim: int, chunks: Chunks) -> bool:
        return self.padded[dim] % self.size(chunks) == 0

    def elements(self, state: State, other: State) -> int:
        """Elements of a device's block in `state` in a step to or from `other`.

        A dim whose split the step changes is padded, even where it is whole.
        """
        n = 1
        for d, chunks in enumerate(state.dims):
            n *= (
                self.block(d, chunks)
                if chunks == other.dims[d]
                else self.padded[d] // self.size(chunks)
            )
        return n

    # ---- one step ----------------------------------------------------------------------------

    def hop(self, a: State, b: State) -> Hop | None:
        """The one step from `a` to `b`, or None where no single step does it."""
        lost, won, crossed = _changes(a, b)
        pending = tuple(c for c in a.partial if c not in b.partial)
        if pending:
            return None if lost else self._reduction(a, b, pending, won)
        if not crossed:
            if not lost:
                return Hop("slice", a, b, won, 0)
            if not won:
                n = self.elements(b, a)
                return self._hop("all-gather", a, b, lost, n - n // self.size(lost))
            if len(lost) == len(won) and set(lost) == set(won):
                n = self.elements(a, b)
                return self._hop("all-to-all", a, b, lost, n - n // self.size(lost))
        return self._relabelling(a, b, lost, won)

    def _hop(self, kind: str, a: State, b: State, chunks: Chunks, elements: int) -> Hop:
        return Hop(kind, a, b, chunks, elements * self.itemsize * self.scale)

    def _reduction(self, a: State, b: State, pending: Chunks, won: Chunks) -> Hop | None:
        n, g = self.elements(a, b), self.size(pending)
        if not won:
            cost = self.all_reduce_cost(n, g)
            return Hop("all-reduce", a, b, pending, cost * self.itemsize)
        if len(won) == len(pending) and set(won) == set(pending):
            return self._hop("reduce-scatter", a, b, won, n - n // g)
        return None

    def all_reduce_cost(self, n: int, g: int) -> int:
        """Elements sent (scaled) to reduce blocks of n over g devices; see `emulated`."""
        if self.native:
            return 2 * n * (g - 1) * (self.scale // g)
        return min(emulated(n, g)) * self.scale

    def _relabelling(self, a: State, b: State, lost: Chunks, won: Chunks) -> Hop | None:
        if self.size(lost) != self.size(won):
            return None
        rounds = 1
        for da, db in zip(a.dims, b.dims, strict=True):
            wanted = self.size(db)
            rounds *= math.lcm(self.size(da), wanted) // wanted
        if rounds == 1:
            kind = "collective-permute"
        else:
            kind = "exchange"
            devices = self.size(tuple({*lost, *won}))
            if rounds > MAX_ROUNDS or rounds * devices > MAX_EXCHANGE:
                return None
        cost = self.elements(a, b) * self.itemsize * self.scale
        return Hop(kind, a, b, tuple(sorted({*lost, *won})), cost, rounds)

    def price(self, hop: Hop) -> int:
        """The hop's place in the search's order: weighted bytes, then number of collectives."""
        if hop.kind == "slice":
            return _SLICE
        weight = max(self.weights[c] for c in hop.chunks)
        extra = _SECOND_PHASE if hop.kind == "all-reduce" else 0
        return hop.cost * weight * _UNIT + self._each * hop.rounds + extra

    @functools.cached_property
    def _each(self) -> int:
        """The price of one collective apart from its bytes."""
        return self.startup * self.scale * _UNIT + _COLLECTIVE

    # ---- what no plan can beat ---------------------------------------------------------------

    @functools.cached_property
    def _wanted(self) -> tuple[int, ...]:
        """Per dim the length a device wants in the end, padding of whole dims left out."""
        return tuple(min(self.block(d, t), s) for d, (t, s) in enumerate(
            zip(self.target.dims, self.shape, strict=True)))  # fmt: skip

    def bound(self, state: State) -> int:
        """Bytes (scaled) that a device must yet send or receive, on any path to the target.

        Nothing pending: what it wants less what it holds; a dim whose chunks differ from the
        target's at some place leaves some device with no overlap at all.  Pending over g devices:
        it holds nothing of what it wants, and over all devices every element needs g - 1 messages
        to be combined, one to reach a device that wants it unless one of the g does, and one for
        each further device that wants it.
        """
        want = math.prod(self._wanted) * self.itemsize * self.scale
        kept = self.size(self.target.partial)
        waiting = self.size(state.partial) // kept
        if waiting > 1:
            devices = math.prod(self.sizes)
            owners = devices // (kept * self.size(sum(self.target.dims, ())))
            elements = math.prod(self.shape) * kept * self.itemsize * self.scale
            messages = elements * (waiting + owners - 1) - elements // self._apart(state)
            return max(want, messages // devices)
        held = self.itemsize * self.scale
        for d, (have, goal) in enumerate(zip(state.dims, self.target.dims, strict=True)):
            n = common(have, goal)
            if n < len(have) and n < len(goal):
                return want
            held *= min(self.block(d, have), self._wanted[d])
        return want - held

    def _apart(self, state: State) -> int:
        """One in this many elements, at most, is wanted where it is held.

        A chunk that splits one dim now and another in the end says of most elements that it is not.
        """
        most = 1
        for have, goal in zip(state.dims, self.target.dims, strict=True):
            for c in have if have != goal and self.shape == self.padded else ():
                if c not in goal and self.sizes[c] > most and c in self.splitting:
                    most = self.sizes[c]
        return most

    @functools.cached_property
    def splitting(self) -> frozenset[int]:
        """The chunks that split dims of the target."""
        return frozenset(c for d in self.target.dims for c in d)

    def is_roomy(self) -> bool:
        """Whether every dim could be split over all chunks at once."""
        return all(size % math.prod(self.sizes) == 0 for size in self.padded)

    def is_least(self, price: int) -> bool:
        """Whether a plan of this price is, but for ties, as good as any can be."""
        return price // _UNIT <= self.rest(self.source) // _UNIT

    def rest(self, state: State) -> int:
        """A lower bound on the price from `state` to the target (consistent: A* is exact)."""
        bound = self.bound(state)
        if not bound:
            return 0
        collectives = 1
        if state.partial != self.target.partial:  # a reduction takes no chunk off a dim
            collectives += any(
                common(a, b) < len(a) for a, b in zip(state.dims, self.target.dims, strict=True)
            )
        return bound * min(self.weights, default=1) * _UNIT + self._each * collectives


def common(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common major part of two splits."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def emulated(n: int, g: int) -> tuple[int, int]:
    """Elements sent to reduce n elements over g devices with no all-reduce for the operation.

    First: gather the terms and reduce them locally.  Second: pad n to a multiple of g, all-to-all,
    reduce locally, all-gather.
    """
    return n * (g - 1), 2 * -(-n // g) * (g - 1)


def _changes(a: State, b: State) -> tuple[Chunks, Chunks, bool]:
    """The chunks that leave dims, those that enter, and whether one dim has both."""
    lost: list[int] = []
    won: list[int] = []
    crossed = False
    for da, db in zip(a.dims, b.dims, strict=True):
        if da != db:
            n = common(da, db)
            crossed |= n < len(da) and n < len(db)
            lost += da[n:]
            won += db[n:]
    return tuple(lost), tuple(won), crossed
