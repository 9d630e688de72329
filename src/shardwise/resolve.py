"""`resolve`: what an annotation means on the program's mesh.

An annotation names axes, a number of parts, or devices (annotate.py); here it becomes a `Sharding`
over the mesh's atoms.  Axes and numbers of parts always do.  Devices do where their order is one
the mesh's atoms can spell: on a mesh x=2 y=2, `[[0, 2], [1, 3]]` is `[y, x]`.  Any other order,
like `[3, 0, 2, 1]`, is a plain sharding on devices in another order: the block that `sharding`
gives to device i is held by device `device_order[i]`, and the partitioner brings the value to and
from the program's order by one collective-permute.

`with_sharding_constraint` of JAX is an annotation too: `from_constraint_params`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shardwise import _jax
from shardwise.annotate import DeviceDim, Entry, Parts
from shardwise.convert import OPEN, AnyMesh, from_named, from_spec, from_xla_text, open_dims
from shardwise.device_tensor import DeviceOrder, Devices, Placement, from_device_tensor, take_atoms
from shardwise.errors import ShardingError
from shardwise.mesh import MeshAxes
from shardwise.sharding import Axes, Sharding


@dataclasses.dataclass(frozen=True)
class Resolved:
    """An annotation on the program's mesh.

    Attributes:
      sharding: how the value is split.
      open: dims completion may split, or split further.
      device_order: the device that holds the block `sharding` gives to device i; None where that
        is device i itself.
    """

    sharding: Sharding
    open: frozenset[int] = frozenset()
    device_order: DeviceOrder | None = None

    @property
    def axes(self) -> tuple[Axes, ...]:
        return self.sharding.axes


def resolve(params: Mapping[str, Any], rank: int, mesh: AnyMesh) -> Resolved:
    """What an `annotation` equation's parameters mean for a value of `rank` dims on `mesh`.

    `split` into n parts takes, in this order: the first mesh axis of size n; the first run of whole
    axes in mesh order whose sizes multiply to n; such a run of atoms; any atoms that make n.

    Args:
      mesh: where it holds devices, a `NamedSharding` over other or reordered devices is noticed;
        an abstract mesh is taken to have the annotation's devices in its order.

    Raises:
      ShardingError: an axis the mesh does not have, a number of parts it cannot make, devices that
        are not the mesh's; with the user's line.
    """
    spec, where = params["spec"], params["source"]
    if len(spec) != rank:
        raise AssertionError(
            f"annotation of {len(spec)} dims on a value of {rank}: a shardwise bug"
        )
    is_open = frozenset(
        i for i, e in enumerate(spec) if e is OPEN or (isinstance(e, DeviceDim) and e.open)
    )
    if params["mesh"] is not None:
        named = NamedSharding(params["mesh"], _named_spec(spec))
        placed = from_named(named, rank, mesh, where)
    elif params["devices"] is not None:
        placed = _on_devices(spec, params["devices"], MeshAxes.of(mesh), where)
    else:
        placed = Placement(_parts(spec, MeshAxes.of(mesh), where))
    return Resolved(placed.sharding, is_open, placed.device_order)


def _named_spec(spec: Sequence[Entry]) -> PartitionSpec:
    """The entries that name axes; the others count as not split."""
    names = [e if isinstance(e, tuple) else None for e in spec]
    return PartitionSpec(*names)


def _parts(spec: Sequence[Entry], mesh: MeshAxes, where: str) -> Sharding:
    sharding = from_spec(_named_spec(spec), len(spec), mesh, where)
    for dim, e in enumerate(spec):
        if isinstance(e, Parts):
            free = [a for a in mesh.atoms if a not in sharding.used]
            sharding = sharding.with_dim(dim, atoms_for_parts(e.count, free, mesh, where))
    return sharding


def atoms_for_parts(count: int, free: Sequence[str], mesh: MeshAxes, where: str = "") -> Axes:
    """The atoms among `free` that split a dim into `count` parts, as `resolve` chooses them.

    Raises:
      ShardingError: `free` cannot make that many.
    """
    axes = [mesh.expand(n) for n in mesh.names]
    axes = [a for a in axes if a and set(a) <= set(free)]
    for run in [[a] for a in axes] + _runs(axes) + _runs([(a,) for a in free]):
        atoms = tuple(a for unit in run for a in unit)
        if mesh.size(atoms) == count:
            return atoms
    total = mesh.size(free)
    if total % count == 0:
        return take_atoms(count, free, mesh)
    raise ShardingError(
        f"split: the mesh cannot make {count} parts",
        where=where,
        facts=f"the mesh has {mesh}, {total} devices to split over; parts can be "
        + ", ".join(str(n) for n in range(1, total + 1) if total % n == 0),
        hint="choose one of these numbers, or a mesh with an axis of that size",
    )


def _runs(units: list[Axes]) -> list[list[Axes]]:
    """Every run of neighbours."""
    return [units[i:j] for i in range(len(units)) for j in range(i + 1, len(units) + 1)]


def _on_devices(spec: Sequence[Entry], devices: Devices, mesh: MeshAxes, where: str) -> Placement:
    """Dims split as dims of a device array; what no dim uses of it holds copies."""
    array = devices.array()
    used = [e.index for e in spec if isinstance(e, DeviceDim)]
    copies = [d for d in range(array.ndim) if d not in used]
    sizes = [array.shape[e.index] if isinstance(e, DeviceDim) else 1 for e in spec]
    tensor = array.transpose([*used, *copies]).reshape([*sizes, -1])
    placed = from_device_tensor(tensor, len(spec), mesh, where=where)
    return _with_named_dims(placed, spec, mesh, where)


def _with_named_dims(
    placed: Placement, spec: Sequence[Entry], mesh: MeshAxes, where: str
) -> Placement:
    """The axes that vmap's `spmd_axis_name` adds to an annotation made of device ids."""
    named = from_spec(_named_spec(spec), len(spec), mesh, where)
    if named.is_replicated:
        return placed
    if placed.device_order is not None or named.used & placed.sharding.used:
        raise ShardingError(
            "vmap's spmd_axis_name does not fit the annotation's devices",
            where=where,
            facts=f"spmd_axis_name asks for {named.text(mesh)}, "
            f"the devices for {placed.sharding.text(mesh)}",
            hint="annotate with axis names, or leave out spmd_axis_name",
        )
    axes = zip(placed.sharding.axes, named.axes, strict=True)
    return Placement(Sharding(tuple(a or b for a, b in axes)))


def from_constraint_params(
    params: Mapping[str, Any], rank: int, mesh: AnyMesh, where: str = ""
) -> Resolved:
    """What a `sharding_constraint` equation of `lax.with_sharding_constraint` means on `mesh`.

    Args:
      params: the equation's `sharding`, and `unconstrained_dims` where it has them.
      mesh, where: as in `resolve`; `where` is the equation's source line, for errors.

    Raises:
      ShardingError: as `from_named`; or the constraint asks for one device, or for manual axes.
    """
    sharding = params["sharding"]
    free = frozenset(params.get("unconstrained_dims") or ())
    if isinstance(sharding, NamedSharding):
        placed = from_named(sharding, rank, mesh, where)
        free |= open_dims(sharding.spec)
    elif isinstance(sharding, SingleDeviceSharding):
        if MeshAxes.of(mesh).device_count > 1:
            raise ShardingError(
                "with_sharding_constraint asks for one device only",
                where=where,
                facts=f"{sharding} on a mesh {MeshAxes.of(mesh)}",
                hint="use a NamedSharding: with P() every device holds the whole array",
            )
        placed = Placement(Sharding.replicated(rank))
    else:
        placed = from_xla_text(_jax.xla_text(sharding, rank), mesh, rank)
    if placed.manual or placed.device is not None or placed.sharding.partial:
        raise ShardingError(
            f"with_sharding_constraint asks for what an annotation cannot be: {sharding}",
            where=where,
            hint="an annotation says how dims are split, not manual or unreduced axes",
        )
    return Resolved(placed.sharding, free, placed.device_order)
