"""Sums of loops: what is added up, and annotations of it, which are the sum's.

The gradient of a weight that a loop reads in every iteration is `g <- g + annotate(t)`, as the weight was
annotated where it is used.  Taken at its word, every term is brought to the annotated layout, a
reduce-scatter in each iteration.  But an annotation is an identity, and says where the gradient is to
lie; so here it is put on the sum, after the loop, and the terms may stay pending in it (`accumulate`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from shardwise.program import ANNOTATIONS, CHECKPOINTS, Body, Eqn, Lit, Var


def addend(body: Body, carry: Var, out: Var) -> Var | None:
    """The value added to a carry, when `out = carry + it` is all the body does with the carry."""
    return _addend(_Reads(body), carry, out)


def _addend(reads: _Reads, carry: Var, out: Var) -> Var | None:
    if isinstance(out, Lit) or reads.count[carry] != 1 or reads.count[out] != 1:
        return None
    eqn = reads.producer.get(out)
    if eqn is None or eqn.name not in ("add", "add_any") or carry not in eqn.invars:
        return None
    return next(v for v in eqn.invars if v is not carry)


class _Reads:
    """What makes each value of a body, and how often it is read there."""

    def __init__(self, body: Body):
        self.body = body
        self.producer = {v: e for e in body.eqns for v in e.outvars}
        self.count = Counter([v for e in body.eqns for v in e.invars] + body.outvars)


def outward(body: Body, fresh: Callable[..., Var]) -> None:
    """Put annotations of what loops add up on the sums, in place; inner loops first.

    Args:
      fresh: (shape, dtype) -> a new variable.
    """
    eqns: list[Eqn] = []
    for eqn in body.eqns:
        for sub in eqn.bodies:
            outward(sub, fresh)
        eqns.append(eqn)
        if eqn.name == "scan":
            eqns += _of_sums(eqn, fresh)
    body.eqns = eqns


def _of_sums(eqn: Eqn, fresh: Callable[..., Var]) -> list[Eqn]:
    """The annotations taken out of a scan's body, on its results."""
    (body,) = eqn.bodies
    n, c = eqn.params["num_consts"], eqn.params["num_carry"]
    reads, after = _Reads(body), []
    for i, carry in enumerate(body.invars[n : n + c]):
        term = _addend(reads, carry, body.outvars[i])
        if term is None or isinstance(term, Lit):
            continue
        bare, taken = _bare(reads, term)
        add = reads.producer[body.outvars[i]]
        add.invars = [bare if v is term else v for v in add.invars]
        for e in taken:
            out = eqn.outvars[i]
            eqn.outvars[i] = new = fresh(out.shape, out.dtype)
            after.append(Eqn(e.primitive, [new], [out], e.params, [], e.info, e.id, e.callers))
    return after[::-1]


def _bare(reads: _Reads, v: Var) -> tuple[Var, list[Eqn]]:
    """A value that only its next reader reads, without the annotations on the way to it: what to read
    instead, and the annotations.  Casts, and checkpoints it comes out of, are passed."""
    eqn = reads.producer.get(v)
    if eqn is None or reads.count[v] != 1:
        return v, []
    if eqn.name in ANNOTATIONS:
        bare, taken = _bare(reads, eqn.invars[0])
        reads.body.eqns.remove(eqn)
        return bare, [eqn, *taken]
    if eqn.name == "convert_element_type":
        eqn.invars[0], taken = _bare(reads, eqn.invars[0])
        return v, taken
    if eqn.name in CHECKPOINTS:
        (inner,) = eqn.bodies
        k = eqn.outvars.index(v)
        inner.outvars[k], taken = _bare(_Reads(inner), inner.outvars[k])
        return v, taken
    return v, []
