"""Which carries of a loop may stay pending sums: `g <- g + (a pending sum)`, finished after the loop.

Gradient accumulation adds a partial gradient to a carry in every iteration.  Finishing it inside costs
one reduction an iteration; adding the terms on each device and reducing once after the loop gives the
same sum.  A carry qualifies when the body only adds to it.  The price is memory: the accumulator is not
split over the pending axes, so large accumulators that would be split stay inside (`LIMIT`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardwise.ops.registry import rules_of
from shardwise.program import Body, Eqn, Lit, Var
from shardwise.sharding import Layout, Sharding

LIMIT = 64 << 20  # bytes one device may spend on an accumulator that could have been split further

_ADDS = ("add", "add_any")


def addend(body: Body, carry: Var, out: Var) -> Var | None:
    """The value added to a carry, when `out = carry + it` is all the body does with the carry."""
    producer = {v: e for e in body.eqns for v in e.outvars}
    readers: dict[Var, int] = {}
    for e in body.eqns:
        for v in e.invars:
            readers[v] = readers.get(v, 0) + 1
    for v in body.outvars:
        readers[v] = readers.get(v, 0) + 1
    if isinstance(out, Lit) or readers.get(carry) != 1 or readers.get(out) != 1:
        return None
    eqn = producer.get(out)
    if eqn is None or eqn.name not in _ADDS or carry not in eqn.invars:
        return None
    return next(v for v in eqn.invars if v is not carry)


def carry_shardings(
    p: Any,
    eqn: Eqn,
    body: Body,
    init: Sequence[Any],
    step: Callable[..., Any],
    xs: Sequence[Any],
) -> list[Sharding]:
    """The sharding of each carry of a scan: the completed one, or a pending sum over more atoms."""
    n, c = eqn.params["num_consts"], eqn.params["num_carry"]
    carries = body.invars[n : n + c]
    plain = [p.wanted(v) for v in carries]
    sums = {
        i: a
        for i, v in enumerate(carries)
        if init[i].zero and (a := addend(body, v, body.outvars[i]))
    }
    if not sums:
        return plain
    steps = max(eqn.params["length"], 1)
    terms = {i: dict.fromkeys(summands(body, a), steps) for i, a in sums.items()}
    for t in terms.values():
        p.terms.update(t)
    pending = _trial(p, body, carries, init, plain, step, xs, sums)
    out = list(plain)
    for i, s in pending.items():
        if s is not None and _affordable(p, carries[i], plain[i], s):
            out[i] = s
        else:
            for v in terms[i]:
                del p.terms[v]
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


def _trial(
    p: Any, body: Body, carries: Sequence[Var], init: Sequence[Any], plain: Sequence[Sharding],
    step: Callable[..., Any], xs: Sequence[Any], sums: dict[int, Var],
) -> dict[int, Sharding | None]:  # fmt: skip
    """Run the body once, abstractly, and see which addends come out pending."""
    found: dict[int, Sharding | None] = dict.fromkeys(sums)
    notes, fallbacks = len(p.notes), len(p.fallbacks)

    def once(blocks: Sequence[Any], x: Sequence[Any]) -> Any:
        p.watch = dict.fromkeys(sums.values())
        step(plain, blocks, x)
        for i, a in sums.items():
            value = p.watch[a]
            if value is not None and not value.free:
                s = value.first
                found[i] = s if s.partial and s.op == "sum" else None
        p.watch = {}
        return 0

    blocks = [
        jax.ShapeDtypeStruct(init[i].layout(s).local_shape(p.mesh), v.dtype)
        for i, (v, s) in enumerate(zip(carries, plain, strict=True))
    ]
    sliced = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs]
    jax.eval_shape(once, blocks, sliced)
    del p.notes[notes:], p.fallbacks[fallbacks:]
    return found


def _affordable(p: Any, v: Var, plain: Sharding, pending: Sharding) -> bool:
    """Whether carrying terms costs no more memory than the split carry, or little."""

    def size(s: Sharding) -> int:
        return math.prod(Layout(v.shape, p.padded(v), s).local_shape(p.mesh)) * v.itemsize

    return size(pending) <= max(size(plain), LIMIT)
