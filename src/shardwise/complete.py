"""Sharding completion (GSPMD 3.5): from a few annotations to a sharding for every value.

A fixed point over edges with priorities.  Every edge projects the splits of its values onto the
factors of its rule, picks the finest split each factor has, and refines the values that lack it.
Edges wait in a queue ordered by (level, program order), so nothing of a higher level happens while a
lower level still has something to say: elementwise first, then moved dims and the larger side onto the
smaller, then dots, last the smaller side onto the larger.  Splits are only ever refined; dims the user
annotated are fixed; what is open stays whole if nobody splits it.  The result does not depend on
anything but the program, and the cost grows with the edges, not with the devices.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Sequence

from shardwise.edges import BACKWARD, FORWARD, Edge, edges_of, tie
from shardwise.factors import Assignment, gathered, spread
from shardwise.mesh import MeshAxes
from shardwise.program import Body, Eqn, Lit, Var
from shardwise.regions import Regions
from shardwise.sharding import Axes, Sharding, padded_size


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why one dim of one value is split as it is.

    Attributes:
      kind: "annotation", "argument", "result" (the user's own), or "rule".
      source: file:line of the annotation, or of the equation the split came through.
      var, dim: for a rule: the neighbour it came from.
      edge: the edge it came through.
    """

    kind: str
    source: str = ""
    var: Var | None = None
    dim: int = -1
    edge: Edge | None = None


@dataclasses.dataclass(eq=False)
class Completion:
    """A sharding, padded sizes and reasons for every value of a program.

    Attributes:
      results: stand-ins for the program's results, carrying what the caller asked of them.
      annotated: values whose sharding the user gave, with the dims given.
      padded: padded sizes of the values that have any (`_padded_sizes`).
      regions: what is under manual control.
    """

    body: Body
    mesh: MeshAxes
    axes: dict[Var, list[Axes]]
    fixed: dict[Var, frozenset[int]]
    reasons: dict[tuple[Var, int], Reason]
    padded: dict[Var, tuple[int, ...]]
    results: list[Var]
    edges: list[Edge]
    annotated: dict[Var, Reason]
    regions: Regions = dataclasses.field(default_factory=Regions)
    visits: int = 0

    def sharding(self, v: Var) -> Sharding:
        """How a value lies.  A value without entries lies whole everywhere: there is nothing to split."""
        axes = self.axes.get(v) if 0 not in v.shape else None
        return Sharding(tuple(axes or ((),) * v.rank))


@dataclasses.dataclass(frozen=True)
class Given:
    """What the user fixed for one value: axes per dim, the dims left open, and where it was said.

    Attributes:
      device_order: the device that is to hold the block the axes give to device i, where the user
        named devices in another order than the mesh's.
    """

    axes: tuple[Axes, ...]
    open: frozenset[int]
    source: str
    kind: str
    device_order: tuple[int, ...] | None = None


def complete(
    body: Body,
    mesh: MeshAxes,
    arguments: Sequence[Given | None],
    results: Sequence[Given | None],
    annotation_of: dict[Eqn, Given],
    regions: Regions | None = None,
) -> Completion:
    """Complete the shardings of a program.

    Args:
      arguments, results: what the caller gave for each of `body.invars` and `body.outvars`.
      annotation_of: the annotation equations of the program with what each says.
      regions: what of the program is under manual control.
    """
    regions = regions or Regions()
    edges = edges_of(body, regions.crossings)
    stand_ins = []
    for i, v in enumerate(body.outvars):
        out = Var(-1 - i, v.shape, v.dtype, f"result{i}")
        stand_ins.append(out)
        if not isinstance(v, Lit):
            eqn = Eqn(None, [v], [out], {}, [], None, 1 << 30)
            edges.append(tie(v, out, eqn, "result"))
    c = Completion(body, mesh, {}, {}, {}, {}, stand_ins, edges, {}, regions)
    for v, given in zip(body.invars, arguments, strict=True):
        _fix(c, v, given)
    for eqn, given in annotation_of.items():
        _fix(c, eqn.outvars[0], given)
    for v, given in zip(stand_ins, results, strict=True):
        _fix(c, v, given)
    for v, axes, eqn in regions.specs:
        _fix(c, v, Given(axes, frozenset(), eqn.source, eqn.name))
    _run(c)
    c.padded = _padded_sizes(c)
    return c


def _fix(c: Completion, v: Var, given: Given | None) -> None:
    if given is None:
        return
    closed = frozenset(range(v.rank)) - given.open
    c.axes[v] = list(given.axes)
    c.fixed[v] = closed
    reason = Reason(given.kind, given.source)
    c.annotated[v] = reason
    for d in closed:
        c.reasons[v, d] = reason


def _run(c: Completion) -> None:
    """The fixed point: a queue of (level, edge, pass), refilled with the edges of a changed value."""
    touching: dict[Var, list[int]] = defaultdict(list)
    for i, edge in enumerate(c.edges):
        for v in set(edge.values):
            touching[v].append(i)
    queue: list[tuple[int, int, str]] = []
    waiting: set[tuple[int, int, str]] = set()

    def push(i: int) -> None:
        for level, direction in c.edges[i].passes:
            item = (level, i, direction)
            if item not in waiting:
                waiting.add(item)
                heapq.heappush(queue, item)

    for v in c.axes:
        for i in touching[v]:
            push(i)
    while queue:
        item = heapq.heappop(queue)
        waiting.discard(item)
        c.visits += 1
        for v in _visit(c, c.edges[item[1]], item[2]):
            for i in touching[v]:
                push(i)


def _visit(c: Completion, edge: Edge, direction: str) -> list[Var]:
    """Let one edge refine its values once; returns those that changed."""
    proposals = _proposals(c, edge, direction)
    if not proposals:
        return []
    merged: Assignment = {f: axes for f, (axes, _, _) in proposals.items()}
    changed = []
    first = edge.operand_count if direction == FORWARD else 0
    last = edge.operand_count if direction == BACKWARD else len(edge.values)
    for i in range(first, last):
        v = edge.values[i]
        if isinstance(v, Lit) or not v.shape:
            continue
        if _refine(c, edge, i, merged, proposals):
            changed.append(v)
    return changed


Proposals = dict[int, tuple[Axes, Var, int]]


def _proposals(c: Completion, edge: Edge, direction: str) -> Proposals:
    """factor -> (the finest split some source has, the source and its dim).

    Where sources disagree the user's own dims win, then the larger value, then the earlier one; an
    atom goes to one factor only, contracted factors being asked last.
    """
    mesh, rule = c.mesh, edge.rule
    first = edge.operand_count if direction == BACKWARD else 0
    last = edge.operand_count if direction == FORWARD else len(edge.values)
    found: list[tuple[bool, bool, int, int, int, int, Axes]] = []
    reduced_factors = [f for f, _ in rule.reduced]
    for i in range(first, last):
        v = edge.values[i]
        axes = c.axes.get(v)
        if axes is None:
            continue
        for d, factors in enumerate(edge.dims[i]):
            if not axes[d]:
                continue
            fixed = d in c.fixed.get(v, ())
            for f, atoms in spread(factors, axes[d], rule.sizes, mesh).items():
                reduced = f in reduced_factors
                found.append((reduced, not fixed, -v.nbytes, i, d, f, atoms))
    out: Proposals = {}
    for _, _, _, i, d, f, atoms in sorted(found):
        have = out[f][0] if f in out else ()
        if len(atoms) > len(have) and atoms[: len(have)] == have:
            out[f] = (atoms, edge.values[i], d)
    return out


def _refine(c: Completion, edge: Edge, i: int, merged: Assignment, proposals: Proposals) -> bool:
    v, mesh = edge.values[i], c.mesh
    axes = c.axes.get(v) or [()] * v.rank
    new = list(axes)
    for d, factors in enumerate(edge.dims[i]):
        if not factors:
            continue
        want = gathered(factors, merged, edge.rule.sizes, mesh)
        if len(want) <= len(new[d]) or want[: len(new[d])] != new[d]:
            continue
        if d in c.fixed.get(v, ()) or v.shape[d] == 1:
            continue
        others = {a for e, dim in enumerate(new) if e != d for a in dim}
        others.update(c.regions.taken.get(v, ()))
        want = _free_prefix(want, others)
        want = _fitting_prefix(want, edge, i, d, mesh)
        if len(want) > len(new[d]):
            new[d] = want
            f = next(
                (f for f in factors if f in proposals and proposals[f][1] is not v), factors[0]
            )
            _, src, src_dim = proposals.get(f, ((), v, d))
            c.reasons[v, d] = Reason("rule", "", src, src_dim, edge)
    if new == axes:
        return False
    c.axes[v] = new
    return True


def _free_prefix(want: Axes, taken: set[str]) -> Axes:
    n = next((k for k, a in enumerate(want) if a in taken), len(want))
    return want[:n]


def _fitting_prefix(want: Axes, edge: Edge, i: int, d: int, mesh: MeshAxes) -> Axes:
    """A special factor ties dims of different sizes: do not split a dim finer than its size."""
    size = edge.values[i].shape[d]
    if any(f in edge.rule.special for f in edge.dims[i][d]):
        while want and mesh.size(want) > size:
            want = want[:-1]
    return want


def _move(c: Completion, edge: Edge) -> tuple[Var, int, int] | None:
    """A dim that may have to take the atoms of one that must lie whole, and over how many shards.

    `choose` moves them there, to a dim or several that they divide; where less can be split so, the
    largest dim is padded.
    """
    rule, mesh = edge.rule, c.mesh
    stuck: list[str] = []
    free: dict[int, tuple[Var, int]] = {}
    for v, dims in zip(edge.values, edge.dims, strict=True):
        for d, (fs, atoms) in enumerate(zip(dims, c.axes.get(v) or [()] * v.rank, strict=True)):
            if not rule.whole.isdisjoint(fs):
                stuck += [a for a in atoms if a not in stuck]
            elif len(fs) == 1 and v.shape[d] > 1 and not (rule.special | rule.even) & {*fs}:
                free.setdefault(fs[0], (v, d))
    if not stuck or not free:
        return None
    divided, rest = 1, list(stuck)
    for f in free:
        left = rule.sizes[f]
        while rest and left % mesh.size_of[rest[0]] == 0:
            left //= mesh.size_of[rest[0]]
            divided *= mesh.size_of[rest.pop(0)]
    largest = max(free, key=rule.sizes.__getitem__)
    size, shards = rule.sizes[largest], mesh.size(stuck)
    padded = -(-size // shards)
    return (*free[largest], shards) if padded * divided < size else None


def _padded_sizes(c: Completion) -> dict[Var, tuple[int, ...]]:
    """One padded size per class of dims tied by a factor: the least all its splits divide.

    Classes hold dims of one size, so only sizes that some split does not divide need any: mostly none,
    and values without such a dim are left out.  Compound factors do not tie: their splits are even, or
    data is realigned.
    """
    uneven = {
        v.shape[d]
        for v, axes in c.axes.items()
        for d, atoms in enumerate(axes)
        if atoms and v.shape[d] % c.mesh.size(atoms)
    }
    moves = [m for edge in c.edges if edge.rule.whole and (m := _move(c, edge))]
    uneven.update(v.shape[d] for v, d, _ in moves)
    if not uneven:
        return {}
    parent: dict[tuple[Var, int], tuple[Var, int]] = {}

    def find(x: tuple[Var, int]) -> tuple[Var, int]:
        while parent.setdefault(x, x) != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for edge in c.edges:
        first: dict[tuple[int, int], tuple[Var, int]] = {}
        for v, dims in zip(edge.values, edge.dims, strict=True):
            for d, factors in enumerate(dims):
                if len(factors) == 1 and v.shape[d] in uneven:
                    # a special factor may tie dims of different sizes; equal ones have equal blocks
                    other = first.setdefault((factors[0], v.shape[d]), (v, d))
                    parent[find((v, d))] = find(other)
    counts: dict[tuple[Var, int], set[int]] = defaultdict(set)
    for v, axes in c.axes.items():
        for d, atoms in enumerate(axes):
            if atoms and v.shape[d] in uneven:
                counts[find((v, d))].add(c.mesh.size(atoms))
    for v, d, shards in moves:
        if not counts.get(x := find((v, d))):
            counts[x] = {shards}
    values = {v for edge in c.edges for v in edge.values} | set(c.axes)
    return {
        v: tuple(
            padded_size(s, counts.get(find((v, d)), ())) if s in uneven else s
            for d, s in enumerate(v.shape)
        )
        for v in values
        if not uneven.isdisjoint(v.shape)
    }
