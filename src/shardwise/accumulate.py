"""Which carries of a loop may stay pending sums: `g <- g + (a pending sum)`, finished after the loop.

Gradient accumulation adds a partial gradient to a carry in every iteration.  Finishing it inside costs
one reduction an iteration; adding the terms on each device and reducing once after the loop gives the
same sum.  A carry qualifies when the body only adds to it.  The price is memory: the accumulator is not
split over the pending axes, so large accumulators that would be split stay inside (`Limits.room`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from shardwise.edges import addend
from shardwise.ops.registry import rules_of
from shardwise.program import Body, Lit, Var
from shardwise.sharding import Layout, Sharding
from shardwise.value import Value

if TYPE_CHECKING:
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


def announce(p: Partitioner, body: Body, found: Mapping[int, Var], steps: int) -> None:
    """Say that terms are added up `steps` times before the sum is finished, so that finishing is cheap."""
    for term in found.values():
        p.terms.update(dict.fromkeys(summands(body, term), steps))


def settled(
    p: Partitioner, body: Body, carries: Sequence[Var], plain: Sequence[Sharding],
    found: Mapping[int, Var], seen: Mapping[Var, Value | None],
) -> list[Sharding]:  # fmt: skip
    """The sharding of each carry: the completed one, or a pending sum as a trial's terms came out."""
    out = list(plain)
    for i, term in found.items():
        value = seen.get(term)
        s = None if value is None or value.free else value.first
        if (
            s is not None
            and s.partial
            and s.op == "sum"
            and _affordable(p, carries[i], plain[i], s)
        ):
            out[i] = s
        else:
            for v in summands(body, term):
                p.terms.pop(v, None)
    return out


def summands(body: Body, v: Var) -> list[Var]:
    """A value and those it is a linear function of, each read by the next only (through checkpoints)."""
    out = [v]
    producer = {o: e for e in body.eqns for o in e.outvars}
    eqn = producer.get(v)
    if eqn is None:
        return out
    if eqn.name in ("checkpoint", "remat", "remat2"):
        inner = eqn.bodies[0].outvars[eqn.outvars.index(v)]
        return out + ([] if isinstance(inner, Lit) else summands(eqn.bodies[0], inner))
    reads = [x for e in body.eqns for x in dict.fromkeys(e.invars)] + body.outvars
    linear = {i for r in rules_of(eqn)[:1] for group in r.linear for i in group}
    for i, x in enumerate(eqn.invars):
        if i in linear and not isinstance(x, Lit) and reads.count(x) == 1 and x in producer:
            out += summands(body, x)
    return out


def _affordable(p: Partitioner, v: Var, plain: Sharding, pending: Sharding) -> bool:
    """Whether carrying terms costs no more memory than the split carry, or little."""

    def size(s: Sharding) -> int:
        return math.prod(Layout(v.shape, p.padded(v), s).local_shape(p.mesh)) * v.itemsize

    return size(pending) <= max(size(plain), p.limits.room)
