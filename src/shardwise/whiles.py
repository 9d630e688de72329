"""While loops, and `fori_loop` with a number of trips known at run time only.

As for a scan (`scans`), a carry lies in every iteration as completion gave it, and constants of the
condition and of the body are held in other layouts, and sums stay pending, as a trial run shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise import accumulate
from shardwise.cost import comm
from shardwise.hoist import (
    UNKNOWN_TRIPS,
    Constants,
    Hoisted,
    abstractly,
    hand,
    situation,
    watching,
)
from shardwise.notes import Note
from shardwise.ops.registry import LocalContext
from shardwise.partition import Partitioner
from shardwise.program import Eqn, Var
from shardwise.sharding import Sharding
from shardwise.stacks import abstract
from shardwise.value import Value


def _refused(hoisted: Sequence[Hoisted]) -> frozenset[Var]:
    return frozenset(v for h in hoisted for v in h.refused)


@dataclasses.dataclass(frozen=True)
class _WhilePlan:
    cond: Hoisted
    body: Hoisted
    carries: tuple[Sharding, ...]


class _While:
    """A loop until a predicate is false; vmapped, until all of a batch of predicates are.

    A batch of predicates means that each element stops by itself.  Where neither body communicates, a
    device runs until its own elements are done; else all devices agree in every iteration.
    """

    def __init__(self, p: Partitioner, eqn: Eqn, ins: list[Value]):
        self.p, self.eqn = p, eqn
        cond, body = eqn.bodies
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        self.cond, self.body = cond, body
        self.init = ins[n + m :]
        self.tests, self.carries = cond.invars[n:], body.invars[m:]
        (self.go,) = cond.outvars
        self.of_cond = Constants(p, eqn, cond, ins[:n], UNKNOWN_TRIPS)
        self.of_body = Constants(p, eqn, body, ins[n : n + m], UNKNOWN_TRIPS)
        key = situation(eqn, ins)
        if key not in p.loops:
            p.loops[key] = self.decide()
        self.plan: _WhilePlan = p.loops[key]

    def decide(self) -> _WhilePlan:
        p = self.p
        plain = _aligned(p.wanted(self.go), [p.wanted(v) for v in self.carries])
        tested = self._tested()
        sums = accumulate.sums(self.body, self.carries, self.init, tested)
        sums = {} if self.go.shape else sums
        both = self.of_cond, self.of_body
        if not (sums or any(c.matter for c in both)):
            return _WhilePlan(
                Hoisted(self.cond, None, {}), Hoisted(self.body, None, {}), tuple(plain)
            )
        accumulate.announce(p, self.body, sums, UNKNOWN_TRIPS)
        single: frozenset[Var] = frozenset()
        while True:
            watched = [*sums.values(), *(v for c in both for v in c.derived)]
            with watching(p, watched) as seen:
                found = self.trial(plain, single)
                room, hoisted = p.limits.room, []
                for c, values in zip(both, found, strict=True):
                    h, room = c.decide(values, seen, room)
                    hoisted.append(h)
            if _refused(hoisted) <= single:
                break
            single |= _refused(hoisted)
        carries = accumulate.settled(p, self.body, self.carries, plain, sums, seen, room)
        return _WhilePlan(hoisted[0], hoisted[1], tuple(carries))

    def _tested(self) -> set[Var]:
        """The carries that the condition reads."""
        read = {v for e in self.cond.eqns for v in e.invars} | set(self.cond.outvars)
        return {v for v, t in zip(self.carries, self.tests, strict=True) if t in read}

    def trial(
        self, carries: Sequence[Sharding], single: frozenset[Var]
    ) -> tuple[list[Value], list[Value]]:
        p = self.p
        found: list[list[Value]] = []

        def once(carry: Sequence[Any]) -> None:
            for c, body, variables in (
                (self.of_cond, self.cond, self.tests),
                (self.of_body, self.body, self.carries),
            ):
                consts = c.values(asked=True, single=single)
                values = [p.value(*v) for v in zip(variables, carry, carries, strict=True)]
                p.run(body, [*consts, *values])
                found.append(consts)

        abstractly(
            once, [abstract(p, v, [s])[0] for v, s in zip(self.carries, carries, strict=True)]
        )
        return found[0], found[1]

    def run(self) -> list[Value]:
        p, eqn, plan = self.p, self.eqn, self.plan
        self.of_cond.hoist(plan.cond)
        self.of_body.hoist(plan.body)
        init = hand(p, eqn, self.init, self.carries, plan.carries)
        if not self.go.shape:
            note = Note(eqn, "loop", var=self.go)

            def go(carry: Any) -> Any:
                return p.get(self.predicate(carry), Sharding(()), note)

            final = lax.while_loop(go, self.step, init)
        else:
            final = _batched_while(p, eqn, self.go, self.predicate, self.step, plan.carries, init)
        return [p.value(o, b, s) for o, b, s in zip(eqn.outvars, final, plan.carries, strict=True)]

    def predicate(self, carry: Sequence[Any]) -> Value:
        return self._run(self.of_cond, self.plan.cond, self.tests, carry)[0]

    def step(self, carry: Sequence[Any]) -> list[Any]:
        outs = self._run(self.of_body, self.plan.body, self.carries, carry)
        return hand(self.p, self.eqn, outs, self.carries, self.plan.carries)

    def _run(
        self, constants: Constants, hoisted: Hoisted, variables: Sequence[Var], carry: Sequence[Any]
    ) -> list[Value]:
        values = constants.values(single=hoisted.refused)
        values += [self.p.value(*v) for v in zip(variables, carry, self.plan.carries, strict=True)]
        return self.p.run(hoisted.inside, [*values, *constants.held()])


def while_loop(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    return _While(p, eqn, ins).run()


def _batched_while(
    p: Partitioner, eqn: Eqn, go_var: Var, predicate: Callable[..., Value],
    step: Callable[..., list[Any]], carry_s: Sequence[Sharding], init: Sequence[Any],
) -> Any:  # fmt: skip
    """Elements whose predicate is false keep their carry; the loop ends when none is left."""
    rank = go_var.rank
    aligned = Sharding(carry_s[0].axes[:rank])
    note = Note(eqn, "loop", var=go_var)

    def going(carry: Sequence[Any]) -> Any:
        """The predicates as the carries lie, false in the padding (it must not keep a loop alive)."""
        value = predicate(carry)
        x = p.get(value, aligned, note)
        ctx = LocalContext(p.mesh, None, {}, (), ())  # type: ignore[arg-type]
        for d in range(rank):
            x = ctx.mask(x, value.layout(aligned), d, False)
        return x

    def kept(carry: Sequence[Any]) -> list[Any]:
        go, new = going(carry), step(carry)
        return [
            lax.select(lax.broadcast_in_dim(go, a.shape, range(rank)), a, b)
            for a, b in zip(new, carry, strict=True)
        ]

    trial = jax.make_jaxpr(lambda c: (going(c), step(c)))(list(init))
    alone = not comm.find(trial, p.mesh)

    def some(carry: Sequence[Any]) -> Any:
        left = lax.reduce_or(going(carry), tuple(range(rank)))
        if alone or not aligned.used:
            return left
        with p.noted(note):
            return lax.pmax(left.astype(jnp.int32), p.mesh.sort(aligned.used)) > 0

    return lax.while_loop(some, kept, list(init))


def _aligned(predicate: Sharding, carries: Sequence[Sharding]) -> list[Sharding]:
    """Carries of a vmapped loop with their batch dims split as the predicates are."""
    n, used = predicate.rank, predicate.used
    return [Sharding((*predicate.axes, *(s.drop(used).axes[n:]))) if n else s for s in carries]
