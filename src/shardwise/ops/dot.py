"""`dot_general`: batch, contracting and free dims, each a factor; contracted ones leave partial sums.

Every combination of splits over several axes is one assignment of atoms to factors: the papers'
recursive partitioning of an Einsum (GSPMD 4.4) with nothing left to recurse on.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.ops.windowed import windowed
from shardwise.program import Eqn


@rule(lax.dot_general_p, level="dot")
def _dot_general(eqn: Eqn) -> FactorRule:
    """`b m k, b k n -> b m n  sum=k`; linear in each operand."""
    (lhs_k, rhs_k), (lhs_b, rhs_b) = eqn.params["dimension_numbers"]
    lhs, rhs = eqn.invars
    b = RuleBuilder()
    left: dict[int, int] = {}
    right: dict[int, int] = {}
    for i, j in (*zip(lhs_b, rhs_b, strict=True), *zip(lhs_k, rhs_k, strict=True)):
        left[i] = right[j] = b.factor(lhs.shape[i])
    for side, v in ((left, lhs), (right, rhs)):
        side.update({d: b.factor(v.shape[d]) for d in range(v.rank) if d not in side})
    out = [left[i] for i in lhs_b]
    out += [left[i] for i in range(lhs.rank) if i not in (*lhs_b, *lhs_k)]
    out += [right[j] for j in range(rhs.rank) if j not in (*rhs_b, *rhs_k)]
    return b.build(
        [[left[i] for i in range(lhs.rank)], [right[j] for j in range(rhs.rank)]],
        [out],
        reduced={left[i]: "sum" for i in lhs_k},
        linear=((0,), (1,)),
    )


@local(lax.dot_general_p)
def _dot_general_local(ctx: LocalContext, eqn: Eqn, lhs: Any, rhs: Any) -> Any:
    """Both operands are masked where a contracted dim has padding: 0 * NaN would be NaN."""
    (lhs_k, rhs_k), _ = eqn.params["dimension_numbers"]
    for i, j in zip(lhs_k, rhs_k, strict=True):
        lhs = ctx.mask(lhs, ctx.ins[0], i, 0)
        rhs = ctx.mask(rhs, ctx.ins[1], j, 0)

    def dot(lhs: Any, rhs: Any) -> Any:
        return lax.dot_general_p.bind(lhs, rhs, **{**eqn.params, "out_sharding": None})

    if ctx.window is not None:
        return windowed(ctx, dot, lhs, rhs, eqn.outvars[0].dtype)
    return dot(lhs, rhs)
