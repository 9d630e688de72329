"""When a dot is windowed: where gathering an operand, or the terms of its result, takes too much.

The layouts of a dot are chosen first, as for any equation (`choose`).  Then, if the choice gathers
an operand of more bytes than allowed, or leaves terms of more where they are wanted scattered, the
largest of these values goes around instead (`ops.windowed`): the operand is brought only to where
the all-gather would start, or the result comes out where the reduce-scatter would end.

One value of a dot goes around, not two: every block of one would have to meet every block of the
other, and one of the two would be sent as often as the other has blocks.  And an operand gathered is
there for the next dot that reads it; blocks that went around are gone, and go around again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from shardwise.candidates import Operand, Result
from shardwise.choose import Choice
from shardwise.mesh import MeshAxes
from shardwise.ops.windowed import Window
from shardwise.reshard import plan_reshard
from shardwise.reshard_model import Step
from shardwise.sharding import Axes, Layout
from shardwise.value import reachable

# Of a device's memory, what one value that need not exist may take.
FRACTION = 1 / 8
ROOM = 64 << 20  # bytes that a loop may hold in order to move less, where no memory limit is given


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one gathered operand, or one result before its reduce-scatter, may take on a device.

    Attributes:
      asked: bytes, `spmd(windowed_einsum=...)`.
      memory: bytes of a device, `spmd(memory_limit=...)`, of which it may take `FRACTION`.
      loops: bytes that a loop may hold, `spmd(loop_memory=...)`.
    """

    asked: float | None = None
    memory: float | None = None
    loops: float | None = None

    @property
    def least(self) -> tuple[float, str]:
        """The limit, and the option it comes from."""
        asked = math.inf if self.asked is None else self.asked
        room = math.inf if self.memory is None else self.memory * FRACTION
        return (asked, "windowed_einsum") if asked <= room else (room, "memory_limit")

    @property
    def room(self) -> float:
        """Bytes a loop may hold on a device so that a collective is done once instead of every time."""
        if self.loops is not None:
            return self.loops
        return ROOM if self.memory is None else self.memory * FRACTION

    def window(self, operand: int | None, whole: Layout, block: Layout, n: int) -> Window:
        return Window(operand, whole, block, n, *self.least)


def windowed_choice(
    choice: Choice,
    operands: Sequence[Operand],
    results: Sequence[Result],
    mesh: MeshAxes,
    limits: Limits,
) -> Choice:
    """The choice for a dot, with the largest value beyond the limits going around if one is."""
    limit, _ = limits.least
    if limit == math.inf:
        return choice
    found = [
        (c.window.bytes, c)
        for c in (
            *_gathers(choice, operands, mesh, limits),
            *_scatters(choice, results, mesh, limits),
        )
        if c.window is not None and c.window.bytes > limit
    ]
    return max(found, key=lambda c: c[0], default=(0, choice))[1]


def _gathers(
    choice: Choice, operands: Sequence[Operand], mesh: MeshAxes, limits: Limits
) -> Iterator[Choice]:
    """The choice with an operand going around whose way to its layout ends in an all-gather."""
    for i, (o, whole) in enumerate(zip(operands, choice.ins, strict=True)):
        sources = [v for v in o.variants if reachable(v, whole.sharding)]
        if o.free or not sources or whole.sharding in sources:
            continue
        ways = [
            plan_reshard(whole.with_sharding(v), whole.sharding, o.itemsize, mesh) for v in sources
        ]
        way = min(ways, key=lambda steps: round(sum(s.bytes for s in steps), 3))
        block = _ungathered(way, whole, o.itemsize, mesh)
        if block is None:
            continue
        window = limits.window(i, whole, block, _bytes(whole, o.itemsize, mesh))
        if not _copies_differ(choice, window):
            ins = (*choice.ins[:i], block, *choice.ins[i + 1 :])
            yield dataclasses.replace(choice, ins=ins, window=window)


def _ungathered(way: Sequence[Step], whole: Layout, itemsize: int, mesh: MeshAxes) -> Layout | None:
    """The layout before the all-gathers a way ends in; None where it does not end in one.

    Of several, only those count that send no less than blocks going around would: between two of
    them padding may be cut off.
    """
    block, sent = None, 0.0
    for step in itertools.takewhile(lambda s: s.kind == "all-gather", reversed(way)):
        sent += step.bytes
        more = whole.with_sharding(step.before)
        turns = mesh.size(step.before.used - whole.sharding.used) - 1
        if turns * _bytes(more, itemsize, mesh) > sent + 0.5:
            break
        block = more
    return block


def _copies_differ(choice: Choice, window: Window) -> bool:
    """Whether devices with copies of the result would add up its parts in different orders.

    A device meets the blocks in the order they come by, its own first.  Rounding depends on that
    order, and copies of a value must agree to the bit.  (A result not split over the ring is one
    that all of the ring computes: such a layout is chosen only for little work.)
    """
    dims = choice.rule.operands[window.operand or 0]
    adds = any(choice.rule.op_of(f) for d in window.cuts for f in dims[d])
    split = {a for axes in choice.outs[0].sharding.axes for a in axes}
    return adds and not split.issuperset(window.atoms)


def _scatters(
    choice: Choice, results: Sequence[Result], mesh: MeshAxes, limits: Limits
) -> Iterator[Choice]:
    """The choice with sums of the result going around, if its way starts with a reduce-scatter.

    Slices that come before it, by which devices that hold the same terms share the sum, are taken
    from the operands: so they share the dot as well.
    """
    (r,), (whole,) = results, choice.outs
    if r.open or not whole.sharding.partial or whole.sharding.op != "sum":
        return  # open: nobody said where the sum should go
    way = plan_reshard(whole, r.wanted, r.itemsize, mesh)
    step = next((s for s in way if s.kind != "slice"), None)
    if step is None or step.kind != "reduce-scatter":
        return
    ins = _cut(choice, whole.sharding.axes, step.before.axes, mesh)
    if ins is None:
        return
    whole, block = whole.with_sharding(step.before), whole.with_sharding(step.after)
    window = limits.window(None, whole, block, _bytes(whole, r.itemsize, mesh))
    yield dataclasses.replace(choice, ins=ins, outs=(block,), window=window)


def _cut(
    choice: Choice, before: Sequence[Axes], after: Sequence[Axes], mesh: MeshAxes
) -> tuple[Layout, ...] | None:
    """The operands' layouts cut along the result's dims as these are, from `before` to `after`."""
    more = {
        f: a[len(b) :] for (f,), b, a in zip(choice.rule.results[0], before, after, strict=True)
    }
    out = []
    for dims, l in zip(choice.rule.operands, choice.ins, strict=True):
        axes = tuple((*a, *more.get(f, ())) for (f,), a in zip(dims, l.sharding.axes, strict=True))
        s = dataclasses.replace(l.sharding, axes=axes)
        if not l.fits(s, mesh):
            return None
        out.append(l.with_sharding(s))
    return tuple(out)


def _bytes(layout: Layout, itemsize: int, mesh: MeshAxes) -> int:
    return math.prod(layout.local_shape(mesh)) * itemsize
