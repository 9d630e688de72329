"""When a dot is windowed: where gathering an operand, or the terms of its result, takes too much.

The layouts of a dot are chosen first, as for any equation (`choose`).  Then, if the choice gathers an
operand of more bytes than allowed, or leaves more of pending terms than allowed where they are wanted
scattered, the largest of these goes around instead (`ops.windowed`): the operand is brought only
to where the all-gather would start, or the result comes out where the reduce-scatter would end.

One value of a dot goes around, not two: with both, every block of one would have to meet every block of
the other, and one of them would be sent as often as the other has blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from shardwise.choose import Choice, Operand, Result, reachable
from shardwise.mesh import MeshAxes
from shardwise.ops.windowed import Window
from shardwise.reshard import plan_reshard
from shardwise.sharding import Layout

# Of a device's memory, what one value that need not exist may take.
FRACTION = 1 / 8


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one gathered operand, or one result before its reduce-scatter, may take on a device.

    Attributes:
      asked: bytes, `spmd(windowed_einsum=...)`.
      memory: bytes of a device, `spmd(memory_limit=...)`, of which it may take `FRACTION`.
    """

    asked: float | None = None
    memory: float | None = None

    @property
    def least(self) -> tuple[float, str]:
        """The limit and the option it comes from."""
        asked = math.inf if self.asked is None else self.asked
        room = math.inf if self.memory is None else self.memory * FRACTION
        return (asked, "windowed_einsum") if asked <= room else (room, "memory_limit")


def windowed_choice(
    choice: Choice, operands: Sequence[Operand], results: Sequence[Result], mesh: MeshAxes, limits: Limits
) -> Choice:  # fmt: skip
    """The choice for a dot with the largest value beyond the limits going around, if there is one."""
    limit, option = limits.least
    if limit == math.inf:
        return choice
    moves = [*_gathers(choice, operands, mesh), *_scatters(choice, results, mesh)]
    windows = [Window(i, w, b, n, limit, option) for i, w, b, n in moves if n > limit]
    if not windows:
        return choice
    window = max(windows, key=lambda w: w.bytes)
    if window.operand is None:
        return dataclasses.replace(choice, outs=(window.block,), window=window)
    ins = list(choice.ins)
    ins[window.operand] = window.block
    return dataclasses.replace(choice, ins=tuple(ins), window=window)


Move = tuple[int | None, Layout, Layout, int]  # operand, whole, block, bytes of whole


def _gathers(choice: Choice, operands: Sequence[Operand], mesh: MeshAxes) -> Iterator[Move]:
    """Operands whose way to the layout chosen ends in an all-gather."""
    for i, (o, whole) in enumerate(zip(operands, choice.ins, strict=True)):
        sources = [v for v in o.variants if reachable(v, whole.sharding)]
        if o.free or not sources or whole.sharding in sources:
            continue
        ways = [plan_reshard(whole.with_sharding(v), whole.sharding, o.itemsize, mesh) for v in sources]
        way = min(ways, key=lambda steps: round(sum(s.bytes for s in steps), 3))
        last = list(itertools.takewhile(lambda s: s.kind == "all-gather", reversed(way)))
        if last:
            yield i, whole, whole.with_sharding(last[-1].before), _bytes(whole, o.itemsize, mesh)


def _scatters(choice: Choice, results: Sequence[Result], mesh: MeshAxes) -> Iterator[Move]:
    """The result, where its way to the layout wanted starts with a reduce-scatter."""
    (r,), (whole,) = results, choice.outs
    if r.open or not whole.sharding.partial:  # open: nobody said where the sum should go
        return
    first, *_ = plan_reshard(whole, r.wanted, r.itemsize, mesh)
    if first.kind == "reduce-scatter" and whole.sharding.op == "sum":
        yield None, whole, whole.with_sharding(first.after), _bytes(whole, r.itemsize, mesh)


def _bytes(layout: Layout, itemsize: int, mesh: MeshAxes) -> int:
    return math.prod(layout.local_shape(mesh)) * itemsize
