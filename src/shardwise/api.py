"""`spmd`: like `jax.jit`, with shardwise's partitioner in place of XLA's.

    f = sw.spmd(fn, mesh=mesh)
    f(*args)              runs partitioned
    f.plan(*args)         the plan: no device needed
    f.lower(*args)        jax's own Lowered

Called while JAX is tracing (in jit, grad, vmap), it becomes one call primitive (`transform`).
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardwise import _jax, transform
from shardwise.arguments import (
    Call,
    Parameters,
    abstract,
    check_untyped,
    is_padded,
    place,
    result,
    signature,
)
from shardwise.capture import capture
from shardwise.complete import Given
from shardwise.convert import to_named
from shardwise.device_tensor import Placement
from shardwise.errors import ShardingError
from shardwise.mesh import MeshAxes
from shardwise.options import Option, given_of, placed_axes
from shardwise.plan import Plan, border_shape, make_plan
from shardwise.windows import Limits

AnyMesh = Mesh | AbstractMesh


def spmd(
    fn: Callable[..., Any],
    *,
    mesh: AnyMesh,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    windowed_einsum: float | None = None,
    memory_limit: float | None = None,
    loop_memory: float | None = None,
) -> Spmd:
    """Partition a one-device program for a mesh.

    Args:
      fn: a JAX function; annotations inside it (`annotate`, `lax.with_sharding_constraint`, ...) and
        the shardings given here are what completion starts from.
      mesh: a `Mesh`, or an `AbstractMesh` to plan with no device.
      in_shardings, out_shardings: None, a `PartitionSpec` or `NamedSharding`, or a tree of them that
        is a prefix of the positional arguments' (results') tree; None leaves the choice to
        completion.  A dim that does not divide is fine: it is padded, and a result comes back as a
        `PaddedArray`.  Without in_shardings, arguments already placed on the mesh's devices stay as
        they lie.
      donate_argnums, static_argnums: as for `jax.jit`.
      windowed_einsum: bytes of one device.  Where a dot would gather an operand of more, or hold
        more of its result's terms before they are summed and scattered, it is computed in a loop
        in which blocks of that value go around instead (GSPMD 4.4): as many bytes are sent, a block
        at a time, while others are multiplied.  None: only where `memory_limit` asks for it.
      memory_limit: bytes of memory one device has.  A dot is windowed where such a value would take
        more than an eighth of it.  None: no limit is known.
      loop_memory: bytes of one device that a loop may hold beyond what it holds anyway, so that what does
        not depend on the iteration is sent once: gathered weights, sums of gradients not yet reduced.
        None: an eighth of `memory_limit`, or 64 MiB.

    Returns:
      A function to call like `fn`, with `.plan` and `.lower`.  It can be called inside jit, grad,
      vmap, and transformed by them; `spmd(grad(fn))` is planned as a whole and moves less than
      `grad(spmd(fn))`.

    Raises:
      ShardingError: not a function, not a mesh, positions no argument can have, or a limit that is
        no number of bytes.
    """
    where = _jax.current_source()
    if not callable(fn):
        raise ShardingError(f"spmd needs a function, not {fn!r:.60}", where=where)
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ShardingError(
            f"spmd needs a Mesh or an AbstractMesh, not {type(mesh).__name__}",
            where=where,
            hint="jax.make_mesh((2, 4), ('x', 'y')), or sw.abstract_mesh({'x': 2, 'y': 4})",
        )
    parameters = Parameters.of(fn, static_argnums, donate_argnums, where)
    limits = Limits(
        _bytes("windowed_einsum", windowed_einsum, where),
        _bytes("memory_limit", memory_limit, where),
        _bytes("loop_memory", loop_memory, where),
    )
    return Spmd(fn, _automatic(mesh), in_shardings, out_shardings, parameters, where, limits)


def _bytes(option: str, n: Any, where: str) -> float | None:
    if n is None or (isinstance(n, (int, float)) and not isinstance(n, bool) and n >= 0):
        return n
    raise ShardingError(
        f"{option} needs a number of bytes or None, not {n!r:.60}",
        where=where,
        hint=f"{option}={256 << 20} for 256 MiB",
    )


def _automatic(mesh: AnyMesh) -> AnyMesh:
    """The mesh with axes of type Auto: how values lie is shardwise's to say, not their types'."""
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names)
    return AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)
    )


@dataclasses.dataclass(frozen=True)
class _Program:
    """A plan made runnable.

    Attributes:
      jitted: takes the user's tree of arguments, padded and placed as `ins` say.
      outs: how the user gets the results; None where that is as `jitted` gives them.
      donated: which arguments' buffers may be reused.
    """

    plan: Plan
    jitted: Any
    ins: list[NamedSharding]
    outs: list[NamedSharding] | None
    donated: tuple[bool, ...]

    def run(self, call: Call) -> Any:
        plan = self.plan
        blocks = [
            place(*x)
            for x in zip(call.leaves, plan.in_layouts, self.ins, self.donated, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(call.tree, blocks)
        out = self.jitted(*args, **kwargs)
        if self.outs is None:
            return out
        leaves = zip(jax.tree.leaves(out), plan.out_layouts, self.outs, strict=True)
        return jax.tree.unflatten(plan.out_tree, [result(*x) for x in leaves])

    def lower(self, call: Call) -> Any:
        args, kwargs = jax.tree.unflatten(call.tree, self.avals())
        return self.jitted.lower(*args, **kwargs)

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
            for a, s in zip(self.plan.padded_avals(), self.ins, strict=True)
        ]


class Spmd:
    """A partitioned function; made by `spmd`.

    Attributes:
      fn, mesh: what was partitioned, for which mesh (axes of type Auto).
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: AnyMesh, in_shardings: Any, out_shardings: Any,
        parameters: Parameters, where: str, limits: Limits,
    ):  # fmt: skip
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.mesh = fn, mesh
        self._in = Option("in_shardings", in_shardings, mesh, where)
        self._out = Option("out_shardings", out_shardings, mesh, where)
        self._parameters, self._where, self._limits = parameters, where, limits
        self._plans: dict[Any, Plan] = {}
        self._like: dict[Any, list[tuple[tuple[Any, ...], Plan]]] = {}
        self._programs: dict[Plan, _Program] = {}
        self._weak: dict[Plan, list[bool]] = {}
        self._staged = jax.jit(self._bind, static_argnums=0)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    # -- what users call ---------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run partitioned.

        Raises:
          ShardingError: an abstract mesh, an argument that is no array, or shardings that cannot be.
        """
        call = Call.of(self._parameters, args, kwargs)
        if not _jax.at_top_level():
            leaves = [x.logical() if is_padded(x) else x for x in call.leaves]
            return self._staged(_Structure(call), *leaves)
        return self._program(call).run(call)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments: arrays, or `ShapeDtypeStruct`s; no device is needed."""
        return self._plan(Call.of(self._parameters, args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower for the mesh's devices: jax's own `Lowered` (`.compile()`, `.as_text()`, ...).

        The compiled program takes the arguments in their tree, without static ones; a dim that does
        not divide by its shards it takes, and gives, padded.
        """
        call = Call.of(self._parameters, args, kwargs)
        return self._program(call).lower(call)

    # -- planning ----------------------------------------------------------------------------------

    def _plan(self, call: Call) -> Plan:
        """The plan for a call's shapes and for how its arguments lie; made once.

        Arguments that lie as an earlier plan wants them, which left the choice to completion, are
        that plan's: results fed back as arguments need no new one.
        """
        avals = call.avals
        shapes = (call.tree, call.static, tuple(map(signature, avals)), _jax.trace_context())
        lie: tuple[Any, ...] = (None,) * len(avals)
        if self._in.specs is None:
            lie = tuple(placed_axes(x, self.mesh) for x in call.leaves)
        key = (shapes, lie)
        if key not in self._plans:
            like = self._like.setdefault(shapes, [])
            plan = next((p for asked, p in like if _serves(p, asked, lie)), None)
            if plan is None:
                plan = self._make_plan(call, avals, lie)
                like.append((lie, plan))
            self._plans[key] = plan
        return self._plans[key]

    @_jax.uncollected()
    def _make_plan(self, call: Call, avals: list[Any], lie: tuple[Any, ...]) -> Plan:
        weak: list[bool] = []
        with _jax.automatic_context_mesh(), _jax.programs_mesh(self.mesh):
            body, out_tree = capture(self._flat(call, weak), avals, call.names)
        results = self._out.flat(out_tree, body.outvars, _result_names(out_tree))
        given = self._given(call, avals, lie)
        plan = make_plan(
            self.mesh, body, given, results, call.shown_tree, out_tree, call.names, self._limits,
            call.donated,
        )  # fmt: skip
        self._weak[plan] = weak
        return plan

    def _flat(self, call: Call, weak: list[bool]) -> Callable[..., Any]:
        """`fn` on flat dynamic arguments; which results are weakly typed is noted when traced."""

        def flat(*leaves: Any) -> Any:
            args, kwargs = call.arguments(leaves)
            out = self.fn(*args, **kwargs)
            weak[:] = [getattr(jax.typeof(x), "weak_type", False) for x in jax.tree.leaves(out)]
            return out

        return flat

    def _given(self, call: Call, avals: list[Any], lie: tuple[Any, ...]) -> list[Given | None]:
        if self._in.specs is None:
            return [given_of(axes) for axes in lie]
        tree = call.trees[0]
        n = tree.num_leaves
        rest: list[Given | None] = [None] * (len(avals) - n)
        return self._in.flat(tree, avals[:n], call.names[:n]) + rest

    # -- running -----------------------------------------------------------------------------------

    def _program(self, call: Call) -> _Program:
        plan = self._plan(call)
        if plan not in self._programs:
            self._programs[plan] = self._build(call, plan)
        return self._programs[plan]

    @_jax.uncollected()
    def _build(self, call: Call, plan: Plan) -> _Program:
        mesh = self._devices()
        results = plan.completion.results
        outs = [to_named(l.sharding, mesh) for l in plan.out_layouts]
        orders = [plan.device_orders.get(r) for r in results]
        placed = zip(plan.out_layouts, orders, strict=True)
        asked = [to_named(Placement(l.sharding, order), mesh) for l, order in placed]
        as_given = not any(orders) and all(border_shape(l) == l.shape for l in plan.out_layouts)
        mapped, weak = plan.mapped(), self._weak[plan]

        def program(*args: Any, **kwargs: Any) -> Any:
            results = mapped(*jax.tree.leaves((args, kwargs)))
            results = [_jax.weakly_typed(r) if w else r for r, w in zip(results, weak, strict=True)]
            return jax.tree.unflatten(plan.out_tree, results)

        program.__name__ = getattr(self.fn, "__name__", "program")
        at, keywords = call.donated_arguments
        jitted = jax.jit(
            program, out_shardings=jax.tree.unflatten(plan.out_tree, outs),
            donate_argnums=at, donate_argnames=keywords,
        )  # fmt: skip
        ins = [to_named(l.sharding, mesh) for l in plan.in_layouts]
        built = _Program(plan, jitted, ins, None if as_given else asked, call.donated)
        args, kwargs = jax.tree.unflatten(call.tree, built.avals())
        plan.traced = jitted.trace(*args, **kwargs).jaxpr
        return built

    def _devices(self) -> Mesh:
        """The mesh, to run on."""
        if not isinstance(self.mesh, Mesh):
            raise ShardingError(
                "an abstract mesh has no devices to run on",
                where=_jax.current_source(self._where),
                facts=f"the mesh has {MeshAxes.of(self.mesh)}; it was given at {self._where}",
                hint="use .plan(...) to plan, or pass a Mesh to run",
            )
        return self.mesh

    # -- under jit, grad, vmap -----------------------------------------------------------------------

    def _bind(self, structure: _Structure, *leaves: Any) -> Any:
        """Bind the call primitive: JAX transforms `fn`, and what comes out is partitioned."""
        devices = self._devices()
        call, mesh = structure.call, MeshAxes.of(devices)
        for x, name in zip(leaves, call.names, strict=True):
            check_untyped(x, name, _jax.current_source(self._where))
        wishes = self._given(call, [abstract(x) for x in leaves], (None,) * len(leaves))
        out_tree: list[Any] = []

        def flat(*xs: Any) -> list[Any]:
            args, kwargs = call.arguments(
                [transform.pin(*x, mesh) for x in zip(xs, wishes, strict=True)]
            )
            with _jax.programs_mesh(devices):
                out, tree = jax.tree.flatten(self.fn(*args, **kwargs))
            out_tree[:] = [tree]
            asked = self._out.flat(tree, [abstract(o) for o in out], _result_names(tree))
            return [transform.pin(*x, mesh) for x in zip(out, asked, strict=True)]

        outs = transform.bind(flat, leaves, devices, self._limits)
        return jax.tree.unflatten(out_tree[0], outs)


class _Structure:
    """What of a call is static, as jit's key: the tree and the static arguments."""

    def __init__(self, call: Call):
        self.call = dataclasses.replace(call, leaves=())
        self.key = call.tree, call.static

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self.key == other.key


def _serves(plan: Plan, asked: Sequence[Any], lie: Sequence[Any]) -> bool:
    """Whether a plan made for arguments lying as `asked` is right for these, with nothing to move."""
    return all(
        l == a or (a is None and l == layout.sharding.axes)
        for a, l, layout in zip(asked, lie, plan.in_layouts, strict=True)
    )


def _result_names(tree: Any) -> list[str]:
    """`result`, `result[0]['loss']`."""
    whole = jax.tree.unflatten(tree, range(tree.num_leaves))
    paths = jax.tree_util.tree_flatten_with_path(whole)[0]
    return ["result" + jax.tree_util.keystr(path) for path, _ in paths]
