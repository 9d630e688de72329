"""Trip counts of HLO loops: XLA's own figure, or worked out from condition, start and step."""

from __future__ import annotations

import dataclasses
import re

from shardwise.hlo.text import Computation, Instruction, Module


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Trips of a `while` in `computation`, or None where the text does not tell."""
    if m := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(m.group(1))
    compare = _root(module, loop.callee("condition"), "compare")
    if compare is None:
        return None
    m = re.search(r"direction=(\w+)", compare.inst.attributes)
    direction, (left, right) = m.group(1) if m else "", compare.operands
    if left.element is None:
        direction, left, right = _MIRROR.get(direction, ""), right, left  # constant OP counter
    index = left.element
    if index is None or direction not in _TRIPS:
        return None
    start = _initial(computation, loop, index)
    # A limit is a constant of the condition, or an element of the state that starts as one.
    limit = right.constant
    if limit is None and right.element is not None:
        limit = _initial(computation, loop, right.element)
    step = _step(module, loop, index)
    if limit is None or start is None or not step:
        return None
    return max(0, _TRIPS[direction](start, limit, step))


_MIRROR = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_TRIPS = {
    "LT": lambda a, b, s: -(-(b - a) // s),
    "LE": lambda a, b, s: (b - a) // s + 1,
    "GT": lambda a, b, s: -(-(a - b) // -s),
    "GE": lambda a, b, s: (a - b) // -s + 1,
    "NE": lambda a, b, s: (b - a) // s,
}


@dataclasses.dataclass(frozen=True)
class _Value:
    """A name in a computation; inside a fusion `outer` maps its parameters to values outside."""

    module: Module
    computation: Computation
    name: str
    outer: tuple[_Value, ...] = ()

    def strip(self) -> _Value:
        """The value behind copies, converts, bitcasts, fusion roots and fusion parameters."""
        inst = self.inst
        if inst.opcode in ("copy", "convert", "bitcast"):
            return self.operands[0].strip()
        if inst.opcode == "parameter" and self.outer:
            return self.outer[int(inst.arguments)].strip()
        if inst.opcode in ("fusion", "call"):
            callee = inst.callee("calls") or inst.callee("to_apply") or ""
            inner = self.module.computations.get(callee)
            if inner and inner.root:
                return _Value(self.module, inner, inner.root, self.operands).strip()
        return self

    @property
    def inst(self) -> Instruction:
        return self.computation.instructions[self.name]

    @property
    def operands(self) -> tuple[_Value, ...]:
        return tuple(dataclasses.replace(self, name=n) for n in self.inst.operands)

    @property
    def constant(self) -> int | None:
        """The value of an integer constant."""
        inst = self.strip().inst
        known = inst.opcode == "constant" and re.fullmatch(r"-?\d+", inst.arguments)
        return int(inst.arguments) if known else None

    @property
    def element(self) -> int | None:
        """Which element of a tuple this is."""
        inst = self.strip().inst
        return inst.integer("index") if inst.opcode == "get-tuple-element" else None


def _root(module: Module, name: str | None, opcode: str) -> _Value | None:
    """The root of a computation, if it is an `opcode`."""
    computation = module.computations.get(name or "")
    if computation is None or not computation.root:
        return None
    value = _Value(module, computation, computation.root).strip()
    return value if value.inst.opcode == opcode else None


def _initial(computation: Computation, loop: Instruction, index: int) -> int | None:
    """The first value of element `index` of a loop's state, if it is a constant."""
    state = computation.instructions.get(loop.operands[0])
    if state is None or state.opcode != "tuple" or index >= len(state.operands):
        return None
    return _Value(Module({}, "", 1), computation, state.operands[index]).constant


def _step(module: Module, loop: Instruction, index: int) -> int | None:
    """What the body adds to element `index` of the state, if it is a constant."""
    root = _root(module, loop.callee("body"), "tuple")
    update = root.operands[index].strip() if root else None
    if update is None or update.inst.opcode != "add":
        return None
    return next((c for v in update.operands if (c := v.constant) is not None), None)
