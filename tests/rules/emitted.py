"""What the local code of one equation sends, read from its jaxpr; no device is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardwise.capture import capture
from shardwise.cost import comm
from shardwise.factors import Assignment, FactorRule
from shardwise.mesh import MeshAxes, abstract_mesh
from shardwise.ops.registry import LocalContext, comm_bytes, layouts_for, rules_of, run_local
from shardwise.program import Eqn
from shardwise.sharding import padded_size


def context(eqn: Eqn, rule: FactorRule, assignment: Assignment, mesh: MeshAxes) -> LocalContext:
    """The context of an equation under an assignment, split dims padded as little as can be."""

    def layouts(values: Sequence[Any], dims: Any, which: str) -> Any:
        shapes = [
            (v.shape, tuple(
                padded_size(s, [mesh.size(a for f in fs for a in assignment.get(f, ()))])
                for s, fs in zip(v.shape, ds, strict=True)
            ))
            for v, ds in zip(values, dims, strict=True)
        ]  # fmt: skip
        return layouts_for(rule, assignment, shapes, which, mesh)

    return LocalContext(
        mesh, rule, assignment,
        layouts(eqn.invars, rule.operands, "operands"),
        layouts(eqn.outvars, rule.results, "results"),
    )  # fmt: skip


def emitted(
    fn: Callable[..., Any],
    shapes: Sequence[jax.ShapeDtypeStruct],
    mesh: dict[str, int],
    split: dict[int, str],
    primitive: str,
) -> tuple[float, float, Any]:
    """(bytes the local code sends, bytes its price says, its jaxpr) with operand 0's dims split.

    Args:
      split: dim of operand 0 -> mesh axis.
    """
    axes = MeshAxes.of(abstract_mesh(mesh))
    body, _ = capture(fn, shapes)
    eqn = next(e for e in reversed(body.eqns) if e.name == primitive)
    rule = rules_of(eqn)[0]
    assignment = {rule.operands[0][d][0]: axes.expand(a) for d, a in split.items()}
    ctx = context(eqn, rule, assignment, axes)
    blocks = [
        jax.ShapeDtypeStruct(layout.local_shape(axes), v.dtype)
        for v, layout in zip(eqn.invars, ctx.ins, strict=True)
    ]
    names = [(a, axes.size_of[a]) for a in axes.atoms]
    jaxpr = jax.make_jaxpr(lambda *xs: run_local(ctx, eqn, xs), axis_env=names)(*blocks)
    sent = sum(f.bytes * f.count for f in comm.find(jaxpr, axes))
    return sent, comm_bytes(ctx, eqn), jaxpr
