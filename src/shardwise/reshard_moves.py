"""The states worth going to from a state, for `reshard_search`.

Every dim keeps the major part it shares with the target; only what lies beyond it (the *loose*
chunks) moves.  A move only proposes a state; what it costs, and by which collective, `Problem.hop`
says.  There are two sets of moves: all that can be part of a cheapest plan, and, where chunks are
many, a few that lead toward the target.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from shardwise.reshard_model import Chunks, Hop, Problem, State, common

Dims = tuple[Chunks, ...]


def moves(p: Problem, state: State, wide: bool) -> Iterator[Hop]:
    """The hops to try from `state`: all that may pay (`wide`), or those toward the target.

    First the two cases with nothing to choose: a free slice the target asks for, and a single hop
    that meets the lower bound.
    """
    sliced = _slice_to_target(p, state)
    if sliced != state:
        hop = p.hop(state, sliced)
        assert hop is not None
        yield hop
        return
    last = p.hop(state, p.target)
    if last is not None:
        yield last
        if p.price(last) <= p.rest(state):
            return
    for after in _all(p, state) if wide else _toward(p, state):
        if after != p.target and (hop := p.hop(state, after)) is not None:
            yield hop


def _slice_to_target(p: Problem, state: State) -> State:
    """All free slices that bring dims nearer to the target: they make all that follows cheaper."""
    free, dims = _free(p, state), []
    for have, goal in zip(state.dims, p.target.dims, strict=True):
        if goal[: len(have)] == have:
            while len(have) < len(goal) and goal[len(have)] in free:
                have = (*have, goal[len(have)])
        dims.append(have)
    return State(tuple(dims), state.partial)


def _free(p: Problem, state: State) -> list[int]:
    """The chunks over which the value is replicated."""
    used = {c for d in state.dims for c in d} | set(state.partial)
    return [c for c in range(len(p.sizes)) if c not in used]


def _pending(p: Problem, state: State) -> Chunks:
    return tuple(c for c in state.partial if c not in p.target.partial)


def _kept(p: Problem, state: State) -> list[int]:
    """Per dim the length of the major part it shares with the target."""
    return [common(a, b) for a, b in zip(state.dims, p.target.dims, strict=True)]


def _without(partial: Chunks, done: Chunks) -> Chunks:
    return tuple(c for c in partial if c not in done)


def _cut(dims: Dims, lengths: Sequence[int]) -> tuple[Dims, Chunks]:
    """The dims cut to these lengths, and the chunks cut off."""
    pairs = list(zip(dims, lengths, strict=True))
    return tuple(d[:n] for d, n in pairs), tuple(c for d, n in pairs for c in d[n:])


def _appended(p: Problem, dims: Dims, dim: int, chunk: int) -> Dims | None:
    new = (*dims[dim], chunk)
    return (*dims[:dim], new, *dims[dim + 1 :]) if p.fits(dim, new) else None


# ---- all moves -----------------------------------------------------------------------------------


def _all(p: Problem, state: State) -> Iterator[State]:
    pending = _pending(p, state)
    every = range(len(state.dims))
    for n in range(len(pending), 0, -1):
        for chunks in _choices(p, pending, n):
            left = _without(state.partial, chunks)
            for placed in _placements(p, state.dims, chunks, every):
                yield State(placed, left)  # reduce-scatter
            yield State(state.dims, left)  # all-reduce
    lengths = [range(k, len(d) + 1) for d, k in zip(state.dims, _kept(p, state), strict=True)]
    for cut in itertools.product(*lengths):
        dims, gone = _cut(state.dims, cut)
        if gone:
            yield State(dims, state.partial)  # all-gather
            receivers = [d for d in every if cut[d] == len(state.dims[d])]
            for placed in _placements(p, dims, gone, receivers):
                yield State(placed, state.partial)  # all-to-all
    yield from _relabellings(p, state)
    yield from _slices(p, state)


def _slices(p: Problem, state: State) -> Iterator[State]:
    """Free slices away from the target.

    They make the blocks smaller before a permute or a reduction; a gather or an all-to-all undoes
    them.  A chunk that the target does not use only helps while a reduction is pending.
    """
    pending = _pending(p, state)
    for (c,) in _choices(p, _free(p, state), 1):
        if pending or c in p.splitting:
            for placed in _placements(p, state.dims, (c,), range(len(state.dims))):
                yield State(placed, state.partial)


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


def _placements(
    p: Problem, dims: Dims, chunks: Chunks, receivers: Sequence[int]
) -> dict[Dims, None]:
    """All ways to add `chunks` to minor ends of receivers (an ordered set)."""
    # All orders of up to three; of more, which are seldom on one dim, the target's.
    place = {c: (d, i) for d, cs in enumerate(p.target.dims) for i, c in enumerate(cs)}
    in_order = tuple(sorted(chunks, key=lambda c: place.get(c, (len(dims), c))))
    out: dict[Dims, None] = {}
    for order in itertools.permutations(in_order) if len(chunks) <= 3 else [in_order]:
        partial = [dims]
        for c in order:
            grown = [_appended(p, old, d, c) for old in partial for d in receivers]
            partial = [new for new in grown if new is not None]
        out.update(dict.fromkeys(partial))
    return out


def _relabellings(p: Problem, state: State) -> Iterator[State]:
    """States of the same number of shards in which every dim agrees with the target.

    Each dim is a major part of the target's dim, or all of it with further chunks at the minor
    end, which a gather or an all-to-all takes off later.
    """
    have = sum(state.dims, ())
    for cut in itertools.product(*(range(len(goal), -1, -1) for goal in p.target.dims)):
        base, _ = _cut(p.target.dims, cut)
        used = sum(base, ())
        missing, uneven = divmod(p.size(have), p.size(used))
        if uneven or any(c in state.partial for c in used):
            continue
        ends = [d for d, goal in enumerate(p.target.dims) if base[d] == goal]
        spare = [c for c in have if c not in used]
        for n in range(len(spare) + 1):
            for extra in itertools.combinations(spare, n):
                if p.size(extra) == missing:
                    yield from (State(x, state.partial) for x in _placements(p, base, extra, ends)
                                if x != state.dims)  # fmt: skip


# ---- moves toward the target ---------------------------------------------------------------------


def _toward(p: Problem, state: State) -> Iterator[State]:
    """A few moves that always lead on: at worst, gather what is loose, reduce, and slice."""
    pending, kept = _pending(p, state), _kept(p, state)
    if pending:
        yield State(state.dims, _without(state.partial, pending))
        placed, done = _settled(p, state.dims, pending, range(len(state.dims)))
        if done:
            yield State(placed, _without(state.partial, done))
    yield from (State(dims, state.partial) for dims in _moved(p, state.dims, kept))
    loose, _ = _cut(state.dims, kept)
    yield State(loose, state.partial)
    for d, have in enumerate(state.dims):
        for n in range(kept[d], len(have)):
            yield State((*state.dims[:d], have[:n], *state.dims[d + 1 :]), state.partial)
    wanted = [c for c in _free(p, state) if pending or c in p.splitting]
    yield State(_packed(p, state.dims, wanted), state.partial)
    if not pending:
        spare = [c for d in state.dims for c in d if c not in p.splitting]
        yield State(_packed(p, p.target.dims, spare), state.partial)
        if (same := _same_shape(p, state.dims)) is not None:
            yield State(same, state.partial)


def _packed(p: Problem, dims: Dims, chunks: Sequence[int]) -> Dims:
    """`dims` with as many of the chunks as fit, each at the minor end of the first dim it fits."""
    for c in chunks:
        fitting = (_appended(p, dims, d, c) for d in range(len(dims)))
        dims = next((new for new in fitting if new is not None), dims)
    return dims


def _settled(
    p: Problem, dims: Dims, chunks: Sequence[int], receivers: Sequence[int]
) -> tuple[Dims, Chunks]:
    """`dims` with those of the chunks that can go where the target has them, and which they are."""
    done: list[int] = []
    for d in receivers:
        have, goal = dims[d], p.target.dims[d]
        while len(have) < len(goal) and have == goal[: len(have)] and goal[len(have)] in chunks:
            done.append(goal[len(have)])
            have = (*have, done[-1])
        dims = (*dims[:d], have, *dims[d + 1 :])
    return dims, tuple(done)


def _moved(p: Problem, dims: Dims, kept: Sequence[int]) -> Iterator[Dims]:
    """All-to-alls: all loose chunks that can settle at once; and any last one to any other dim."""
    agree = [d for d, have in enumerate(dims) if kept[d] == len(have)]
    cut = list(kept)
    while True:
        base, gone = _cut(dims, cut)
        placed, done = _settled(p, base, gone, agree)
        stuck = [max((i + 1 for i, c in enumerate(have) if i >= n and c not in done), default=n)
                 for have, n in zip(dims, cut, strict=True)]  # fmt: skip
        if stuck == cut:
            break
        cut = stuck
    if done:
        yield placed
    for d, have in enumerate(dims):
        if len(have) > kept[d]:
            short = (*dims[:d], have[:-1], *dims[d + 1 :])
            for e in range(len(dims)):
                if e != d and (new := _appended(p, short, e, have[-1])) is not None:
                    yield new


def _same_shape(p: Problem, dims: Dims) -> Dims | None:
    """The same number of shards on every dim, with as much of the target as they can hold."""
    out, need = [], []
    for have, goal in zip(dims, p.target.dims, strict=True):
        n = len(goal)
        while p.size(have) % p.size(goal[:n]):
            n -= 1
        out.append(goal[:n])
        need.append(p.size(have) // p.size(goal[:n]))
    used = {c for d in out for c in d}
    # Chunks the target does not split by come last off, so they go in first.
    pool = sorted((c for d in dims for c in d if c not in used),
                  key=lambda c: (c in p.splitting, -p.sizes[c]))  # fmt: skip
    for d in range(len(out)):
        for c in list(pool):
            if need[d] % p.sizes[c] == 0:
                pool.remove(c)
                out[d], need[d] = (*out[d], c), need[d] // p.sizes[c]
    return tuple(out) if set(need) == {1} and tuple(out) != dims else None
