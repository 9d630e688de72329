"""Bodies that several equations hold: captured once, then copied.

JAX traces a function under `jax.checkpoint` once and holds the same jaxpr in the equation of every layer
of an unrolled network.  It is captured once, and the rewrites of `capture` run on it once; then every
equation gets variables of its own, since the layers may lie differently.  What follows from an
equation alone (its rules) is worked out once for all copies, and what is emitted is emitted once for those
that lie alike (`repeats`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.program import Body, Eqn, Lit, Var

Fresh = Callable[[Any], Var]


def unshare(body: Body, fresh: Fresh) -> None:
    """Give every equation of a program bodies of its own, in place.

    `fresh` makes a new variable like another.
    """
    _unshare(body, fresh, set())


def _unshare(body: Body, fresh: Fresh, seen: set[Body]) -> None:
    for eqn in body.eqns:
        for i, sub in enumerate(eqn.bodies):
            if sub in seen:
                sub.origin = sub
                eqn.bodies[i] = copied(sub, fresh)
            else:
                seen.add(sub)
                _unshare(sub, fresh, seen)


def copied(body: Body, fresh: Fresh) -> Body:
    """The same program with variables of its own."""
    new: dict[Var, Var] = {}

    def write(v: Var) -> Var:
        new[v] = out = fresh(v)
        return out

    def read(v: Var) -> Var:
        return Lit(v.id, v.value, v.shape, v.dtype) if isinstance(v, Lit) else new[v]

    invars = [write(v) for v in body.invars]
    consts = [(write(v), x) for v, x in body.consts]
    eqns = []
    for e in body.eqns:
        ins, bodies = [read(v) for v in e.invars], [copied(b, fresh) for b in e.bodies]
        outs = [write(v) for v in e.outvars]
        eqn = Eqn(e.primitive, ins, outs, e.params, bodies, e.info, e.id, e.callers)
        eqn.memo = e.memo
        eqns.append(eqn)
    return Body(invars, [read(v) for v in body.outvars], eqns, consts, body.origin)
