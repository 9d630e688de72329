"""Which equations are under manual control (GSPMD 3.4), over which atoms, and where values cross over.

A nested `jax.shard_map` puts its body under manual control over some axes of its mesh; so do
`auto_to_manual` and `manual_to_auto` with the values between them.  There values have the shapes of one
device's blocks, and collectives are the user's own.  The other atoms stay the partitioner's.

What this analysis gives completion and the partitioner:

    meshes      equation -> the mesh it sees: its atoms are those not under manual control
    taken       value -> the atoms no dim of it may be split over
    crossings   equation that crosses -> edges tying a value's dims on both sides:
                (m f), m -> f    where m is the part of the dim that the user's spec splits
    specs       the second operand of such an edge, with the atoms the user fixed
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardwise.convert import spec_text
from shardwise.device_tensor import from_device_tensor
from shardwise.edges import PASSES, Edge
from shardwise.errors import ShardingError
from shardwise.factors import RuleBuilder
from shardwise.mesh import ManualAxes, MeshAxes
from shardwise.ops.collectives import USERS
from shardwise.program import Body, Eqn, Lit, Var
from shardwise.sharding import Axes
from shardwise.varying import Varying

Dims = tuple[Axes, ...]


@dataclasses.dataclass(eq=False)
class Regions:
    """What is under manual control; see the module.

    Attributes:
      inside: equation that crosses -> the mesh on the manual side.
      terms: `manual_to_auto` -> atoms along which devices hold terms of a sum.
      entries, exits: equation that crosses -> per operand (result) the atoms its spec splits each dim over.
    """

    inside: dict[Eqn, ManualAxes] = dataclasses.field(default_factory=dict)
    meshes: dict[Eqn, ManualAxes] = dataclasses.field(default_factory=dict)
    taken: dict[Var, frozenset[str]] = dataclasses.field(default_factory=dict)
    crossings: dict[Eqn, list[Edge]] = dataclasses.field(default_factory=dict)
    specs: list[tuple[Var, Dims, Eqn]] = dataclasses.field(default_factory=list)
    entries: dict[Eqn, list[Dims]] = dataclasses.field(default_factory=dict)
    exits: dict[Eqn, list[Dims]] = dataclasses.field(default_factory=dict)
    terms: dict[Eqn, Axes] = dataclasses.field(default_factory=dict)

    def check_annotations(self, said: Mapping[Var, tuple[Dims, str]], mesh: MeshAxes) -> None:
        """An annotation under manual control splits over other axes.

        Raises:
          ShardingError: it names an axis that is manual there.
        """
        for v, (dims, where) in said.items():
            both = [a for d in dims for a in d if a in self.taken.get(v, ())]
            if both:
                raise ShardingError(
                    "an annotation splits over an axis that is under manual control there",
                    where=where, facts=f"{mesh.text(both)} on {_name(v)} {list(v.shape)}",
                    hint="inside a manual region annotate with the other axes only",
                )  # fmt: skip


def regions_of(body: Body, mesh: Any) -> Regions:
    """The manual regions of a program for a mesh (a `Mesh` or `AbstractMesh`).

    Raises:
      ShardingError: a shard_map over devices that are not the mesh's, or in another order.
    """
    walk = _Walk(mesh)
    walk.body(body, None)
    return walk.out


class _Walk:
    def __init__(self, mesh: Any) -> None:
        self.mesh, self.axes, self.out = mesh, MeshAxes.of(mesh), Regions()
        self.ids = itertools.count(1)
        self.sees: dict[
            Var, ManualAxes | None
        ] = {}  # values between auto_to_manual and manual_to_auto
        self.made: set[Var] = set()  # of no operands, or of such: good on both sides
        self.varying = Varying(self.named_atoms)

    def body(self, body: Body, here: ManualAxes | None) -> None:
        self.made.update(v for v, _ in body.consts)
        if here is not None:
            self.take([*body.invars, *(v for v, _ in body.consts)], here)
        for eqn in body.eqns:
            self.equation(eqn, here)
        for v in body.outvars:
            if (inside := self.sees.get(v, here)) != here:
                raise ShardingError(
                    f"{_name(v)} is still under manual control over {_over(inside, here)} where "
                    "its function ends", where=self.source(body, v), facts=f"it has {v!r}",
                    hint="give it back with manual_to_auto",
                )  # fmt: skip

    @staticmethod
    def source(body: Body, v: Var) -> str:
        return next((e.source for e in body.eqns if v in e.outvars), "")

    def equation(self, eqn: Eqn, here: ManualAxes | None) -> None:
        sees = inside = self.seen(eqn, here)
        if eqn.name == "shard_map":
            inside = self.shard_map(eqn, sees)
        elif eqn.name == "auto_to_manual":
            inside = self.entered(eqn, sees)
        elif eqn.name == "manual_to_auto":
            sees, inside = self.left(eqn, sees, here), sees
        if sees is not None:
            self.out.meshes[eqn] = sees
        # what the results see: the inside of auto_to_manual, the outside of the other two
        after = inside if eqn.name == "auto_to_manual" else sees
        if after is not None:
            self.take(eqn.outvars, after)
        if after != here:
            self.sees.update(dict.fromkeys(eqn.outvars, after))
        if all(isinstance(v, Lit) or v in self.made for v in eqn.invars) and not eqn.bodies:
            self.made.update(eqn.outvars)
        if eqn.name not in ("auto_to_manual", "manual_to_auto"):
            self.varying.equation(eqn)
        for sub in eqn.bodies:
            self.body(sub, inside)

    def named_atoms(self, eqn: Eqn) -> list[str]:
        """The atoms of the axes that a collective names."""
        known = dict(self.spelled(self.out.meshes.get(eqn)))
        return [a for n in _axes_named(eqn) for a in known.get(n, ())]

    def spelled(self, here: ManualAxes | None) -> tuple[tuple[str, Axes], ...]:
        """The axes by name, with their atoms."""
        return here.spelled if here else tuple((n, self.axes.expand(n)) for n in self.axes.names)

    def seen(self, eqn: Eqn, here: ManualAxes | None) -> ManualAxes | None:
        """The mesh an equation sees: that of its operands, which must agree."""
        found = {v: self.sees.get(v, here) for v in eqn.invars if not isinstance(v, Lit)}
        meshes = [*found.values(), self.named_by(eqn, here)]
        most = max(meshes, key=lambda m: len(m.manual) if m else 0, default=here) or here
        for v, m in found.items():
            if m != most and v not in self.made:
                raise ShardingError(
                    f"{eqn.name} mixes values under manual control over {_over(most, m)} "
                    f"with {_name(v)}, which is not", where=eqn.source,
                    facts=", ".join(f"{_name(w)} {list(w.shape)}: "
                                    + (f"manual over {_over(n, None)}" if n and n.manual else "automatic")
                                    for w, n in found.items()),
                    hint="bring it in with auto_to_manual (P() where every device needs all of it), or "
                    "give the others back with manual_to_auto first",
                )  # fmt: skip
        if eqn.name in USERS:
            self.check_collective(eqn, most, found)
        return most

    def named_by(self, eqn: Eqn, here: ManualAxes | None) -> ManualAxes | None:
        """What an `axis_index`, which has no operands, must see."""
        if eqn.name != "axis_index":
            return here
        known = dict(self.spelled(here))
        names = _axes_named(eqn)
        manual = here.manual if here else ()
        new = {a for n in names for a in known.get(n, ())}
        if new <= set(manual):
            return here
        both = self.axes.sort({*manual, *new})
        return ManualAxes(self.axes.names, self.axes.sizes, both, self.spelled(here))

    def check_collective(self, eqn: Eqn, sees: ManualAxes | None, found: Iterable[Var]) -> None:
        known = dict(self.spelled(sees))
        for n in _axes_named(eqn):
            if not set(known.get(n, ())) <= set(sees.manual if sees else ()):
                raise ShardingError(
                    f"{eqn.name} over axis {n!r}, which is not under manual control here",
                    where=eqn.source,
                    facts=", ".join(f"{_name(v)} {list(v.shape)}" for v in found) or "no operands",
                    hint="collectives belong inside sw.manual or jax.shard_map, or between "
                    f"auto_to_manual and manual_to_auto over {n!r}",
                )  # fmt: skip

    def entered(self, eqn: Eqn, sees: ManualAxes | None) -> ManualAxes:
        """The mesh after `auto_to_manual`."""
        known = dict(self.spelled(sees))
        p = eqn.params
        atoms = [a for n in p["axes"] for a in known[n]]
        held = set(sees.manual if sees else ())
        if held & set(atoms):
            twice = [n for n in p["axes"] if held & set(known[n])]
            raise ShardingError(
                f"auto_to_manual over {', '.join(twice)}: the value is under manual control there",
                where=p["source"], facts=f"{_name(eqn.invars[0])} {list(eqn.invars[0].shape)}",
                hint="an axis is manual or automatic: leave it out of axes here",
            )  # fmt: skip
        spelled = self.spelled(sees)
        inside = ManualAxes(
            self.axes.names, self.axes.sizes, self.axes.sort({*held, *atoms}), spelled
        )
        dims = tuple(tuple(a for n in d for a in known[n]) for d in p["split"])
        self.cross(eqn, [dims], [], eqn.outvars, [])
        self.out.inside[eqn] = inside
        split = {a for d in dims for a in d}
        self.varying.note(eqn.outvars, split | self.varying.of(eqn.invars))
        return inside

    def left(self, eqn: Eqn, sees: ManualAxes | None, here: ManualAxes | None) -> ManualAxes | None:
        """The mesh after `manual_to_auto`."""
        known = dict(self.spelled(sees))
        p = eqn.params
        atoms = {a for n in p["axes"] for a in known[n]}
        held = set(sees.manual if sees else ())
        entered = held - set(here.manual if here else ())
        if not atoms <= entered and not set(eqn.invars) <= self.made:
            not_held = [n for n in p["axes"] if not set(known[n]) <= entered]
            raise ShardingError(
                f"manual_to_auto over {', '.join(not_held)}: the value is not under manual "
                "control there", where=p["source"],
                facts=f"{_name(eqn.invars[0])} {list(eqn.invars[0].shape)}",
                hint="name the axes auto_to_manual was given",
            )  # fmt: skip
        dims = tuple(tuple(a for n in d for a in known[n]) for d in p["split"])
        self.cross(eqn, [], [dims], [], eqn.invars)
        self.out.inside[eqn] = ManualAxes(
            self.axes.names, self.axes.sizes, self.axes.sort({*held, *atoms}), self.spelled(sees)
        )
        self.out.terms[eqn] = terms = tuple(a for n in p["terms"] for a in known[n])
        varies = self.varying.of(eqn.invars)
        more = varies & atoms - {a for d in dims for a in d} - set(terms)
        if p["check"] and more:
            self.check_same(eqn, [n for n in p["axes"] if more & set(known[n])])
        self.varying.note(eqn.outvars, varies - atoms)
        rest = tuple(a for a in (sees.manual if sees else ()) if a not in atoms)
        if not rest:
            return None
        return ManualAxes(self.axes.names, self.axes.sizes, rest, self.spelled(sees))

    @staticmethod
    def check_same(eqn: Eqn, names: list[str]) -> None:
        """What leaves whole along axes must be the same there."""
        split = [d[0] if len(d) == 1 else d or None for d in eqn.params["split"]]
        while split and split[-1] is None:
            split.pop()
        raise ShardingError(
            f"manual_to_auto: the value may differ between devices along {', '.join(names)}",
            where=eqn.params["source"],
            facts=f"{_name(eqn.invars[0])} {list(eqn.invars[0].shape)}; "
            f"{spec_text(PartitionSpec(*split))} says that they hold the same value",
            hint=f"name {names[0]!r} in the spec, or reduce the value over it "
            f"(lax.psum(x, {names[0]!r})); check=False if you know that it does not differ",
        )

    def take(self, values: Iterable[Var], here: ManualAxes) -> None:
        self.out.taken.update(dict.fromkeys(values, frozenset(here.manual)))

    def shard_map(self, eqn: Eqn, here: ManualAxes | None) -> ManualAxes:
        """The mesh inside; the operands' and results' crossings are noted."""
        named = self.named(eqn, here)
        p = eqn.params
        new = p["newly_manual_axes"] if "newly_manual_axes" in p else p["manual_axes"]
        atoms = [a for n in named if n in new for a in named[n]]
        outer = here.manual if here else ()
        inside = ManualAxes(
            self.axes.names,
            self.axes.sizes,
            self.axes.sort({*outer, *atoms}),
            tuple(named.items()),
        )
        (body,) = eqn.bodies
        ins = [_dims(s, v.rank, named) for s, v in zip(p["in_specs"], eqn.invars, strict=True)]
        outs = [_dims(s, v.rank, named) for s, v in zip(p["out_specs"], eqn.outvars, strict=True)]
        self.cross(eqn, ins, outs, body.invars, body.outvars)
        self.out.inside[eqn] = inside
        return inside

    def cross(
        self, eqn: Eqn, ins: list[Dims], outs: list[Dims], entered: list[Var], left: list[Var]
    ) -> None:
        self.out.entries[eqn], self.out.exits[eqn] = ins, outs
        self.out.crossings[eqn] = [
            self.edge(eqn, outer, inner, dims, f"{label}[{i}]")
            for label, pairs in (
                ("in_specs", zip(eqn.invars, entered, ins, strict=bool(ins))),
                ("out_specs", zip(eqn.outvars, left, outs, strict=bool(outs))),
            )
            for i, (outer, inner, dims) in enumerate(pairs)
        ]

    def edge(self, eqn: Eqn, outer: Var, inner: Var, dims: Dims, label: str) -> Edge:
        """`(m f) j, m -> f j`: the spec's atoms on m, whatever the partitioner likes on f and j."""
        b = RuleBuilder()
        inside = b.factors(inner.shape)
        blocks = [b.factor(self.axes.size(a)) if a else None for a in dims]
        outside = [[f] if m is None else [m, f] for m, f in zip(blocks, inside, strict=True)]
        split = [m for m in blocks if m is not None]
        spec = Var(-(1 << 40) - next(self.ids), tuple(b.sizes[m] for m in split), np.dtype("int8"),
                   label)  # fmt: skip
        self.out.specs.append((spec, tuple(a for a in dims if a), eqn))
        rule = b.build([outside, split], [inside])
        return Edge(rule, [outer, spec, inner], PASSES["elementwise"], eqn, eqn.name)

    def named(self, eqn: Eqn, here: ManualAxes | None) -> dict[str, Axes]:
        """The axes of a shard_map's mesh with their atoms, in that mesh's order."""
        theirs = eqn.params["mesh"]
        if here is not None and set(theirs.axis_names) <= set(dict(here.spelled)):
            known = dict(here.spelled)
            return {n: known[n] for n in theirs.axis_names}
        return axes_of(theirs, self.mesh, eqn.source)


def _dims(spec: Any, rank: int, named: dict[str, Axes]) -> Dims:
    """A PartitionSpec's atoms for each dim."""
    entries = [*spec, *[None] * (rank - len(spec))]
    names = [() if e is None else e if isinstance(e, tuple) else (e,) for e in entries]
    return tuple(tuple(a for n in dim for a in named[n]) for dim in names)


def axes_of(theirs: Any, mesh: Any, where: str) -> dict[str, Axes]:
    """The atoms of each axis of a mesh that the user named inside the program.

    It may have other axes than the program's mesh, as long as they are on the same devices and each
    runs along some of the atoms.

    Raises:
      ShardingError: other devices, or an order of them that no atoms spell.
    """
    axes = MeshAxes.of(mesh)
    names, sizes = tuple(theirs.axis_names), tuple(theirs.shape[n] for n in theirs.axis_names)
    facts = f"it has {MeshAxes.of(theirs)}, the program {axes}"
    hint = "use the program's own mesh"
    positions: Sequence[int] | np.ndarray = range(math.prod(sizes))
    if isinstance(theirs, Mesh) and isinstance(mesh, Mesh):
        at = {d: i for i, d in enumerate(np.asarray(mesh.devices).flat)}
        devices = list(np.asarray(theirs.devices).flat)
        if set(devices) != set(at):
            raise ShardingError(
                "a shard_map over other devices than the program's", where=where,
                facts=f"{facts}; devices {_ids(devices)} instead of {_ids(at)}", hint=hint,
            )  # fmt: skip
        positions = [at[d] for d in devices]
    if len(positions) != axes.device_count:
        raise ShardingError(
            f"a shard_map over {len(positions)} devices in a program for {axes.device_count}",
            where=where, facts=facts, hint=hint,
        )  # fmt: skip
    in_order = np.array_equal(positions, np.arange(len(positions)))
    if in_order and names == axes.names and sizes == axes.sizes:
        return {n: axes.expand(n) for n in names}
    placed = from_device_tensor(np.reshape(positions, sizes), len(sizes), axes, where=where)
    if placed.device_order is not None:
        raise ShardingError(
            "a shard_map whose mesh has the program's devices in an order its axes cannot spell",
            where=where, facts=f"{facts}; its order is {_some(positions)}", hint=hint,
        )  # fmt: skip
    return dict(zip(names, placed.sharding.axes, strict=True))


def _axes_named(eqn: Eqn) -> tuple[str, ...]:
    names = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return (names,) if isinstance(names, str) else tuple(map(str, names))


def _name(v: Var) -> str:
    return v.name or f"v{v.id}"


def _over(mesh: ManualAxes | None, outer: ManualAxes | None) -> str:
    """The axes manual in `mesh`, by name; those of `outer` left out."""
    if mesh is None:
        return "nothing"
    known = outer.manual if outer else ()
    return mesh.text([a for a in mesh.manual if a not in known])


def _ids(devices: Iterable[Any]) -> str:
    return _some([d.id for d in devices])


def _some(ids: Sequence[int] | np.ndarray) -> str:
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
