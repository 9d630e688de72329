"""Shardings in the forms other programs use, both ways.

    PartitionSpec   from_spec            to_spec            P("x", None)
    NamedSharding   from_named           to_named           a spec on a mesh of devices
    XLA's text      from_xla_text        to_xla_text        {devices=[4,2]<=[2,4]T(1,0)}
    device tensor   from_device_tensor   to_device_tensor   in device_tensor.py

A `Sharding` names mesh atoms.  Forms that name devices can say more: an order of the devices that
is not the program's, axes under manual control, a value on one device only.  That is kept in a
`Placement`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardwise.device_tensor import Placement, from_device_tensor, grid
from shardwise.errors import ShardingError
from shardwise.mesh import MeshAxes
from shardwise.sharding import Axes, Sharding

OPEN = PartitionSpec.UNCONSTRAINED
AnyMesh = Mesh | AbstractMesh | MeshAxes


# --- PartitionSpec ------------------------------------------------------------------------------


def from_spec(spec: PartitionSpec, rank: int, mesh: AnyMesh, where: str = "") -> Sharding:
    """The sharding a `PartitionSpec` states for a value of `rank` dims.

    Axes may be parts, `x[0:2]`, as reports print them.  Unconstrained dims count as not split: ask
    `open_dims` for them.  Unreduced axes become a pending sum.

    Raises:
      ShardingError: unknown axis, an axis used twice, more entries than dims.
    """
    axes = MeshAxes.of(mesh)
    if len(spec) > rank:
        raise too_many_entries(spec, f"a value of {rank} dims", where)
    dims = [_entry_atoms(e, axes, where) for e in spec.partitions]
    partial = axes.sort(_entry_atoms(tuple(sorted(spec.unreduced)), axes, where))
    used = [a for d in dims for a in d] + list(partial)
    if twice := sorted({a for a in used if used.count(a) > 1}, key=used.index):
        raise ShardingError(
            f"mesh axis {axes.text(twice)} is used twice in {spec_text(spec)}",
            where=where,
            hint="an axis splits one dim: take it out of the others",
        )
    kind = getattr(spec, "unreduced_kind", None)  # newer JAX: also min and max
    return Sharding((*dims, *[()] * (rank - len(dims))), partial, kind.name if kind else "sum")


def _entry_atoms(entry: Any, mesh: MeshAxes, where: str) -> Axes:
    if entry is None or entry is OPEN:
        return ()
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(a for n in names for a in expand(str(n), mesh, where))


def expand(axis: str, mesh: MeshAxes, where: str = "") -> Axes:
    """`mesh.expand`, with the place in the user's code in the error."""
    try:
        return mesh.expand(axis)
    except ShardingError as e:
        raise ShardingError(e.what, where=where, facts=e.facts, hint=e.hint) from None


def too_many_entries(spec: PartitionSpec, of: str, where: str) -> ShardingError:
    return ShardingError(
        f"{spec_text(spec)} has {len(spec)} entries for {of}",
        where=where,
        hint="give one entry per dim; trailing dims that are not split may be left out",
    )


def open_dims(spec: PartitionSpec) -> frozenset[int]:
    """The dims a spec leaves to completion (`P.UNCONSTRAINED`)."""
    return frozenset(i for i, e in enumerate(spec.partitions) if e is OPEN)


def spec_text(spec: PartitionSpec) -> str:
    """A spec as every version of JAX can read it: newer ones print the usual kind of sum, too."""
    return str(spec).replace(", unreduced_kind=sum", "")


def to_spec(sharding: Sharding, mesh: AnyMesh, *, atoms: bool = False) -> PartitionSpec:
    """A sharding as a `PartitionSpec` of full rank, over the user's axes or over the atoms.

    Args:
      atoms: name atoms (`x.0`), for use on `MeshAxes.atom_mesh`, where any split can be said.

    Raises:
      ShardingError: the sharding uses part of an axis, which a spec over whole axes cannot say; or
        a pending max, min, ... (JAX's specs know pending sums only, as unreduced axes).
    """
    axes = MeshAxes.of(mesh)
    if sharding.partial and sharding.op != "sum":
        raise ShardingError(
            f"a pending {sharding.op} has no PartitionSpec",
            facts=f"the sharding is {sharding.text(axes)}; a spec can say pending sums only",
            hint="finish it first: convert sharding.tiling",
        )
    dims = [d if atoms else _whole_axes(d, f"dim {i}", axes) for i, d in enumerate(sharding.axes)]
    pending = sharding.partial if atoms else _whole_axes(sharding.partial, "the sum", axes)
    entries = [None if not d else d[0] if len(d) == 1 else tuple(d) for d in dims]
    return PartitionSpec(*entries, unreduced=frozenset(pending))


def _whole_axes(atoms: Axes, what: str, mesh: MeshAxes) -> Axes:
    whole = mesh.exact(atoms)
    if whole is None:
        raise ShardingError(
            f"{what} uses part of a mesh axis, which a PartitionSpec cannot say",
            facts=f"{what} is over {mesh.text(atoms)}; the mesh has {mesh}",
            hint="use to_spec(..., atoms=True) or to_named, over a mesh with an axis for each atom",
        )
    return whole


# --- NamedSharding ------------------------------------------------------------------------------


def to_named(value: Sharding | Placement, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """A sharding on a mesh of devices, as `jax.device_put` and `jax.jit` take it.

    On the user's mesh where whole axes say it; on its atom mesh (same devices, an axis for each
    atom) where only part of an axis splits a dim; on a mesh of reordered devices for a placement
    with a device order.

    Raises:
      ShardingError: a pending reduction other than a sum, or a sum over axes that are not Explicit;
        manual axes; a device order on an abstract mesh.
    """
    placed, axes = Placement.of(value), MeshAxes.of(mesh)
    if placed.manual or placed.device is not None:
        raise ShardingError("manual axes and one-device placements have no NamedSharding")
    if placed.device_order is not None:
        if not isinstance(mesh, Mesh):
            raise ShardingError("a device order needs a mesh of devices, and this one is abstract")
        devices = mesh.devices.ravel()[list(placed.device_order)].reshape(mesh.devices.shape)
        mesh = Mesh(devices, mesh.axis_names, mesh.axis_types)
    whole = all(axes.exact(d) is not None for d in (*placed.sharding.axes, placed.sharding.partial))
    spec = to_spec(placed.sharding, axes, atoms=not whole)
    try:
        return NamedSharding(mesh if whole else axes.atom_mesh(mesh), spec)
    except ValueError as e:
        if not placed.sharding.partial:
            raise
        raise ShardingError(
            f"a pending sum has no NamedSharding on this mesh: {spec_text(spec)}",
            facts="JAX allows unreduced axes on a mesh whose axes are Explicit only",
            hint="finish the sum first: convert sharding.tiling",
        ) from e


def from_named(named: NamedSharding, rank: int, mesh: AnyMesh, where: str = "") -> Placement:
    """A `NamedSharding` in the terms of the program's mesh.

    Its mesh may be another one over the same devices: other axes, another order of the devices.
    Device orders are compared where both meshes hold devices; an abstract mesh has the program's.

    Raises:
      ShardingError: the two meshes do not have the same devices; or as `from_spec`.
    """
    program, own = MeshAxes.of(mesh), MeshAxes.of(named.mesh)
    sharding = from_spec(named.spec, rank, own, where)
    order = _device_positions(named.mesh, mesh, where)
    if own == program and np.array_equal(order, np.arange(len(order))):
        return Placement(sharding)
    tensor = order[grid((*sharding.axes, sharding.partial), own)]
    return from_device_tensor(tensor, rank, program, ("unreduced", "replicated"), where)


def _device_positions(mesh: Any, program: AnyMesh, where: str) -> np.ndarray:
    """The devices of `mesh`, row-major, as positions in the program's mesh."""
    mine, theirs = MeshAxes.of(mesh).device_count, MeshAxes.of(program).device_count
    if mine != theirs:
        raise ShardingError(
            f"the sharding is on a mesh of {mine} devices, and the program runs on {theirs}",
            where=where,
            facts=f"its mesh has {MeshAxes.of(mesh)}, the program's {MeshAxes.of(program)}",
            hint="use one mesh for both",
        )
    if not (isinstance(mesh, Mesh) and isinstance(program, Mesh)):
        return np.arange(mine)
    position = {d: i for i, d in enumerate(program.devices.flat)}
    if missing := [d.id for d in mesh.devices.flat if d not in position]:
        raise ShardingError(
            "the sharding is on devices that the program does not run on",
            where=where,
            facts=f"device ids {missing}",
            hint="use one mesh for both",
        )
    return np.array([position[d] for d in mesh.devices.flat])


# --- XLA's text form ----------------------------------------------------------------------------

_DEVICES = re.compile(
    r"devices=\[(?P<tile>[\d,]+)\]"
    r"(?:<=\[(?P<iota>[\d,]+)\](?:T\((?P<perm>[\d,]+)\))?|(?P<ids>\d+(?:,\d+)*))"
    r"(?: (?P<last>last_tile_dim_replicate)| last_tile_dims=\{(?P<types>[a-z, ]*)\})?"
)
_METADATA = re.compile(r"\s*metadata=\{(?:[^{}]|\{[^{}]*\})*\}")
_SUBGROUPS = ("manual", "unreduced", "replicated")


def from_xla_text(text: str, mesh: AnyMesh, rank: int | None = None) -> Placement:
    """What XLA's text form of a sharding states, `{devices=[4,2]<=[2,4]T(1,0)}`.

    Args:
      rank: the value's number of dims; needed only where the text does not show it, as in
        `{replicated}`.

    Raises:
      ShardingError: not a sharding's text (tuples are not), or not for this mesh and rank.
    """
    axes = MeshAxes.of(mesh)
    body = _METADATA.sub("", text.strip())
    body = body[1:-1].strip() if body.startswith("{") and body.endswith("}") else ""
    if match := _DEVICES.fullmatch(body):
        return _tiled(match, text, axes, rank)
    device = re.fullmatch(r"maximal device=(\d+)", body)
    if not device and body not in _SUBGROUPS:
        raise ShardingError(
            f"not an XLA sharding: {text!r}",
            facts="forms: {replicated}, {manual}, {unreduced}, {maximal device=0}, "
            "{devices=[2,4]<=[8]}, {devices=[2,2]0,2,1,3}, with last_tile_dim_replicate or "
            "last_tile_dims={...}",
            hint="a tuple's shardings are converted one by one",
        )
    if rank is None:
        raise ShardingError(f"{text!r} does not show how many dims the value has: give the rank")
    whole = Sharding.replicated(rank)
    if device:
        if int(device[1]) >= axes.device_count:
            raise ShardingError(f"{text!r} names a device the mesh does not have", facts=str(axes))
        return Placement(whole, device=int(device[1]))
    if body == "unreduced":
        return Placement(whole.with_partial(axes.atoms))
    return Placement(whole, manual=axes.atoms if body == "manual" else ())


def _tiled(match: re.Match[str], text: str, mesh: MeshAxes, rank: int | None) -> Placement:
    tile = _ints(match["tile"])
    types = tuple(re.split(r",\s*", match["types"])) if match["types"] else ()
    if match["last"]:
        types = ("replicated",)
    shown = len(tile) - len(types)
    if unknown := [t for t in types if t not in _SUBGROUPS]:
        raise ShardingError(f"unknown subgroup {unknown[0]!r} in {text!r}")
    if rank not in (None, shown):
        raise ShardingError(f"{text!r} is for a value of {shown} dims, not {rank}")
    try:
        devices = np.array(_ids(match)).reshape(tile)
    except ValueError as e:
        raise ShardingError(f"the device numbers in {text!r} do not fill its tiles") from e
    return from_device_tensor(devices, shown, mesh, types)


def _ids(match: re.Match[str]) -> np.ndarray:
    """The device numbers of a tiled form, in tile order."""
    if match["ids"]:
        return np.array(_ints(match["ids"]))
    dims = _ints(match["iota"])
    ids = np.arange(np.prod(dims)).reshape(dims)
    return ids.transpose(_ints(match["perm"])) if match["perm"] else ids


def _ints(text: str) -> list[int]:
    return [int(t) for t in text.split(",")]


def to_xla_text(value: Sharding | Placement, mesh: AnyMesh) -> str:
    """The text XLA itself prints for a sharding; explicit device numbers for a device order.

    Raises:
      ShardingError: a pending max, min, ...: XLA knows pending sums only (`unreduced`).
    """
    placed, axes = Placement.of(value), MeshAxes.of(mesh)
    sharding = placed.sharding
    if sharding.partial and sharding.op != "sum":
        raise ShardingError(
            f"a pending {sharding.op} has no XLA text",
            facts=f"the sharding is {sharding.text(axes)}; XLA can say pending sums only",
            hint="finish it first: convert sharding.tiling",
        )
    if placed.device is not None:
        return f"{{maximal device={placed.device}}}"
    groups = {"manual": placed.manual, "unreduced": sharding.partial}
    named = {a for d in (*sharding.axes, *groups.values()) for a in d}
    groups["replicated"] = tuple(a for a in axes.atoms if a not in named)
    groups = {k: atoms for k, atoms in groups.items() if atoms}
    if not any(sharding.axes) and len(groups) <= 1:
        return f"{{{next(iter(groups), 'replicated')}}}"
    dims = [*sharding.axes, *groups.values()]
    tile = ",".join(str(axes.size(d)) for d in dims)
    return f"{{devices=[{tile}]{_order_text(placed, dims, axes)}{_last_dims_text(groups)}}}"


def _last_dims_text(groups: Iterable[str]) -> str:
    kinds = list(groups)
    if kinds == ["replicated"]:
        return " last_tile_dim_replicate"
    return f" last_tile_dims={{{', '.join(kinds)}}}" if kinds else ""


def _order_text(placed: Placement, dims: list[Axes], mesh: MeshAxes) -> str:
    """The order of the devices over the tiles: `<=[2,4]T(1,0)`, or their numbers."""
    if placed.device_order is not None:
        ids = np.array(placed.device_order)[grid(dims, mesh)]
        return ",".join(map(str, ids.ravel()))
    # Runs of atoms that stay side by side are one dim, which is how XLA prints it.
    runs: list[list[str]] = []
    for a in (a for d in dims for a in d):
        if runs and mesh.order[runs[-1][-1]] + 1 == mesh.order[a]:
            runs[-1].append(a)
        else:
            runs.append([a])
    ordered = sorted(runs, key=lambda run: mesh.order[run[0]])
    sizes = ",".join(str(mesh.size(run)) for run in ordered)
    perm = ",".join(str(ordered.index(run)) for run in runs)
    return f"<=[{sizes}]" + (f"T({perm})" if len(runs) > 1 else "")
