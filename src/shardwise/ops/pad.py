"""`pad`: low, high and interior, negative low and high too."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import Device, cut, exchange, pad_dim
from shardwise.messages import Rows, overlaps
from shardwise.ops.moves import (
    APART,
    TIED,
    by_growth,
    bytes_sent,
    choices,
    empty,
    is_tied,
    moved_dims,
    split,
)
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn, Lit
from shardwise.rounds import Plan, Start, plan_exchange


def padded_dims(eqn: Eqn) -> dict[int, tuple[int, int, int]]:
    """dim -> (low, high, interior) of the dims a pad changes."""
    config = [(int(lo), int(hi), int(k)) for lo, hi, k in eqn.params["padding_config"]]
    sizes = eqn.invars[0].shape
    return {d: c for d, c in enumerate(config) if any(c[:2]) or (c[2] and sizes[d] > 1)}


@rule(lax.pad_p)
def _pad(eqn: Eqn) -> list[FactorRule]:
    """Apart: the operand's dim is whole, and each device cuts its block of the padded dim."""
    (x, value), y = eqn.invars, eqn.outvars[0]
    changed = list(padded_dims(eqn))
    zero = isinstance(value, Lit) and not np.any(np.asarray(value.value))
    rules = []
    orders = [(APART, TIED) if x.shape[d] <= 1 else (TIED, APART) for d in changed]
    for kinds in choices(orders):
        b = RuleBuilder()
        ins = b.factors(x.shape)
        outs, apart = list(ins), [d for d, k in zip(changed, kinds, strict=True) if k == APART]
        for d in apart:
            outs[d] = b.factor(y.shape[d])
        rules.append(
            b.build(
                [ins, []], [outs], special=[outs[d] for d in changed],
                whole=[ins[d] for d in apart],
                linear=[[0]] if zero else [[0, 1]], variant=" ".join(kinds),
            )
        )  # fmt: skip
    return rules


@functools.lru_cache(maxsize=4096)
def pad_plan(
    shards: int, block: int, size: int, low: int, step: int, length: int, out: int
) -> tuple[Start, int, Plan]:
    """How a split dim is padded: each device gets the source rows that fall into its block.

    Args:
      shards, block, size: the source dim.
      step: 1 + interior padding.
      length, out: the result's size and block.

    Returns:
      the result row of a device's first source row (one number or a table), how many source rows it
      gets, and the plan that moves them (with the padding value for those there are none of).
    """
    begin = np.arange(shards) * out - low
    first = -(-begin // step)
    count = (out - 1) // step + 1
    limit = (length - 1 - low) // step + 1
    wanted = Rows(first, np.clip(first + count, first, max(limit, 0)), np.zeros(shards, np.int64))
    held = Rows.blocks(shards, block, size)
    offset = first * step - begin
    plan = plan_exchange(held, wanted, block, count, overlaps(held, wanted))
    return int(offset[0]) if (offset == offset[0]).all() else offset, count, plan


def _pad_plan(ctx: LocalContext, eqn: Eqn, d: int) -> tuple[Start, int, Plan]:
    low, _, interior = padded_dims(eqn)[d]
    (size, n), atoms = (eqn.invars[0].shape[d], eqn.outvars[0].shape[d]), split(ctx, d)[0]
    return pad_plan(
        ctx.mesh.size(atoms), ctx.local_in(0)[d], size, low, interior + 1, n, ctx.local_out()[d]
    )


@local(lax.pad_p)
def _pad_local(ctx: LocalContext, eqn: Eqn, x: Any, value: Any) -> Any:
    if empty(ctx) or 0 in x.shape:
        return jnp.broadcast_to(value, ctx.local_out())
    changed = padded_dims(eqn)
    for d in by_growth(ctx, changed):
        low, high, interior = changed[d]
        rows = ctx.local_out()[d]
        mine, theirs = split(ctx, d)
        if is_tied(ctx, d) and mine:
            offset, _, plan = _pad_plan(ctx, eqn, d)
            device = Device(mine)
            x = exchange(x, d, mine, plan, value)
            if interior:
                bounds = (-int(np.max(offset)), -int(np.min(offset)))
                x = pad_dim(x, d, 0, 0, value, interior)
                x = cut(x, d, -device.at(offset), rows, value, bounds)
        elif theirs:
            x = pad_dim(x, d, 0, 0, value, interior)
            bounds = (-low, (ctx.mesh.size(theirs) - 1) * rows - low)
            x = cut(x, d, ctx.block_index(theirs) * rows - low, rows, value, bounds)
        else:
            x = pad_dim(x, d, low, high, value, interior)
    return x


@comm(lax.pad_p)
def _pad_comm(ctx: LocalContext, eqn: Eqn) -> float:
    if 0 in ctx.local_in(0):
        return 0.0
    moved = set(moved_dims(ctx, padded_dims(eqn)))
    return bytes_sent(
        ctx, eqn, padded_dims(eqn),
        lambda d: _pad_plan(ctx, eqn, d)[2].rows if d in moved else 0,
    )  # fmt: skip
