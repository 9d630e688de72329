"""What can leave a loop does, when memory allows.

A value from outside that a body brings to another layout is brought there in every iteration, and
always with the same outcome: an all-gather of a weight, a reduction of a mask, the same after a cast.
A *trial* runs the body once, abstractly, and sees which layouts of loop constants, and of values made
of nothing but constants, cost communication.  Those are made once, before the loop, and held
through it, as long as the blocks held take no more than `Limits.room` bytes in all; the equations that lead
to them run before the loop too.

While the layouts of the body are chosen, bringing a loop constant somewhere is priced as one
iteration's share (`Operand.times`): gathering a weight once can beat reducing activations in
every iteration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from shardwise.capture import prune
from shardwise.invariants import invariants
from shardwise.notes import Note
from shardwise.ops.registry import comm_bytes
from shardwise.partition import Partitioner
from shardwise.program import Body, Eqn, Var
from shardwise.reshard import reshard_bytes
from shardwise.sharding import Layout, Sharding
from shardwise.value import Value, reachable

UNKNOWN_TRIPS = 8  # what a loop is taken to run whose number of trips is known at run time only


def situation(eqn: Eqn, ins: Sequence[Value]) -> Any:
    """What the decisions about a loop depend on."""
    return eqn, tuple((tuple(v.variants), v.padded, v.free, v.zero, v.times) for v in ins)


def hand(p: Partitioner, eqn: Eqn, values: Sequence[Value], variables: Sequence[Var],
         shardings: Sequence[Sharding]) -> list[Any]:  # fmt: skip
    """Blocks of `values` in the shardings the body's variables have."""
    out = []
    for v, var, s in zip(values, variables, shardings, strict=True):
        out.append(p.get(_named(p, v, var), s, Note(eqn, "loop", var=var)))
    return out


def _named(p: Partitioner, v: Value, var: Var) -> Value:
    return v if len(v.shape) != len(var.shape) else p.repadded(v, var)


@contextlib.contextmanager
def watching(p: Partitioner, variables: Sequence[Var]) -> Iterator[dict[Var, Value | None]]:
    """A trial run: nothing it notes stays, and what becomes of `variables` is seen."""
    watch, notes, fallbacks = p.watch, len(p.notes), len(p.fallbacks)
    p.watch = dict.fromkeys(variables)
    try:
        yield p.watch
    finally:
        p.watch = watch
        del p.notes[notes:], p.fallbacks[fallbacks:]


def abstractly(f: Callable[..., Any], *args: Any) -> Any:
    """Run a function of blocks on shapes only, for what it does on the way; returns what was traced."""

    def run(*xs: Any) -> int:
        f(*xs)
        return 0

    return jax.make_jaxpr(run)(*args)


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """What is done before a loop for one of its bodies.

    Attributes:
      inside: the body that runs in the loop: its inputs, then the values made before.
      before: constants -> those values; None where there are none.
      layouts: constant, or value made before -> the layouts it is held in (of a constant: those beside
        the completed one).
      refused: constants that would have been held and did not fit.
    """

    inside: Body
    before: Body | None
    layouts: Mapping[Var, tuple[Sharding, ...]]
    refused: frozenset[Var] = frozenset()


class Constants:
    """The values from outside that a body reads in every iteration.

    `count` of the body's inputs are such; `trips` is how often the body runs.
    """

    def __init__(self, p: Partitioner, eqn: Eqn, body: Body, values: Sequence[Value], trips: int):
        self.p, self.eqn, self.body, self.trips = p, eqn, body, trips
        self.vars = body.invars[: len(values)]
        self.outer = [_named(p, v, var) for v, var in zip(values, self.vars, strict=True)]
        self.blocks: list[dict[Sharding, Any]] = []
        for v, var in zip(self.outer, self.vars, strict=True):
            s = p.wanted(var)
            self.blocks.append({s: p.get(v, s, Note(eqn, "loop", var=var))})
        self.made: list[tuple[Var, dict[Sharding, Any]]] = []
        self.equations = invariants(body, self.vars) if self.matter else []
        p.invariant.update(self.derived)

    @property
    def matter(self) -> bool:
        """Whether moving them can cost anything, so that it may be worth a trial."""
        return self.trips > 1 and any(s.used for blocks in self.blocks for s in blocks)

    @property
    def derived(self) -> list[Var]:
        return [v for e in self.equations for v in e.outvars]

    def values(self, asked: bool = False, single: frozenset[Var] = frozenset()) -> list[Value]:
        """The constants for one run of the body; `asked`: count what layouts are asked for.

        `single`: constants, and values made of them, that will not be held in another layout, whatever it
        would save.
        """
        self.p.invariant.update(self.derived)
        self.p.invariant.difference_update(single)
        out = []
        for v, outer, blocks in zip(self.vars, self.outer, self.blocks, strict=True):
            value = Value(v, self.p.padded(v), dict(blocks))
            value.times = 1 if v in single else self.trips * outer.times
            value.asked = Counter() if asked else None
            out.append(value)
        return out

    def held(self) -> list[Value]:
        """What was made before the loop, for one run of the body."""
        out = []
        for v, blocks in self.made:
            value = Value(v, self.p.padded(v), dict(blocks))
            value.times = self.trips
            out.append(value)
        return out

    def decide(
        self, values: Sequence[Value], seen: Mapping[Var, Value | None], room: float
    ) -> tuple[Hoisted, float]:
        """What to hold, after a trial; and how much room is left."""
        starts = {v: list(b) for v, b in zip(self.vars, self.blocks, strict=True)}
        tracked: dict[Var, Value] = dict(zip(self.vars, values, strict=True))
        sent: dict[tuple[Var, Sharding], float] = {}  # in every iteration, to have a value so
        for eqn in self.equations:
            for v in eqn.outvars:
                value = seen.get(v)
                if value is not None and not value.free and value.variants:
                    tracked[v], starts[v] = value, [value.first]
                    sent[v, value.first] = self._own(eqn)
        for v, value in tracked.items():
            for s in value.asked or () if self.trips > 1 else ():
                sent[v, s] = sent.get((v, s), 0) + _bytes(self.p, value, starts[v], s)
        layouts: dict[Var, list[Sharding]] = {}
        refused = set()
        for (v, s), n in sorted(sent.items(), key=lambda x: -x[1]):
            value = tracked[v]
            held = layouts.get(v, ())
            if s.partial or not n or (held and not _bytes(self.p, value, [*starts[v], *held], s)):
                continue
            need = _size(self.p, value, s)
            if need > room:
                refused.add(v)
                continue
            room -= need
            layouts.setdefault(v, []).append(s)
        return self._split(layouts, refused), room

    def _own(self, eqn: Eqn) -> float:
        """What an equation's own code sends."""
        found = self.p.eqn_choices.get(eqn)
        if found is None or not found[0].rule.special:
            return 0.0
        return comm_bytes(found[0].context(self.p.mesh), eqn)

    def _split(self, layouts: Mapping[Var, list[Sharding]], refused: set[Var]) -> Hoisted:
        """The body without what is made before it."""
        frozen = {v: tuple(s) for v, s in layouts.items()}
        derived = [v for v in self.derived if v in layouts]
        if not derived:
            return Hoisted(self.body, None, frozen, frozenset(refused))
        b, early = self.body, self.equations
        before = Body(list(self.vars), derived, list(early), list(b.consts))
        eqns = [e for e in b.eqns if not (e in early and set(e.outvars) <= set(derived))]
        inside = Body([*b.invars, *derived], b.outvars, eqns, list(b.consts))
        prune(before)
        prune(inside)
        self.p.counted(before)
        return Hoisted(self.p.counted(inside), before, frozen, frozenset(refused))

    def hoist(self, h: Hoisted) -> None:
        """Make, outside the loop, what is held through it."""
        p = self.p

        def note(v: Var) -> Note:
            return Note(self.eqn, "hoisted", var=v)

        for v, outer, blocks in zip(self.vars, self.outer, self.blocks, strict=True):
            for s in h.layouts.get(v, ()):
                blocks[s] = p.get(outer, s, note(v))
        if h.before is None:
            return
        inputs = [
            Value(v, p.padded(v), dict(b)) for v, b in zip(self.vars, self.blocks, strict=True)
        ]
        for v, out in zip(h.before.outvars, p.run(h.before, inputs), strict=True):
            self.made.append((v, {s: p.get(out, s, note(v)) for s in h.layouts[v]}))


def _bytes(p: Partitioner, value: Value, starts: Sequence[Sharding], s: Sharding) -> float:
    return min(
        (
            reshard_bytes(value.layout(a), s, value.itemsize, p.mesh)
            for a in starts
            if reachable(a, s)
        ),
        default=0.0,
    )


def _size(p: Partitioner, value: Value, s: Sharding) -> int:
    return math.prod(Layout(value.shape, value.padded, s).local_shape(p.mesh)) * value.itemsize
