"""`concatenate`: along a split dim all operands' rows move in shared rounds."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import cut, exchange, iota_of, row_bytes, where
from shardwise.messages import Messages, Rows, overlaps
from shardwise.ops.moves import APART, TIED, empty, is_tied, split, zeros
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn
from shardwise.rounds import MAX_ROUNDS, Plan, colour_messages, plan_exchange, plan_rounds


@rule(lax.concatenate_p)
def _concatenate(eqn: Eqn) -> list[FactorRule]:
    """Tied: every operand's dim is split like the result's.  Apart: the operands' are whole."""
    dim, y = eqn.params["dimension"], eqn.outvars[0]
    linear = [range(len(eqn.invars))]
    b = RuleBuilder()
    dims = b.factors(y.shape)
    b.sizes[dim] = max(v.shape[dim] for v in eqn.invars)
    tied = b.build(
        [dims for _ in eqn.invars], [dims], special=[dims[dim]], linear=linear, variant=TIED
    )
    b = RuleBuilder()
    dims = b.factors(y.shape)
    parts = b.factors(v.shape[dim] for v in eqn.invars)
    ins = [[*dims[:dim], f, *dims[dim + 1 :]] for f in parts]
    apart = b.build(ins, [dims], special=[dims[dim]], whole=parts, linear=linear, variant=APART)
    return [tied, apart]


@functools.lru_cache(maxsize=4096)
def concatenate_plans(
    shards: int, blocks: tuple[int, ...], sizes: tuple[int, ...], out: int
) -> tuple[Plan, ...]:
    """One plan that moves all operands at once (cut from their blocks, joined), or one for each.

    Together they share rounds: two of 2048 rows over 8 take 2 rounds of 256 rows.  One for each
    is for operands so small beside the result that one device gets all of them.
    """
    first = np.cumsum([0, *sizes])
    at = np.cumsum([0, *blocks])
    wanted = Rows.windows(shards, out, 0, out, int(first[-1]))
    held = [
        Rows.blocks(shards, b, n, int(first[k]))
        for k, (b, n) in enumerate(zip(blocks, sizes, strict=True))
    ]
    moves = [overlaps(h, wanted) for h in held]
    apart = tuple(
        plan_exchange(h, wanted, b, out, m) for h, b, m in zip(held, blocks, moves, strict=True)
    )
    joined = Messages.join([
        Messages(m.src, m.dst, m.src_off + int(at[k]), m.dst_off, m.length)
        for k, m in enumerate(moves)
    ])  # fmt: skip
    found = colour_messages(joined.pick(joined.src != joined.dst))
    if found.rounds <= MAX_ROUNDS and found.rows <= sum(p.rows for p in apart):
        return (plan_rounds(joined, wanted, int(at[-1]), out, found),)
    return apart


def _concatenate_plans(ctx: LocalContext, eqn: Eqn) -> tuple[Plan, ...]:
    dim = eqn.params["dimension"]
    return concatenate_plans(
        ctx.mesh.size(split(ctx, dim)[1]),
        tuple(ctx.local_in(k)[dim] for k in range(len(eqn.invars))),
        tuple(v.shape[dim] for v in eqn.invars),
        ctx.local_out()[dim],
    )


@local(lax.concatenate_p)
def _concatenate_local(ctx: LocalContext, eqn: Eqn, *xs: Any) -> Any:
    dim, n = eqn.params["dimension"], ctx.local_out()[eqn.params["dimension"]]
    if empty(ctx):
        return zeros(ctx, xs[0].dtype)
    atoms = split(ctx, dim)[1]
    if not atoms:
        return lax.concatenate(xs, dim)
    if not is_tied(ctx, dim):
        bounds = (0, (ctx.mesh.size(atoms) - 1) * n)
        return cut(lax.concatenate(xs, dim), dim, ctx.block_index(atoms) * n, n, 0, bounds)
    plans = _concatenate_plans(ctx, eqn)
    if len(plans) == 1:
        return exchange(lax.concatenate(xs, dim), dim, atoms, plans[0])
    parts = [exchange(x, dim, atoms, p) for x, p in zip(xs, plans, strict=True)]
    out, first = parts[0], 0
    row = iota_of(out, dim) + ctx.block_index(atoms) * n
    for part, v in zip(parts[1:], eqn.invars, strict=False):
        first += v.shape[dim]
        out = where(row >= first, part, out)
    return out


@comm(lax.concatenate_p)
def _concatenate_comm(ctx: LocalContext, eqn: Eqn) -> float:
    dim = eqn.params["dimension"]
    if empty(ctx) or not is_tied(ctx, dim) or not split(ctx, dim)[1]:
        return 0.0
    rows = sum(p.rows for p in _concatenate_plans(ctx, eqn))
    return float(rows * row_bytes(ctx.local_out(), dim, eqn.outvars[0].itemsize))
