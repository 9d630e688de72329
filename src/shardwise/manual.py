"""Manual subgraphs (GSPMD 3.4): a function of one device's blocks as a function of whole arrays.

    y = sw.manual(fn, in_specs=P("x"), out_specs=P("x"), axes="x")(x)

Inside, values have the shapes of blocks and collectives are the user's own.  Axes not named in `axes` stay
the partitioner's.  Outside `sw.spmd` it is the program of a mesh of one device: blocks are whole arrays
and every axis has size 1, so that a sum over it is its operand, and its index 0.

`manual` is `jax.shard_map` on the program's mesh, which it need not be given, and such a shard_map may
be written too.  With check on, JAX knows along which axes a value varies, and a result claimed to be
the same on all devices that is not is an error.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from shardwise import _jax
from shardwise.convert import spec_text
from shardwise.errors import ShardingError

Names = tuple[str, ...]

# --- a function of blocks ---------------------------------------------------------------------------


def manual(
    fn: Callable[..., Any],
    *,
    in_specs: Any,
    out_specs: Any,
    axes: str | Iterable[str] | None = None,
    check: bool = True,
) -> Callable[..., Any]:
    """A function of one device's blocks as a function of whole arrays.

    Args:
      fn: takes and returns blocks; may use collectives over `axes`.
      in_specs: a `PartitionSpec` over `axes`, or a tree of them that is a prefix of the arguments' tree.
      out_specs: likewise for the results; an axis that a spec does not name means that the devices
        along it hold the same value.
      axes: the mesh axes under manual control; None: all of the mesh.  What the specs do not say
        about other axes is the partitioner's choice.
      check: check that results vary along no axis but those their specs name.

    Returns:
      A function to call like `fn`, in `sw.spmd` or on one device.

    Raises:
      ShardingError: an axis that the mesh does not have, or that is already under manual control, or
        is not in `axes`; a dim that does not divide; a result that varies where its spec says that it
        does not.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> total = manual(lambda x: jax.lax.psum(x.sum(), "x"), in_specs=P("x"), out_specs=P())
      >>> float(total(jnp.ones(8)))
      8.0
    """
    where = _jax.current_source()
    for label, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        for s in jax.tree.leaves(specs, is_leaf=_is_spec):
            if not isinstance(s, PartitionSpec):
                raise ShardingError(
                    f"manual: {label} needs PartitionSpecs, not {s!r:.60}", where=where,
                    hint="write P('x', None), with P = jax.sharding.PartitionSpec",
                )  # fmt: skip
    chosen = None if axes is None else axis_names(axes)

    what = f"manual({getattr(fn, '__name__', 'fn')})"

    @functools.lru_cache(maxsize=16)
    def mapped(mesh: Any, names: Names, at_once: bool) -> Callable[..., Any]:
        def body(*blocks: Any) -> Any:
            with _collectives_inside(what, names, where):
                out = fn(*blocks)
            _check_results(what, out_specs, out, names, check, where)
            return out

        f = jax.shard_map(
            body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(names),
            check_vma=check,
        )  # fmt: skip
        return jax.jit(f) if at_once else f

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        mesh, sizes = _mesh_for([in_specs, out_specs], chosen)
        names = chosen or tuple(sizes)
        check_axes(what, names, [in_specs, out_specs], sizes, where)
        check_free(what, names, where)
        for path, spec in jax.tree_util.tree_leaves_with_path(out_specs, is_leaf=_is_spec):
            label = f"{what}: result {jax.tree_util.keystr(path)}".rstrip()
            check_spec(label, spec, names, len(spec), where)
        _check_args(what, in_specs, args, names, sizes, where)
        outside = _jax.program_mesh() is None
        if outside and mesh is not None:
            _check_one_device(what, args, where)
        return mapped(mesh, names, outside)(*args)

    return call


@contextlib.contextmanager
def _collectives_inside(what: str, names: Names, where: str) -> Iterator[None]:
    """JAX's own words for a collective over an axis that stays automatic are about types."""
    try:
        yield
    except ValueError as e:
        found = re.search(r"with axis: (\w+) of type AxisType\.", str(e))
        if found is None or found[1] in names:
            raise
        raise ShardingError(
            f"{what}: a collective over axis {found[1]!r}, which is not under manual control",
            where=where, facts=f"axes={names}",
            hint=f"add {found[1]!r} to axes: what is not in it is the partitioner's",
        ) from None  # fmt: skip


def _check_one_device(what: str, args: Any, where: str) -> None:
    for x in jax.tree.leaves(args):
        if (n := _jax.device_count(x)) > 1:
            raise ShardingError(
                f"{what}: outside sw.spmd it runs on one device, and an argument lies on {n}",
                where=where,
                hint="call it in what sw.spmd partitions, or under jax.set_mesh(mesh)",
            )


def _is_spec(s: Any) -> bool:
    return isinstance(s, PartitionSpec)


def axis_names(axes: str | Iterable[str]) -> Names:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _mesh_for(specs: Any, chosen: Names | None) -> tuple[Any, dict[str, int]]:
    """What to give shard_map as mesh (None: the one in context), and the axes' sizes."""
    context = jax.sharding.get_abstract_mesh()
    program = _jax.program_mesh()
    if not context.empty:
        return None, dict(context.shape)
    if program is not None:
        return program, {str(n): program.shape[n] for n in program.axis_names}
    named = [a for s in jax.tree.leaves(specs, is_leaf=_is_spec) for d in entries(s) for a in d]
    names = tuple(dict.fromkeys([*(chosen or ()), *named])) or ("one",)
    one = AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
    return one, dict.fromkeys(names, 1)


def entries(spec: PartitionSpec, rank: int | None = None) -> tuple[Names, ...]:
    """The axes each dim is split over."""
    out = [() if e is None else tuple(map(str, e)) if isinstance(e, tuple) else (str(e),)
           for e in spec]  # fmt: skip
    return tuple(out + [()] * ((rank or 0) - len(out)))


def blocks_along(axes: str | Iterable[str]) -> int:
    """The blocks along `axes` that manual code called here would see: 1 on one device."""
    names = axis_names(axes)
    sizes = _mesh_for((), names)[1]
    check_axes("blocks_along", names, (), sizes, _jax.current_source())
    return math.prod(sizes[n] for n in names)


def check_axes(what: str, names: Names, specs: Any, sizes: dict[str, int], where: str) -> None:
    has = " ".join(f"{n}={s}" for n, s in sizes.items())
    named = [a for s in jax.tree.leaves(specs, is_leaf=_is_spec) for d in entries(s) for a in d]
    for n in (*names, *named):
        if n not in sizes:
            raise ShardingError(
                f"{what}: unknown mesh axis {n!r}", where=where, facts=f"the mesh has {has}",
                hint="use one of the mesh's axis names, or build the mesh with that axis",
            )  # fmt: skip


def check_free(what: str, names: Names, where: str) -> None:
    outside = [n for n in names if n in _jax.under_manual_control()]
    if outside:
        raise ShardingError(
            f"{what}: axis {outside[0]!r} is under manual control already", where=where,
            facts=f"the enclosing manual function has {', '.join(_jax.under_manual_control())}",
            hint="leave it out of axes: inside, its collectives work as they are",
        )  # fmt: skip


def check_spec(what: str, spec: PartitionSpec, names: Names, rank: int, where: str) -> None:
    """A spec over the axes under manual control, of no more entries than the value has dims."""
    dims = entries(spec)
    if len(dims) > rank:
        raise ShardingError(f"{what}: {spec_text(spec)} has more entries than the value's {rank} dims",
                            where=where)  # fmt: skip
    used = [a for d in dims for a in d]
    for a in used:
        if a not in names:
            raise ShardingError(
                f"{what}: {spec_text(spec)} names axis {a!r}, which is not under manual control",
                where=where,
                facts=f"axes={names}",
                hint=f"add {a!r} to axes, or leave it out of the spec: it stays the partitioner's",
            )  # fmt: skip
        if used.count(a) > 1:
            raise ShardingError(f"{what}: axis {a!r} is used twice in {spec_text(spec)}", where=where,
                                hint="an axis splits one dim")  # fmt: skip


def _check_args(
    what: str, specs: Any, args: Sequence[Any], names: Names, sizes: dict[str, int], where: str
) -> None:
    for name, spec, x in _pairs(what, "in_specs", specs, tuple(args), where):
        label = f"{what}: argument {name}"
        check_spec(label, spec, names, np.ndim(x), where)
        check_divides(label, spec, np.shape(x), sizes, where)


def check_divides(
    what: str, spec: PartitionSpec, shape: Sequence[int], sizes: dict[str, int], where: str
) -> None:
    for d, axes in enumerate(entries(spec)):
        shards = math.prod(sizes[a] for a in axes)
        if shape[d] % shards:
            raise ShardingError(
                f"{what}: dim {d} of {list(shape)} does not divide", where=where,
                facts=f"{spec_text(spec)} makes {shards} blocks of {shape[d]} rows",
                hint="pad the dim: what the padding means is the manual code's to say",
            )  # fmt: skip


def _check_results(what: str, specs: Any, out: Any, names: Names, check: bool, where: str) -> None:
    for name, spec, x in _pairs(what, "out_specs", specs, out, where):
        label = f"{what}: result {name}".rstrip()
        check_spec(label, spec, names, np.ndim(x), where)
        said = {a for d in entries(spec) for a in d}
        more = [a for a in _jax.varies_over(x) if a in names and a not in said] if check else []
        if more:
            raise ShardingError(
                f"{label} may differ between devices along {', '.join(more)}", where=where,
                facts=f"{spec_text(spec)} says that they hold the same value",
                hint=f"name {more[0]!r} in the spec, or reduce the value over it "
                f"(lax.psum(x, {more[0]!r})); check=False if you know that it does not differ",
            )  # fmt: skip


def _pairs(
    what: str, label: str, specs: Any, tree: Any, where: str
) -> list[tuple[str, PartitionSpec, Any]]:
    """(path, spec, leaf) of each leaf under a prefix tree of specs."""
    found: list[tuple[str, PartitionSpec, Any]] = []

    def sub(path: Any, spec: PartitionSpec, part: Any) -> None:
        for rest, leaf in jax.tree_util.tree_flatten_with_path(part)[0]:
            found.append((jax.tree_util.keystr((*path, *rest)), spec, leaf))

    try:
        jax.tree_util.tree_map_with_path(sub, specs, tree, is_leaf=_is_spec)
    except ValueError:
        raise ShardingError(
            f"{what}: the tree of {label} is not a prefix of the values'", where=where,
            facts=f"{label} {jax.tree.structure(specs, is_leaf=_is_spec)}, "
            f"values {jax.tree.structure(tree)}",
        ) from None  # fmt: skip
    return found
