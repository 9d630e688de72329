"""Where the rules of primitives are registered and looked up.

A primitive is described by up to three functions, written side by side in one file of `ops/`:

  @rule(p)    eqn -> FactorRule, or several (the first is the one completion reads)
  @local(p)   (ctx, eqn, *xs) -> local results; default: bind the primitive on the local operands
  @comm(p)    (ctx, eqn) -> bytes one device sends inside the local code (only for special factors)

`local` gets operands already in `ctx.ins` and must return results in `ctx.outs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise.factors import Assignment, FactorRule, dim_axes
from shardwise.mesh import MeshAxes
from shardwise.ops.windowed import Window
from shardwise.program import Eqn
from shardwise.sharding import Layout, Sharding

_RULES: dict[Any, Callable[[Eqn], FactorRule | Sequence[FactorRule]]] = {}
_LOCALS: dict[Any, Callable[..., Any]] = {}
_COMMS: dict[Any, Callable[[LocalContext, Eqn], float]] = {}
_LEVELS: dict[Any, str] = {}


def rule(*primitives: Any, level: str = "dims") -> Callable[[Any], Any]:
    """Register the factor rule of primitives.

    `level` says when completion lets shardings flow through it: "elementwise" first, then "dims"
    (dims are moved, added or removed), "dot" last.
    """

    def register(f: Any) -> Any:
        for p in primitives:
            if p in _RULES:
                raise ValueError(f"primitive {p} has two rules")
            _RULES[p], _LEVELS[p] = f, level
        return f

    return register


def local(*primitives: Any) -> Callable[[Any], Any]:
    """Register the code that runs on one device's blocks."""

    def register(f: Any) -> Any:
        _LOCALS.update(dict.fromkeys(primitives, f))
        return f

    return register


def comm(*primitives: Any) -> Callable[[Any], Any]:
    """Register the bytes one device sends inside the local code."""

    def register(f: Any) -> Any:
        _COMMS.update(dict.fromkeys(primitives, f))
        return f

    return register


def rules_of(eqn: Eqn) -> tuple[FactorRule, ...]:
    """The rules of an equation, the primary one first; empty when the primitive has none."""
    rules = eqn.memo.rules
    if rules is None:
        f = _RULES.get(eqn.primitive)
        out = f(eqn) if f is not None else ()
        rules = eqn.memo.rules = (out,) if isinstance(out, FactorRule) else tuple(out)
    return rules


def level_of(primitive: Any) -> str:
    return _LEVELS.get(primitive, "dims")


def registered() -> dict[Any, Any]:
    return dict(_RULES)


@dataclasses.dataclass(frozen=True)
class LocalContext:
    """What local code knows: the layouts it gets and must return, and where it runs.

    Attributes:
      ins, outs: layouts of operands and results (global shape, padded sizes, sharding).
      rule: the factor rule chosen; `assignment` its factor -> atoms.
      window: for a dot: what goes around in blocks instead of being gathered or scattered at once.
      received: for each operand, what equations before received of its block, for `sliding.slide`.
    """

    mesh: MeshAxes
    rule: FactorRule
    assignment: Assignment
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    window: Window | None = None
    received: tuple[dict[Any, Any], ...] = dataclasses.field(default=(), compare=False, repr=False)

    def axes(self, factor: int) -> tuple[str, ...]:
        return self.assignment.get(factor, ())

    def local_in(self, i: int) -> tuple[int, ...]:
        return self.ins[i].local_shape(self.mesh)

    def local_out(self, i: int = 0) -> tuple[int, ...]:
        return self.outs[i].local_shape(self.mesh)

    def block_index(self, atoms: Sequence[str]) -> Any:
        """This device's block number over `atoms` (int32, 0 when there are none)."""
        if not atoms:
            return jnp.int32(0)
        return lax.axis_index(atoms[0] if len(atoms) == 1 else tuple(atoms))

    def global_iota(self, layout: Layout, dim: int) -> Any:
        """Global positions of this device's block of `dim`, an int32 vector of the block's length."""
        n = layout.local_shape(self.mesh)[dim]
        return lax.iota(jnp.int32, n) + self.block_index(layout.sharding.axes[dim]) * n

    def mask(self, x: Any, layout: Layout, dim: int, fill: Any) -> Any:
        """`x` with the padding of an uneven split dim replaced by `fill` (a scalar)."""
        if not layout.uneven(dim):
            return x
        inside = self.global_iota(layout, dim) < layout.shape[dim]
        shape = [1] * x.ndim
        shape[dim] = x.shape[dim]
        return jnp.where(inside.reshape(shape), x, jnp.asarray(fill, x.dtype))


def layouts_for(
    rule: FactorRule,
    assignment: Assignment,
    shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    which: str,
    mesh: MeshAxes,
) -> tuple[Layout, ...]:
    """The layouts of the operands or results (`which`) of a rule under an assignment.

    `shapes` gives (shape, padded) of each value.  Results are partial over split reduced factors.
    """
    values = getattr(rule, which)
    partial: tuple[str, ...] = ()
    op = "sum"
    if which == "results":
        for f, o in rule.reduced:
            if atoms := assignment.get(f, ()):
                partial, op = (*partial, *atoms), o
    return tuple(
        Layout(shape, padded, Sharding(
            tuple(dim_axes(fs, assignment) for fs in dims), mesh.sort(partial), op))
        for dims, (shape, padded) in zip(values, shapes, strict=True)
    )  # fmt: skip


def run_local(ctx: LocalContext, eqn: Eqn, xs: Sequence[Any]) -> list[Any]:
    """Run an equation on local blocks: its own local code, or the primitive itself."""
    f = _LOCALS.get(eqn.primitive)
    out = f(ctx, eqn, *xs) if f is not None else eqn.primitive.bind(*xs, **eqn.params)
    return list(out) if isinstance(out, (list, tuple)) else [out]


def comm_bytes(ctx: LocalContext, eqn: Eqn) -> float:
    """Bytes one device sends inside the local code under this context (0 for most)."""
    f = _COMMS.get(eqn.primitive)
    return f(ctx, eqn) if f else 0.0


Array = jax.Array
