"""`reshard`: from any sharding of a value to any other, as a shortest list of collectives.

    steps = plan_reshard(layout, target, itemsize, mesh)
    y = emit_reshard(x, layout, target, mesh)          # inside shard_map

A step is one collective over exactly the atoms it needs, or a slice, which is free.  The plan is
the cheapest in bytes that one device sends (ring algorithms; `Step.bytes`), then in collectives.
GSPMD (section 3.5) has a list of patterns for this and gathers everything where none matches; here
the cases are not listed but searched, with a lower bound that tells when to stop.

    on x=4 y=2, f32[1024,1024]
    (x, -) -> (-, x)            all-to-all over x
    (x, y) -> (y, x)            exchange over (x, y): two permutes of half a block
    partial over x -> (x, -)    reduce-scatter over x
    partial over x -> (y, -)    slice y, then all-reduce over x of half as much

`reshard_model` says what a step does and costs, `reshard_search` finds the path, `reshard_emit` and
`reshard_rounds` have the steps' lax code.  This module brings a question into the form they work
on: atoms become *chunks*, runs that source and target keep together, so that the work does not grow
with the mesh.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from shardwise.errors import ShardingError
from shardwise.mesh import MeshAxes
from shardwise.reshard_emit import emit_step
from shardwise.reshard_model import Hop, Problem, State, Step, emulated
from shardwise.reshard_search import MAX_CHUNKS, Plan, search, search_below
from shardwise.sharding import Axes, Layout, Sharding

_WEIGHT_UNIT = 1 << 10  # weights are rounded to this, so that costs compare exactly


def plan_reshard(
    src: Layout,
    dst: Sharding,
    itemsize: int,
    mesh: MeshAxes,
    weights: Mapping[str, float] | None = None,
    startup: float = 0.0,
) -> tuple[Step, ...]:
    """The cheapest steps from `src` to `dst`.

    Args:
      src: the present sharding with the global shape and the padded sizes.
      dst: the wanted sharding; it may keep some of `src`'s pending reductions.
      itemsize: bytes of an element.
      mesh: the mesh's axes.
      weights: what a byte over an atom costs (1 where not named): a collective's bytes count with
        the greatest weight among its atoms.
      startup: how many bytes starting a collective is worth.  At 0 bytes alone count, and three
        collectives are taken for one where they send a byte less.

    Returns:
      The steps, in order; the same tuple for the same question (memoised).

    Raises:
      ShardingError: when `dst` has another rank, asks for a pending reduction that `src` does not
        have, uses an atom twice, or does not divide the padded sizes.
    """
    named = tuple(sorted(weights.items())) if weights else ()
    return _plan(src, dst, itemsize, mesh, named, startup)


def reshard_bytes(
    src: Layout,
    dst: Sharding,
    itemsize: int,
    mesh: MeshAxes,
    weights: Mapping[str, float] | None = None,
    startup: float = 0.0,
) -> float:
    """Bytes one device sends to bring `src` to `dst` (each step's times its weight)."""
    steps = plan_reshard(src, dst, itemsize, mesh, weights, startup)
    if not weights:
        return sum(s.bytes for s in steps)
    return sum(s.bytes * max(weights.get(a, 1.0) for a in s.atoms) for s in steps if s.bytes)


@functools.lru_cache(maxsize=1 << 16)
def least_bytes(src: Layout, dst: Sharding, itemsize: int, mesh: MeshAxes) -> float:
    """Bytes that any way from `src` to `dst` sends at the least: mostly what the best one sends.

    No search: for pricing what is then not looked at further.
    """
    if src.sharding == dst or 0 in src.shape:
        return 0.0
    _check(src, dst, mesh)
    problem, _ = _question(src, dst, itemsize, mesh, (), 0.0)
    return problem.bound(problem.source) / problem.scale


def emit_reshard(
    x: jax.Array,
    src: Layout,
    dst: Sharding,
    mesh: MeshAxes,
    steps: Sequence[Step] | None = None,
) -> jax.Array:
    """The lax code of a reshard, inside `jax.shard_map` over the mesh of atoms.

    Args:
      x: this device's block, of shape `src.local_shape(mesh)`.
      src, dst, mesh: as in `plan_reshard`.
      steps: a plan made with weights or for slow starts; by default the cheapest in bytes.

    Returns:
      This device's block in `dst`; where it holds padding, that is garbage.
    """
    if steps is None:
        steps = plan_reshard(src, dst, x.dtype.itemsize, mesh)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return _emit_keys(x, src, steps, mesh)
    for step in steps:
        x = emit_step(x, src, step, mesh)
    return x


def _emit_keys(x: jax.Array, src: Layout, steps: Sequence[Step], mesh: MeshAxes) -> jax.Array:
    """Random keys travel as the integers they are made of, along one dim more."""
    data = jax.random.key_data(x)
    n = data.shape[-1]

    def longer(s: Sharding) -> Sharding:
        return dataclasses.replace(s, axes=(*s.axes, ()))

    wide = Layout((*src.shape, n), (*src.padded, n), longer(src.sharding))
    for step in steps:
        step = dataclasses.replace(step, before=longer(step.before), after=longer(step.after))
        data = emit_step(data, wide, step, mesh)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


@functools.lru_cache(maxsize=1 << 16)
def _plan(
    src: Layout,
    dst: Sharding,
    itemsize: int,
    mesh: MeshAxes,
    weights: tuple[tuple[str, float], ...],
    startup: float,
) -> tuple[Step, ...]:
    if src.sharding == dst:
        return ()
    _check(src, dst, mesh)
    if 0 in src.shape:  # no element to move
        return (Step("slice", src.sharding, dst, (), 0.0),)
    cost = dict(weights)
    problem, runs = _question(src, dst, itemsize, mesh, weights, startup)
    plan = search(problem)
    if not problem.is_least(plan.price) and not problem.is_roomy():
        finer = _finer(runs, mesh)
        fine = _problem(src, dst, itemsize, mesh, cost, finer, startup)
        other = search_below(fine, plan.price) if len(finer) > len(runs) else None
        if other is not None:
            problem, plan, runs = fine, other, finer
    return _steps(problem, plan, runs, src.sharding.op, mesh)


@functools.lru_cache(maxsize=1 << 16)
def _question(
    src: Layout,
    dst: Sharding,
    itemsize: int,
    mesh: MeshAxes,
    weights: tuple[tuple[str, float], ...],
    startup: float,
) -> tuple[Problem, list[Axes]]:
    """The reshard as the search sees it, and what its chunks are."""
    cost = dict(weights)
    runs = _runs(src.sharding, dst, mesh, cost)
    return _problem(src, dst, itemsize, mesh, cost, runs, startup), runs


# ---- atoms to chunks and back --------------------------------------------------------------------


def _runs(a: Sharding, b: Sharding, mesh: MeshAxes, cost: Mapping[str, float]) -> list[Axes]:
    """The chunks: longest runs of atoms that stay together in both shardings.

    Atoms that neither uses are of no help, unless a reduction is pending: devices that hold the
    same term can share its work.  Such atoms are kept together by axis only.
    """
    here, there = _places(a), _places(b)
    atoms = [x for dim in a.axes for x in dim]
    later = sorted(
        (x for x in mesh.atoms if x not in atoms),
        key=lambda x: (here.get(x, _NOWHERE), there.get(x, _NOWHERE), mesh.order[x]),
    )
    if a.partial == b.partial:
        later = [x for x in later if x in here or x in there]
    runs: list[Axes] = []
    for x in [*atoms, *later]:
        if runs and _together(runs[-1][-1], x, here, there, mesh, cost):
            runs[-1] = (*runs[-1], x)
        else:
            runs.append((x,))
    return runs


_Place = tuple[int, int]  # dim and position; _PARTIAL and _NOWHERE have no order
_PARTIAL, _NOWHERE = (1 << 30, 0), (1 << 31, 0)


def _places(s: Sharding) -> dict[str, _Place]:
    out = {x: (d, i) for d, dim in enumerate(s.axes) for i, x in enumerate(dim)}
    return out | dict.fromkeys(s.partial, _PARTIAL)


def _together(
    x: str,
    y: str,
    here: Mapping[str, _Place],
    there: Mapping[str, _Place],
    mesh: MeshAxes,
    cost: Mapping[str, float],
) -> bool:
    """Whether y follows x in both shardings, so that they can move as one."""
    for place in (here, there):
        p, q = place.get(x, _NOWHERE), place.get(y, _NOWHERE)
        if q != (p if p in (_PARTIAL, _NOWHERE) else (p[0], p[1] + 1)):
            return False
    unused = x not in here and x not in there
    return cost.get(x, 1) == cost.get(y, 1) and not (unused and mesh.axis_of[x] != mesh.axis_of[y])


def _finer(runs: list[Axes], mesh: MeshAxes) -> list[Axes]:
    """The chunks cut into atoms, or, where those are many, into parts as large as the smallest.

    Needed where a dim is too short to hold all chunks: half of x may be all it can take, or can
    take the place of y.  (Where there is room, whole chunks are as good: slice and gather freely.)
    """
    if sum(map(len, runs)) <= MAX_CHUNKS:
        return [(x,) for run in runs for x in run]
    unit = min(map(mesh.size, runs))
    out = []
    for run in runs:
        part: Axes = ()
        for x in run:
            part = (*part, x)
            if mesh.size(part) == unit:
                out.append(part)
                part = ()
        if part:
            out.append(part)
    return out if len(out) <= MAX_CHUNKS else runs


def _problem(
    src: Layout,
    dst: Sharding,
    itemsize: int,
    mesh: MeshAxes,
    cost: Mapping[str, float],
    runs: list[Axes],
    startup: float,
) -> Problem:
    a, op = src.sharding, src.sharding.op
    # An all-reduce exists for sum, max and min; for and and or on booleans, which take one byte.
    native = op in ("sum", "max", "min") or (op in ("and", "or") and itemsize == 1)
    return Problem(
        sizes=tuple(map(mesh.size, runs)),
        weights=tuple(round(cost.get(run[0], 1) * _WEIGHT_UNIT) if cost else 1 for run in runs),
        shape=src.shape,
        padded=src.padded,
        itemsize=itemsize,
        source=_state(a, runs),
        target=_state(dst, runs),
        native=native,
        startup=round(startup * (_WEIGHT_UNIT if cost else 1)),
    )


def _state(s: Sharding, runs: list[Axes]) -> State:
    of = {run[0]: i for i, run in enumerate(runs)}
    dims = tuple(tuple(of[x] for x in dim if x in of) for dim in s.axes)
    return State(dims, tuple(sorted(of[x] for x in s.partial if x in of)))


def _steps(
    problem: Problem, plan: Plan, runs: list[Axes], op: str, mesh: MeshAxes
) -> tuple[Step, ...]:
    def atoms(chunks: Iterable[int]) -> Axes:
        return tuple(x for c in chunks for x in runs[c])

    def sharding(state: State) -> Sharding:
        pending = mesh.sort(atoms(state.partial))
        return Sharding(tuple(map(atoms, state.dims))).with_partial(pending, op)

    return tuple(
        Step(
            hop.kind,
            sharding(hop.before),
            sharding(hop.after),
            atoms(hop.chunks) if hop.kind in _ORDERED else mesh.sort(atoms(hop.chunks)),
            hop.cost / problem.scale,
            hop.rounds,
            _collectives(problem, hop, op),
        )
        for hop in plan.hops
    )


# Where the order of devices decides which block goes where.  `lax.ppermute` is not among them: it
# numbers devices in mesh order whatever the order of the names.
_ORDERED = frozenset({"slice", "all-gather", "all-to-all", "reduce-scatter"})


def _collectives(p: Problem, hop: Hop, op: str) -> tuple[tuple[str, float], ...]:
    """What is run for a hop: (kind, bytes), in order."""
    sent = hop.cost / p.scale
    if hop.kind == "slice":
        return ()
    if hop.kind == "exchange":
        return (("collective-permute", sent / hop.rounds),) * hop.rounds
    if hop.kind == "reduce-scatter" and op != "sum":
        return (("all-to-all", sent),)
    if hop.kind == "all-reduce" and not p.native:
        gather, scatter = emulated(p.elements(hop.before, hop.after), p.size(hop.chunks))
        if gather <= scatter:
            return (("all-gather", sent),)
        return (("all-to-all", sent / 2), ("all-gather", sent / 2))
    return ((hop.kind, sent),)


def _check(src: Layout, dst: Sharding, mesh: MeshAxes) -> None:
    here = f"{src.sharding.text(mesh)} of shape {src.shape}, padded {src.padded}"
    if dst.rank != len(src.shape):
        raise ShardingError(
            f"a value of {len(src.shape)} dims cannot take a sharding of {dst.rank} dims",
            facts=f"from {here} to {dst.text(mesh)}",
        )
    if not set(dst.partial) <= set(src.sharding.partial) or (
        dst.partial and dst.op != src.sharding.op
    ):
        raise ShardingError(
            "a reshard can finish pending reductions but not start or change one",
            facts=f"from {here} to {dst.text(mesh)}",
        )
    for s in (src.sharding, dst):
        named = [a for d in s.axes for a in d] + list(s.partial)
        if len(named) != len(set(named)):
            raise ShardingError("a sharding uses a part of the mesh twice", facts=s.text(mesh))
        if not src.fits(s, mesh):
            raise ShardingError(
                "a dim's padded size does not divide into its blocks",
                facts=f"{s.text(mesh)} with shape {src.shape}, padded {src.padded}",
                hint="choose the padded size with `padded_size` over all splits used for the dim",
            )
