"""Which carries of a loop may stay pending sums: `g <- g + (a pending sum)`, finished after the loop.

Gradient accumulation adds a partial gradient to a carry in every iteration.  Finishing it inside costs
one reduction an iteration; adding the terms on each device and reducing once after the loop gives the
same sum.  A carry qualifies when the body only adds to it.  The price is memory: the accumulator is not
split over the pending axes, so large accumulators that would be split stay inside (`Limits.room`).

A term that is the stack of an inner loop's results, the gradients of a stage's layers, is never made: the
inner loop adds each slice to the accumulator as it comes (`Value.onto`).  Nor is one that is rows added to
zeros, the gradient of the layers of one round among those of all: they are added to the accumulator.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.ops.registry import rules_of
from shardwise.outward import addend
from shardwise.program import ANNOTATIONS, CHECKPOINTS, Body, Eqn, Lit, Var
from shardwise.sharding import Layout, Sharding
from shardwise.value import Value

if TYPE_CHECKING:
    from shardwise.choose import Choice
    from shardwise.partition import Partitioner


def sums(
    body: Body, carries: Sequence[Var], init: Sequence[Value], elsewhere: Collection[Var] = ()
) -> dict[int, Var]:
    """Carry -> the term added to it in every iteration, for carries that start as zero.

    `elsewhere`: what else is read of the carries (a while loop's condition).
    """
    out = {}
    for i, (v, start, end) in enumerate(zip(carries, init, body.outvars, strict=False)):
        term = addend(body, v, end) if start.zero and v not in elsewhere else None
        if term is not None:
            out[i] = term
    return out


def stacks(
    body: Body, carries: Sequence[Var], found: Mapping[int, Var]
) -> dict[Var, tuple[Var, int]]:
    """Terms that need not be made -> the carry to add to instead: stacks of an inner loop's results, with
    the dim of the carry that is the stack's first (vmap puts its own before it); scatter-adds (0).
    """
    made = ((carries[i], _stack(body, term)) for i, term in found.items())
    return {m[0]: (carry, m[1]) for carry, m in made if m is not None}


def _stack(body: Body, term: Var) -> tuple[Var, int] | None:
    """The stack of a scan's results that a value is, through checkpoints and a transposition that moves the
    scan's dim only, and the dim that this is of the value; or the result of a scatter-add that it is."""
    producer = {o: e for e in body.eqns for o in e.outvars}
    eqn, dim = producer.get(term), 0
    if eqn is not None and eqn.name in CHECKPOINTS:
        (inner,) = eqn.bodies
        out = inner.outvars[eqn.outvars.index(term)]
        alone = not isinstance(out, Lit) and _read(inner, out) == 1
        return _stack(inner, out) if alone else None
    if eqn is not None and eqn.name == "scatter-add":
        return term, 0
    if eqn is not None and eqn.name == "transpose" and _read(body, eqn.invars[0]) == 1:
        order = eqn.params["permutation"]
        if [d for d in order if d] != sorted(d for d in order if d):
            return None
        term, dim = eqn.invars[0], order.index(0)
        eqn = producer.get(term)
    if eqn is None or eqn.name != "scan" or eqn.outvars.index(term) < eqn.params["num_carry"]:
        return None
    return term, dim


def added_to(
    p: Partitioner, eqn: Eqn, ins: Sequence[Value], choice: Choice
) -> tuple[Var, Any] | None:
    """The accumulator, and its block, that a scatter-add to zeros may add to instead, if that lies as the
    zeros would."""
    found = p.accumulators.get(eqn.outvars[0])
    if found is None or eqn.name != "scatter-add" or not ins[0].zero:
        return None
    carry, value, _ = found
    zeros, result = choice.ins[0], choice.outs[0]
    alike = (zeros.sharding, zeros.padded) == (result.sharding, value.padded)
    if not alike or result.padded != value.padded or value.free:
        return None
    return (carry, value.variants[s]) if (s := result.sharding) in value.variants else None


def announce(p: Partitioner, body: Body, found: Mapping[int, Var], steps: int) -> None:
    """Say that terms are added up `steps` times before the sum is finished, so that finishing is cheap."""
    for term in found.values():
        p.terms.update(dict.fromkeys(summands(body, term), steps))


def settled(
    p: Partitioner, body: Body, carries: Sequence[Var], plain: Sequence[Sharding],
    found: Mapping[int, Var], seen: Mapping[Var, Value | None], room: float,
) -> list[Sharding]:  # fmt: skip
    """The sharding of each carry: the completed one, or a pending sum as a trial's terms came out.

    Args:
      room: bytes that pending sums may take beyond what the carries would.
    """
    out = list(plain)
    for i, term in found.items():
        s = _pending(seen.get(term))
        more = 0 if s is None else _size(p, carries[i], s) - _size(p, carries[i], plain[i])
        if s is not None and more <= room:
            out[i] = s
            room -= max(0, more)
        else:
            for v in summands(body, term):
                p.terms.pop(v, None)
    return out


def _pending(value: Value | None) -> Sharding | None:
    """The sharding of a value that came out as a pending sum."""
    if value is None or value.free or not value.first.partial or value.first.op != "sum":
        return None
    return value.first


def summands(body: Body, v: Var) -> list[Var]:
    """A value and those it is a linear function of, each read by the next only.

    Through annotations, through checkpoints, and into the loop whose slices the value is a stack of.
    """
    out = [v]
    producer = {o: e for e in body.eqns for o in e.outvars}
    eqn = producer.get(v)
    if eqn is None:
        return out
    if eqn.name in (*CHECKPOINTS, "scan"):
        i = eqn.outvars.index(v)
        if eqn.name == "scan" and i < eqn.params["num_carry"]:
            return out
        inner = eqn.bodies[0].outvars[i]
        alone = not isinstance(inner, Lit) and _read(eqn.bodies[0], inner) == 1
        return out + (summands(eqn.bodies[0], inner) if alone else [])
    linear = {i for r in rules_of(eqn)[:1] for group in r.linear for i in group}
    if eqn.name in ANNOTATIONS:
        linear = {0}
    for i, x in enumerate(eqn.invars):
        if i in linear and not isinstance(x, Lit) and _read(body, x) == 1 and x in producer:
            out += summands(body, x)
    return out


def _read(body: Body, v: Var) -> int:
    """How many equations of a body, and results, read a value."""
    return sum(v in e.invars for e in body.eqns) + body.outvars.count(v)


def _size(p: Partitioner, v: Var, s: Sharding) -> int:
    return math.prod(Layout(v.shape, p.padded(v), s).local_shape(p.mesh)) * v.itemsize
