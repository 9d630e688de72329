"""The only module that touches JAX's internals: helpers say why the public API is not enough."""

from __future__ import annotations

import contextlib
import functools
import gc
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax._src import config, core, dispatch, effects, source_info_util, traceback_util
from jax._src import linear_util as lu
from jax._src.interpreters import ad, mlir, partial_eval
from jax._src.lax import lax as lax_internal

traceback_util.register_exclusion(__file__)

# Source lines must be the user's: frames of the partitioner are passed over.  The models and
# examples that come with the package are users of it like any other.
_PACKAGE = pathlib.Path(__file__).parent
for _path in _PACKAGE.iterdir():
    if _path.name not in ("nn", "demo", "__pycache__"):
        source_info_util.register_exclusion(str(_path))

UNKNOWN = "<unknown>"  # where no frame is the user's

Literal = core.Literal


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """(jaxpr, consts) of a closed or an open jaxpr; one class in newer JAX, two in 0.10."""
    consts = list(getattr(jaxpr, "consts", ()) or ())
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, consts


def params_of(eqn: Any) -> dict[str, Any]:
    """An equation's parameters, in the spelling of JAX 0.10 where versions differ."""
    params = dict(eqn.params)
    if "ft_in" in params:  # a scan of JAX 0.12: its operands are grouped by a tree
        consts, carry, _ = params.pop("ft_in").unpack()
        params["num_consts"], params["num_carry"] = len(consts), len(carry)
        del params["ft_out"]
    if eqn.primitive.name == "composite" and "call_jaxpr" in params:
        params["jaxpr"] = params.pop("call_jaxpr")
    return params


def dce(closed: Any) -> Any:
    """The same program without equations whose results nobody reads (carries of loops too).

    What newer JAX keeps as one equation of a high-level primitive (`jnp.searchsorted`) is written
    out, as jit does before it compiles.
    """
    if open_jaxpr(closed)[0].is_high:
        closed = partial_eval.lower_jaxpr2(closed)
    closed = _without_refs(closed)
    jaxpr, consts = open_jaxpr(closed)
    if jaxpr.constvars and not consts:
        return closed
    used = [True] * len(jaxpr.outvars)
    new: Any = partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)[0]
    return new.with_consts(consts) if hasattr(new, "with_consts") else core.ClosedJaxpr(new, consts)


def source_of(info: Any) -> str:
    """`file.py:line` of the user's frame an equation came from, or `<unknown>`."""
    frame = source_info_util.user_frame(info.traceback) if info is not None else None
    if frame is None:
        return UNKNOWN
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line}"


def current_source(otherwise: str = "<unknown>") -> str:
    """`file.py:line` of the user's frame that is calling now, where there is one."""
    source = source_of(source_info_util.current())
    return otherwise if source == "<unknown>" else source


def calling() -> Any:
    """Where the user's code is calling from now, for `called_from`."""
    return source_info_util.current().traceback


def called_from(traceback: Any) -> Any:
    """A context in which new equations come from a call made earlier.

    The body of a loop is traced below frames of JAX's: what the package itself puts there has no frame
    of the user's else.
    """
    return source_info_util.user_context(traceback)


def under_source(info: Any, scope: str) -> Any:
    """A context in which new equations carry the user's source line and `scope` in their name."""
    stack = info.name_stack if info is not None else source_info_util.new_name_stack()
    return source_info_util.user_context(
        info.traceback if info is not None else None,
        name_stack=source_info_util.current_name_stack() + stack.extend(scope),
    )


_OWN_SCOPE = re.compile(r"sw\d+")


def scope_of(eqn: Any) -> str:
    """The innermost named scope of the user's that an equation of a per-device jaxpr comes from, or ""."""
    names = [getattr(part, "name", "") for part in eqn.source_info.name_stack.stack]
    kinds = [type(part).__name__ for part in eqn.source_info.name_stack.stack]
    scopes = [n for n, kind in zip(names, kinds, strict=True) if kind == "Scope"]
    return next((n for n in reversed(scopes) if not _OWN_SCOPE.fullmatch(n)), "")


def wrap_fun(f: Callable[..., Any], name: str, args: Sequence[Any]) -> Any:
    """`f` of `args` as the function argument of a call primitive."""
    debug = jax.api_util.debug_info(name, f, tuple(args), {})
    return lu.wrap_init(f, debug_info=debug)


def random_bits_impl(key_dtype: Any) -> Callable[[Any, int, tuple[int, ...]], Any] | None:
    """The bit generator of a key dtype as a function of (raw key, width, shape), if it has one."""
    impl = getattr(key_dtype, "_impl", None)
    return getattr(impl, "random_bits", None)


def key_impl_name(key_dtype: Any) -> str:
    """`threefry2x32`, `rbg`, ... of an extended key dtype."""
    return getattr(getattr(key_dtype, "_impl", None), "name", str(key_dtype))


def xla_text(sharding: jax.sharding.Sharding, rank: int) -> str:
    """XLA's text form of any JAX sharding; the public API shows it only in compiled programs."""
    return str(sharding._to_xla_hlo_sharding(rank))


def parameter_names(fn: Callable[..., Any]) -> list[str]:
    """The names of a function's positional parameters, as far as they can be known."""
    import inspect

    try:
        return [
            p.name
            for p in inspect.signature(fn).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        return []


def bind_call(primitive: Any, fn: Callable[..., Any], args: Any, **params: Any) -> Any:
    """Bind a call primitive on a function: its transformations apply to the function's body."""
    if hasattr(jex, "CallPrimitive"):
        return primitive.bind(*args, subfuns=(wrap_fun(fn, primitive.name, args),), **params)
    # What the function closes over, tracers perhaps, becomes operands: a parameter must hold none.
    body: Any = jax.make_jaxpr(fn)(*args)
    return primitive.bind(*body.consts, *args, call_jaxpr=body.with_consts(()), **params)


def with_consts(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """A jaxpr closed over the values of its constants."""
    if hasattr(jaxpr, "with_consts"):
        return jaxpr.with_consts(list(consts))
    return core.ClosedJaxpr(jaxpr, list(consts))


def closed(jaxpr: Any) -> Any:
    """A closed jaxpr of an open one without constants."""
    if hasattr(jaxpr, "with_consts") or isinstance(jaxpr, getattr(core, "ClosedJaxpr", ())):
        return jaxpr
    return core.ClosedJaxpr(jaxpr, ())


def call_primitive(name: str, impl: Callable[..., Any]) -> Any:
    """A primitive on a function's body, `call_jaxpr`, that JAX's transformations go through.

    `impl(fn, *args, **params)` runs it outside jit.  JAX has had two public ways to make one: up to
    0.11.0 `CallPrimitive`, bound on a function; since then rules for a primitive bound on a jaxpr.
    """
    if not hasattr(jex, "CallPrimitive"):
        p = jex.Primitive(name)
        getattr(jex, "register_call_primitive_rules")(p)  # noqa: B009
        p.def_impl(
            lambda *args, call_jaxpr, **params: impl(jex.jaxpr_as_fun(call_jaxpr), *args, **params)
        )
        return p
    p = jex.CallPrimitive(name)
    p.def_impl(lambda fun, *args, **params: impl(fun.call_wrapped, *args, **params))
    ad.fancy_transposes[p] = functools.partial(ad.call_transpose_fancy, p)
    partial_eval.dce_rules[p] = partial_eval.dce_jaxpr_call_rule
    partial_eval.partial_eval_jaxpr_custom_rules[p] = partial_eval.partial_eval_jaxpr_custom_rules[
        core.call_p
    ]
    return p


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A context without Python's cyclic garbage collection.

    Tracing and planning make many objects and drop few: every collection would go through all of them to
    free next to nothing.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def at_top_level() -> bool:
    """Whether no transformation of JAX is tracing now."""
    return core.trace_state_clean()


def trace_context() -> Any:
    """What of JAX's configuration a trace depends on (64-bit types, precisions, ...), hashable."""
    return config.trace_context()


def weakly_typed(x: Any) -> Any:
    """`x` with a weak type, as Python scalars and what is made of them have."""
    return lax_internal._convert_element_type(x, x.dtype, weak_type=True)


def no_context_mesh() -> Any:
    """A context without the mesh of `jax.set_mesh`: the partitioned program brings its own."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def automatic_context_mesh() -> Any:
    """A context in which the mesh of `jax.set_mesh`, if there is one, has axes of type Auto."""
    mesh = jax.sharding.get_abstract_mesh()
    automatic = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=automatic)
    )


_program_mesh = jax.make_user_context(None)


@contextlib.contextmanager
def programs_mesh(mesh: Any) -> Iterator[None]:
    """A context in which the user's function is traced for a mesh: its axes have names.

    The mesh is part of the key of JAX's caches: a function of the user's under jit, traced for one
    device before, is traced again.
    """
    sizes = [(str(n), mesh.shape[n]) for n in mesh.axis_names]
    with _program_mesh(mesh), core.extend_axis_env_nd(sizes):
        yield


def program_mesh() -> Any:
    """The mesh the function being traced is partitioned for, None outside `spmd`."""
    return _program_mesh.value


def under_manual_control() -> tuple[str, ...]:
    """The axes of the enclosing shard_maps, as JAX is tracing now."""
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(str(n) for n, kind in types if kind == jax.sharding.AxisType.Manual)


def device_count(x: Any) -> int:
    """How many devices an array lies on; 0 while it is traced, and for what is no array."""
    return 0 if isinstance(x, core.Tracer) or not isinstance(x, jax.Array) else len(x.devices())


def varies_over(x: Any) -> tuple[str, ...]:
    """The axes along which devices may hold different values, inside a shard_map that checks them."""
    return tuple(map(str, jax.typeof(x).mat.varying))


def _opaque_avals(*avals: Any, fn: Callable[..., Any]) -> Any:
    jaxpr = jax.make_jaxpr(fn)(*avals)
    return [plain_aval(a) for a in jaxpr.out_avals], jaxpr.effects


_opaque_p = core.Primitive("opaque")
_opaque_p.multiple_results = True
_opaque_p.def_impl(lambda *xs, fn: fn(*xs))
_opaque_p.def_effectful_abstract_eval(_opaque_avals)
mlir.register_lowering(
    _opaque_p, lambda ctx, *xs, fn: mlir.lower_fun(fn, multiple_results=True)(ctx, *xs),
    cacheable=False,
)  # fmt: skip


def opaque(fn: Callable[..., list[Any]], *args: Any) -> list[Any]:
    """`fn(*args)`, out of the sight of jit where it holds a callback.

    With a callback in sight, jit insists that all shardings of a program are on one mesh, though those
    of arguments are on the user's and the program's on its atoms.
    """
    if not dispatch.jaxpr_has_prim_requiring_devices(open_jaxpr(jax.make_jaxpr(fn)(*args))[0]):
        return list(fn(*args))
    return _opaque_p.bind(*args, fn=fn)


def plain_aval(aval: Any) -> Any:
    """An abstract array with nothing said of where it lies; what else there is as it is."""
    if not isinstance(aval, (core.ShapedArray, jax.ShapeDtypeStruct)):
        return aval
    return core.ShapedArray(aval.shape, aval.dtype)


def is_ordered(effect: Any) -> bool:
    """Whether an effect keeps the order of the program; None is no effect."""
    return effect is not None and effects.ordered_effects.contains(effect)


def without_types(x: Any) -> Any:
    """An array on Explicit axes as one on Auto axes: where it lies is not part of its type."""
    s = getattr(x, "sharding", None)
    if isinstance(x, core.Tracer) or not isinstance(s, jax.sharding.NamedSharding):
        return x
    if s.mesh._any_axis_explicit and s.mesh.devices is not None:
        mesh = jax.sharding.Mesh(s.mesh.devices, s.mesh.axis_names)
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, s.spec))
    return x


def tracing_platform() -> str:
    """The platform of the devices shard_map is being traced for; empty on a mesh without devices."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "platform", None) or ""


def as_function(jaxpr: Any) -> Callable[..., Any]:
    """A jaxpr as a function that returns a list."""
    inner, consts = open_jaxpr(jaxpr)
    return lambda *xs: core.eval_jaxpr(inner, consts, *xs)


def _without_refs(closed: Any) -> Any:
    """The same program with its mutable references (`jax.new_ref`) as values: reads and writes become
    slices and updates, as in jit before it compiles."""
    if not any(isinstance(e, core.InternalMutableArrayEffect) for e in closed.effects):
        return closed
    from jax._src.state.discharge import discharge_state

    return discharge_state(closed)


def run_state_body(jaxpr: Any) -> Any:
    """The body of a `run_state` as a function of values that returns the values left behind."""
    from jax._src.state.discharge import discharge_state

    return discharge_state(closed(jaxpr))


def key_function(key_dtype: Any, use: str) -> Callable[..., Any]:
    """What a generator does to one raw key: `seed`, `split`, `fold_in`."""
    return getattr(key_dtype._impl, use)


def wrap_key_data(raw: Any, key_dtype: Any) -> Any:
    """Words as keys of a dtype."""
    return jax.random.wrap_key_data(raw, impl=key_dtype._impl)


def dst_sharding(eqn: Any) -> Any:
    """Where `jax.sharding.reshard` wants its operand: on concrete devices, if it knows them."""
    s, mesh = eqn.params["dst_sharding"], eqn.params.get("concrete_mesh")
    return s if mesh is None else jax.sharding.NamedSharding(mesh, s.spec)
