"""`spmd`: like `jax.jit`, with shardwise's partitioner in place of XLA's.

    f = sw.spmd(fn, mesh=mesh)
    f(*args)              runs partitioned
    f.plan(*args)         the plan: no device needed
    f.lower(*args)        jax's own Lowered

Called with tracers (under jit, grad, vmap), it binds one call primitive: the transformation is applied
to `fn` and the result is partitioned then.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import _jax
from shardwise.annotate import annotate
from shardwise.capture import capture
from shardwise.complete import Given
from shardwise.convert import from_named
from shardwise.errors import ShardingError
from shardwise.mesh import MeshAxes
from shardwise.padded import PaddedArray
from shardwise.plan import Plan, border_shape, given, make_plan
from shardwise.sharding import Layout

AnyMesh = Mesh | AbstractMesh


def spmd(
    fn: Callable[..., Any],
    *,
    mesh: AnyMesh,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
) -> Spmd:
    """Partition a one-device program for a mesh.

    Args:
      fn: a JAX function; annotations inside it (`annotate`, `lax.with_sharding_constraint`, ...) and
        the shardings given here are what completion starts from.
      mesh: a `Mesh`, or an `AbstractMesh` to plan with no device.
      in_shardings, out_shardings: None, a `PartitionSpec` or `NamedSharding`, or a tree of them that is
        a prefix of the arguments' (results') tree; None leaves the choice to completion.  A dim that
        does not divide is fine: it is padded, and a result comes back as a `PaddedArray`.
      donate_argnums, static_argnums: as for `jax.jit`.

    Returns:
      A function to call like `fn`, with `.plan`, `.lower`.
    """
    nums = lambda n: (n,) if isinstance(n, int) else tuple(n)  # noqa: E731
    if not callable(fn):
        raise ShardingError(f"spmd needs a function, not {fn!r}", where=_jax.current_source())
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ShardingError(
            f"spmd needs a Mesh or an AbstractMesh, not {type(mesh).__name__}",
            where=_jax.current_source(),
            hint="jax.make_mesh((2, 4), ('x', 'y')), or sw.abstract_mesh({'x': 2, 'y': 4})",
        )
    return Spmd(
        fn, mesh, in_shardings, out_shardings, nums(donate_argnums), nums(static_argnums),
        _jax.current_source(),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call's arguments, taken apart.

    Attributes:
      leaves: the dynamic arguments, flat; `tree` their structure, as (args, kwargs).
      static: {position: value} of the static ones.
    """

    leaves: tuple[Any, ...]
    tree: Any
    static: tuple[tuple[int, Any], ...]


@dataclasses.dataclass
class _Entry:
    """A plan with its compiled program."""

    plan: Plan
    jitted: Any
    shardings: list[NamedSharding]
    out_shardings: list[NamedSharding]


class Spmd:
    """A partitioned function; made by `spmd`."""

    def __init__(
        self, fn: Callable[..., Any], mesh: AnyMesh, in_shardings: Any, out_shardings: Any,
        donate: tuple[int, ...], static: tuple[int, ...], source: str,
    ):  # fmt: skip
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.mesh, self.source = fn, mesh, source
        self.in_shardings, self.out_shardings = in_shardings, out_shardings
        self.donate, self.static = donate, static
        self._plans: dict[Any, Plan] = {}
        self._entries: dict[Any, _Entry] = {}

    # -- what users call ---------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._take_apart(args, kwargs)
        if any(isinstance(x, jax.core.Tracer) for x in call.leaves):
            return self._bind(call)
        entry = self._entry(call)
        blocks = [_place(x, l, s) for x, l, s in zip(call.leaves, entry.plan.in_layouts, entry.shardings, strict=True)]  # fmt: skip
        outs = entry.jitted(*blocks)
        results = [
            _result(o, l, s)
            for o, l, s in zip(outs, entry.plan.out_layouts, entry.out_shardings, strict=True)
        ]
        return jax.tree.unflatten(entry.plan.out_tree, results)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments: arrays, or `ShapeDtypeStruct`s; no device is needed."""
        return self._plan(self._take_apart(args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower for the mesh's devices: jax's own `Lowered` (`.compile()`, `.as_text()`, ...)."""
        entry = self._entry(self._take_apart(args, kwargs))
        return entry.jitted.lower(*entry.plan.padded_avals())

    # -- planning ----------------------------------------------------------------------------------

    def _take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        for i in self.static:
            if i >= len(args):
                raise ShardingError(
                    f"static_argnums names argument {i}, and the call has {len(args)}",
                    where=self.source,
                )
        dynamic = tuple(a for i, a in enumerate(args) if i not in self.static)
        leaves, tree = jax.tree.flatten((dynamic, kwargs), is_leaf=lambda x: isinstance(x, PaddedArray))
        static = tuple((i, args[i]) for i in self.static)
        return _Call(tuple(leaves), tree, static)

    def _plan(self, call: _Call) -> Plan:
        key = (call.tree, call.static, tuple(map(_signature, call.leaves)))
        key = (*key, tuple(self._placed(x) for x in call.leaves) if self.in_shardings is None else ())
        if key not in self._plans:
            self._plans[key] = self._make_plan(call)
        return self._plans[key]

    def _placed(self, x: Any) -> Any:
        """The sharding an argument already has on this mesh (or a ShapeDtypeStruct says), if any."""
        s = getattr(x, "sharding", None)
        if not isinstance(s, NamedSharding) or isinstance(x, jax.core.Tracer):
            return None
        if isinstance(x, jax.Array) and not getattr(x, "committed", True):
            return None
        same = isinstance(s.mesh, AbstractMesh) or isinstance(self.mesh, AbstractMesh) or (
            s.mesh.devices.size == self.mesh.devices.size
            and (s.mesh.devices.ravel() == self.mesh.devices.ravel()).all()
        )
        return s if same else None

    def _make_plan(self, call: _Call) -> Plan:
        avals = [_aval(x, name, self.source) for x, name in zip(call.leaves, self._names(call), strict=True)]  # fmt: skip
        body, out_tree = capture(self._flat_fn(call), avals, self._names(call))
        arguments = self._given_arguments(call, avals)
        results = self._given(self.out_shardings, out_tree, [v.shape for v in body.outvars], "result")
        return make_plan(
            self.mesh, body, arguments, results, self._args_tree(call), out_tree, self._names(call)
        )

    def _args_tree(self, call: _Call) -> Any:
        """The arguments' tree as plans show it: positional ones, and keywords where there are any."""
        dynamic, kwargs = jax.tree.unflatten(call.tree, list(range(call.tree.num_leaves)))
        return jax.tree.structure((dynamic, kwargs) if kwargs else dynamic)

    def _flat_fn(self, call: _Call) -> Callable[..., Any]:
        def flat(*leaves: Any) -> Any:
            dynamic, kwargs = jax.tree.unflatten(call.tree, leaves)
            args = list(dynamic)
            for i, value in call.static:
                args.insert(i, value)
            return self.fn(*args, **kwargs)

        return flat

    def _names(self, call: _Call) -> list[str]:
        """`params['wi']`: each leaf named by the function's own parameter names."""
        parameters = _jax.parameter_names(self.fn)
        parameters = [p for i, p in enumerate(parameters) if i not in self.static]
        paths = jax.tree_util.tree_flatten_with_path(
            jax.tree.unflatten(call.tree, list(range(call.tree.num_leaves)))
        )[0]
        names = []
        for path, _ in paths:
            which, first, *rest = path
            if which.idx == 0:
                i = first.idx
                base = parameters[i] if i < len(parameters) else f"arg{i}"
            else:
                base = str(first.key)
            names.append(base + jax.tree_util.keystr(tuple(rest)))
        return names

    def _given_arguments(self, call: _Call, avals: list[Any]) -> list[Given | None]:
        shapes = [a.shape for a in avals]
        if self.in_shardings is not None:
            dynamic, kwargs = jax.tree.unflatten(call.tree, list(range(call.tree.num_leaves)))
            tree = jax.tree.structure(dynamic)
            n = tree.num_leaves
            out = self._given(self.in_shardings, tree, shapes[:n], "argument")
            return out + [None] * (len(shapes) - n)
        out = []
        for x, shape in zip(call.leaves, shapes, strict=True):
            s = self._placed(x)
            if s is None:
                out.append(None)
                continue
            placed = from_named(s, len(shape), self.mesh, self.source)
            out.append(Given(placed.sharding.axes, frozenset(), "the array's own sharding", "argument"))
        return out

    def _given(self, specs: Any, tree: Any, shapes: list[Any], kind: str) -> list[Given | None]:
        """A prefix tree of specs, leaf by leaf."""
        if specs is None:
            return [None] * len(shapes)
        name = "in_shardings" if kind == "argument" else "out_shardings"
        leaf = lambda s: s is None or isinstance(s, (P, NamedSharding))  # noqa: E731
        try:
            whole = jax.tree.unflatten(tree, list(range(tree.num_leaves)))
            flat: list[Any] = [None] * tree.num_leaves
            jax.tree.map(
                lambda s, sub: [flat.__setitem__(i, s) for i in jax.tree.leaves(sub)],
                specs, whole, is_leaf=leaf,
            )  # fmt: skip
        except ValueError as e:
            raise ShardingError(
                f"{name} is not a prefix of the tree of {kind}s", where=self.source,
                facts=str(e).splitlines()[0],
            ) from None  # fmt: skip
        out = []
        for s, shape in zip(flat, shapes, strict=True):
            if s is not None and not isinstance(s, (P, NamedSharding)):
                raise ShardingError(
                    f"{name} needs PartitionSpecs, not {s!r}", where=self.source,
                    hint="write P('x', None), with P = jax.sharding.PartitionSpec",
                )  # fmt: skip
            spec = s.spec if isinstance(s, NamedSharding) else s
            out.append(given(spec, len(shape), MeshAxes.of(self.mesh), kind, f"{name} at {self.source}"))
        return out

    # -- running -----------------------------------------------------------------------------------

    def _entry(self, call: _Call) -> _Entry:
        plan = self._plan(call)
        key = id(plan)
        if key not in self._entries:
            self._entries[key] = self._compile(call, plan)
        return self._entries[key]

    def _compile(self, call: _Call, plan: Plan) -> _Entry:
        if isinstance(self.mesh, AbstractMesh):
            raise ShardingError(
                "an abstract mesh has no devices to run on", where=self.source,
                facts=f"the mesh has {MeshAxes.of(self.mesh)}",
                hint="use .plan(...) to plan, or pass a Mesh to run",
            )  # fmt: skip
        ins = [self._named(plan, l) for l in plan.in_layouts]
        outs = [self._named(plan, l) for l in plan.out_layouts]
        mapped = plan.mapped()
        jitted = jax.jit(
            mapped, in_shardings=tuple(ins), out_shardings=outs,
            donate_argnums=self._donated(call),
        )  # fmt: skip
        plan.traced = jitted.trace(*plan.padded_avals()).jaxpr
        return _Entry(plan, jitted, ins, outs)

    def _named(self, plan: Plan, layout: Layout) -> NamedSharding:
        """A border layout as NamedSharding: on the user's mesh where whole axes say it."""
        axes = plan.axes
        if all(axes.exact(d) is not None for d in layout.sharding.axes):
            return NamedSharding(self.mesh, plan.spec(layout.sharding))
        return NamedSharding(axes.atom_mesh(self.mesh), plan.spec(layout.sharding))

    def _donated(self, call: _Call) -> tuple[int, ...]:
        dynamic, _ = jax.tree.unflatten(call.tree, list(range(call.tree.num_leaves)))
        positions = [i for i in range(len(dynamic) + len(self.static)) if i not in self.static]
        out: list[int] = []
        for i, sub in zip(positions, dynamic, strict=True):
            if i in self.donate:
                out += jax.tree.leaves(sub)
        return tuple(out)

    # -- under jit, grad, vmap -----------------------------------------------------------------------

    def _bind(self, call: _Call) -> Any:
        """Bind the call primitive: JAX transforms `fn`, and what comes out is partitioned."""
        out_tree: list[Any] = []
        specs = self._given_arguments(call, [_aval(x, "", self.source) for x in call.leaves])

        def flat(*leaves: Any) -> list[Any]:
            leaves = tuple(_pin(x, g, self.mesh) for x, g in zip(leaves, specs, strict=True))
            out, tree = jax.tree.flatten(self._flat_fn(call)(*leaves))
            if self.out_shardings is not None:
                wishes = self._given(self.out_shardings, tree, [jnp.shape(o) for o in out], "result")
                out = [_pin(o, g, self.mesh) for o, g in zip(out, wishes, strict=True)]
            out_tree[:] = [tree]
            return out

        outs = _jax.bind_call(spmd_call_p, flat, call.leaves, mesh=self.mesh)
        return jax.tree.unflatten(out_tree[0], outs)


def _pin(x: Any, g: Given | None, mesh: AnyMesh) -> Any:
    """What `in_shardings` or `out_shardings` say, as an annotation inside the function."""
    if g is None:
        return x
    axes = MeshAxes.of(mesh)
    entries = [
        P.UNCONSTRAINED if i in g.open else tuple(axes.merge(d)) or None for i, d in enumerate(g.axes)
    ]
    return annotate(x, P(*entries))


# -- the call primitive ------------------------------------------------------------------------------


spmd_call_p = _jax.CallPrimitive("spmd_call")


def _run_call(fun: Any, *args: Any, mesh: AnyMesh, **_: Any) -> list[Any]:
    """Partition and run what a transformation made of the function; results are plain arrays."""
    return jax.jit(_partitioned(lambda *xs: fun.call_wrapped(*xs), mesh))(*args)


def _partitioned(fn: Callable[..., Any], mesh: AnyMesh) -> Callable[..., Any]:
    """`fn` partitioned, as a function of global arrays to be traced under jit."""

    def run(*args: Any) -> list[Any]:
        avals = [jax.typeof(x) for x in args]
        names = [f"arg{i}" for i in range(len(args))]
        body, out_tree = capture(fn, avals, names)
        plan = make_plan(mesh, body, [None] * len(args), [None] * len(body.outvars), None, out_tree, names)
        ins = [_pad_global(x, l) for x, l in zip(args, plan.in_layouts, strict=True)]
        outs = plan.mapped()(*ins)
        return [_cut_global(o, l) for o, l in zip(outs, plan.out_layouts, strict=True)]

    return run


def _pad_global(x: Any, layout: Layout) -> Any:
    target = border_shape(layout)
    pad = [(0, t - s, 0) for s, t in zip(layout.shape, target, strict=True)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), pad) if any(p[1] for p in pad) else x


def _cut_global(x: Any, layout: Layout) -> Any:
    return jax.lax.slice(x, (0,) * x.ndim, layout.shape) if x.shape != layout.shape else x


def _lower_call(ctx: Any, *args: Any, call_jaxpr: Any, mesh: AnyMesh, **_: Any) -> Any:
    run = _partitioned(jax.extend.core.jaxpr_as_fun(_jax.closed(call_jaxpr)), mesh)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


spmd_call_p.def_impl(_run_call)
mlir.register_lowering(spmd_call_p, _lower_call)


# -- arguments and results -----------------------------------------------------------------------------


def _signature(x: Any) -> Any:
    dtype = x.dtype if hasattr(x, "dtype") else jax.dtypes.result_type(x)
    return tuple(np.shape(x)), str(dtype), getattr(x, "weak_type", isinstance(x, (int, float, complex)))


def _aval(x: Any, name: str, source: str) -> jax.ShapeDtypeStruct:
    """The abstract argument; an error names what cannot be one."""
    if isinstance(x, jax.core.Tracer):
        return jax.typeof(x)
    try:
        weak = bool(getattr(x, "weak_type", isinstance(x, (bool, int, float, complex))))
        dtype = x.dtype if hasattr(x, "dtype") else jax.dtypes.result_type(x)
        if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(tuple(np.shape(x)), dtype, weak_type=weak)
    except (TypeError, ValueError):
        raise ShardingError(
            f"argument {name} is not an array", where=source,
            facts=f"it is {x!r} of type {type(x).__name__}",
            hint="pass arrays, or name its position in static_argnums",
        ) from None  # fmt: skip


def _place(x: Any, layout: Layout, sharding: NamedSharding) -> Any:
    """An argument as the compiled program takes it: padded where a split dim is uneven, and placed."""
    if isinstance(x, PaddedArray):
        if tuple(x.array.shape) == border_shape(layout):
            return jax.device_put(x.array, sharding)
        x = x.logical()
    if border_shape(layout) != layout.shape:
        return PaddedArray.from_logical(x, sharding).array
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    return jax.device_put(x, sharding)


def _result(x: Any, layout: Layout, sharding: NamedSharding) -> Any:
    if border_shape(layout) == layout.shape:
        return x
    return PaddedArray(x, layout.shape, sharding)
