"""Bodies that lie alike, emitted once: the layers of an unrolled network under `jax.checkpoint`.

Their equations hold copies of one body (`copies`).  Where completion gave a copy the same shardings and
padded sizes as an earlier one, and its operands come in the same layouts, what would be emitted is the
same too.  The first such copy becomes a jitted function, and the others are calls of it, which JAX neither
traces nor lowers again (as it does for the program of one device).  XLA inlines calls: the compiled program
is that of bodies emitted one by one.

A backward pass only: the inputs of its bodies go through a barrier, so nothing that is brought to a
layout inside could be read again outside.

What the notes say inside the function is of the first copy; `Call.of_mine` says it of another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from shardwise.notes import Note
from shardwise.partition import Partitioner
from shardwise.program import Body, Eqn
from shardwise.sharding import Sharding
from shardwise.value import Value


@dataclasses.dataclass(frozen=True)
class Call(Note):
    """The note of a call of what was emitted for the body `first`, a copy of the equation's own."""

    first: Body | None = None

    @functools.cached_property
    def _mine(self) -> dict[Any, Any]:
        """What of `first` is what of this equation's body: variables, their names, and equations."""
        assert self.first is not None and self.eqn is not None
        first, (mine,) = self.first, self.eqn.bodies
        out: dict[Any, Any] = dict(zip(first.equations(), mine.equations(), strict=True))
        for a, b in zip(first.variables(), mine.variables(), strict=True):
            out[a], out[a.label] = b, b.label
        return out

    def of_mine(self, note: Note) -> Note:
        """What a note inside the function says, said of this equation's body."""
        eqn, var, value = (self._mine.get(x, x) for x in (note.eqn, note.var, note.value))
        return dataclasses.replace(note, eqn=eqn, var=var, value=value)


@dataclasses.dataclass
class Emitted:
    """A body as a jitted function of its operands' blocks.

    Attributes:
      outs: of each result its padded sizes, the shardings it comes out in, and whether it is zero.
      again: whether other copies may call it; not where they have fallbacks to report of their own.
    """

    body: Body
    function: Any
    outs: list[tuple[tuple[int, ...], list[Sharding], bool]]
    again: bool = True


def run(p: Partitioner, eqn: Eqn, body: Body, values: Sequence[Value]) -> list[Value]:
    """Run the body of an equation on values; as a call where it repeats and each has one layout."""
    many = any(len(v.variants) != 1 or v.asked is not None for v in values)
    adds = p.accumulators and any(v in p.accumulators for v in body.variables())
    if body.origin is None or many or adds:
        return p.run(body, values)
    key = (body.origin, _situation(p, body), tuple((v.padded, v.first) for v in values))
    emitted = p.emitted.get(key)
    if emitted is None:
        fallbacks = len(p.fallbacks)
        emitted = p.emitted[key] = _emitted(p, eqn.name, body, values)
        outs = _call(p, eqn, body, values, emitted)
        emitted.again = len(p.fallbacks) == fallbacks
        return outs
    if not emitted.again:
        return p.run(body, values)
    for mine, first in zip(body.equations(), emitted.body.equations(), strict=True):
        if first in p.eqn_choices:
            p.eqn_choices[mine] = p.eqn_choices[first]
    return _call(p, eqn, body, values, emitted)


def _situation(p: Partitioner, body: Body) -> Any:
    """All that emitting a body depends on, other than the body and how its operands lie."""
    c = p.completion
    return tuple(
        (tuple(c.axes[v]) if v in c.axes else None, c.padded.get(v), p.terms.get(v))
        for v in body.variables()
    )


def _emitted(p: Partitioner, name: str, body: Body, values: Sequence[Value]) -> Emitted:
    outs = []
    layouts = [(v.padded, v.first) for v in values]

    def function(*blocks: Any) -> list[list[Any]]:
        ins = [
            Value(var, padded, {s: x})
            for var, x, (padded, s) in zip(body.invars, blocks, layouts, strict=True)
        ]
        results = p.run(body, ins)
        for v, var in zip(results, body.outvars, strict=True):
            if not v.variants:  # a created value is made outside of the trace it was created in
                p.get(v, p.wanted(var))
        outs[:] = [(v.padded, list(v.variants), v.zero) for v in results]
        return [list(v.variants.values()) for v in results]

    function.__name__ = name
    return Emitted(body, jax.jit(function), outs)


def _call(
    p: Partitioner, eqn: Eqn, body: Body, values: Sequence[Value], emitted: Emitted
) -> list[Value]:
    with p.noted(Call(eqn, "call", first=emitted.body)):
        results = emitted.function(*[v.variants[v.first] for v in values])
    return [
        Value(var, padded, dict(zip(shardings, blocks, strict=True)), zero=zero)
        for var, blocks, (padded, shardings, zero) in zip(
            body.outvars, results, emitted.outs, strict=True
        )
    ]
