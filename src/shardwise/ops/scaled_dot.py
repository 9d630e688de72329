"""`scaled_dot`: a dot of narrow numbers, each block of a contracted dim with its own scale.

A contracted dim is a compound one, `(s r)`: s blocks of r numbers, and s is the scale's dim.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.elementwise import find
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn, Var

_P = find("scaled_dot")


@rule(*_P, level="dot")
def _scaled_dot(eqn: Eqn) -> FactorRule:
    """`b m (s r), b n (s r), b m s, b n s -> b m n  sum=s`.

    Where the two operands' blocks differ in size, or one scale serves the whole dim, the dim has
    one factor only if no scale is split with it; else it lies whole.
    """
    (lhs_k, rhs_k), (lhs_b, rhs_b) = eqn.params["dimension_numbers"]
    lhs, rhs, lhs_scale, rhs_scale = eqn.invars
    b = RuleBuilder()
    left: dict[int, Any] = {}
    right: dict[int, Any] = {}
    scales: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
    reduced, whole = {}, []
    for i, j in zip(lhs_b, rhs_b, strict=True):
        left[i] = right[j] = scales[0][i] = scales[1][j] = b.factor(lhs.shape[i])
    for i, j in zip(lhs_k, rhs_k, strict=True):
        counts = lhs_scale.shape[i], rhs_scale.shape[j]
        blocks = [n for n in counts if n > 1] or [1]
        if max(counts) == 1:
            left[i] = right[j] = k = b.factor(lhs.shape[i])
            scales[0][i] = scales[1][j] = None
        elif len(set(blocks)) == 1:
            s, r = b.factor(blocks[0]), b.factor(lhs.shape[i] // blocks[0])
            left[i] = right[j] = [s, r]
            scales[0][i], scales[1][j] = (s if n > 1 else None for n in counts)
            whole.append(r)
            k = s
        else:
            left[i] = right[j] = k = b.factor(lhs.shape[i])
            scales[0][i], scales[1][j] = b.factors(counts)
            whole += [k, scales[0][i], scales[1][j]]
        reduced[k] = "sum"
    for side, scale, v in ((left, scales[0], lhs), (right, scales[1], rhs)):
        for d in range(v.rank):
            if d not in side:
                side[d] = scale[d] = b.factor(v.shape[d])
    out = [left[i] for i in lhs_b]
    out += [left[i] for i in range(lhs.rank) if i not in (*lhs_b, *lhs_k)]
    out += [right[j] for j in range(rhs.rank) if j not in (*rhs_b, *rhs_k)]
    return b.build(
        [_in_order(side, v) for side, v in zip((left, right, *scales), eqn.invars, strict=True)],
        [out],
        reduced=reduced,
        whole=whole,
    )


def _in_order(side: dict[int, Any], v: Var) -> list[Any]:
    return [side[d] for d in range(v.rank)]


@local(*_P)
def _scaled_dot_local(
    ctx: LocalContext, eqn: Eqn, lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any
) -> Any:
    """The primitive itself, which XLA may have hardware for; it wants at least two numbers a scale."""
    (lhs_k, rhs_k), _ = eqn.params["dimension_numbers"]
    for i, j in zip(lhs_k, rhs_k, strict=True):
        lhs = ctx.mask(lhs, ctx.ins[0], i, 0)
        rhs = ctx.mask(rhs, ctx.ins[1], j, 0)
    few = [i for i in lhs_k if lhs.shape[i] < 2 * lhs_scale.shape[i]]
    few += [j for j in rhs_k if rhs.shape[j] < 2 * rhs_scale.shape[j]]
    if not few:
        return eqn.primitive.bind(lhs, rhs, lhs_scale, rhs_scale, **eqn.params)
    wide = [x.astype(jnp.bfloat16) for x in (lhs, rhs, lhs_scale, rhs_scale)]
    return lax.dot_general(
        wide[0] * _repeated(wide[2], lhs.shape), wide[1] * _repeated(wide[3], rhs.shape),
        eqn.params["dimension_numbers"], preferred_element_type=eqn.outvars[0].dtype,
    )  # fmt: skip


def _repeated(scale: Any, shape: tuple[int, ...]) -> Any:
    for d, n in enumerate(shape):
        scale = jnp.repeat(scale, n // max(scale.shape[d], 1), axis=d) if n else scale
    return scale
