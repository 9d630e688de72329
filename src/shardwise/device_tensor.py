"""Shardings that name devices: the papers' *device tensor*, and what it says beyond a `Sharding`.

A device tensor is an array of device ids: its entry at a block's position is the device that holds
the block (GShard, arXiv 2006.16668, section 3.2; GSPMD, arXiv 2105.04663, section 3.1).  One dim
more, the last, lists the devices that hold copies of one block:

    [[0, 1], [2, 3]]          on a mesh x=2 y=2:  [x, y]
    [[0, 2], [1, 3]]                              [y, x]
    [[[0, 2]], [[1, 3]]]      shape [2, 1, 2]:    [y, -], with copies over x
    [[3, 1], [2, 0]]                              [x, y] on the devices in another order

Devices are numbered by their position in the program's mesh, row-major: XLA's partition ids.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from shardwise.errors import ShardingError
from shardwise.mesh import MeshAxes, prime_factors
from shardwise.sharding import Axes, Sharding

DeviceOrder = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Devices:
    """A hashable array of device ids; `ids` is None for 0, 1, 2, ... in row-major order."""

    shape: tuple[int, ...]
    ids: tuple[int, ...] | None = None

    @staticmethod
    def of(array: np.ndarray) -> Devices:
        flat = array.ravel()
        in_order = np.array_equal(flat, np.arange(flat.size))
        return Devices(array.shape, None if in_order else tuple(map(int, flat)))

    def array(self) -> np.ndarray:
        flat = np.arange(math.prod(self.shape)) if self.ids is None else np.array(self.ids)
        return flat.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Placement:
    """A sharding, and what a form that names devices can say beyond it.

    Attributes:
      sharding: the split over the mesh's atoms, with the devices in the program's order.
      device_order: where the value lies on another order of the devices: the block that `sharding`
        gives to device i is held by device `device_order[i]`.  None for the program's order.
      manual: atoms under manual control (XLA's manual subgroups), in mesh order.
      device: the one device that holds the whole value (XLA's maximal sharding), or None.
    """

    sharding: Sharding
    device_order: DeviceOrder | None = None
    manual: Axes = ()
    device: int | None = None

    @staticmethod
    def of(value: Sharding | Placement) -> Placement:
        return value if isinstance(value, Placement) else Placement(value)


def grid(dims: Sequence[Axes], mesh: MeshAxes) -> np.ndarray:
    """Device numbers by position over `dims`; the last dim holds devices that differ in no dim."""
    named = [a for d in dims for a in d]
    rest = [a for a in mesh.atoms if a not in named]
    devices = np.arange(mesh.device_count).reshape([mesh.size_of[a] for a in mesh.atoms])
    devices = devices.transpose([mesh.order[a] for a in (*named, *rest)])
    return devices.reshape([mesh.size(d) for d in (*dims, rest)])


def to_device_tensor(value: Sharding | Placement, mesh: MeshAxes) -> np.ndarray:
    """The papers' device tensor: entry [i, j, ...] is the device that holds block (i, j, ...).

    A value replicated over part of the mesh has one dim more, the last, over the devices that hold
    the same block (GSPMD, arXiv 2105.04663, section 3.1).

    Raises:
      ShardingError: pending reductions, manual axes: a device tensor cannot say them.
    """
    placed = Placement.of(value)
    if placed.sharding.partial or placed.manual or placed.device is not None:
        raise ShardingError(
            "a device tensor cannot say pending reductions, manual axes, or one device alone",
            facts=f"the sharding is {placed.sharding.text(mesh)}",
        )
    tensor = grid(placed.sharding.axes, mesh)
    if placed.device_order is not None:
        tensor = np.array(placed.device_order)[tensor]
    return tensor[..., 0] if tensor.shape[-1] == 1 else tensor


def from_device_tensor(
    tensor: np.ndarray,
    rank: int,
    mesh: MeshAxes,
    subgroups: Sequence[str] = ("replicated",),
    where: str = "",
) -> Placement:
    """The sharding a device tensor states.

    The entry of the tensor at a block's position is the device that holds the block.  Where each
    dim's block number is a mixed-radix number in the device's coordinates over some of the mesh's
    atoms, the tensor is a plain sharding: `[[0, 2], [1, 3]]` on a mesh x=2 y=2 is `[y, x]`.  Any
    other order of the devices is a canonical tiling (the mesh's atoms dealt to the dims in mesh
    order) with a `device_order`.

    Args:
      tensor: device numbers, each of the mesh's devices once; `rank` dims, or more: see subgroups.
      subgroups: what the dims after the first `rank` mean: "replicated", "manual" or "unreduced".

    Raises:
      ShardingError: wrong number of dims, a device missing, repeated, or not in the mesh.
    """
    tensor = np.asarray(tensor)
    kinds = tuple(subgroups[: tensor.ndim - rank]) if tensor.ndim > rank else ()
    if tensor.ndim != rank + len(kinds):
        raise ShardingError(
            f"a device tensor of {tensor.ndim} dims for a value of {rank} dims",
            where=where,
            facts=f"its shape is {tensor.shape}",
            hint="give it one dim per dim of the value, and one more where devices hold copies",
        )
    _check_devices(tensor, mesh, where)
    # Dims that tell devices apart: the value's own, then manual and unreduced ones.
    keep = [*range(rank), *(rank + i for i, k in enumerate(kinds) if k != "replicated")]
    copies = [d for d in range(tensor.ndim) if d not in keep]
    tensor = tensor.transpose([*keep, *copies])
    tensor = tensor.reshape(*tensor.shape[: len(keep)], -1)
    found, order = _match(tensor, mesh)
    typed: dict[str, Axes] = {"manual": (), "unreduced": ()}
    for d, atoms in zip(keep[rank:], found[rank:], strict=True):
        typed[kinds[d - rank]] += atoms
    sharding = Sharding(found[:rank], mesh.sort(typed["unreduced"]))
    return Placement(sharding, order, mesh.sort(typed["manual"]))


def _check_devices(tensor: np.ndarray, mesh: MeshAxes, where: str) -> None:
    n = mesh.device_count
    if tensor.size == n and np.array_equal(np.sort(tensor, axis=None), np.arange(n)):
        return
    ids, counts = np.unique(tensor, return_counts=True)
    facts = [f"the tensor has {tensor.size} entries, the mesh {n} devices"]
    if len(outside := ids[(ids < 0) | (ids >= n)]):
        facts.append(f"no such device: {_some(outside)}")
    if len(twice := ids[counts > 1]):
        facts.append(f"more than once: {_some(twice)}")
    if len(missing := np.setdiff1d(np.arange(n), ids)):
        facts.append(f"missing: {_some(missing)}")
    raise ShardingError(
        "a device tensor must name each device of the mesh exactly once",
        where=where,
        facts="; ".join(facts),
        hint="devices that hold copies of one block go into one more dim, the last",
    )


def _some(ids: np.ndarray) -> str:
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")


def _match(tensor: np.ndarray, mesh: MeshAxes) -> tuple[tuple[Axes, ...], DeviceOrder | None]:
    """Atoms for each dim but the last (copies), and the device order where atoms do not suffice."""
    position = np.empty(tensor.size, int)
    position[tensor.ravel()] = np.arange(tensor.size)
    blocks = np.unravel_index(position, tensor.shape)[:-1]
    found = [_atoms_of_blocks(b, mesh) for b in blocks]
    if None not in found:
        return tuple(f for f in found if f is not None), None
    left, dims = list(mesh.atoms), []
    for size in tensor.shape[:-1]:
        dims.append(take_atoms(size, left, mesh))
        left = [a for a in left if a not in dims[-1]]
    return tuple(dims), _order(tensor, grid(dims, mesh))


def take_atoms(size: int, atoms: Sequence[str], mesh: MeshAxes) -> Axes:
    """The first of `atoms` whose sizes multiply to `size`: for each prime of it the first atoms."""
    left, taken = list(atoms), []
    for p in prime_factors(size):
        a = next(a for a in left if mesh.size_of[a] == p)
        left.remove(a)
        taken.append(a)
    return mesh.sort(taken)


def _atoms_of_blocks(block: np.ndarray, mesh: MeshAxes) -> Axes | None:
    """The atoms, major first, whose coordinates spell each device's block number; or None."""
    stride_of: dict[str, int] = {}
    step = mesh.device_count
    spelled = np.zeros(mesh.device_count, int)
    for a in mesh.atoms:
        step //= mesh.size_of[a]
        if stride := int(block[step] - block[0]):
            stride_of[a] = stride
            spelled += stride * (np.arange(mesh.device_count) // step % mesh.size_of[a])
    if not np.array_equal(spelled, block):
        return None
    # Every block number occurs, each equally often: so the strides are a mixed radix's, and sorting
    # by them is all that is left to do.
    return tuple(sorted(stride_of, key=stride_of.__getitem__, reverse=True))


def _order(wanted: np.ndarray, canonical: np.ndarray) -> DeviceOrder:
    """For each device in the canonical tiling the device that is to hold its block.

    Among devices that hold copies of one block those already right stay, so that nothing moves.
    """
    copies = wanted.shape[-1]
    out = np.empty(wanted.size, int)
    if copies == 1:
        out[canonical.ravel()] = wanted.ravel()
        return tuple(map(int, out))
    for to, have in zip(wanted.reshape(-1, copies), canonical.reshape(-1, copies), strict=True):
        stay = np.intersect1d(to, have)
        out[stay] = stay
        out[np.setdiff1d(have, stay)] = np.setdiff1d(to, stay)
    return tuple(map(int, out))
