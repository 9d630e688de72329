"""What a compiled program sends: the collectives of optimised HLO text, with loops multiplied.

A plan says what shardwise means to send; XLA may add, drop, merge or hoist collectives after it.
This module reads the text of the compiled program, so that both, and jax.jit's program beside them,
are judged by the same figure: bytes that one device sends per call, with ring algorithms.

    report = wire_report(jitted.lower(*args).compile().as_text())
    report.bytes, report.by_kind(), report.collectives

Collectives are found wherever they are called from: fusions, called computations, asynchronous
pairs (counted once, at the start), branches (the branch that sends most), and loops, whose trip
count is XLA's `known_trip_count` or is worked out from the loop's condition.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from shardwise.hlo.loops import trip_count
from shardwise.hlo.text import (
    Computation,
    Instruction,
    Module,
    group_size,
    parse_module,
    type_bytes,
)

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


def ring_bytes(kind: str, operand_bytes: float, group: int) -> float:
    """Bytes one device sends in one collective over `group` devices, by ring algorithms.

    Args:
      kind: HLO's name of the collective.
      operand_bytes: local bytes of its operands (an all-gather's result is `group` times that).
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return operand_bytes
    share = (group - 1) / group
    if kind == "all-reduce":
        return 2 * operand_bytes * share
    if kind == "all-gather":
        return operand_bytes * group * share
    return operand_bytes * share


@dataclasses.dataclass(frozen=True)
class WireOp:
    """One collective of a compiled program.

    Attributes:
      kind: HLO's name of it, without `-start`.
      bytes: what one device sends per execution.
      times: executions per call of the program.
      group_size: devices that take part together.
      name: the HLO instruction; `op_name`: JAX's path of the operation it came from.
    """

    kind: str
    bytes: float
    times: int
    group_size: int
    name: str
    op_name: str

    @property
    def total_bytes(self) -> float:
        return self.bytes * self.times


@dataclasses.dataclass(frozen=True)
class WireReport:
    """The collectives of a program, and the loops whose trip count the text does not tell.

    `unknown_loops` are counted as one trip: where there are any, `bytes` is a lower bound.
    """

    collectives: tuple[WireOp, ...]
    unknown_loops: tuple[str, ...] = ()

    @property
    def bytes(self) -> float:
        """Bytes one device sends per call."""
        return sum(op.total_bytes for op in self.collectives)

    def by_kind(self) -> dict[str, float]:
        """Kind -> bytes one device sends per call, largest first."""
        out: dict[str, float] = {}
        for op in self.collectives:
            out[op.kind] = out.get(op.kind, 0.0) + op.total_bytes
        return dict(sorted(out.items(), key=lambda kv: -kv[1]))


def wire_report(text: str) -> WireReport:
    """Read the text of a compiled HLO module (`compiled.as_text()`)."""
    return _Counter(parse_module(text)).report()


def wire_bytes(text: str) -> float:
    """Bytes one device sends per call of a compiled program."""
    return wire_report(text).bytes


class _Counter:
    def __init__(self, module: Module):
        self.module = module
        self.unknown: dict[str, None] = {}

    def report(self) -> WireReport:
        ops = tuple(self.visit(self.module.entry, 1))
        return WireReport(ops, tuple(self.unknown))

    def visit(self, name: str, times: int) -> Iterator[WireOp]:
        computation = self.module.computations.get(name)
        if computation is None:
            return
        # TPU: a reduce-scatter may be a fusion that calls a computation of this name.
        scatter = name.startswith("all-reduce-scatter")
        for inst in computation.instructions.values():
            kind = inst.opcode.removesuffix("-start")
            if kind in KINDS:
                op = self.wire_op(inst, computation, kind, times)
                if scatter and op.kind == "all-reduce":
                    op = dataclasses.replace(op, kind="reduce-scatter", bytes=op.bytes / 2)
                yield op
            else:
                yield from self.called(inst, computation, times)

    def called(self, inst: Instruction, computation: Computation, times: int) -> Iterator[WireOp]:
        if inst.opcode == "while":
            trips = trip_count(self.module, computation, inst)
            inside = [
                op
                for key in ("condition", "body")
                for op in self.visit(inst.callee(key) or "", times * (trips or 1))
            ]
            if trips is None and inside:
                self.unknown[inst.name] = None
            yield from inside
        elif inst.opcode == "conditional":
            names = inst.callees("branch_computations") or tuple(
                inst.callee(f"{branch}_computation") or "" for branch in ("true", "false")
            )
            branches = [list(self.visit(n, times)) for n in names]
            yield from max(branches, key=lambda ops: sum(op.total_bytes for op in ops), default=())
        else:
            keys = ("calls", "to_apply")
            names = [n for key in keys if (n := inst.callee(key))]
            for n in (*names, *inst.callees("called_computations")):
                yield from self.visit(n, times)

    def wire_op(self, inst: Instruction, computation: Computation, kind: str, times: int) -> WireOp:
        operands = [computation.instructions.get(n) for n in inst.operands]
        n = sum(type_bytes(o.type) for o in operands if o)
        group = group_size(inst, self.module.device_count)
        if kind == "collective-permute":
            m = re.search(r"source_target_pairs=\{(.*?)\}\}", inst.attributes)
            pairs = re.findall(r"(\d+),(\d+)", m.group(1)) if m else []
            group = len(pairs)
            n = n if not pairs or any(a != b for a, b in pairs) else 0
        op_name = re.search(r'op_name="([^"]*)"', inst.attributes)
        return WireOp(
            kind,
            ring_bytes(kind, n, group),
            times,
            group,
            inst.name,
            op_name.group(1) if op_name else "",
        )
