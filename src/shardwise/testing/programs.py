"""Random programs as Python text: a function, its arguments, a mesh, annotations.

A program is built step by step from one source of chance, `choose(options)`, so that Hypothesis can
draw (and shrink) what `python -m shardwise.testing.fuzz` draws from a seed.  Options come simplest
first.  The text of a program is all there is of it: what failed can be pasted into a file and run.

Two rules keep a program's value well defined on any number of devices, where sums are added in
another order: values stay of order one; and what depends on exact equality or order (argmax, max and
their gradients, comparisons) is applied to *exact* values only, moved but not computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.annotate import annotate
from shardwise.mesh import MeshAxes
from shardwise.testing.check import check

Choose = Callable[[Sequence[Any]], Any]

MESHES: tuple[dict[str, int], ...] = (
    {"x": 2}, {"x": 4}, {"x": 2, "y": 2}, {"x": 8}, {"x": 2, "y": 4}, {"x": 3}, {"x": 2, "y": 3},
    {"x": 6}, {"x": 2, "y": 2, "z": 2}, {"x": 1, "y": 4}, {"x": 7}, {"x": 3, "y": 2},
)  # fmt: skip
DIMS = (4, 8, 2, 6, 3, 5, 1, 10, 12, 7, 0)


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the program under construction; `exact` if it was only moved, never computed."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    exact: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype == "float32"


@dataclasses.dataclass
class Program:
    """A program's parts; `text()` is the whole of it."""

    mesh: dict[str, int]
    args: list[Value] = dataclasses.field(default_factory=list)
    in_specs: list[str] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)
    results: list[str] = dataclasses.field(default_factory=list)
    out_specs: list[str] = dataclasses.field(default_factory=list)
    used: list[str] = dataclasses.field(default_factory=list)  # the operations
    grad: bool = True

    def function(self) -> str:
        names = ", ".join(a.name for a in self.args)
        lines = [f"    {line}" for line in self.lines]
        return "\n".join([f"def f({names}):", *lines, f"    return {', '.join(self.results)}"])

    def call(self, tol: float = 1e-4) -> str:
        values = [f"values({a.shape}, {a.dtype!r}, {i})" for i, a in enumerate(self.args)]
        return (
            f"check(f, ({', '.join(values)},), {self.mesh},\n"
            f"      in_shardings=({', '.join(self.in_specs)},),\n"
            f"      out_shardings={self._out()}, tol={tol},\n"
            f"      grad={self.grad}, together=True, wire='at most')"
        )

    def _out(self) -> str:
        return self.out_specs[0] if len(self.out_specs) == 1 else f"({', '.join(self.out_specs)})"

    def text(self) -> str:
        """The program as a script."""
        return f"{_HEADER}\n\n{self.function()}\n\n\n{self.call()}\n"

    def run(self, wide: bool = False) -> Any:
        """Check it: one device against many, values and gradients.  Raises what `check` raises.

        Args:
          wide: in float64, and closer: what only rounding made different is equal then.

        Returns:
          the plan.
        """
        scope = dict(_NAMES)
        if wide:
            scope["values"] = _wide_values
        text = f"{self.function()}\nplan = {self.call(1e-6 if wide else 1e-4)}"
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            exec(compile(text, "<program>", "exec"), scope)
        return scope["plan"]


_HEADER = """import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
import shardwise as sw
from shardwise.testing import check
from shardwise.testing.programs import values
"""


def values(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """The values of an argument: floats in (-1, 1), small integers (negative ones too), booleans."""
    rng = np.random.default_rng(seed)
    if dtype == "float32":
        return np.asarray(rng.uniform(-1, 1, shape), np.float32)
    if dtype == "bool":
        return np.asarray(rng.integers(0, 2, shape), bool)
    return np.asarray(rng.integers(-2, 5, shape), np.int32)


def _wide_values(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    x = values(shape, dtype, seed)
    return x.astype(np.float64) if dtype == "float32" else x


# What a program's text may name; of `sw` it uses `annotate` only.
_NAMES: dict[str, Any] = {
    "jax": jax, "jnp": jnp, "lax": lax, "P": jax.sharding.PartitionSpec,
    "sw": types.SimpleNamespace(annotate=annotate), "check": check, "values": values,
}  # fmt: skip


class Builder:
    """A program in the making."""

    def __init__(self, choose: Choose, mesh: dict[str, int]):
        self.choose, self.program = choose, Program(mesh)
        self.axes = MeshAxes(tuple(mesh), tuple(mesh.values()))
        self.values: list[Value] = []

    def chance(self, one_in: int) -> bool:
        """True once in `one_in` draws; False is the simple case."""
        return self.choose(range(one_in)) == one_in - 1

    def new(self, shape: Sequence[int], dtype: str = "float32") -> Value:
        """A new argument."""
        v = Value(f"a{len(self.program.args)}", tuple(shape), dtype, exact=True)
        self.program.args.append(v)
        self.program.in_specs.append(self.spec(v.rank) if self.chance(2) else "None")
        return v

    def emit(self, text: str, operands: Sequence[Value], exact: bool = False) -> Value:
        """A line `v = text`; its shape is found by tracing.  Raises what tracing raises."""
        names = [v.name for v in operands]
        f = eval(f"lambda {', '.join(names)}: {text}", dict(_NAMES))
        types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands]
        out = jax.eval_shape(f, *types)
        if out.size > 4096:
            raise ValueError("too large")
        exact = exact and all(v.exact for v in operands)
        v = Value(f"v{len(self.program.lines)}", out.shape, str(out.dtype), exact)
        self.program.lines.append(f"{v.name} = {text}")
        return v

    def spec(self, rank: int, open_dims: bool = False) -> str:
        """A random `P(...)` for a value of `rank` dims."""
        entries: list[list[str]] = [[] for _ in range(rank)]
        for axis in self.choose(_orders(self.axes.names)):
            dim = self.choose([*range(rank), None])
            if dim is not None:
                entries[dim].append(
                    self.choose(_parts(axis, self.axes)) if self.chance(6) else axis
                )
        texts = [repr(e[0]) if len(e) == 1 else repr(tuple(e)) if e else "None" for e in entries]
        if open_dims:
            texts = ["P.UNCONSTRAINED" if t == "None" and self.chance(3) else t for t in texts]
        return f"P({', '.join(texts)})"


def _parts(axis: str, mesh: MeshAxes) -> list[str]:
    """The axis, and parts of it as reports print them: `x[0:2]` and `x[2:8]` of 8."""
    atoms = mesh.expand(axis)
    cuts = range(1, len(atoms))
    return [axis, *(p for k in cuts for p in (*mesh.merge(atoms[:k]), *mesh.merge(atoms[k:])))]


def _orders(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(names), tuple(reversed(names))]
