"""Reshard plans are the cheapest there are: against brute force, bounds and pinned values.

The brute force below is written on its own: it walks all sequences of steps over single atoms, with
the costs of ring algorithms, and shares no code with the planner.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import strategies as st
from reshards import X4Y2, even, shardings, spread

from shardwise import reshard, reshard_search
from shardwise.mesh import MeshAxes
from shardwise.reshard import Step, plan_reshard, reshard_bytes
from shardwise.sharding import Layout, Sharding

# ---- brute force ---------------------------------------------------------------------------------


class BruteForce:
    """Every sharding of a value on a small mesh, and every step over one atom between them."""

    def __init__(self, mesh: MeshAxes, shape: tuple[int, ...], itemsize: int = 4):
        self.mesh, self.shape, self.itemsize = mesh, shape, itemsize
        self.shardings = shardings(mesh, shape)
        known = set(self.shardings)
        alike: dict[object, list[Sharding]] = {}
        for s in self.shardings:
            alike.setdefault((s.shards(mesh), mesh.size(s.partial)), []).append(s)
        self.steps: dict[Sharding, list[tuple[Sharding, float]]] = {}
        for s in self.shardings:
            steps = [(t, cost) for t, cost in self._single(s) if t in known]
            same = alike[s.shards(mesh), mesh.size(s.partial)]  # any relabelling: one permute
            self.steps[s] = steps + [(t, self.block(s)) for t in same if t != s]

    def block(self, s: Sharding) -> float:
        return self.itemsize * math.prod(self.shape) / math.prod(s.shards(self.mesh))

    def _single(self, s: Sharding) -> Iterator[tuple[Sharding, float]]:
        n = self.block(s)
        dims = range(s.rank)
        for a in self.mesh.atoms:
            g = self.mesh.size_of[a]
            if a not in s.used:
                yield from ((s.with_dim(d, (*s.axes[d], a)), 0.0) for d in dims)  # slice
            if a in s.partial:
                less = s.with_partial(tuple(x for x in s.partial if x != a))
                yield less, 2 * n * (g - 1) / g  # all-reduce
                for d in dims:
                    yield less.with_dim(d, (*s.axes[d], a)), n * (g - 1) / g  # reduce-scatter
        for d in dims:
            if s.axes[d]:
                *rest, a = s.axes[d]
                g, less = self.mesh.size_of[a], s.with_dim(d, rest)
                yield less, n * (g - 1)  # all-gather
                for e in dims:
                    if e != d:
                        yield less.with_dim(e, (*s.axes[e], a)), n * (g - 1) / g  # all-to-all

    def costs(self, source: Sharding) -> dict[Sharding, float]:
        """The least bytes from `source` to every sharding (Dijkstra)."""
        best, tickets = {source: 0.0}, itertools.count()
        heap = [(0.0, next(tickets), source)]
        while heap:
            cost, _, s = heapq.heappop(heap)
            if cost > best[s]:
                continue
            for t, price in self.steps[s]:
                if cost + price < best.get(t, math.inf) - 1e-9:
                    best[t] = cost + price
                    heapq.heappush(heap, (best[t], next(tickets), t))
        return best


@pytest.mark.parametrize("axes, shape", [
    ({"x": 2, "y": 2}, (16, 16)),
    ({"x": 2, "y": 2}, (4, 2)),
    ({"x": 2, "y": 2}, (4, 2, 8)),
    ({"x": 4, "y": 2}, (64, 64)),
    ({"x": 4, "y": 2}, (8, 4)),
    ({"x": 4, "y": 2}, (4, 2)),
    ({"x": 2, "y": 3}, (36, 36)),
    ({"x": 2, "y": 3}, (6, 2)),
])  # fmt: skip
def test_never_above_brute_force(axes, shape):
    mesh = MeshAxes(tuple(axes), tuple(axes.values()))
    brute = BruteForce(mesh, shape)
    for source in brute.shardings:
        least = brute.costs(source)
        for target in brute.shardings:
            if set(target.partial) <= set(source.partial):
                cost = reshard_bytes(even(shape, source), target, 4, mesh)
                text = f"{source.text(mesh)} -> {target.text(mesh)}"
                assert cost <= least[target] + 1e-6, f"{text}: {cost}, and {least[target]} will do"


def test_whole_axes_are_as_good_as_their_parts():
    """Where there is room, the planner does not cut x=4 into atoms; the brute force does."""
    mesh, shape = MeshAxes(("x", "y"), (4, 3)), (144, 144)
    brute = BruteForce(mesh, shape)
    for source in random.Random(0).sample(brute.shardings, 30):
        least = brute.costs(source)
        for target in brute.shardings:
            if set(target.partial) <= set(source.partial):
                cost = reshard_bytes(even(shape, source), target, 4, mesh)
                assert cost <= least[target] + 1e-6, (source, target)


# ---- pinned --------------------------------------------------------------------------------------

SQUARE = (1024, 1024)
MIB = 1 << 20


def planned(shape, a: Sharding, b: Sharding) -> tuple[list[str], float]:
    steps = plan_reshard(even(shape, a), b, 4, X4Y2)
    return [s.kind for s in steps], sum(s.bytes for s in steps)


@pytest.mark.parametrize("shape, a, b, kinds, cost", [
    (SQUARE, ("x", "y"), ("y", "x"), ["exchange"], 524288),
    (SQUARE, ("xy", ""), ("yx", ""), ["collective-permute"], 524288),
    (SQUARE, ("x", ""), ("y", ""), ["slice", "collective-permute", "all-gather"], 2097152),
    ((16, 16, 16), ("y", "", "x"), ("", "xy", ""), ["all-to-all"], 1792),
    (SQUARE, ("x", ""), ("", "xy"), ["slice", "all-to-all"], 7 * MIB // 16),
    (SQUARE, ("x", ""), ("", "x"), ["all-to-all"], 3 * MIB // 4),
    (SQUARE, ("x", "y"), ("", ""), ["all-gather"], 7 * MIB // 2),
    (SQUARE, ("", ""), ("y", "x"), ["slice"], 0),
    (SQUARE, ("x", "y"), ("x", ""), ["all-gather"], MIB // 2),
    (SQUARE, ("x", ""), ("x", "y"), ["slice"], 0),
])  # fmt: skip
def test_pinned(shape, a, b, kinds, cost):
    assert planned(shape, spread(X4Y2, *a), spread(X4Y2, *b)) == (kinds, cost)


@pytest.mark.parametrize("partial, a, b, kinds, cost", [
    ("xy", ("", ""), ("x", "y"), ["reduce-scatter"], 7 * MIB // 2),
    ("xy", ("", ""), ("", ""), ["all-reduce"], 7 * MIB),
    ("xy", ("", ""), ("x", ""), ["reduce-scatter", "all-gather"], 4 * MIB),
    ("x", ("y", ""), ("y", "x"), ["reduce-scatter"], 3 * MIB // 2),
    ("x", ("", "y"), ("", "y"), ["all-reduce"], 3 * MIB),
    ("y", ("", ""), ("", ""), ["all-reduce"], 4 * MIB),
    # devices that hold the same term share the work
    ("x", ("", ""), ("y", ""), ["slice", "all-reduce"], 3 * MIB),
    ("x", ("", ""), ("x", "y"), ["slice", "reduce-scatter"], 3 * MIB // 2),
])  # fmt: skip
def test_pinned_reductions(partial, a, b, kinds, cost):
    source = spread(X4Y2, *a, partial=partial)
    assert planned(SQUARE, source, spread(X4Y2, *b)) == (kinds, cost)


def test_a_pending_sum_can_be_kept():
    source = spread(X4Y2, "", "", partial="xy")
    target = spread(X4Y2, "x", "", partial="y")
    assert planned(SQUARE, source, target) == (["reduce-scatter"], 3 * MIB)
    assert planned(SQUARE, target, spread(X4Y2, "", "x", partial="y")) == (
        ["all-to-all"], 3 * MIB // 4)  # fmt: skip


def test_uneven_dims_count_with_their_padding():
    layout = Layout((5, 3), (8, 3), spread(X4Y2, "x", ""))
    [step] = plan_reshard(layout, spread(X4Y2, "", ""), 4, X4Y2)
    assert (step.kind, step.bytes) == ("all-gather", 3 / 4 * 8 * 3 * 4)
    whole = Layout((5, 3), (8, 3), spread(X4Y2, "", "", partial="x"))
    steps = plan_reshard(whole, spread(X4Y2, "", ""), 4, MeshAxes(("x",), (4,)))
    assert [(s.kind, s.bytes) for s in steps] == [("all-reduce", 2 * 3 / 4 * 5 * 3 * 4)]


def test_weights_move_traffic_to_fast_links():
    source, target = spread(X4Y2, "xy", ""), spread(X4Y2, "", "")
    [step] = plan_reshard(even(SQUARE, source), target, 4, X4Y2)
    assert step.atoms == ("x.0", "x.1", "y")
    slow = {"x.0": 10.0, "x.1": 10.0}
    steps = plan_reshard(even(SQUARE, source), target, 4, X4Y2, weights=slow)
    # y moves out of the way first, so that only half as much crosses x
    assert [(s.kind, s.atoms) for s in steps] == [
        ("all-to-all", ("y",)), ("all-gather", ("x.0", "x.1")), ("all-gather", ("y",))]  # fmt: skip
    assert (
        reshard_bytes(even(SQUARE, source), target, 4, X4Y2, slow) == (1 / 4 + 10 * 3 / 2 + 2) * MIB
    )


def test_slow_starts_take_fewer_collectives():
    """Sharing an all-reduce saves 64 of 384 bytes here, for two collectives more."""
    source, target = spread(X4Y2, "", partial="x"), spread(X4Y2, "")
    plans = [plan_reshard(even((64,), source), target, 4, X4Y2, startup=s) for s in (0, 1000)]
    assert [[s.kind for s in p] for p in plans] == [
        ["slice", "reduce-scatter", "all-gather"], ["all-reduce"]]  # fmt: skip
    assert [sum(s.bytes for s in p) for p in plans] == [320, 384]


# ---- properties ----------------------------------------------------------------------------------

SIZES = st.sampled_from([2, 3, 4, 6, 8, 16, 256])


@st.composite
def questions(draw, partial: bool = True, sizes=SIZES, axes: int = 4):
    """A mesh, a layout and a target: axes in any order on any dims, replicated or pending."""
    n = draw(st.integers(1, axes))
    mesh = MeshAxes(tuple("wxyz"[:n]), tuple(draw(sizes) for _ in range(n)))
    rank = draw(st.integers(1, 4))
    source = draw(_sharding(mesh, rank, partial))
    target = draw(_sharding(mesh, rank, False))
    shape = []
    for d in range(rank):
        need = math.lcm(mesh.size(source.axes[d]), mesh.size(target.axes[d]))
        shape.append(need * draw(st.sampled_from([1, 2, 3, 8, 64])))
    return mesh, even(shape, source), target


@st.composite
def _sharding(draw, mesh: MeshAxes, rank: int, partial: bool) -> Sharding:
    dims: list[tuple[str, ...]] = [()] * rank
    pending: tuple[str, ...] = ()
    for name in draw(st.permutations(mesh.names)):
        where = draw(st.integers(0, rank + partial))
        if where < rank:
            dims[where] = (*dims[where], *mesh.expand(name))
        elif where == rank + 1:
            pending = (*pending, *mesh.expand(name))
    return Sharding(tuple(dims)).with_partial(mesh.sort(pending))


def gather_all(layout: Layout, mesh: MeshAxes, itemsize: int = 4) -> float:
    """Reduce what is pending where it lies, gather everything, slice."""
    n = itemsize * math.prod(layout.local_shape(mesh))
    g = mesh.size(layout.sharding.partial)
    return 2 * n * (g - 1) / g + itemsize * math.prod(layout.padded) - n


def must_receive(layout: Layout, target: Sharding, mesh: MeshAxes, itemsize: int = 4) -> float:
    """What the device with the least of its target block at hand lacks of it (nothing pending)."""
    want = math.prod(layout.with_sharding(target).local_shape(mesh))
    held = 1
    for d, (a, b) in enumerate(zip(layout.sharding.axes, target.axes, strict=True)):
        if a[: len(b)] != b and b[: len(a)] != a:
            return itemsize * want
        held *= layout.padded[d] // mesh.size(max(a, b, key=len))
    return itemsize * (want - held)


def legal(steps: tuple[Step, ...], layout: Layout, target: Sharding, mesh: MeshAxes) -> None:
    """Each step starts where the last ended, and every state has whole blocks and no atom twice."""
    at = layout.sharding
    for step in steps:
        assert step.before == at
        at = step.after
        assert layout.fits(at, mesh)
        assert sum(map(len, at.axes)) + len(at.partial) == len(at.used)
        assert at.partial == mesh.sort(at.partial)
        assert step.bytes == pytest.approx(sum(n for _, n in step.collectives))
    assert at == target


@hypothesis.given(questions())
@hypothesis.settings(max_examples=150)
def test_plans_are_legal_and_never_above_gathering_everything(question):
    mesh, layout, target = question
    steps = plan_reshard(layout, target, 4, mesh)
    legal(steps, layout, target, mesh)
    cost = reshard_bytes(layout, target, 4, mesh)
    assert cost <= gather_all(layout, mesh) * (1 + 1e-9)
    if not layout.sharding.partial:
        assert cost >= must_receive(layout, target, mesh) * (1 - 1e-9)


@hypothesis.given(questions(partial=False, sizes=st.just(2), axes=3))
@hypothesis.settings(max_examples=60)
def test_with_room_nothing_is_received_twice(question):
    """With room for all axes on every dim the bound is met, but for what is gathered past it."""
    mesh, layout, target = question
    roomy = tuple(p * mesh.device_count for p in layout.padded)
    layout = even(roomy, layout.sharding)
    cost = reshard_bytes(layout, target, 4, mesh)
    least = must_receive(layout, target, mesh)
    # An all-to-all that must pass a gathered axis keeps 1/(all devices) instead of its own block.
    n = 4 * math.prod(layout.local_shape(mesh))
    assert least <= cost <= least + n


@hypothesis.given(questions(sizes=st.sampled_from([2, 3, 4]), axes=3), st.data())
@hypothesis.settings(max_examples=60)
def test_no_detour_is_cheaper(question, data):
    mesh, layout, target = question
    stop = data.draw(_sharding(mesh, len(layout.shape), False))
    hypothesis.assume(layout.fits(stop, mesh))
    detour = reshard_bytes(layout, stop, 4, mesh)
    detour += reshard_bytes(layout.with_sharding(stop), target, 4, mesh)
    assert reshard_bytes(layout, target, 4, mesh) <= detour * (1 + 1e-9)


@hypothesis.given(questions(), st.data())
@hypothesis.settings(max_examples=60)
def test_weighted_plans_are_legal_and_no_worse_by_their_weights(question, data):
    mesh, layout, target = question
    by_axis = {n: data.draw(st.sampled_from([0.5, 1.0, 4.0]), label=n) for n in mesh.names}
    weights = {a: by_axis[mesh.axis_of[a]] for a in mesh.atoms}
    steps = plan_reshard(layout, target, 4, mesh, weights)
    legal(steps, layout, target, mesh)
    plain = plan_reshard(layout, target, 4, mesh)
    price = sum(s.bytes * max(weights[a] for a in s.atoms) for s in plain if s.bytes)
    hypothesis.assume(len(mesh.names) < 4)  # beyond, the search may stop early
    assert reshard_bytes(layout, target, 4, mesh, weights) <= price * (1 + 1e-9)


@hypothesis.given(questions())
@hypothesis.settings(max_examples=40)
def test_the_same_question_has_the_same_answer(question):
    """Whatever was asked before, and whatever the axes are called."""
    mesh, layout, target = question
    steps = plan_reshard(layout, target, 4, mesh)
    reshard._plan.cache_clear()
    reshard_search.search.cache_clear()
    assert plan_reshard(layout, target, 4, mesh) == steps
    names = dict(zip(mesh.names, ("zeta", "b", "a", "k"), strict=False))
    other = MeshAxes(tuple(names.values()), mesh.sizes)
    new = dict(zip(mesh.atoms, other.atoms, strict=True))

    def renamed(s: Sharding) -> Sharding:
        return Sharding(tuple(tuple(new[a] for a in d) for d in s.axes),
                        tuple(new[a] for a in s.partial), s.op)  # fmt: skip

    again = plan_reshard(even(layout.shape, renamed(layout.sharding)), renamed(target), 4, other)
    assert [(s.kind, s.bytes) for s in again] == [(s.kind, s.bytes) for s in steps]


# ---- the work of planning ------------------------------------------------------------------------


def explored(layout: Layout, target: Sharding, mesh: MeshAxes) -> tuple[int, int]:
    """Chunks of the question, and states the search expanded."""
    runs = reshard._runs(layout.sharding, target, mesh, {})
    problem = reshard._problem(layout, target, 4, mesh, {}, runs, 0)
    plan = reshard_search.search(problem)
    return len(runs), plan.expanded


def on(big: MeshAxes, small: MeshAxes, s: Sharding) -> Sharding:
    def atoms(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(x for a in axes for x in big.expand(small.axis_of[a]))

    return Sharding(tuple(map(atoms, s.axes))).with_partial(atoms(s.partial), s.op)


def test_a_large_mesh_is_no_harder_than_a_small_one():
    """65536 devices have 16 atoms, but no more chunks than 4 devices, nor states to look at."""
    small, middle, big = (MeshAxes(("x", "y"), (n, n)) for n in (2, 32, 256))
    shape = (1 << 17, 1 << 17)
    every = shardings(small, (4, 4))
    for a, b in itertools.product(every, every):
        if a == b or not set(b.partial) <= set(a.partial):
            continue
        few, many, most = (
            explored(even(shape, on(m, small, a)), on(m, small, b), m) for m in (small, middle, big)
        )
        assert few[0] == many[0] == most[0] <= 2
        assert many[1] == most[1] <= 4  # on so many devices another plan may be the cheapest
        assert few[1] <= 4


def test_asking_again_costs_a_lookup():
    layout, target = even(SQUARE, spread(X4Y2, "x", "y")), spread(X4Y2, "y", "x")
    first = plan_reshard(layout, target, 4, X4Y2)
    layout, target = even(SQUARE, spread(X4Y2, "x", "y")), spread(X4Y2, "y", "x")
    assert plan_reshard(layout, target, 4, X4Y2) is first


@pytest.mark.parametrize("size", [2, 4])
def test_many_axes_fall_back_to_moves_toward_the_target(size):
    """Ten axes in any order: the full search would not end, and the plan is still a good one."""
    mesh = MeshAxes(tuple("abcdefghij"), (size,) * 10)
    shape = (1 << 20,) * 4
    rng = random.Random(0)
    for _ in range(15):
        source, target = ([()] * 4, [()] * 4)
        for dims in (source, target):
            for name in rng.sample(mesh.names, rng.randrange(5, 11)):
                d = rng.randrange(4)
                dims[d] = (*dims[d], *mesh.expand(name))
        layout, wanted = even(shape, Sharding(tuple(source))), Sharding(tuple(target))
        steps = plan_reshard(layout, wanted, 4, mesh)
        legal(steps, layout, wanted, mesh)
        assert sum(s.bytes for s in steps) <= 3 * must_receive(layout, wanted, mesh)
