"""Scans, and `fori_loop` with a known number of trips.

A carry lies, in every iteration, in the sharding completion gave the body's variable: the loop's
contract.  What more there is to decide is decided after a trial run of the body on shapes, once for
each way the operands may lie, and only for loops where it can matter: constants held in other layouts
(`hoist`), how slices of stacks come and go (`stacks`), sums that stay pending (`accumulate`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardwise import accumulate, tpu
from shardwise.cost import comm, memory
from shardwise.hoist import Constants, Hoisted, abstractly, hand, situation, watching
from shardwise.partition import Partitioner
from shardwise.program import Body, Eqn, Var
from shardwise.reshard import reshard_bytes
from shardwise.sharding import Axes, Layout, Sharding
from shardwise.stacks import Arrival, Departure, abstract, stacked
from shardwise.value import Value

# What devices do together, each counting on the others to be in the same iteration.
_TOGETHER = frozenset(
    ["pure_callback", "io_callback", "debug_callback", "debug_print", "rng_uniform", "shard_map",
     "auto_to_manual", "manual_to_auto"]
)  # fmt: skip


def equations(body: Body) -> Iterator[Eqn]:
    """All equations of a body, bodies in it included."""
    for eqn in body.eqns:
        yield eqn
        for sub in eqn.bodies:
            yield from equations(sub)


@dataclasses.dataclass(frozen=True)
class _ScanPlan:
    """What was decided.  `asked`: of stacks that are constants of a loop around this one, the layouts
    that the body asked for slices in: the stack may be brought there before that loop."""

    constants: Hoisted
    carries: tuple[Sharding, ...]
    arrivals: tuple[Arrival, ...]
    departures: tuple[Departure, ...]
    lead: Axes = ()
    asked: tuple[tuple[Sharding, ...], ...] = ()


class _Scan:
    def __init__(self, p: Partitioner, eqn: Eqn, ins: list[Value]):
        self.p, self.eqn = p, eqn
        (self.body,) = eqn.bodies
        n, c = eqn.params["num_consts"], eqn.params["num_carry"]
        self.init, self.xs = ins[n : n + c], ins[n + c :]
        self.carries, self.x_vars = self.body.invars[n : n + c], self.body.invars[n + c :]
        self.stacks = [*eqn.invars[n + c :], *eqn.outvars[c:]]
        self.length = eqn.params["length"]
        self.traced: Any = None
        self.constants = Constants(p, eqn, self.body, ins[:n], self.length)
        summed = tuple(p.terms.get(v) for v in self.body.outvars)
        key = situation(eqn, ins), summed
        if key not in p.loops:
            p.loops[key] = self.decide()
        self.plan: _ScanPlan = p.loops[key]
        sums = accumulate.sums(self.body, self.carries, self.init)
        self.stacks_of = accumulate.stacks(self.body, self.carries, sums)
        for x, layouts in zip(self.xs, self.plan.asked, strict=False):
            if x.asked is not None:
                x.asked.update(map(stacked, layouts))

    # deciding

    def decide(self, share: bool = True) -> _ScanPlan:
        p, c = self.p, len(self.carries)
        plain = tuple(p.wanted(v) for v in self.carries)
        sums = accumulate.sums(self.body, self.carries, self.init)
        ys = list(zip(self.eqn.outvars[c:], self.body.outvars[c:], strict=True))
        lead = self.shared(len(sums)) if share else ()
        arrivals = tuple(
            Arrival(v, (p.wanted(v),), lead=lead) if lead else Arrival.of(p, x, v)
            for x, v in zip(self.xs, self.x_vars, strict=True)
        )
        led = not lead and any(p.wanted(o).axes[0] for o, _ in ys)
        choices = any(len(a.slices) > 1 for a in arrivals)
        branches = any(e.name in ("while", "cond") for e in equations(self.body))
        summed = any(v in p.terms for v in self.body.outvars[c:])
        again = any(x.times > 1 and not x.free for x in self.xs)
        matter = self.constants.matter or again or summed
        if not (sums or led or choices or matter or (lead and branches)):
            nothing = Hoisted(self.body, None, {})
            departures = self.departures(ys, [None] * len(ys), lead)
            return _ScanPlan(nothing, plain, arrivals, departures, lead)
        accumulate.announce(p, self.body, sums, max(self.length, 1))
        single: frozenset[Var] = frozenset()
        while True:
            watched = [*sums.values(), *self.constants.derived]
            with watching(p, watched) as seen:
                consts, xs, found = self.trial(plain, arrivals, single)
                hoisted, room = self.constants.decide(consts, seen, p.limits.room)
            if lead and sums and memory.peak_temporaries(self.traced) > p.limits.room:
                return self.decide(share=False)  # split, a slice may take less
            if lead and branches and comm.find(self.traced, p.mesh):
                return self.decide(share=False)  # devices may part ways, and wait for each other
            if not choices and hoisted.refused <= single:
                break
            # the body may choose otherwise when told what it cannot have
            single |= hoisted.refused
            arrivals = tuple(a.settled(x) for a, x in zip(arrivals, xs, strict=True))
            choices = False
        carries = accumulate.settled(p, self.body, self.carries, plain, sums, seen, room)
        departures = self.departures(ys, found, lead)
        asked = tuple(
            tuple(s for s in x.asked or () if not s.partial) if x.times > 1 and not a.flat else ()
            for a, x in zip(arrivals, xs, strict=True)
        )
        return _ScanPlan(hoisted, tuple(carries), arrivals, departures, lead, asked)

    def shared(self, sums: int) -> Axes:
        """The atoms over which the iterations are shared out: each device runs those whose slices it has.

        That can be where iterations do not depend on each other, but for sums, the stacks are split over
        the loop dim, and nothing in the body is split over the same atoms.  Padding would be added up
        too, and could keep a loop in the body alive: there must be none then.
        """
        p, c = self.p, len(self.carries)
        if any(e.name in _TOGETHER for e in equations(self.body)):
            return ()
        lead = next((a for v in self.stacks if (a := p.wanted(v).axes[0])), ())
        rows = {p.padded(v)[0] for v in self.stacks}
        if not lead or sums < c or len(rows) > 1 or max(rows) % p.mesh.size(lead):
            return ()
        if max(rows) != self.length and (c or any(e.name == "while" for e in equations(self.body))):
            return ()
        inner = (v for e in equations(self.body) for b in e.bodies for v in b.invars)
        made = (v for e in equations(self.body) for v in e.outvars)
        values = {*self.body.invars, *self.body.outvars, *inner, *made}
        used = {a for v in values for dim in p.completion.axes.get(v, ()) for a in dim}
        return () if used & set(lead) or not self.pays(lead) else lead

    def pays(self, lead: Axes) -> bool:
        """Whether reducing the sums of shared iterations sends no more than gathering the slices."""
        p = self.p
        sums = gathers = 0.0
        for v in self.carries:
            s = p.wanted(v)
            layout = Layout(v.shape, p.padded(v), s.with_partial(p.mesh.sort(lead)))
            sums += reshard_bytes(layout, s, v.itemsize, p.mesh)
        for x, v in zip(self.xs, self.x_vars, strict=True):
            if not x.free and not x.first.partial:
                whole = stacked(p.wanted(v))
                gathers += reshard_bytes(x.layout(x.first), whole, x.itemsize, p.mesh)
        return sums <= gathers or not self.carries

    def trial(
        self, carries: Sequence[Sharding], arrivals: Sequence[Arrival], single: frozenset[Var]
    ) -> tuple[list[Value], list[Value], list[Sharding | None]]:
        """The body on shapes: its constants and slices, asked for this and that, and how results lie."""
        p = self.p
        consts: list[Value] = []
        slices: list[Value] = []
        outs: list[Value] = []

        def once(carry: Sequence[Any], xs: Sequence[Any]) -> None:
            consts.extend(self.constants.values(asked=True, single=single))
            for a, x, blocks in zip(arrivals, self.xs, xs, strict=True):
                value = Value(a.var, p.padded(a.var), dict(zip(a.slices, blocks, strict=True)))
                value.asked, value.times = Counter(), x.times
                slices.append(value)
            values = [p.value(*v) for v in zip(self.carries, carry, carries, strict=True)]
            outs.extend(p.run(self.body, [*consts, *values, *slices]))

        carry = [abstract(p, v, [s])[0] for v, s in zip(self.carries, carries, strict=True)]
        traced = abstractly(once, carry, [abstract(p, a.var, a.slices) for a in arrivals])
        self.traced = traced.jaxpr
        found = [None if y.free else y.first for y in outs[len(self.carries) :]]
        return consts, slices, found

    def departures(
        self, ys: Sequence[tuple[Var, Var]], found: Sequence[Sharding | None], lead: Axes
    ) -> tuple[Departure, ...]:
        if lead:
            inner = [Sharding(self.p.wanted(o).drop(lead).axes[1:]) for o, _ in ys]
            return tuple(Departure(o, s, lead=lead) for (o, _), s in zip(ys, inner, strict=True))
        out = []
        others = {*self.body.invars, *self.body.outvars[: len(self.carries)]}
        for (o, v), s in zip(ys, found, strict=True):
            d = Departure.of(self.p, o, v, s)
            if v in self.p.terms and s is not None and s.partial and s.op == "sum":
                d = Departure(o, s)  # the loop around this one adds the stacks up
            moved = not d.own and not d.slice.partial
            if self.p.wanted(o).axes[0] and moved and v not in others:
                self.p.preferred[v] = d.slice
            out.append(d)
        return tuple(out)

    # emitting

    def run(self) -> list[Value]:
        p, eqn, plan = self.p, self.eqn, self.plan
        self.constants.hoist(plan.constants)
        given = [
            a.send(p, eqn, x, v)
            for a, x, v in zip(plan.arrivals, self.xs, self.stacks, strict=False)
        ]
        init = hand(p, eqn, self.init, self.carries, plan.carries)
        departures = [d.adding(p) for d in plan.departures]
        kept = [d for d in departures if d.kept]
        count = jnp.arange(self.length, dtype=jnp.int32) if kept else None
        leaving = list(departures)
        narrow = [tpu.read_as(self.body, v) if tpu.tracing() else None for v in self.x_vars]

        def step(state: Any, item: Any) -> Any:
            (carry, kept), (xs, i) = state, item
            xs = [
                tpu.rounded(x, t) if t is not None else x for x, t in zip(xs, narrow, strict=True)
            ]
            outs = self.iteration(carry, xs)
            c = len(carry)
            made = zip(departures, outs[c:], strict=True)
            leaving[:] = [d.as_read(p, y) for d, y in made]
            ys = hand(p, eqn, outs[c:], self.y_vars(c), [d.slice for d in leaving])
            pairs = list(zip(leaving, ys, strict=True))
            rows = iter(kept)
            kept = [d.write(p, next(rows), i, y) for d, y in pairs if d.kept]
            new = hand(p, eqn, outs[:c], self.carries, plan.carries)
            return (new, kept), [y for d, y in pairs if not d.kept]

        params = {k: eqn.params[k] for k in ("length", "reverse", "unroll") if k in eqn.params}
        if plan.lead:
            params["length"] = p.padded(self.stacks[0])[0] // p.mesh.size(plan.lead)
        start = init, [d.start(p) for d in kept]
        (final, written), ys = lax.scan(step, start, (given, count), **params)
        terms = [s.with_partial(p.mesh.sort((*s.partial, *plan.lead))) for s in plan.carries]
        ends = zip(eqn.outvars, final, terms, strict=False)
        out = [p.value(o, b, s) for o, b, s in ends]
        owned, rest = iter(written), iter(ys)
        return out + [d.result(p, next(owned if d.kept else rest)) for d in leaving]

    def y_vars(self, c: int) -> list[Var]:
        return self.plan.constants.inside.outvars[c:]

    def iteration(self, carry: Sequence[Any], xs: Sequence[Any]) -> list[Value]:
        p, plan = self.p, self.plan
        values = self.constants.values(single=plan.constants.refused)
        held = [p.value(*v) for v in zip(self.carries, carry, plan.carries, strict=True)]
        values += held
        at = dict(zip(self.carries, held, strict=True))
        adding = {o: (v, at[v], d) for o, (v, d) in self.stacks_of.items()}
        for a, stack, x in zip(plan.arrivals, self.xs, xs, strict=True):
            value = p.value(a.var, a.receive(p, self.eqn, x), a.slice)
            value.times = stack.times
            values.append(value)
        p.accumulators |= adding
        try:
            return p.run(plan.constants.inside, [*values, *self.constants.held()])
        finally:  # their blocks are of this trace: a later trial must not meet them
            for o in adding:
                del p.accumulators[o]


def scan(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    return _Scan(p, eqn, ins).run()
