"""What a TPU compiler's program is estimated to take: cycles of its HLO, bytes over its links.

Nothing here has run.  Cycles are the compiler's own estimate, which it leaves in the
`backend_config` of every fusion, dot and copy; collectives carry none, and their bytes are priced.
"""

from __future__ import annotations

import dataclasses
import re

from shardwise.hlo.loops import trip_count
from shardwise.hlo.text import Module, parse_module


@dataclasses.dataclass(frozen=True)
class Core:
    """One core of a TPU, as far as the estimate needs it.

    Attributes:
      hertz: clock.
      ring_bytes_per_second: what one core sends in a ring that runs both ways round.
    """

    hertz: float
    ring_bytes_per_second: float


V3 = Core(hertz=0.94e9, ring_bytes_per_second=2 * 82e9)


def compute_seconds(text: str, core: Core) -> float:
    """Estimated seconds of everything but collectives, in one call of a compiled program."""
    module = parse_module(text)
    return _cycles(module, module.entry) / core.hertz


def _cycles(module: Module, name: str) -> float:
    """Cycles of a computation: its instructions' own, and loops and calls times their trips.

    A loop whose trip count the text does not tell counts once.  What is inside a fusion is part of
    the fusion's own figure.
    """
    computation = module.computations.get(name)
    if computation is None:
        return 0.0
    total = 0.0
    for inst in computation.instructions.values():
        if m := re.search(r'"estimated_cycles":"?(\d+)', inst.attributes):
            total += int(m.group(1))
        if inst.opcode == "while":
            trips = trip_count(module, computation, inst)
            inside = sum(_cycles(module, inst.callee(k) or "") for k in ("condition", "body"))
            total += (1 if trips is None else trips) * inside
        elif inst.opcode == "call":
            total += _cycles(module, inst.callee("to_apply") or "")
        elif inst.opcode == "conditional":
            branches = inst.callees("branch_computations") or tuple(
                inst.callee(f"{b}_computation") or "" for b in ("true", "false")
            )
            total += max(_cycles(module, b) for b in branches)
    return total
