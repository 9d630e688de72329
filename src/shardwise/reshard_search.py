"""The search behind `reshard`: the cheapest list of collectives from one split to another (A*).

Why it is fast: a device must receive what it wants and does not hold, however it is sent.  That
lower bound (`Problem.bound`) is met exactly by the best plan in most cases, so a state from which
one hop meets it ends the search, and A* seldom visits more than a handful of states.

Every dim keeps the major part it shares with the target; only what lies beyond it (the *loose*
chunks) moves.  The moves below only propose states to go to; what each costs, and by which
collective, `Problem.hop` says.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.reshard_model import Chunks, Hop, Problem, State, common

MAX_CHUNKS = 6  # with more, only moves toward the target are tried
MAX_HOPS = 4000  # hops the full search may price before it falls back to those moves
MAX_HOPS_BELOW = 1500  # and when there is a plan already

Dims = tuple[Chunks, ...]


class Plan(NamedTuple):
    """The hops of the cheapest path found, its price, and how many states were expanded."""

    hops: tuple[Hop, ...]
    price: int
    expanded: int


@functools.lru_cache(maxsize=4096)
def search(problem: Problem, below: int | None = None) -> Plan | None:
    """The cheapest plan, or None where none costs less than `below`.

    With more than `MAX_CHUNKS` chunks, or after `MAX_HOPS`, the best found by moves toward the
    target alone, which always reach it.
    """
    wide = _Search(problem, below, wide=True)
    hops = wide.run() if len(problem.sizes) <= MAX_CHUNKS else None
    expanded = len(wide.done)
    if hops is None and below is None:
        narrow = _Search(problem, None, wide=False)
        hops = narrow.run()
        expanded += len(narrow.done)
        assert hops is not None, "gathering, reducing and slicing reach any target"
    if hops is None:
        return None
    hops = _merged(problem, hops)
    return Plan(tuple(hops), sum(map(problem.price, hops)), expanded)


class _Search:
    """A* from source to target; narrow, it is greedy: the way left counts four times."""

    def __init__(self, problem: Problem, below: int | None, *, wide: bool):
        self.problem, self.below, self.wide = problem, below, wide
        self.best: dict[State, int] = {problem.source: 0}
        self.came: dict[State, Hop] = {}
        self.done: set[State] = set()
        self.priced = 0

    def run(self) -> list[Hop] | None:
        """The hops to the target; None where there are none below the price, or hops run out."""
        target, greed = self.problem.target, 1 if self.wide else 4
        heap = [(0, 0, 0, self.problem.source)]
        ticket = 0  # ties go to the state found first: plans do not depend on hashing
        while heap:
            *_, state = heapq.heappop(heap)
            if state == target:
                return _path(self.came, state)
            if state in self.done:
                continue
            self.done.add(state)
            for after, price, rest in self.steps(state):
                ticket += 1
                heapq.heappush(heap, (price + greed * rest, rest, ticket, after))
            if self.wide and self.priced > (MAX_HOPS if self.below is None else MAX_HOPS_BELOW):
                return None
        return None

    def steps(self, state: State) -> Iterator[tuple[State, int, int]]:
        """States reached more cheaply through `state`: their price, and a bound on what is left."""
        p, best = self.problem, self.best
        for hop in _moves(p, state, self.wide):
            self.priced += 1
            price = best[state] + p.price(hop)
            if price >= best.get(hop.after, price + 1):
                continue
            rest = p.rest(hop.after)
            if self.below is None or price + rest < self.below:
                best[hop.after], self.came[hop.after] = price, hop
                yield hop.after, price, rest


def _path(came: dict[State, Hop], state: State) -> list[Hop]:
    hops = []
    while state in came:
        hops.append(came[state])
        state = came[state].before
    return hops[::-1]


def _merged(p: Problem, hops: list[Hop]) -> list[Hop]:
    """Neighbouring hops made one where one collective does both at no higher price."""
    out: list[Hop] = []
    for hop in hops:
        while out:
            both = p.hop(out[-1].before, hop.after)
            if both is None or p.price(both) > p.price(out[-1]) + p.price(hop):
                break
            out.pop()
            hop = both
        out.append(hop)
    return out


# ---- where to go from a state --------------------------------------------------------------------


def _moves(p: Problem, state: State, wide: bool) -> Iterator[Hop]:
    """The hops to try from `state`.

    First the two cases with nothing to choose: a free slice the target asks for, and a single hop
    that meets the lower bound.  Then all others; not `wide`, only those toward the target.
    """
    sliced = _slice_to_target(p, state)
    if sliced != state:
        yield _sure(p.hop(state, sliced))
        return
    last = p.hop(state, p.target)
    if last is not None:
        yield last
        if p.price(last) <= p.rest(state):
            return
    for after in _proposals(p, state, wide):
        if after != p.target:
            hop = p.hop(state, after)
            if hop is not None:
                yield hop


def _sure(hop: Hop | None) -> Hop:
    assert hop is not None
    return hop


def _proposals(p: Problem, state: State, wide: bool) -> Iterator[State]:
    keep = [common(a, b) for a, b in zip(state.dims, p.target.dims, strict=True)]
    pending = tuple(c for c in state.partial if c not in p.target.partial)
    yield from _reductions(p, state, pending, wide)
    for cut in _cuts(state.dims, keep, wide):
        dims = tuple(d[:n] for d, n in zip(state.dims, cut, strict=True))
        yield State(dims, state.partial)  # all-gather
        gone = tuple(c for d, n in zip(state.dims, cut, strict=True) for c in d[n:])
        receivers = [d for d, n in enumerate(cut) if n == len(state.dims[d])]
        for placed in _placements(p, dims, gone, receivers, wide):
            yield State(placed, state.partial)  # all-to-all
    yield from _relabellings(p, state, wide)
    if wide:
        yield from _slices(p, state, bool(pending))


def _slice_to_target(p: Problem, state: State) -> State:
    """All free slices that bring dims nearer to the target: they make all that follows cheaper."""
    used = {c for d in state.dims for c in d} | set(state.partial)
    dims = []
    for have, goal in zip(state.dims, p.target.dims, strict=True):
        if goal[: len(have)] == have:
            while len(have) < len(goal) and goal[len(have)] not in used:
                have = (*have, goal[len(have)])
        dims.append(have)
    return State(tuple(dims), state.partial)


def _slices(p: Problem, state: State, pending: bool) -> Iterator[State]:
    """Free slices away from the target.

    They make the blocks smaller before a permute or a reduction; a gather or an all-to-all undoes
    them.  A chunk that the target does not use only helps while a reduction is pending.
    """
    used = {c for d in state.dims for c in d} | set(state.partial)
    free = [c for c in range(len(p.sizes)) if c not in used]
    for (c,) in _choices(p, free, 1):
        if pending or c in p.splitting:
            for placed in _placements(p, state.dims, (c,), range(len(state.dims)), True):
                yield State(placed, state.partial)


def _reductions(p: Problem, state: State, pending: Chunks, wide: bool) -> Iterator[State]:
    """Reduce pending chunks: everywhere, or onto minor ends of dims.

    Wide, any of them anywhere; else those the target wants next, or all that are left.
    """
    dims = range(len(state.dims))
    if wide:
        choices = [
            c for n in range(len(pending), 0, -1) for c in itertools.combinations(pending, n)
        ]
    else:
        wanted = {c for d in p.target.dims for c in d}
        choices = [pending, *((c,) for c in pending if c in wanted)]
    for chunks in filter(None, choices):
        left = tuple(c for c in state.partial if c not in chunks)
        for placed in _placements(p, state.dims, chunks, dims, wide):
            yield State(placed, left)
        yield State(state.dims, left)


def _choices(p: Problem, chunks: Sequence[int], n: int) -> Iterator[Chunks]:
    """The ways to take n of the chunks, all pending or all replicated.

    Two that the target puts on no dim, of one size and weight, are the same to it: of such, the
    first are taken.
    """
    alike: dict[int, list[int]] = {}
    for c in chunks:
        alike[c] = [
            b for b in chunks
            if b < c and not {b, c} & p.splitting
            and (p.sizes[b], p.weights[b]) == (p.sizes[c], p.weights[c])
        ]  # fmt: skip
    for some in itertools.combinations(chunks, n):
        if all(b in some for c in some for b in alike[c]):
            yield some


def _cuts(dims: Dims, keep: Sequence[int], wide: bool) -> Iterator[tuple[int, ...]]:
    """Ways to take loose chunks off minor ends: any; not wide, off one dim or all of all dims."""
    whole = tuple(map(len, dims))
    if wide:
        lengths = [range(k, n + 1) for n, k in zip(whole, keep, strict=True)]
        yield from (cut for cut in itertools.product(*lengths) if cut != whole)
        return
    for d, (n, k) in enumerate(zip(whole, keep, strict=True)):
        yield from ((*whole[:d], m, *whole[d + 1 :]) for m in range(k, n))
    if tuple(keep) != whole:
        yield tuple(keep)


def _placements(
    p: Problem, dims: Dims, chunks: Chunks, receivers: Sequence[int], wide: bool
) -> list[Dims]:
    """All ways to add `chunks` to minor ends of receivers; not wide, each where it is wanted."""
    goal = p.target.dims
    place = {c: (d, i) for d, cs in enumerate(goal) for i, c in enumerate(cs)}
    in_order = tuple(sorted(chunks, key=lambda c: place.get(c, (len(goal), c))))
    orders = itertools.permutations(in_order) if wide and len(chunks) <= 3 else [in_order]
    out: dict[Dims, None] = {}
    for order in orders:
        partial = [dims]
        for c in order:
            partial = [
                new
                for old in partial
                for d in receivers
                if (new := _appended(p, old, d, c)) is not None
                and (wide or goal[d][: len(new[d])] == new[d])
            ]
        out.update(dict.fromkeys(partial))
    return list(out)


def _appended(p: Problem, dims: Dims, dim: int, chunk: int) -> Dims | None:
    new = (*dims[dim], chunk)
    return (*dims[:dim], new, *dims[dim + 1 :]) if p.fits(dim, new) else None


def _relabellings(p: Problem, state: State, wide: bool) -> Iterator[State]:
    """States of the same number of shards in which every dim agrees with the target.

    Each dim is a major part of the target's dim, or all of it with further chunks at the minor
    end, which a gather or an all-to-all takes off later.
    """
    have = [c for d in state.dims for c in d]
    shards = p.size(have)
    lengths = [range(len(goal), -1, -1) for goal in p.target.dims]
    for cut in itertools.product(*lengths):
        base = tuple(goal[:n] for goal, n in zip(p.target.dims, cut, strict=True))
        used = [c for d in base for c in d]
        if set(used) & set(state.partial) or shards % p.size(used):
            continue
        ends = [d for d, goal in enumerate(p.target.dims) if base[d] == goal]
        spare = [c for c in have if c not in used]
        yield from _extended(p, state, base, spare, ends, shards // p.size(used), wide)
        if not wide:
            return


def _extended(
    p: Problem, state: State, base: Dims, spare: list[int], ends: list[int], size: int, wide: bool
) -> Iterator[State]:
    """`base` with chunks of `spare`, of `size` devices together, at the minor ends of `ends`."""
    for n in range(len(spare) + 1):
        for extra in itertools.combinations(spare, n):
            if p.size(extra) == size:
                for placed in _placements(p, base, extra, ends, wide=True)[: None if wide else 1]:
                    if placed != state.dims:
                        yield State(placed, state.partial)
