"""HLO text split into computations and instructions; nothing is interpreted here.

The text is what `compiled.as_text()` prints.  Only what the other modules of this package read is
kept: names, types, opcodes, arguments, attributes, and which computation is the entry.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name = type opcode(arguments), attributes`; `operands` are the names among the arguments."""

    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.\-]+)", self.arguments))

    def callee(self, key: str) -> str | None:
        m = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return m.group(1) if m else None

    def callees(self, key: str) -> tuple[str, ...]:
        m = re.search(rf"\b{key}=\{{([^}}]*)\}}", self.attributes)
        return tuple(n.strip().lstrip("%") for n in m.group(1).split(",")) if m else ()

    def integer(self, key: str) -> int | None:
        m = re.search(rf"\b{key}=(-?\d+)", self.attributes)
        return int(m.group(1)) if m else None


@dataclasses.dataclass
class Computation:
    instructions: dict[str, Instruction]
    root: str = ""


@dataclasses.dataclass
class Module:
    """Computations by name, the entry's name, and how many devices run the program."""

    computations: dict[str, Computation]
    entry: str
    device_count: int


def parse_module(text: str) -> Module:
    """Split HLO text into computations and instructions (nothing is interpreted yet)."""
    header = text.split("\n", 1)[0]
    devices = math.prod(
        int(m.group(1))
        for key in ("replica_count", "num_partitions")
        if (m := re.search(rf"\b{key}=(\d+)", header))
    )
    computations: dict[str, Computation] = {}
    entry, current = "", Computation({})
    for line in text.splitlines():
        if not line.startswith(" "):
            m = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
            if m and not line.startswith("HloModule"):
                current = computations[m.group(2)] = Computation({})
                entry = m.group(2) if m.group(1) else entry
        elif instruction := _parse_instruction(line):
            current.instructions[instruction.name] = instruction
            if line.lstrip().startswith("ROOT "):
                current.root = instruction.name
    return Module(computations, entry, devices)


def _parse_instruction(line: str) -> Instruction | None:
    m = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
    if not m:
        return None
    rest = line[m.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    start = rest.find("(")
    if start < 0:
        return None
    stop = _closing(rest, start)
    return Instruction(m.group(1), type_, rest[:start], rest[start + 1 : stop], rest[stop + 1 :])


def _closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`."""
    depth = 0
    for m in re.finditer(r"[()]", text[start:]):
        depth += 1 if m.group() == "(" else -1
        if depth == 0:
            return start + m.start()
    return len(text)


def type_bytes(type_text: str) -> float:
    """Bytes of an HLO type, tuples summed: `(f32[8,128]{1,0}, pred[4])` is 4100."""
    total = 0.0
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", type_text):
        sizes = [int(d.lstrip("<=")) for d in dims.split(",") if d]
        total += math.prod(sizes) * _dtype_bytes(dtype)
    return total


def _dtype_bytes(dtype: str) -> float:
    if dtype == "pred":
        return 1
    m = re.match(r"[a-z]+?(\d+)", dtype)  # bf16, s4, f8e4m3fn, c64 (a complex of 64 bits)
    return int(m.group(1)) / 8 if m else 0  # token, opaque


def group_size(instruction: Instruction, device_count: int) -> int:
    """Devices of one group: from lists, from `[groups,size]<=[...]`, or from named mesh axes."""
    text = instruction.attributes
    if m := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", text):
        return int(m.group(2))
    if m := re.search(r"replica_groups=\{\{([\d,]*)\}", text):
        return len(m.group(1).split(","))
    if m := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", m.group(1)))
        used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", m.group(2))
        return math.prod(int(part or sizes[axis]) for axis, part in used)
    return device_count
