"""Why emitted code is there (`Note`), and what had to be replicated (`Fallback`): read by the plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from shardwise.choose import Choice
from shardwise.factors import FactorRule
from shardwise.mesh import MeshAxes
from shardwise.program import Eqn, Var
from shardwise.sharding import Sharding
from shardwise.value import Value


@dataclasses.dataclass(frozen=True)
class Note:
    """Why a stretch of emitted code is there.

    Attributes:
      eqn: the equation on whose behalf; None at the program's own results.
      what: "bring" (an operand to the layout chosen), "local" (the op's own exchange), "fallback",
        "annotation", "result", "loop" (a value handed to or from a body).
      value: the name of the value moved; `before`, `after`: its shardings.
      choice, runner_up: for an operand: the layouts chosen and the second best.
    """

    eqn: Eqn | None
    what: str
    value: str = ""
    var: Var | None = None
    before: Sharding | None = None
    after: Sharding | None = None
    choice: Choice | None = None
    runner_up: Choice | None = None


@dataclasses.dataclass(frozen=True)
class Fallback:
    """A value that had to be replicated, and why.

    Attributes:
      op: the primitive; `source` file:line; `value` the operand gathered, of `bytes` bytes whole.
      why: the reason in words.
    """

    op: str
    source: str
    value: str
    shape: tuple[int, ...]
    bytes: int
    why: str


def gathers(
    eqn: Eqn, ins: Sequence[Value], rules: Sequence[FactorRule], choice: Choice, mesh: MeshAxes
) -> Iterator[Fallback]:
    """A dim that lies whole in every rule of this op, and was split, is a fallback to report.

    Not where its atoms now split another dim: then it was moved, not gathered.
    """
    for i, (v, layout) in enumerate(zip(ins, choice.ins, strict=True)):
        if v.free or layout.sharding == v.first:
            continue
        for d, axes in enumerate(v.first.axes):
            if not layout.sharding.used.issuperset(axes) and all(
                _whole(r, r.operands[i][d], mesh.size(axes)) for r in rules
            ):
                yield Fallback(
                    eqn.name, eqn.source, v.name, v.shape, math.prod(v.shape) * v.itemsize,
                    f"dim {d} must lie whole for `{eqn.name}` and was split over {mesh.text(axes)}",
                )  # fmt: skip


def _whole(rule: FactorRule, factors: Sequence[int], shards: int) -> bool:
    """Whether a rule has a dim of these factors whole where it was split over so many shards."""
    uneven = any(f in rule.even and rule.sizes[f] % shards for f in factors)
    return uneven or not rule.whole.isdisjoint(factors)
