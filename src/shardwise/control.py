"""Annotations, branches, checkpoints; with `scans` and `whiles`, the equations that need more than a rule.

Inside, a body is partitioned like any program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from shardwise import repeats
from shardwise.convert import to_spec
from shardwise.errors import ShardingError
from shardwise.hoist import hand
from shardwise.mesh import abstract_mesh
from shardwise.notes import Note
from shardwise.partition import Handler, Partitioner
from shardwise.program import Eqn
from shardwise.scans import scan
from shardwise.sharding import Sharding
from shardwise.value import Value
from shardwise.whiles import while_loop


def annotation(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """The user's word: from here on the value lies as annotated."""
    (out,) = eqn.outvars
    s = p.wanted(out)
    v = p.repadded(ins[0], out)
    if v.free and v.make is not None:
        return [v]
    if out in p.terms and v.first.partial and v.first.op == "sum":
        return [v]  # of a sum that a loop adds up, the annotation says how the sum is to lie
    x = p.get(v, s, Note(eqn, "annotation", var=out))
    # Other layouts the operand is at hand in are no variants: a reader would take the cheapest of
    # them, and the annotation would be a gather that nobody reads.
    value = Value(out, v.padded, {s: x})
    value.behind = {**v.behind, **v.variants}
    return [value]


def cond(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """Operands as they lie: what a branch needs otherwise it moves itself, when it runs.

    Results are in the completed sharding, so that it does not matter which branch ran.  A pending sum that
    others read too is finished first.
    """
    index = p.get(ins[0], Sharding(()), Note(eqn, "loop", var=eqn.invars[0]))
    out_s = [p.wanted(o) for o in eqn.outvars]
    operands = list(zip(ins[1:], eqn.invars[1:], strict=True))
    for v, var in operands:
        if not v.free and v.first.partial and sum(p.uses.get(var, {}).values()) > 1:
            p.get(v, p.wanted(var), Note(eqn, "loop", var=var))

    def branch(body: Any) -> Callable[..., Any]:
        def run(*blocks: Any) -> Any:
            rest = iter(blocks)
            values = []
            for (v, _), inner in zip(operands, body.invars, strict=True):
                variants = {s: next(rest) for s in layouts[id(v)]}
                value = Value(inner, v.padded, variants, zero=v.zero)
                value.times, value.asked = v.times, v.asked
                values.append(p.repadded(value, inner))
            return hand(p, eqn, p.run(body, values), eqn.outvars, out_s)

        return run

    for (v, var), inner in zip(operands, eqn.bodies[0].invars, strict=True):
        if v.free:
            p.get(v, p.wanted(inner), Note(eqn, "loop", var=var))
    layouts = {id(v): tuple(v.variants) for v, _ in operands}
    blocks = [v.variants[s] for v, _ in operands for s in layouts[id(v)]]
    outs = lax.switch(index, [branch(b) for b in eqn.bodies], *blocks)
    return [p.value(o, x, s) for o, x, s in zip(eqn.outvars, outs, out_s, strict=True)]


def checkpoint(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """The body in place.  In a backward pass its inputs go through an optimisation barrier, as JAX
    itself does, so that the compiler does not reuse the forward pass's values instead of recomputing."""
    (body,) = eqn.bodies
    prevent = eqn.params.get("prevent_cse", True)
    values = []
    held = [v for v in ins if not v.free]
    if eqn.params.get("differentiated", False) and (
        any(prevent) if isinstance(prevent, tuple) else prevent
    ):
        # What was gathered for the forward pass is gathered again, not kept; of a loop's constants
        # all layouts are there anyway.
        kept = [v.variants if v.times > 1 else {v.first: v.variants[v.first]} for v in held]
        fresh = dict(zip(map(id, held), _behind_barrier(kept), strict=True))
        for v, var in zip(ins, body.invars, strict=True):
            value = v if v.free else Value(var, v.padded, fresh[id(v)])
            value.times, value.asked = v.times, v.asked
            values.append(value)
        return repeats.run(p, eqn, body, values)
    return p.run(body, ins)


def _behind_barrier(blocks: list[dict[Sharding, Any]]) -> list[dict[Sharding, Any]]:
    held = lax.optimization_barrier([list(b.values()) for b in blocks])
    return [dict(zip(b, h, strict=True)) for b, h in zip(blocks, held, strict=True)]


def inspect_sharding(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """`jax.debug.inspect_array_sharding`: the callback gets the sharding, while the program is made."""
    s = p.wanted(eqn.invars[0]).tiling
    try:
        spec, mesh = (
            to_spec(s, p.mesh),
            abstract_mesh(dict(zip(p.mesh.names, p.mesh.sizes, strict=True))),
        )
    except ShardingError:  # it uses part of an axis
        spec, mesh = to_spec(s, p.mesh, atoms=True), abstract_mesh(dict(p.mesh.size_of))
    eqn.params["callback"](jax.sharding.NamedSharding(mesh, spec))
    return []


HANDLERS: dict[str, Handler] = {
    "annotation": annotation,
    "sharding_constraint": annotation,
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "inspect_sharding": inspect_sharding,
    "checkpoint": checkpoint,
    "remat": checkpoint,
    "remat2": checkpoint,
}
