"""What a loop's body computes the same in every iteration: equations of loop constants only.

`hoist` moves such equations before the loop where that saves communication.  Those inside a checkpoint
in the body, the cast of a weight before it is gathered, say, are lifted out of the checkpoint first,
into the loop's body: they need no recomputing, as their operands are there in every iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shardwise.program import Body, Eqn, Lit, Var

# Effects, and what must not run where the loop does not.
_STAY = frozenset(
    ["debug_callback", "io_callback", "debug_print", "pure_callback", "optimization_barrier"]
)
CHECKPOINTS = ("checkpoint", "remat", "remat2")


def _pure(eqn: Eqn) -> bool:
    return not eqn.bodies and eqn.name not in _STAY


def invariants(body: Body, constants: Iterable[Var]) -> list[Eqn]:
    """The equations of a body that compute the same in every iteration, but for those of no operand."""
    known = {*constants, *(v for v, _ in body.consts)}
    out = []
    for eqn in body.eqns:
        if _pure(eqn) and all(isinstance(v, Lit) or v in known for v in eqn.invars):
            known.update(eqn.outvars)
            if any(not isinstance(v, Lit) for v in eqn.invars):
                out.append(eqn)
    return out


def lift(body: Body, fresh: Callable[..., Var]) -> bool:
    """Lift equations of loop constants out of the checkpoints of loop bodies, in place.

    Args:
      fresh: (shape, dtype) -> a new variable.

    Returns:
      whether there were any.
    """
    found = False
    for eqn in body.eqns:
        for sub in eqn.bodies:
            found |= lift(sub, fresh)
        if eqn.name == "scan":
            found |= _lift(eqn.bodies[0], eqn.params["num_consts"], fresh)
        elif eqn.name == "while":
            found |= _lift(eqn.bodies[1], eqn.params["body_nconsts"], fresh)
    return found


def _lift(body: Body, count: int, fresh: Callable[..., Var]) -> bool:
    known = set(body.invars[:count])
    out: list[Eqn] = []
    before = len(body.eqns)
    for eqn in body.eqns:
        if eqn.name in CHECKPOINTS:
            early = _out_of(eqn, known, fresh)
            known.update(v for e in early for v in e.outvars)
            out += early
        elif _pure(eqn) and _of(eqn, known):
            known.update(eqn.outvars)
        out.append(eqn)
    body.eqns = out
    return len(out) > before


def _of(eqn: Eqn, known: set[Var]) -> bool:
    """Whether an equation is of known values, and makes no larger one."""
    operands = [v for v in eqn.invars if not isinstance(v, Lit)]
    largest = max((v.size for v in operands), default=-1)
    return (
        bool(operands)
        and all(v in known for v in operands)
        and all(v.size <= largest for v in eqn.outvars)
    )


def _out_of(eqn: Eqn, known: set[Var], fresh: Callable[..., Var]) -> list[Eqn]:
    """A checkpoint's equations of known values, for its caller; their results become operands."""
    (inner,) = eqn.bodies
    outer: dict[Var, Var] = {
        v: x for v, x in zip(inner.invars, eqn.invars, strict=True) if x in known
    }
    early, kept = [], []
    for e in inner.eqns:
        if _pure(e) and _of(e, set(outer)):
            invars = [outer.get(v, v) for v in e.invars]
            early.append(Eqn(e.primitive, invars, e.outvars, e.params, [], e.info, e.id, e.callers))
            outer.update({v: v for v in e.outvars})
        else:
            kept.append(e)
    made = [v for e in early for v in e.outvars]
    read = {v for e in kept for v in e.invars} | set(inner.outvars)
    inside: dict[Var, Var] = {v: fresh(v.shape, v.dtype) for v in made if v in read}
    if made:
        for e in kept:
            e.invars = [inside.get(v, v) for v in e.invars]
        outs: list[Any] = [inside.get(v, v) for v in inner.outvars]
        eqn.bodies[0] = Body([*inner.invars, *inside.values()], outs, kept, inner.consts)
        eqn.invars = [*eqn.invars, *inside]
    return early
