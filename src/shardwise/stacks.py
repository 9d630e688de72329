"""Stacks split over the loop dim: what a scan reads a slice of, or writes one into, in each iteration.

The stack of layers `w: [L, M, H]` split over x on L lies with its owners, and every device needs each
slice.  Gathering the stack before the loop holds L layers where one is needed.  Sending a slice
at a time from its owner would be an all-reduce of the masked slice in every iteration, twice the bytes.
So the axis is *moved* before the loop, from L to a dim of the slice:

    (x, -, -) -> (-, x, -)      one all-to-all of the blocks, 1/g of the stack's bytes; as much memory

and an iteration gathers its slice, or, better, computes with the slice split.  Where no dim of the slice
can take the axis, the slice is flattened for it.  Results go the other way: the slices come out
split (a pending sum by reduce-scatter) and one all-to-all brings the stack to its owners; slices that
every device has anyway are written by their owners only, with nothing sent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise.halo import all_to_all
from shardwise.notes import Note
from shardwise.partition import Partitioner
from shardwise.program import Eqn, Var
from shardwise.reshard import reshard_bytes
from shardwise.sharding import Axes, Layout, Sharding
from shardwise.value import Value, reachable

# A collective in every iteration for less than this is not worth it: such stacks are gathered.
SMALL_SLICE = 512


def stacked(s: Sharding, lead: Axes = ()) -> Sharding:
    """The sharding of a stack of values: the loop dim first."""
    return Sharding((lead, *s.axes), s.partial, s.op)


def moved(p: Partitioner, v: Var, inner: Sharding, lead: Axes) -> list[Sharding]:
    """Shardings of a slice with the loop dim's atoms on it too: on one dim, else spread over several."""

    def takes(s: Sharding, d: int) -> bool:
        return v.shape[d] > 1 and p.padded(v)[d] % p.mesh.size(s.axes[d]) == 0

    def with_atoms(s: Sharding, d: int, atoms: Axes) -> Sharding:
        return s.with_dim(d, (*s.axes[d], *atoms))

    whole = [with_atoms(inner, d, lead) for d in range(v.rank)]
    found = [s for d, s in enumerate(whole) if takes(s, d)]
    if found:
        return found
    s: Sharding | None = inner
    for a in lead:
        options = [with_atoms(s, d, (a,)) for d in range(v.rank)] if s else []
        s = next((o for d, o in enumerate(options) if takes(o, d)), None)
    return [s] if s else []


@dataclasses.dataclass(frozen=True)
class Arrival:
    """How the slices of a stacked operand come to the body.

    Attributes:
      var: the body's variable; `slices` the layouts a slice may be handed over in: the first, until a
        trial has seen which the body asks for.
      flat: the atoms of the loop dim, where slices are flattened and gathered in every iteration.
      lead: the atoms of the loop dim, where every device runs the iterations it owns.
    """

    var: Var
    slices: tuple[Sharding, ...]
    flat: Axes = ()
    lead: Axes = ()

    @property
    def slice(self) -> Sharding:
        return self.slices[0]

    @staticmethod
    def of(p: Partitioner, value: Value, var: Var) -> Arrival:
        inner = p.wanted(var)
        lead = _lead(p, value, inner)
        layout = Layout(var.shape, p.padded(var), inner)
        n = math.prod(layout.local_shape(p.mesh)) * var.itemsize
        extended = jnp.issubdtype(var.dtype, jax.dtypes.extended)
        if not lead or n <= SMALL_SLICE or extended:
            slices = (*_as_left(p, value, var, inner), inner, *_held(p, value, var))
            return Arrival(var, tuple(dict.fromkeys(slices)))
        if slices := moved(p, var, inner, lead):
            at_hand = [s for s in slices if stacked(s) in value.variants]
            return Arrival(var, (*at_hand, *(s for s in slices if s not in at_hand)))
        return Arrival(var, (inner,), lead)

    def settled(self, value: Value) -> Arrival:
        """With the one layout that a trial asked for most often (the first of equals)."""
        asked = value.asked or {}
        return dataclasses.replace(self, slices=(max(self.slices, key=lambda s: asked.get(s, 0)),))

    def shape(self, p: Partitioner, s: Sharding) -> tuple[int, ...]:
        return Layout(self.var.shape, p.padded(self.var), s).local_shape(p.mesh)

    def send(self, p: Partitioner, eqn: Eqn, value: Value, stack: Var) -> Any:
        """Before the loop: this device's part of every slice."""
        note = Note(eqn, "stack" if self.slice != p.wanted(self.var) else "loop", var=stack)
        if not self.flat:
            return p.get(value, stacked(self.slice, self.lead), note)
        x = p.get(value, stacked(self.slice, self.flat), note)
        rows = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        short = -rows.shape[1] % p.mesh.size(self.flat)
        rows = jnp.pad(rows, ((0, 0), (0, short)))
        with p.noted(self._note(eqn, stack, value, "stack")):
            # split and joined through a leading dim, as in `reshard_emit`
            parts = rows.reshape(rows.shape[0], p.mesh.size(self.flat), -1).swapaxes(0, 1)
            parts = all_to_all(parts, self.flat)
            rows = parts.reshape(-1, parts.shape[2])
        return rows[: stack.shape[0]]

    def receive(self, p: Partitioner, eqn: Eqn, part: Any) -> Any:
        """In the loop: the slice, in the layout the body gets it in."""
        if not self.flat:
            return part
        with p.noted(self._note(eqn, self.var, None, "loop")):
            flat = lax.all_gather(part, self.flat, axis=0, tiled=True)
        shape = self.shape(p, self.slice)
        return flat[: math.prod(shape)].reshape(shape)

    def _note(self, eqn: Eqn, v: Var, value: Value | None, what: str) -> Note:
        name = value.name if value else v.name or f"v{v.id}"
        return Note(eqn, what, name, v)


def _as_left(p: Partitioner, value: Value, var: Var, inner: Sharding) -> list[Sharding]:
    """The layout another loop left its slices in (`Departure.as_read`), if it is not the completed one."""
    if value.free or stacked(inner) in value.variants or not var.rank:
        return []
    s = value.first
    slices = Sharding(s.axes[1:])
    even = value.padded[1:] == p.padded(var)
    if s.partial or s.axes[0] or not even or not _no_larger(p, var, slices, inner):
        return []
    return [slices]


def _held(p: Partitioner, value: Value, var: Var) -> list[Sharding]:
    """The other layouts a stack is held in through a loop around this one (`hoist`)."""
    if value.free or value.times == 1 or value.padded[1:] != p.padded(var):
        return []
    return [Sharding(s.axes[1:]) for s in value.variants if not s.partial and not s.axes[0]]


def _no_larger(p: Partitioner, v: Var | Value, a: Sharding, b: Sharding) -> bool:
    """Whether a block in layout `a` takes no more than one in layout `b`."""
    padded = v.padded if isinstance(v, Value) else p.padded(v)

    def size(s: Sharding) -> int:
        return math.prod(Layout(v.shape, padded, s).local_shape(p.mesh))

    return size(a) <= size(b)


def _lead(p: Partitioner, value: Value, inner: Sharding) -> Axes:
    """The atoms that split the loop dim and do not split the slice; none where no gather is needed."""
    if value.free or 0 in value.shape:
        return ()
    target = stacked(inner)
    layouts = [value.layout(s) for s in value.variants if not s.partial]
    leads = [tuple(a for a in l.sharding.axes[0] if a not in inner.used) for l in layouts]
    free = any(not reshard_bytes(l, target, value.itemsize, p.mesh) for l in layouts)
    return () if free else min(filter(None, leads), key=len, default=())


@dataclasses.dataclass(frozen=True)
class Departure:
    """How the slices a body makes become a stack.

    Attributes:
      out: the stack; `slice` the layout a slice is brought to in the body.
      own: the atoms of the loop dim, where every device writes the slices it owns.
      lead: the atoms of the loop dim, where every device runs the iterations it owns.
      onto: the accumulator of a loop around this one that the slices are added to, its value, and the
        dim of it that is the loop's.
    """

    out: Var
    slice: Sharding
    own: Axes = ()
    lead: Axes = ()
    onto: tuple[Var, Value, int] | None = None

    @property
    def kept(self) -> bool:
        """Whether the stack is written by the body, not by the scan."""
        return bool(self.own) or self.onto is not None

    def adding(self, p: Partitioner) -> Departure:
        """With the accumulator that the stack is for, if that lies as the slices do."""
        found = p.accumulators.get(self.out)
        if found is None or self.own or self.lead:
            return self
        _, value, dim = found
        sizes = list(p.padded(self.out))
        sizes.insert(dim, sizes.pop(0))
        at_hand = not value.free and self._accumulator(dim) in value.variants
        return (
            dataclasses.replace(self, onto=found)
            if at_hand and value.padded == tuple(sizes)
            else self
        )

    def _accumulator(self, dim: int) -> Sharding:
        """The sharding of an accumulator of stacks whose dim `dim` is the loop's."""
        axes = self.slice.axes
        return Sharding((*axes[:dim], (), *axes[dim:]), self.slice.partial, self.slice.op)

    @staticmethod
    def of(p: Partitioner, out: Var, var: Var, found: Sharding | None) -> Departure:
        """The cheapest way, where slices are computed in layout `found` (None: in any)."""
        whole = p.wanted(out)
        inner, lead = Sharding(whole.axes[1:]), whole.axes[0]
        if not lead:
            return Departure(out, inner)
        ways: list[tuple[Sharding, Axes]] = [(s, ()) for s in moved(p, var, inner, lead)]
        if jnp.issubdtype(out.dtype, jax.dtypes.extended):
            ways.append((inner, ()))  # keys are few: whole until they are wanted split
        else:
            ways.insert(0, (inner, lead))

        def sent(way: tuple[Sharding, Axes]) -> float:
            s, own = way
            after = 0.0
            if not own:
                stack = Layout(out.shape, p.padded(out), stacked(s))
                after = reshard_bytes(stack, whole, out.itemsize, p.mesh)
            if found is None or not reachable(found, s):
                return after
            layout = Layout(var.shape, p.padded(var), found)
            return after + out.shape[0] * reshard_bytes(layout, s, out.itemsize, p.mesh)

        return Departure(out, *min(ways, key=sent))

    def as_read(self, p: Partitioner, value: Value) -> Departure:
        """With the layout that the body brought a slice to last, if only loops read the stack.

        Such stacks are what a backward pass needs of each iteration: the operand of a dot that was moved
        for it by an all-to-all is wanted there again.  It may take no more memory.
        """
        if self.kept or self.lead or value.free or set(p.uses.get(self.out, ())) - {"scan"}:
            return self
        s = next(reversed(value.variants))
        if s.partial or s in (self.slice, value.first) or value.padded != p.padded(self.out)[1:]:
            return self
        if not reshard_bytes(value.layout(value.first), s, value.itemsize, p.mesh):
            return self  # a slice costs nothing to take again, and would have to be gathered
        if any(n % p.mesh.size(a) for n, a in zip(value.padded, s.axes, strict=True)):
            return self
        if not _no_larger(p, value, s, self.slice):
            return self
        return dataclasses.replace(self, slice=s)

    def result(self, p: Partitioner, block: Any) -> Value:
        if self.onto is None:
            return p.value(self.out, block, stacked(self.slice, self.own or self.lead))
        carry, value, dim = self.onto
        out = value.moved(value.padded, {self._accumulator(dim): block})
        out.onto, out.zero = carry, False
        return out

    def start(self, p: Partitioner) -> Any:
        """The stack that the body writes, before the loop."""
        if self.onto is not None:
            return self.onto[1].variants[self._accumulator(self.onto[2])]
        layout = Layout(self.out.shape, p.padded(self.out), stacked(self.slice, self.own))
        return jnp.zeros(layout.local_shape(p.mesh), self.out.dtype)

    def write(self, p: Partitioner, stack: Any, i: Any, x: Any) -> Any:
        """Iteration `i`: its owner keeps the slice, or it is added to the accumulator."""
        if self.onto is not None:
            dim = self.onto[2]
            old = lax.dynamic_index_in_dim(stack, i, dim, keepdims=False)
            return lax.dynamic_update_index_in_dim(stack, old + x, i, dim)
        rows = stack.shape[0]
        row = i - lax.axis_index(self.own) * rows
        mine = (row >= 0) & (row < rows)
        row = jnp.clip(row, 0, rows - 1)
        old = lax.dynamic_index_in_dim(stack, row, keepdims=False)
        return lax.dynamic_update_index_in_dim(stack, jnp.where(mine, x, old), row, 0)


def abstract(p: Partitioner, v: Var, shardings: Sequence[Sharding]) -> list[Any]:
    """The blocks of a value, as shapes."""
    return [
        jax.ShapeDtypeStruct(Layout(v.shape, p.padded(v), s).local_shape(p.mesh), v.dtype)
        for s in shardings
    ]
