"""Random programs, and the operations they are made of: a family a file, a function each."""

from __future__ import annotations

from shardwise.testing.operations import (
    algebra,
    control,
    elementwise,
    indices,
    moves,
    order,
    random,
    reductions,
)
from shardwise.testing.operations.base import Operation
from shardwise.testing.programs import DIMS, MESHES, Builder, Choose, Program, Value

OPERATIONS: tuple[Operation, ...] = (
    *elementwise.OPERATIONS, *algebra.OPERATIONS, *reductions.OPERATIONS, *moves.OPERATIONS,
    *indices.OPERATIONS, *order.OPERATIONS, *control.OPERATIONS, *random.OPERATIONS,
)  # fmt: skip


TRIES = 4  # draws for each step: many operations want a certain shape or dtype


def random_program(choose: Choose, steps: int = 6) -> Program:
    """A program of up to `steps` operations."""
    b = Builder(choose, choose(MESHES))
    dtype = choose(("float32",) * 5 + ("int32",))
    v = b.new([choose(DIMS) for _ in range(choose((2, 1, 3)))], dtype)
    b.values.append(v)
    for _ in range(choose(range(1, steps + 1))):
        v = _step(b, v)
    kept = [v]
    if b.chance(3):
        kept.append(choose(b.values))
    b.program.results = [k.name for k in kept]
    b.program.out_specs = [b.spec(k.rank) if b.chance(2) else "None" for k in kept]
    b.program.grad = not b.chance(5)
    return b.program


def _step(b: Builder, v: Value) -> Value:
    """One operation, annotated perhaps; the value itself where none of those drawn is possible."""
    for _ in range(TRIES):
        operation = b.choose(OPERATIONS)
        before = len(b.program.args), len(b.program.lines)
        try:
            v = operation(b, v)
        except (TypeError, ValueError, ZeroDivisionError, IndexError):
            # Not possible for this shape or dtype: as if it had not been drawn.
            del b.program.args[before[0] :], b.program.in_specs[before[0] :]
            del b.program.lines[before[1] :]
            continue
        b.program.used.append(operation.__name__.strip("_"))
        b.values.append(v)
        if b.chance(3):
            v = b.emit(f"sw.annotate({v.name}, {b.spec(v.rank, open_dims=True)})", [v], exact=True)
            b.values.append(v)
        return v
    return v
