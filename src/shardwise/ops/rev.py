"""`rev`: blocks trade places, and realign where the dim does not divide."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import exchange
from shardwise.messages import Rows, overlaps
from shardwise.ops.moves import bytes_sent, empty, split
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn
from shardwise.rounds import Plan, plan_exchange


@rule(lax.rev_p)
def _rev(eqn: Eqn) -> FactorRule:
    b = RuleBuilder()
    dims = b.factors(eqn.invars[0].shape)
    special = [dims[d] for d in eqn.params["dimensions"]]
    return b.build([dims], [dims], special=special, linear=[[0]])


@functools.lru_cache(maxsize=4096)
def rev_plan(shards: int, block: int, size: int) -> Plan:
    """How blocks that are reversed already find their place: device p's goes to P-1-p and a bit."""
    edges = np.minimum(np.arange(shards + 1) * block, size)
    lo, hi = size - edges[1:], size - edges[:-1]
    held = Rows(lo, hi, block - (hi - lo))
    wanted = Rows.windows(shards, block, 0, block, size)
    return plan_exchange(held, wanted, block, block, overlaps(held, wanted))


def _rev_plans(ctx: LocalContext, eqn: Eqn) -> dict[int, Plan]:
    x, n = eqn.invars[0], ctx.local_in(0)
    return {
        d: rev_plan(ctx.mesh.size(split(ctx, d)[0]), n[d], x.shape[d])
        for d in eqn.params["dimensions"]
        if split(ctx, d)[0]
    }


@local(lax.rev_p)
def _rev_local(ctx: LocalContext, eqn: Eqn, x: Any) -> Any:
    x = lax.rev(x, eqn.params["dimensions"])
    if not empty(ctx):
        for d, plan in _rev_plans(ctx, eqn).items():
            x = exchange(x, d, split(ctx, d)[0], plan)
    return x


@comm(lax.rev_p)
def _rev_comm(ctx: LocalContext, eqn: Eqn) -> float:
    plans = _rev_plans(ctx, eqn)
    return bytes_sent(ctx, eqn, plans, lambda d: plans[d].rows)
