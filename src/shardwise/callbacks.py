"""Calls that leave the program: Python callbacks, foreign functions, Pallas kernels.

Nothing is known of what such a call does along its dims, so it gets its operands whole, which is reported
as a fallback; `sw.batched` is how the user says that it maps over some.

Python callbacks run once per call of the program, on the first device, as under `jax.jit`: a message is
printed once, a counter counts once.  Their results are there on that device and zero on the others: a
pending sum like any other, finished where, and in the sharding, that it is needed.  Inside a manual region
"once" is once for each of the user's devices, as in `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from shardwise import _jax
from shardwise.crossing import HANDLERS as _CROSSING
from shardwise.notes import Fallback, Note
from shardwise.partition import Handler, Partitioner
from shardwise.program import Eqn
from shardwise.sharding import Sharding
from shardwise.value import Value


def _operands(
    p: Partitioner, eqn: Eqn, ins: list[Value], why: str, what: str = "callback"
) -> list[Any]:
    """The operands whole on every device; those that were split are reported."""
    xs = []
    for v, var in zip(ins, eqn.invars, strict=True):
        whole = Sharding.replicated(len(v.shape))
        if not v.free and whole not in v.variants and any(v.first.axes):
            p.fallbacks.append(Fallback(eqn.name, eqn.source, v.name, v.shape, var.nbytes, why))
        xs.append(p.get(v, whole, Note(eqn, what, var=var)))
    return xs


def _params(eqn: Eqn) -> dict[str, Any]:
    """The equation's parameters without what they say of the user's mesh and devices."""
    params = dict(eqn.params)
    for key in ("result_avals", "out_avals"):
        if key in params:
            params[key] = tuple(map(_jax.plain_aval, params[key]))
    if eqn.name in ("pure_callback", "io_callback"):
        params["sharding"] = None
    return params


def _once(p: Partitioner, eqn: Eqn, call: Callable[[], list[Any]]) -> list[Value]:
    """Run a call on the first device only."""
    atoms = p.mesh.atoms
    with p.noted(Note(eqn, "callback")):
        if not atoms:
            return [p.value(o, y, Sharding.replicated(o.rank))
                    for o, y in zip(eqn.outvars, call(), strict=True)]  # fmt: skip

        def zeros() -> list[Any]:
            return [jnp.zeros(o.shape, o.dtype) for o in eqn.outvars]

        ys = lax.cond(lax.axis_index(atoms) == 0, call, zeros)
    out = []
    for o, y in zip(eqn.outvars, ys, strict=True):
        op = "or" if o.dtype == np.dtype(bool) else "sum"
        out.append(p.value(o, y, Sharding.replicated(o.rank).with_partial(atoms, op)))
    return out


def callback(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """`pure_callback`, `io_callback`, a foreign function with side effects."""
    xs = _operands(p, eqn, ins, "a callback gets its operands whole, on one device")
    params = _params(eqn)

    def call(*args: Any) -> list[Any]:
        return list(eqn.primitive.bind(*args, **params))

    return _once(p, eqn, lambda: _jax.opaque(call, *xs))


def debug(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """`jax.debug.print`, `jax.debug.callback`: on one device, or on each with its own blocks.

    JAX orders debug callbacks on one device only; here ordered ones run as ordered `io_callback`s.
    """
    params = _params(eqn)
    ordered = params.get("ordered") or _jax.is_ordered(params.get("effect"))
    if params.get("partitioned"):
        xs = [v.make(Sharding.replicated(len(v.shape))) if v.make else v.variants[v.first]
              for v in ins]  # fmt: skip
        with p.noted(Note(eqn, "callback")):
            eqn.primitive.bind(*xs, **params)
        return []
    xs = _operands(p, eqn, ins, "a debug callback gets its operands whole, on one device")

    def run(*args: Any) -> tuple[()]:
        eqn.primitive.impl(*args, **params)
        return ()

    def call(*args: Any) -> list[Any]:
        if ordered:
            return list(io_callback(run, (), *args, ordered=True))
        return list(eqn.primitive.bind(*args, **params))

    return _once(p, eqn, lambda: _jax.opaque(call, *xs))


def foreign(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """`ffi_call`, `pallas_call`: whole on every device, which costs no bytes but the operands'."""
    if eqn.params.get("has_side_effect"):
        return callback(p, eqn, ins)
    xs = _operands(p, eqn, ins, f"nothing is known of what `{eqn.name}` does along a split dim "
                   "(sw.batched says so)", "fallback")  # fmt: skip
    with p.noted(Note(eqn, "fallback")):
        ys = eqn.primitive.bind(*xs, **_params(eqn))
    return [
        p.value(o, y, Sharding.replicated(o.rank)) for o, y in zip(eqn.outvars, ys, strict=True)
    ]


HANDLERS: dict[str, Handler] = {
    **_CROSSING,
    "pure_callback": callback,
    "io_callback": callback,
    "debug_callback": debug,
    "debug_print": debug,
    "ffi_call": foreign,
    "pallas_call": foreign,
}
