"""What a loop's body computes the same in every iteration: equations of loop constants only.

`hoist` moves such equations before the loop where that saves communication.  Those inside a checkpoint
in the body, the cast of a weight before it is gathered, say, are lifted out of the checkpoint first,
into the loop's body: they need no recomputing, as their operands are there in every iteration.

A loop in the body that goes through a stack of constants, as the layers of a pipeline's stage do in every
tick, reads slices that are constants too.  What leads from a slice to its use without computing
anything (an annotation, a cast, a transposition) is done to the whole stack before the inner loop, and so
it is of constants only, and may leave the outer loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from shardwise.program import ANNOTATIONS, CHECKPOINTS, Body, Eqn, Lit, Var

Fresh = Callable[..., Var]
WrittenOut = Callable[[Callable[..., Any], Eqn, Body], tuple[list[Eqn], list[Var]]]

# Effects, and what must not run where the loop does not.
_STAY = frozenset(
    ["debug_callback", "io_callback", "debug_print", "pure_callback", "optimization_barrier"]
)
# What only says how a value lies, or lays it out.
_LAYOUT = frozenset(
    [*ANNOTATIONS, "convert_element_type", "reduce_precision", "transpose",
     "reshape", "squeeze"]
)  # fmt: skip


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


def lift(body: Body, fresh: Fresh, written_out: WrittenOut) -> bool:
    """Lift equations of loop constants out of the checkpoints and inner loops of loop bodies, in place.

    Args:
      fresh: (shape, dtype) -> a new variable.
      written_out: (function, equation, body) -> the function of the equation's operands as equations of
        the body, and its results.

    Returns:
      whether there were any.
    """
    found = False
    for eqn in body.eqns:
        for sub in eqn.bodies:
            found |= lift(sub, fresh, written_out)
        if eqn.name == "scan":
            known = eqn.bodies[0].invars[: eqn.params["num_consts"]]
            found |= _lift(eqn.bodies[0], set(known), fresh, written_out)
        elif eqn.name == "while":
            known = eqn.bodies[1].invars[: eqn.params["body_nconsts"]]
            found |= _lift(eqn.bodies[1], set(known), fresh, written_out)
    return found


def _lift(body: Body, known: set[Var], fresh: Fresh, written_out: WrittenOut) -> bool:
    out: list[Eqn] = []
    before = len(body.eqns)
    for eqn in body.eqns:
        if eqn.name in CHECKPOINTS:
            (inner,) = eqn.bodies
            constants = {v for v, x in zip(inner.invars, eqn.invars, strict=True) if x in known}
            _lift(inner, constants, fresh, written_out)
            early = _out_of(eqn, known, fresh)
        elif eqn.name == "scan":
            early = _of_slices(body, eqn, known, fresh, written_out)
        else:
            early = []
            if _pure(eqn) and _of(eqn, known):
                known.update(eqn.outvars)
        known.update(v for e in early for v in e.outvars)
        out += [*early, eqn]
    body.eqns = out
    return len(out) > before


def _of_slices(
    body: Body, eqn: Eqn, known: set[Var], fresh: Fresh, written_out: WrittenOut
) -> list[Eqn]:
    """What an inner loop does to slices of known stacks before it uses them, done to the stacks.

        for w in ws: h = tanh(h @ cast(w))      ->      vs = cast(ws);  for v in vs: h = tanh(h @ v)

    Returns the equations for the caller's body; the loop reads slices of their results instead.
    """
    (inner,) = eqn.bodies
    first = eqn.params["num_consts"] + eqn.params["num_carry"]
    xs = dict(zip(inner.invars[first:], eqn.invars[first:], strict=True))
    stacks = {v: x for v, x in xs.items() if x in known}
    out: list[Eqn] = []
    kept: list[Eqn] = []
    for e in inner.eqns:
        early = _out_of(e, set(stacks), fresh, _LAYOUT) if e.name in CHECKPOINTS else [e]
        for k in early:
            if k.name in _LAYOUT and not k.bodies and _of(k, set(stacks)):
                new = Eqn(k.primitive, [stacks.get(v, v) for v in k.invars], [], k.params, [],
                          k.info, k.id, k.callers)  # fmt: skip
                eqns, outs = written_out(_vmapped(k, stacks), new, body)
                out += eqns
                stacks.update(zip(k.outvars, outs, strict=True))
            elif k is not e:
                kept.append(k)
        if e.name in CHECKPOINTS or e.outvars[0] not in stacks:
            kept.append(e)
    if not out:
        return []
    inner.eqns = kept
    read = {v for e in kept for v in e.invars} | set(inner.outvars)
    slices = {v: x for v, x in {**xs, **stacks}.items() if v in read}
    inner.invars = [*inner.invars[:first], *slices]
    eqn.invars = [*eqn.invars[:first], *slices.values()]
    return out


def _vmapped(eqn: Eqn, stacks: Mapping[Var, Var]) -> Callable[..., Any]:
    """An equation of slices as a function of the stacks."""

    def one(*operands: Any) -> Any:
        out = eqn.primitive.bind(*operands, **eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    return jax.vmap(one, in_axes=tuple(0 if v in stacks else None for v in eqn.invars))


def _of(eqn: Eqn, known: set[Var]) -> bool:
    """Whether an equation is of known values, and makes no larger one."""
    operands = [v for v in eqn.invars if not isinstance(v, Lit)]
    largest = max((v.size for v in operands), default=-1)
    return (
        bool(operands)
        and all(v in known for v in operands)
        and all(v.size <= largest for v in eqn.outvars)
    )


def _out_of(
    eqn: Eqn, known: set[Var], fresh: Fresh, names: frozenset[str] | None = None
) -> list[Eqn]:
    """A checkpoint's equations of known values, for its caller; their results become operands.

    `names`: of those primitives only.
    """
    (inner,) = eqn.bodies
    outer: dict[Var, Var] = {
        v: x for v, x in zip(inner.invars, eqn.invars, strict=True) if x in known
    }
    early, kept = [], []
    for e in inner.eqns:
        if _pure(e) and _of(e, set(outer)) and (names is None or e.name in names):
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
