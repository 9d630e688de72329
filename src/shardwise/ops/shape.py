"""Primitives that only rename, add or drop dims: broadcast, transpose, reshape, squeeze."""

from __future__ import annotations

import math
from typing import Any

from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn


@rule(lax.broadcast_in_dim_p, level="broadcast")
def _broadcast_in_dim(eqn: Eqn) -> FactorRule:
    """`i -> i j`: new dims, and dims of size 1 made larger, belong to the result only."""
    x, (y,) = eqn.invars[0], eqn.outvars
    b = RuleBuilder()
    out = b.factors(y.shape)
    where = eqn.params["broadcast_dimensions"]
    operand = [out[j] if x.shape[i] == y.shape[j] else None for i, j in enumerate(where)]
    return b.build([operand], [out], linear=((0,),))


@local(lax.broadcast_in_dim_p)
def _broadcast_in_dim_local(ctx: LocalContext, eqn: Eqn, x: Any, *_: Any) -> Any:
    return lax.broadcast_in_dim(x, ctx.local_out(), eqn.params["broadcast_dimensions"])


@rule(lax.transpose_p, level="dims")
def _transpose(eqn: Eqn) -> FactorRule:
    """`i j k -> j k i` for the permutation given."""
    b = RuleBuilder()
    dims = b.factors(eqn.invars[0].shape)
    return b.build([dims], [[dims[i] for i in eqn.params["permutation"]]], linear=((0,),))


@rule(lax.squeeze_p, level="dims")
def _squeeze(eqn: Eqn) -> FactorRule:
    """`i 1 -> i`."""
    b = RuleBuilder()
    x = eqn.invars[0]
    dims = [None if i in eqn.params["dimensions"] else b.factor(s) for i, s in enumerate(x.shape)]
    return b.build([dims], [[d for d in dims if d is not None]], linear=((0,),))


def common_factors(
    src: tuple[int, ...], dst: tuple[int, ...]
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Split the dims of two shapes of one size into common factors, major first.

    `(6, 8), (48,) -> [[0],[1]], [[0,1]], sizes [6, 8]`.  Where two dims have only a common divisor it
    is shared as the major part: `(12, 8), (16, 6)` share a factor 4; what is left up to where the
    shapes meet again is unrelated (such factors appear on one side only).
    """
    sizes: list[int] = []
    ins: list[list[int]] = [[] for _ in src]
    outs: list[list[int]] = [[] for _ in dst]

    def factor(size: int, *owners: list[int]) -> None:
        for owner in owners:
            owner.append(len(sizes))
        sizes.append(size)

    # What is left of each side, major first: [dim's factor list, size still to be explained].
    left = [[f, s] for f, s in zip(ins, src, strict=True) if s > 1]
    right = [[f, s] for f, s in zip(outs, dst, strict=True) if s > 1]
    while left and right:
        g = math.gcd(left[0][1], right[0][1])
        if g > 1:
            factor(g, left[0][0], right[0][0])
            for side in (left, right):
                side[0][1] //= g
        else:
            a = b = 1
            while a != b or a == 1:
                side = left if a <= b else right
                owner, size = side.pop(0)
                factor(size, owner)
                a, b = (a * size, b) if side is left else (a, b * size)
        for side in (left, right):
            if side and side[0][1] == 1:
                side.pop(0)
    return ins, outs, sizes


@rule(lax.reshape_p, level="dims")
def _reshape(eqn: Eqn) -> FactorRule:
    """`(a b) c -> a b c`: compound dims on either side; factors of one side only stay whole."""
    x, (y,) = eqn.invars[0], eqn.outvars
    b = RuleBuilder()
    if 0 in x.shape:
        ins = b.factors(x.shape)
        outs = b.factors(y.shape)
        return b.build([ins], [outs], whole=(*ins, *outs))
    ins, outs, sizes = common_factors(x.shape, y.shape)
    b.sizes.extend(sizes)
    shared = {f for d in ins for f in d} & {f for d in outs for f in d}
    whole = [f for f in range(len(sizes)) if f not in shared]
    return b.build([ins], [outs], whole=whole, linear=((0,),))


@local(lax.reshape_p)
def _reshape_local(ctx: LocalContext, eqn: Eqn, x: Any, *_: Any) -> Any:
    return lax.reshape(x, ctx.local_out())
