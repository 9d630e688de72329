"""Annotations: the few lines a user adds to a program, and the one primitive behind them.

    x = sw.annotate(x, P("x", None))          # name mesh axes; P.UNCONSTRAINED leaves a dim open
    x = sw.mesh_split(x, device_mesh, [0, -1])            # GSPMD (arXiv 2105.04663), section 3.1
    x = sw.split(x, 0, 8); w = sw.replicate(w)            # GShard (arXiv 2006.16668), section 3.2
    x = sw.shard(x, [[0, 1], [2, 3]])                     # GShard: which device holds which block

All are identities: outside `sw.spmd` they do nothing, so annotated code runs unchanged on one
device.  They differentiate (the cotangent carries the same annotation) and vmap (the new dim is
open).  An annotation knows no mesh; `resolve` turns one into a sharding of the program's mesh.

The primitive's parameters, all hashable:

    spec     per dim: None (not split), OPEN, a tuple of axis names, `Parts`, or `DeviceDim`
    kind     "annotate", "mesh_split", "split", "replicate" or "shard"
    source   `file.py:line` of the user's call
    devices  the `Devices` that `DeviceDim`s index, for mesh_split and shard; else None
    mesh     the mesh of the `NamedSharding` given to annotate; else None
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardwise import _jax
from shardwise.convert import OPEN, spec_text, too_many_entries
from shardwise.device_tensor import Devices
from shardwise.errors import ShardingError
from shardwise.sharding import Axes


@dataclasses.dataclass(frozen=True)
class Parts:
    """A dim split into `count` blocks, over whichever axes of the mesh make that many."""

    count: int


@dataclasses.dataclass(frozen=True)
class DeviceDim:
    """A dim split as dim `index` of the annotation's devices; `open`: it may be split further."""

    index: int
    open: bool = False


Entry = None | Axes | Parts | DeviceDim | Any  # Any: OPEN, whose class JAX does not export


# --- the primitive ------------------------------------------------------------------------------

annotate_p = jex.Primitive("annotation")
annotate_p.def_impl(lambda x, **_: x)
annotate_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(annotate_p, lambda ctx, x, **_: [x])
ad.deflinear2(annotate_p, lambda ct, x, **params: [annotate_p.bind(ct, **params)])


def _batch(axis_data: Any, args: Any, dims: Any, *, spec: tuple[Entry, ...], **params: Any) -> Any:
    """The batched dim is open, or split over vmap's `spmd_axis_name` when it has one."""
    (x,), (dim,) = args, dims
    if dim is None:
        return annotate_p.bind(x, spec=spec, **params), None
    names = axis_data.spmd_name
    new = OPEN if not names else tuple(names) if isinstance(names, tuple) else (names,)
    return annotate_p.bind(x, spec=(*spec[:dim], new, *spec[dim:]), **params), dim


batching.fancy_primitive_batchers[annotate_p] = _batch


def _bind(
    x: Any,
    spec: Sequence[Entry],
    kind: str,
    source: str,
    devices: Devices | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Any:
    out = annotate_p.bind(x, spec=tuple(spec), kind=kind, source=source, devices=devices, mesh=mesh)
    # Outside tracing bind returns NumPy arrays and scalars in a wrapper of JAX's own.
    return out if isinstance(out, jax.Array) else x


# --- what users call ----------------------------------------------------------------------------


def annotate(x: Any, spec: Any) -> Any:
    """Fix how arrays are split over the mesh's axes.

    Args:
      x: an array, or a pytree of arrays.
      spec: a `PartitionSpec` or `NamedSharding`; or a tree of them that is a prefix of x's tree,
        with None for parts that get no annotation.  In a spec, None keeps a dim whole,
        `P.UNCONSTRAINED` leaves it to completion, and dims after the last entry are whole.  Part of
        an axis is written as reports print it, `x[0:2]`.

    Returns:
      `x`, unchanged in value.

    Raises:
      ShardingError: not arrays, not specs, more entries than dims, an axis used twice.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> annotate(jnp.zeros((8, 4)), P("x", P.UNCONSTRAINED)).shape
      (8, 4)
    """
    source = _jax.current_source()

    def is_leaf(s: Any) -> bool:
        return s is None or isinstance(s, (PartitionSpec, NamedSharding))

    for s in jax.tree.leaves(spec, is_leaf=is_leaf):
        if not is_leaf(s):
            raise ShardingError(
                f"annotate needs a PartitionSpec, not {s!r}",
                where=source,
                hint="write P('x', None), with P = jax.sharding.PartitionSpec",
            )
    try:
        return jax.tree_util.tree_map_with_path(
            functools.partial(_annotate_subtree, source), spec, x, is_leaf=is_leaf
        )
    except ShardingError:
        raise
    except ValueError:
        raise ShardingError(
            "the tree of specs is not a prefix of the tree of arrays",
            where=source,
            facts=f"specs {jax.tree.structure(spec, is_leaf=is_leaf)}, "
            f"arrays {jax.tree.structure(x)}",
        ) from None


def _annotate_subtree(source: str, path: Any, spec: Any, sub: Any) -> Any:
    if spec is None:
        return sub

    def leaf(rest: Any, x: Any) -> Any:
        _check_array(x, "annotate", source)
        named = isinstance(spec, NamedSharding)
        name = jax.tree_util.keystr((*path, *rest))
        entries = _entries(spec.spec if named else spec, x, name, source)
        return _bind(x, entries, "annotate", source, mesh=spec.mesh if named else None)

    return jax.tree_util.tree_map_with_path(leaf, sub)


def _entries(spec: PartitionSpec, x: Any, name: str, source: str) -> list[Entry]:
    """The spec's entries as parameters, one per dim of `x`, checked as far as needs no mesh."""
    what = f"{name}: {_text(x)}" if name else _text(x)
    if len(spec) > np.ndim(x):
        raise too_many_entries(spec, what, source)
    if spec.unreduced or spec.reduced:
        raise ShardingError(
            f"an annotation cannot ask for a pending sum: {spec_text(spec)}",
            where=source,
            facts=f"it annotates {what}",
            hint="leave out unreduced and reduced: shardwise keeps sums pending where that pays",
        )
    entries: list[Entry] = []
    for e in spec.partitions:
        if e is None or e is OPEN:
            entries.append(e)
        else:
            entries.append(tuple(map(str, e)) if isinstance(e, tuple) else (str(e),))
    used = [(a, i) for i, e in enumerate(entries) if isinstance(e, tuple) for a in e]
    for axis, _ in used:
        dims = [i for a, i in used if a == axis]
        if len(dims) > 1:
            raise ShardingError(
                f"mesh axis {axis!r} is used twice in {spec}",
                where=source,
                facts=f"on dims {dims} of {what}",
                hint="an axis splits one dim: take it out of the others",
            )
    return entries + [None] * (np.ndim(x) - len(entries))


def mesh_split(
    x: Any, device_mesh: Any, dims_mapping: Sequence[int], unspecified_dims: Sequence[int] = ()
) -> Any:
    """Split an array over a logical mesh of devices (GSPMD, section 3.1).

    Args:
      x: an array.
      device_mesh: an array of device ids of any rank, each of the program's devices once; a tuple
        is the array's shape, for the devices in order.  A device's id is its position in the
        program's mesh, row-major.
      dims_mapping: for each dim of x the dim of `device_mesh` it is split over, or -1.
      unspecified_dims: dims of x that completion may split further (section 3.5).

    Raises:
      ShardingError: not an array; a mapping of the wrong length, out of range, or with a mesh dim
        twice; device ids that are no integers, negative or repeated.
    """
    source = _jax.current_source()
    _check_array(x, "mesh_split", source)
    devices = _devices(device_mesh, "mesh_split: device_mesh", source)
    mapping = _check_mapping(dims_mapping, len(devices.shape), x, source)
    free = {_check_dim(d, x, "mesh_split: unspecified_dims", source) for d in unspecified_dims}
    spec = [
        DeviceDim(m, i in free) if m >= 0 else OPEN if i in free else None
        for i, m in enumerate(mapping)
    ]
    return _bind(x, spec, "mesh_split", source, devices)


def _check_mapping(mapping: Sequence[int], mesh_rank: int, x: Any, source: str) -> list[int]:
    mapping = [_integer(m, "mesh_split: dims_mapping", source) for m in mapping]
    hint = ""
    if len(mapping) != np.ndim(x):
        hint = "give one entry per dim: the dim of the device mesh that splits it, or -1"
    elif any(not -1 <= m < mesh_rank for m in mapping):
        hint = f"entries are -1 (not split) to {mesh_rank - 1}"
    elif len(used := [m for m in mapping if m >= 0]) != len(set(used)):
        hint = "a dim of the device mesh splits one dim of the array"
    if hint:
        raise ShardingError(
            f"mesh_split: dims_mapping {mapping} does not fit",
            where=source,
            facts=f"{_text(x)} on a device mesh of {mesh_rank} dims",
            hint=hint,
        )
    return mapping


def split(x: Any, dim: int, num_partitions: int) -> Any:
    """Split dim `dim` of an array into `num_partitions` blocks (GShard, section 3.2).

    The mesh must be able to make that many: the number divides its device count.  A whole mesh axis
    of that size is taken if there is one.  Devices beyond `num_partitions` hold copies.

    Raises:
      ShardingError: not an array, no such dim, less than one partition.
    """
    source = _jax.current_source()
    _check_array(x, "split", source)
    dim = _check_dim(dim, x, "split", source)
    count = _integer(num_partitions, "split: num_partitions", source)
    if count < 1:
        raise ShardingError(f"split: num_partitions is {count}, less than 1", where=source)
    spec: list[Entry] = [None] * np.ndim(x)
    spec[dim] = Parts(count) if count > 1 else None
    return _bind(x, spec, "split", source)


def replicate(x: Any) -> Any:
    """Keep an array whole on every device (GShard, section 3.2).

    Raises:
      ShardingError: not an array.
    """
    source = _jax.current_source()
    _check_array(x, "replicate", source)
    return _bind(x, [None] * np.ndim(x), "replicate", source)


def shard(x: Any, device_assignment: Any) -> Any:
    """Say which device holds which block of an array (GShard, section 3.2).

    Args:
      x: an array.
      device_assignment: an array of device ids with x's rank; its shape is the number of blocks of
        each dim, and entry [i, j, ...] the device that holds block (i, j, ...).  Any order of the
        devices is allowed; a tuple is the array's shape, for the devices in order.  With one dim
        more, the last lists devices that hold copies of a block (GSPMD's partial tiling).  A
        device's id is its position in the program's mesh, row-major.

    Raises:
      ShardingError: not an array, an assignment of another rank, ids that are no integers,
        negative or repeated.
    """
    source = _jax.current_source()
    _check_array(x, "shard", source)
    devices = _devices(device_assignment, "shard: device_assignment", source)
    rank = np.ndim(x)
    if len(devices.shape) not in (rank, rank + 1):
        raise ShardingError(
            f"shard: a device_assignment of {len(devices.shape)} dims for {_text(x)}",
            where=source,
            facts=f"its shape is {devices.shape}",
            hint="give it one dim per dim of the array, and one more where devices hold copies",
        )
    return _bind(x, [DeviceDim(i) for i in range(rank)], "shard", source, devices)


# --- checks of what users pass ------------------------------------------------------------------


def _text(x: Any) -> str:
    return f"{jax.dtypes.result_type(x)}[{','.join(map(str, np.shape(x)))}]"


def _check_array(x: Any, what: str, source: str) -> None:
    if not jex.valid_jaxtype(x):
        raise ShardingError(
            f"{what} needs an array, not {type(x).__name__}", where=source, facts=f"got {x!r:.30}"
        )


def _integer(n: Any, what: str, source: str) -> int:
    try:
        return operator.index(n)
    except TypeError:
        raise ShardingError(f"{what} needs integers, not {n!r}", where=source) from None


def _check_dim(dim: Any, x: Any, what: str, source: str) -> int:
    dim, rank = _integer(dim, what, source), np.ndim(x)
    if not -rank <= dim < rank:
        raise ShardingError(f"{what}: {_text(x)} has no dim {dim}", where=source)
    return dim % rank


def _devices(array: Any, what: str, source: str) -> Devices:
    """Device ids as a parameter; a tuple of integers is a shape, filled with 0, 1, 2, ..."""
    if isinstance(array, tuple) and all(isinstance(n, (int, np.integer)) for n in array):
        if min(array, default=1) < 1:
            raise ShardingError(f"{what} cannot have the shape {array}", where=source)
        return Devices(tuple(map(int, array)))
    ids = np.asarray(array)
    fault = ""
    if ids.dtype.kind not in "iu":
        fault = f"needs integer device ids, not {ids.dtype}"
    elif ids.size == 0:
        fault = f"names no devices: its shape is {ids.shape}"
    elif ids.min() < 0:
        fault = f"has a negative device id, {ids.min()}"
    elif len(np.unique(ids)) != ids.size:
        values, counts = np.unique(ids, return_counts=True)
        fault = f"has device {values[counts > 1][0]} more than once"
    if fault:
        raise ShardingError(f"{what} {fault}", where=source)
    return Devices.of(ids)
