"""A partitioned function inside jit, grad, vmap: one call primitive that JAX transforms.

Called while JAX is tracing, `spmd` binds `spmd_call` on the user's function.  JAX's transformations
apply to what is inside; when what they made is lowered, it is captured and partitioned.  So
`jit(grad(f))` computes what partitioning the gradient would.  (Forward and backward pass are
planned apart, though: `spmd(grad(fn))` sees both at once, and moves less.)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import _jax
from shardwise.annotate import annotate
from shardwise.capture import capture
from shardwise.complete import Given
from shardwise.errors import ShardingError
from shardwise.mesh import MeshAxes
from shardwise.plan import border_shape, make_plan
from shardwise.sharding import Layout
from shardwise.windows import Limits


def bind(
    fn: Callable[..., list[Any]], args: Sequence[Any], mesh: Mesh, limits: Limits
) -> list[Any]:
    """Call `fn` under the call primitive; its results come out in the shapes `fn` gives them.

    Raises:
      ShardingError: inside a `jax.shard_map`.
    """
    context = jax.sharding.get_abstract_mesh()
    types = zip(context.axis_names, context.axis_types, strict=True)
    if manual := [str(name) for name, kind in types if kind == AxisType.Manual]:
        raise ShardingError(
            "spmd inside shard_map: a device's block cannot be partitioned again",
            facts=f"the enclosing shard_map is manual over {', '.join(manual)}",
            hint="call the function itself there, or put shard_map inside what spmd partitions",
        )
    return _jax.bind_call(spmd_call_p, fn, args, mesh=mesh, limits=limits, anchor=_anchor(mesh))


@functools.lru_cache(maxsize=64)
def _anchor(mesh: Mesh) -> Any:
    """A jaxpr that names the mesh's devices.

    jit takes its devices from the shardings in its jaxpr, those in equations' parameters included.
    Without one it would compile for a single device, and learn of the mesh too late.
    """
    everywhere = NamedSharding(mesh, P())
    return jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, everywhere))(0.0)


def pin(x: Any, given: Given | None, mesh: MeshAxes) -> Any:
    """What `in_shardings` or `out_shardings` say, as an annotation inside the function."""
    if given is None:
        return x
    entries = [
        P.UNCONSTRAINED if i in given.open else tuple(mesh.merge(d)) or None
        for i, d in enumerate(given.axes)
    ]
    return annotate(x, P(*entries))


def _partitioned(fn: Callable[..., Any], mesh: Mesh, limits: Limits) -> Callable[..., list[Any]]:
    """`fn` partitioned, as a function of global arrays to be traced under jit."""

    def run(*args: Any) -> list[Any]:
        avals = [jax.typeof(x) for x in args]
        names = [f"arg{i}" for i in range(len(args))]
        with _jax.programs_mesh(mesh):
            body, out_tree = capture(fn, avals, names)
        free: tuple[list[Given | None], ...] = [None] * len(args), [None] * len(body.outvars)
        plan = make_plan(mesh, body, *free, None, out_tree, names, limits)
        outside = functools.partial(_outside, mesh=mesh, axes=plan.axes)
        ins = [_pad(outside(x, l), l) for x, l in zip(args, plan.in_layouts, strict=True)]
        outs = plan.mapped(delivered=False)(*ins)
        return [outside(_cut(o, l), l) for o, l in zip(outs, plan.out_layouts, strict=True)]

    return run


def _pad(x: Any, layout: Layout) -> Any:
    """Inside jit arrays have their logical shapes: uneven dims are padded on the way in, ..."""
    pad = [(0, t - s, 0) for s, t in zip(layout.shape, border_shape(layout), strict=True)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), pad) if any(p[1] for p in pad) else x


def _cut(x: Any, layout: Layout) -> Any:
    """... and cut on the way out."""
    return jax.lax.slice(x, (0,) * x.ndim, layout.shape) if x.shape != layout.shape else x


def _outside(x: Any, layout: Layout, mesh: Mesh, axes: MeshAxes) -> Any:
    """An argument or result, split evenly and over whole axes of the user's mesh where it must be.

    Arrays that jit takes and gives, XLA splits as this program does, as far as that is even.  Where
    this takes part of an axis, jit may have no name for it, and raises `IndivisibleError`.
    """
    dims = zip(layout.sharding.axes, layout.shape, strict=True)
    even = [axes.merge(_dividing(d, size, axes)) for d, size in dims]
    whole = [tuple(itertools.takewhile(axes.names.__contains__, e)) for e in even]
    if whole == even:
        return x
    with _jax.no_context_mesh():
        spec = P(*(w or None for w in whole))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _dividing(atoms: Sequence[str], size: int, axes: MeshAxes) -> Sequence[str]:
    """The first of `atoms`, as many as split a dim of `size` evenly."""
    ks = range(len(atoms), -1, -1)
    return next(atoms[:k] for k in ks if size % axes.size(atoms[:k]) == 0)


def _run(fn: Callable[..., Any], *args: Any, mesh: Mesh, limits: Limits, **_: Any) -> list[Any]:
    """Outside jit (under `jax.disable_jit`): as if it were inside."""
    return jax.jit(_partitioned(fn, mesh, limits))(*args)


def _lower(ctx: Any, *args: Any, call_jaxpr: Any, mesh: Mesh, limits: Limits, **_: Any) -> Any:
    run = _partitioned(jex.jaxpr_as_fun(_jax.closed(call_jaxpr)), mesh, limits)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


spmd_call_p = _jax.call_primitive("spmd_call", _run)
mlir.register_lowering(spmd_call_p, _lower)
