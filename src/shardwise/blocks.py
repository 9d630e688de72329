"""Manual subgraphs value by value: `auto_to_manual` and `manual_to_auto` (GSPMD 3.4).

    block = sw.auto_to_manual(x, P("x"), axes="x")
    block = lax.ppermute(block * 2, "x", ring)
    y = sw.manual_to_auto(block, P("x"), axes="x")

Both are primitives of their own; `regions` finds what lies between them.  Outside `sw.spmd` they are
identities, and axes have no names: use `manual` around collectives that must also run on one device.

`manual_to_auto` takes an axis that no dim names to mean that all devices hold the same, and gradients
follow from that: the cotangent of what enters whole is summed; of what leaves whole, divided.  A value
that is seen to vary along such an axis (`varying`) is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec

from shardwise import _jax
from shardwise.convert import spec_text
from shardwise.errors import ShardingError
from shardwise.manual import (
    Names,
    axis_names,
    check_axes,
    check_divides,
    check_free,
    check_spec,
    entries,
)
from shardwise.mesh import MeshAxes


def auto_to_manual(x: Any, spec: PartitionSpec, axes: str | Iterable[str] | None = None) -> Any:
    """A value as one device's block of it: from here on, over `axes`, the program is the user's.

    Args:
      x: an array.
      spec: the axes among `axes` that split its dims; over those it does not name every device has
        the same block.
      axes: the mesh axes to put under manual control; None: all of the mesh.

    Returns:
      The block; outside `sw.spmd`, `x`.

    Raises:
      ShardingError: an axis the mesh does not have, or not in `axes`; a dim that does not divide.
    """
    where = _jax.current_source()
    mesh, names = _program("auto_to_manual", spec, axes, x, where)
    if mesh is None:
        return x
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    check_free("auto_to_manual", names, where)
    check_divides("auto_to_manual", spec, np.shape(x), sizes, where)
    return _enter(jnp.asarray(x), entries(spec, np.ndim(x)), names, mesh, where)


def manual_to_auto(
    y: Any,
    spec: PartitionSpec,
    axes: str | Iterable[str] | None = None,
    shape: Sequence[int] | None = None,
    check: bool = True,
) -> Any:
    """The devices' blocks as one value again: what `auto_to_manual` undoes.

    Args:
      y: the block.
      spec: the axes among `axes` that its dims are blocks over; along those it does not name, devices
        must hold the same block.
      axes: the mesh axes to give back to the partitioner; None: all of the mesh.
      shape: the shape the whole value should have, to be checked.
      check: whether a value that may differ along an axis that the spec does not name is an error, where
        that is seen: loops and branches with collectives in them are not looked into.

    Returns:
      The value; outside `sw.spmd`, `y`.

    Raises:
      ShardingError: an axis the mesh does not have, or not in `axes`; a block of another shape than
        `shape` says; (when planned) a value that may differ where it is said to be the same.
    """
    where = _jax.current_source()
    mesh, names = _program("manual_to_auto", spec, axes, y, where)
    sizes = {} if mesh is None else dict(zip(mesh.names, mesh.sizes, strict=True))
    dims = entries(spec, np.ndim(y))
    whole = [s * math.prod(sizes.get(a, 1) for a in d)
             for s, d in zip(np.shape(y), dims, strict=True)]  # fmt: skip
    if shape is not None and list(shape) != whole:
        raise ShardingError(
            f"manual_to_auto: blocks of {list(np.shape(y))} make {whole}, not {list(shape)}",
            where=where,
            facts=f"{spec_text(spec)} on " + ("one device" if mesh is None else f"the mesh {mesh}"),
            hint="the block must have the shape of one device's part, as auto_to_manual gives it",
        )
    if mesh is None:
        return y
    return _leave(jnp.asarray(y), dims, names, (), mesh, where, check)


def _program(what: str, spec: Any, axes: Any, x: Any, where: str) -> tuple[MeshAxes | None, Names]:
    """The program's mesh and the axes meant; checked as far as can be."""
    if not isinstance(spec, PartitionSpec):
        raise ShardingError(f"{what} needs a PartitionSpec, not {spec!r:.60}", where=where,
                            hint="write P('x', None), with P = jax.sharding.PartitionSpec")  # fmt: skip
    if not jex.valid_jaxtype(x):
        raise ShardingError(f"{what} needs an array, not {type(x).__name__}", where=where)
    program = _jax.program_mesh()
    mesh = None if program is None else MeshAxes.of(program)
    named = tuple(a for d in entries(spec) for a in d)
    names = axis_names(axes) if axes is not None else mesh.names if mesh is not None else named
    if mesh is not None:
        check_axes(what, names, spec, dict(zip(mesh.names, mesh.sizes, strict=True)), where)
    check_spec(what, spec, names, np.ndim(x), where)
    return mesh, names


def _enter(x: Any, dims: tuple[Names, ...], names: Names, mesh: MeshAxes, where: str) -> Any:
    return auto_to_manual_p.bind(x, split=dims, axes=names, mesh=mesh, source=where)


def _leave(
    y: Any, dims: tuple[Names, ...], names: Names, terms: Names, mesh: MeshAxes, where: str,
    check: bool = False,
) -> Any:  # fmt: skip
    return manual_to_auto_p.bind(
        y, split=dims, axes=names, terms=terms, mesh=mesh, source=where, check=check
    )


def _size(mesh: MeshAxes, names: Iterable[str]) -> int:
    return math.prod(mesh.sizes[mesh.names.index(n)] for n in names)


# Parameters of both: `split`, per dim the axes that split it; `axes` that enter or leave manual control;
# `mesh`, the program's; `source`, the user's line.  `terms`: axes along which devices hold terms of a
# sum, finished by the partitioner: the gradient of a value that entered whole.  `check`: whether values
# may differ along the other axes that split nothing.

auto_to_manual_p = jex.Primitive("auto_to_manual")
manual_to_auto_p = jex.Primitive("manual_to_auto")


def _block_aval(x: Any, *, split: Any, mesh: MeshAxes, **_: Any) -> Any:
    shape = tuple(s // _size(mesh, d) for s, d in zip(x.shape, split, strict=True))
    return x.update(shape=shape)


def _whole_aval(y: Any, *, split: Any, mesh: MeshAxes, **_: Any) -> Any:
    shape = tuple(s * _size(mesh, d) for s, d in zip(y.shape, split, strict=True))
    return y.update(shape=shape)


def _enter_transpose(ct: Any, x: Any, *, split: Any, axes: Names, mesh: Any, source: str) -> Any:
    """What entered whole along an axis gets the sum of all devices' cotangents."""
    terms = tuple(a for a in axes if not any(a in d for d in split))
    return [_leave(ct, split, axes, terms, mesh, source)]


def _leave_transpose(
    ct: Any, y: Any, *, split: Any, axes: Names, terms: Names, mesh: Any, source: str, check: bool
) -> Any:
    """What left whole along an axis hands each device its share; a term of a sum, all of it."""
    copies = [a for a in axes if a not in terms and not any(a in d for d in split)]
    block = _enter(ct, split, axes, mesh, source)
    return [block / _size(mesh, copies) if copies else block]


def _batched(p: Any) -> Callable[..., Any]:
    def rule(args: Any, batch: Any, *, split: Any, **params: Any) -> Any:
        (x,), (b,) = args, batch
        return p.bind(x, split=(*split[:b], (), *split[b:]), **params), b

    return rule


auto_to_manual_p.def_abstract_eval(_block_aval)
manual_to_auto_p.def_abstract_eval(_whole_aval)
ad.deflinear2(auto_to_manual_p, _enter_transpose)
ad.deflinear2(manual_to_auto_p, _leave_transpose)
for _p in (auto_to_manual_p, manual_to_auto_p):
    batching.primitive_batchers[_p] = _batched(_p)
