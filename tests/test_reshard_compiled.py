"""What is compiled of a reshard, against the plan: kinds, bytes, and what is copied on the way."""

from __future__ import annotations

import math
import re

import jax
import numpy as np
import pytest
from reshards import X4Y2, Pair, even, program, spread

from shardwise.mesh import MeshAxes
from shardwise.reshard import plan_reshard

_BITS = {"f32": 4, "s32": 4, "pred": 1, "bf16": 2, "s8": 1, "c64": 8}
_OP = re.compile(r"= (.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)\(")


def compiled(pair: Pair, mesh: MeshAxes, dtype: object = np.float32) -> list[tuple[str, float]]:
    """(kind, bytes one device sends on a ring) of every collective in the compiled program."""
    src, _ = pair
    arg = jax.ShapeDtypeStruct((mesh.device_count, *src.local_shape(mesh)), dtype)
    out = []
    for line in program([pair], mesh).lower(arg).compile().as_text().splitlines():
        if found := _OP.search(line):
            n = sum(
                _BITS[t] * math.prod(int(d) for d in dims.split(",") if d)
                for t, dims in re.findall(r"(\w+)\[([\d,]*)\]", found[1])
            )
            out.append((found[2], _ring(found[2], n, _group(line))))
    return out


def _group(line: str) -> int:
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        return math.prod(int(sizes[a]) for a in re.findall(r"'([^']+)'", found[2]))
    found = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    return int(found[2]) if found else 1


def _ring(kind: str, result: int, g: int) -> float:
    if kind == "collective-permute":
        return float(result)
    if kind == "all-reduce":
        return 2 * result * (g - 1) / g
    return float(result * (g - 1)) if kind == "reduce-scatter" else result * (g - 1) / g


COUNTED = [
    ((64, 64), ("x", "y"), ("y", "x")),
    ((64, 64), ("xy", ""), ("yx", "")),
    ((64, 64), ("x", ""), ("y", "")),
    ((64, 64), ("x", ""), ("", "xy")),
    ((64, 64), ("x", "y"), ("", "")),
    ((64, 64), ("xy", ""), ("", "x")),
    ((16, 16, 16), ("y", "", "x"), ("", "xy", "")),
    ((64, 64), ("", ""), ("y", "x")),
]


@pytest.mark.parametrize("shape, a, b", COUNTED)
def test_the_compiled_program_sends_what_the_plan_says(shape, a, b):
    pair = even(shape, spread(X4Y2, *a)), spread(X4Y2, *b)
    steps = plan_reshard(*pair, 4, X4Y2)
    assert compiled(pair, X4Y2) == [c for s in steps for c in s.collectives]
    for s in steps:
        assert s.bytes == sum(n for _, n in s.collectives)


@pytest.mark.parametrize("op", ["sum", "max", "prod"])
@pytest.mark.parametrize("partial, a, b", [
    ("xy", ("", ""), ("", "")),
    ("xy", ("", ""), ("x", "y")),
    ("x", ("", "y"), ("", "")),
    ("x", ("", ""), ("", "xy")),
])  # fmt: skip
def test_the_compiled_program_reduces_as_the_plan_says(op, partial, a, b):
    pair = even((64, 64), spread(X4Y2, *a, partial=partial, op=op)), spread(X4Y2, *b)
    steps = plan_reshard(*pair, 4, X4Y2)
    assert compiled(pair, X4Y2) == [c for s in steps for c in s.collectives]
    for s in steps:
        assert s.bytes == sum(n for _, n in s.collectives)


def test_a_small_product_is_gathered_and_a_large_one_scattered():
    kinds = []
    for size, axes in ((1, "y"), (4096, "xy")):
        pair = even((size,), spread(X4Y2, "", partial=axes, op="prod")), spread(X4Y2, "")
        [step] = [s for s in plan_reshard(*pair, 4, X4Y2) if s.kind != "slice"]
        assert step.kind == "all-reduce"
        kinds.append([kind for kind, _ in step.collectives])
        assert compiled(pair, X4Y2) == list(step.collectives)
    assert kinds == [["all-gather"], ["all-to-all", "all-gather"]]


@pytest.mark.parametrize("a, b, partial", [
    (("", "x"), ("", ""), ""),
    (("x", "y"), ("x", ""), ""),
    (("y", ""), ("y", "x"), "x"),
])  # fmt: skip
def test_a_block_of_columns_is_copied_row_by_row(a, b, partial):
    """The dim of parts leads in what a collective sends; XLA would transpose the value instead."""
    pair = even((64, 64), spread(X4Y2, *a, partial=partial)), spread(X4Y2, *b)
    src, _ = pair
    arg = jax.ShapeDtypeStruct((X4Y2.device_count, *src.local_shape(X4Y2)), np.float32)
    text = program([pair], X4Y2).lower(arg).compile().as_text()
    (sent,) = re.findall(r"= (\S+) (?:all-gather|reduce-scatter)\(", text)
    layout = [int(d) for d in re.findall(r"\{([\d,]*)\}", sent)[0].split(",")]
    assert layout == sorted(layout, reverse=True)
