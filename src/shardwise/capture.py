"""`capture`: a Python function and abstract arguments, to a flat `Body` of equations.

JAX traces the function; calls (jit, custom derivatives, closed calls) are inlined, so that rules see
primitives only; scan, while, cond, checkpoint and the user's own shard_map stay structured, with
their bodies captured the same way.  Primitives that abbreviate others are written out (`spelling`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from shardwise import _jax
from shardwise.associative import find_scans
from shardwise.copies import unshare
from shardwise.invariants import lift
from shardwise.merge import merge
from shardwise.order import longest_first
from shardwise.outward import outward
from shardwise.pairing import pair_rows
from shardwise.program import Body, Eqn, Lit, Var
from shardwise.ranking import rank_sorts
from shardwise.refused import refuse
from shardwise.share import share
from shardwise.spelling import respell
from shardwise.swap import swap

# primitive name -> the parameter that holds the function to inline
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "spmd_call": "call_jaxpr",
    "remat_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "custom_lin": "call_jaxpr",
    "composite": "jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "linear_call": "callee",
    "remat_opt": "fwd_jaxpr",
    "custom_partitioning": "call",
    "compute_on": "jaxpr",
    "fused_call": "jaxpr",
    "cudnn_fusion": "jaxpr",
    "xla_metadata_call": "jaxpr",
}

# Identities that say nothing about values: their result is their operand.
_IDENTITIES = frozenset(
    ["name", "stop_gradient", "device_put", "copy", "tie", "pvary", "reshard", "stage",
     "layout_constraint"]
)  # fmt: skip

# primitive name -> the parameters that hold bodies, in order
_STRUCTURED = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "checkpoint": ("jaxpr",),
    "remat": ("jaxpr",),
    "remat2": ("jaxpr",),
    "shard_map": ("jaxpr",),
}


# Kept though nobody reads their results.
_EFFECTS = frozenset(
    ["debug_callback", "io_callback", "debug_print", "inspect_sharding", "dce_sink"]
)


class _Capture:
    def __init__(self, platform: str, scans: bool = True) -> None:
        self.platform, self.scans = platform, scans
        self.callers: tuple[Any, ...] = ()
        self.ids = 0
        self.eqn_ids = 0
        # of jaxprs that equations hold, with what keeps the ids in the key alive
        self.bodies: dict[Any, tuple[Body, Any]] = {}

    def var(self, aval: Any, name: str = "") -> Var:
        self.ids += 1
        return Var(self.ids, tuple(aval.shape), aval.dtype, name)

    def body(self, jaxpr: Any, names: Sequence[str] = ()) -> Body:
        """A jaxpr with its own variables, calls inlined."""
        inner, consts = _jax.open_jaxpr(jaxpr)
        env: dict[Any, Var] = {}
        body = Body([], [], [], [])
        for i, v in enumerate(inner.invars):
            env[v] = self.var(v.aval, names[i] if i < len(names) else "")
            body.invars.append(env[v])
        self.bind_consts(inner, consts, env, body)
        self.equations(inner, env, body)
        body.outvars = [self.read(env, v) for v in inner.outvars]
        if self.scans:
            find_scans(body, self.unrecognised, self.var)
        pair_rows(body, lambda shape, dtype: self.var(jax.ShapeDtypeStruct(shape, dtype)))
        rank_sorts(body)
        prune(body)
        return body

    def unrecognised(self, fn: Callable[..., Any], avals: Sequence[Any]) -> Body:
        """A function as a body in which scans stand as JAX writes them."""
        return _Capture(self.platform, scans=False).body(_jax.dce(jax.make_jaxpr(fn)(*avals)))

    def bind_consts(
        self, inner: Any, consts: Sequence[Any], env: dict[Any, Var], body: Body
    ) -> None:
        for v, value in zip(inner.constvars, consts, strict=True):
            env[v] = self.var(v.aval)
            body.consts.append((env[v], _jax.without_types(value)))

    def read(self, env: dict[Any, Var], atom: Any) -> Var:
        if isinstance(atom, _jax.Literal):
            self.ids += 1
            aval: Any = atom.aval
            return Lit(self.ids, atom.val, tuple(aval.shape), aval.dtype)
        return env[atom]

    def converted(self, literal: Lit, dtype: Any) -> Lit:
        """A literal of another dtype is a literal: `jnp.pad`'s zero is one that rules can see."""
        self.ids += 1
        return Lit(self.ids, np.asarray(literal.value).astype(dtype)[()], (), np.dtype(dtype))

    def equations(self, inner: Any, env: dict[Any, Var], body: Body) -> None:
        for eqn in inner.eqns:
            args = [self.read(env, a) for a in eqn.invars]
            name = eqn.primitive.name
            if (key := _INLINED.get(name)) and key in (params := _jax.params_of(eqn)):
                outs = self.call(eqn, params[key], args, body)
            elif (written_out := respell(eqn, self.platform)) is not None:
                first = len(body.eqns)
                outs = self.inline(written_out, args, body)
                for e in body.eqns[first:]:
                    e.info = eqn.source_info  # the user wrote the short form
            elif name == "convert_element_type" and isinstance(args[0], Lit) and not args[0].shape:
                outs = [self.converted(args[0], eqn.params["new_dtype"])]
            elif name in _IDENTITIES:
                outs = args[: len(eqn.outvars)]
            elif name == "reshard":  # of a program on Explicit axes: an annotation here
                outs = self.constrain(eqn, args, [_jax.dst_sharding(eqn)], body)
            else:
                refuse(name, _jax.source_of(eqn.source_info))
                outs = [self.var(v.aval) for v in eqn.outvars]
                body.eqns.append(self.equation(eqn, args, outs))
            env.update(zip(eqn.outvars, outs, strict=True))

    def equation(self, eqn: Any, args: list[Var], outs: list[Var]) -> Eqn:
        params, bodies = _jax.params_of(eqn), []
        for key in _STRUCTURED.get(eqn.primitive.name, ()):
            sub = params.pop(key)
            for s in sub if isinstance(sub, (tuple, list)) else (sub,):
                key = (id(s), *map(id, self.callers))
                if key not in self.bodies:
                    self.bodies[key] = self.body(s), (s, self.callers)
                bodies.append(self.bodies[key][0])
        self.eqn_ids += 1
        return Eqn(
            eqn.primitive, args, outs, params, bodies, eqn.source_info, self.eqn_ids, self.callers
        )

    def call(self, eqn: Any, jaxpr: Any, args: list[Var], body: Body) -> list[Var]:
        """Inline a call; shardings a nested jit fixes for its operands and results are kept."""
        args = self.constrain(eqn, args, eqn.params.get("in_shardings"), body)
        outside = self.callers
        self.callers = (eqn.source_info, *outside)
        outs = self.inline(jaxpr, args, body)
        self.callers = outside
        return self.constrain(eqn, outs, eqn.params.get("out_shardings"), body)

    def inline(self, jaxpr: Any, args: list[Var], body: Body) -> list[Var]:
        inner, consts = _jax.open_jaxpr(jaxpr)
        env: dict[Any, Var] = dict(zip(inner.invars, args, strict=True))
        self.bind_consts(inner, consts, env, body)
        self.equations(inner, env, body)
        return [self.read(env, v) for v in inner.outvars]

    def written_out(
        self, f: Callable[..., Any], eqn: Eqn, body: Body
    ) -> tuple[list[Eqn], list[Var]]:
        """The equations of a function of an equation's operands, in its place in the user's code."""
        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in eqn.invars]
        new = Body([], [], [], [])
        outs = self.inline(jax.make_jaxpr(f)(*avals), eqn.invars, new)
        body.consts += new.consts
        for e in new.eqns:
            e.info, e.callers = eqn.info, eqn.callers
        return new.eqns, outs

    def constrain(self, eqn: Any, values: list[Var], shardings: Any, body: Body) -> list[Var]:
        out = []
        for i, v in enumerate(values):
            s = shardings[i] if shardings is not None and i < len(shardings) else None
            if isinstance(s, jax.sharding.NamedSharding):
                new = self.var(v)
                self.eqn_ids += 1
                body.eqns.append(
                    Eqn(_constraint_p(), [v], [new],
                        {"sharding": s, "unconstrained_dims": frozenset()}, [], eqn.source_info,
                        self.eqn_ids)
                )  # fmt: skip
                v = new
            out.append(v)
        return out


def _constraint_p() -> Any:
    """The primitive of `lax.with_sharding_constraint`."""
    from jax.extend.core import primitives

    return primitives.sharding_constraint_p


def prune(body: Body) -> None:
    """Drop equations whose results nobody reads (those with effects stay)."""
    live = set(body.outvars)
    kept = []
    for eqn in reversed(body.eqns):
        if any(v in live for v in eqn.outvars) or _has_effects(eqn):
            live.update(eqn.invars)
            kept.append(eqn)
    body.eqns = kept[::-1]
    body.consts = [(v, c) for v, c in body.consts if v in live]


def _has_effects(eqn: Eqn) -> bool:
    foreign = bool(eqn.params.get("has_side_effect"))
    nested = any(_has_effects(e) for b in eqn.bodies for e in b.eqns)
    return eqn.name in _EFFECTS or foreign or nested


def capture(
    fn: Callable[..., Any], avals: Sequence[Any], names: Sequence[str] = (), merged: bool = True
) -> tuple[Body, Any]:
    """Trace `fn` on abstract arguments.

    Args:
      fn: a function of flat positional arguments returning a pytree.
      avals: `ShapeDtypeStruct`s (or anything with shape and dtype), one per argument.
      names: what to call the arguments in reports.
      merged: False leaves moves as they are spelled.

    Returns:
      the flat program, and the tree of its results.
    """
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*avals)
    return capture_jaxpr(closed, names, merged=merged), jax.tree.structure(out_shape)


def capture_jaxpr(
    closed: Any, names: Sequence[str] = (), platform: str = "", merged: bool = True
) -> Body:
    """A closed jaxpr as a flat `Body`, for a platform (`lax.platform_dependent`; else the default's)."""
    c = _Capture(platform or jax.default_backend())
    body = c.body(_jax.dce(closed), names)

    def fresh(shape: tuple[int, ...], dtype: Any) -> Var:
        return c.var(jax.ShapeDtypeStruct(shape, dtype))

    swap(body, fresh)
    if merged:
        merge(body, fresh, c.written_out)
        prune(body)
    outward(body, fresh)
    share(body)
    longest_first(body)
    unshare(body, c.var)
    if lift(body, fresh, c.written_out):
        share(body)
    return body
