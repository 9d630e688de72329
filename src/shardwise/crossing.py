"""Into and out of manual control: a nested `jax.shard_map`, `auto_to_manual` (GSPMD 3.4).

Operands are brought to the layouts the user's specs say, over the axes under manual control; over the
others they lie as the body wants them.  The body is then partitioned like any program, on a mesh that has
only those other atoms left.
"""

from __future__ import annotations

from shardwise.border import realign
from shardwise.control import HANDLERS as _CONTROL
from shardwise.notes import Note
from shardwise.partition import Handler, Partitioner
from shardwise.program import Eqn, Var
from shardwise.regions import Dims
from shardwise.sharding import Axes, Sharding
from shardwise.value import Value


def shard_map(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    (body,) = eqn.bodies
    regions = p.completion.regions
    inside = p.on(regions.inside[eqn])
    values = [enter(p, eqn, *x) for x in zip(ins, body.invars, regions.entries[eqn], strict=True)]
    outs = inside.run(body, values)
    return [
        leave(p, inside, eqn, *x)
        for x in zip(outs, body.outvars, eqn.outvars, regions.exits[eqn], strict=True)
    ]


def auto_to_manual(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    (dims,) = p.completion.regions.entries[eqn]
    return [enter(p, eqn, ins[0], eqn.outvars[0], dims)]


def manual_to_auto(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    regions = p.completion.regions
    (dims,), inside = regions.exits[eqn], p.on(regions.inside[eqn])
    (outer,), terms = eqn.outvars, regions.terms[eqn]
    return [leave(p, inside, eqn, ins[0], eqn.invars[0], outer, dims, terms)]


def enter(p: Partitioner, eqn: Eqn, value: Value, inner: Var, dims: Dims) -> Value:
    """A value as the user's blocks of it."""
    rest = _even(p, inner, dims)
    note = Note(eqn, "manual", value=value.name)
    padded = tuple(s if a else q for s, q, a in
                   zip(value.shape, p.padded(inner), dims, strict=True))  # fmt: skip
    target = Sharding(tuple((*a, *b) for a, b in zip(dims, rest.axes, strict=True)))
    x = p.get(_at(p, value, padded, note), target, note)
    return Value(inner, p.padded(inner), {rest: x})


def leave(
    p: Partitioner, inside: Partitioner, eqn: Eqn, value: Value, inner: Var, outer: Var, dims: Dims,
    terms: Axes = (),
) -> Value:  # fmt: skip
    """The user's blocks as one value again; along `terms` they are terms of a sum."""
    rest = _even(p, inner, dims)
    note = Note(eqn, "manual", value=value.name)
    x = inside.get(inside.repadded(value, inner), rest, note)
    axes = tuple((*a, *b) for a, b in zip(dims, rest.axes, strict=True))
    padded = tuple(s if a else q for s, q, a in
                   zip(outer.shape, p.padded(inner), dims, strict=True))  # fmt: skip
    return _at(p, Value(outer, padded, {Sharding(axes, p.mesh.sort(terms)): x}),
               p.padded(outer), note)  # fmt: skip


def _even(p: Partitioner, inner: Var, dims: Dims) -> Sharding:
    """How a value of the body lies at the crossing, over the atoms that are not manual.

    Blocks of blocks are contiguous only where they are even.
    """
    s, padded = p.wanted(inner), p.padded(inner)
    return Sharding(tuple(
        () if manual and padded[d] != inner.shape[d] else axes
        for d, (axes, manual) in enumerate(zip(s.axes, dims, strict=True))
    ))  # fmt: skip


def _at(p: Partitioner, value: Value, padded: tuple[int, ...], note: Note) -> Value:
    """A value with dims padded to other sizes: blocks are realigned, or gathered where they cannot be."""
    if value.padded == padded:
        return value
    differ = [d for d, (a, b) in enumerate(zip(value.padded, padded, strict=True)) if a != b]
    s = Sharding.replicated(len(value.shape)) if value.free else value.first.tiling
    for d in differ:
        if value.free or padded[d] % p.mesh.size(s.axes[d]):
            s = s.with_dim(d, ())
    x = p.get(value, s, note)
    x = realign(p, x, value.layout(s), padded, note)
    return value.moved(padded, {s: x})


HANDLERS: dict[str, Handler] = {
    **_CONTROL,
    "shard_map": shard_map,
    "auto_to_manual": auto_to_manual,
    "manual_to_auto": manual_to_auto,
}
