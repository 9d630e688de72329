"""Gamma variates: a primitive of its own; all else that `jax.random` draws is arithmetic on bits."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise import _jax, _jax_primitives
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.elementwise import find
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn


@rule(*find("random_gamma"), level="dims")
def _gamma(eqn: Eqn) -> FactorRule:
    """`i, i j -> i j`: each key is split into one for each of its elements."""
    keys, alpha = eqn.invars
    b = RuleBuilder()
    dims = b.factors(alpha.shape)
    return b.build([dims[: keys.rank], dims], [dims])


@local(*find("random_gamma"))
def _gamma_local(ctx: LocalContext, eqn: Eqn, keys: Any, alpha: Any) -> Any:
    """The keys of all elements of this block's keys (they are cheap); variates of the block's own."""
    out, rank = ctx.outs[0], keys.ndim
    if not any(out.sharding.axes[rank:]):
        return eqn.primitive.bind(keys, alpha, **eqn.params)
    inner = out.shape[rank:]
    new = jax.vmap(lambda k: jax.random.split(k, math.prod(inner)))(keys.reshape(-1))
    new = new.reshape(*keys.shape, *inner)
    for d in range(rank, alpha.ndim):
        at = lax.min(ctx.global_iota(out, d), jnp.int32(max(out.shape[d] - 1, 0)))
        new = new.at[(slice(None),) * d + (at,)].get(mode="promise_in_bounds")
    one = functools.partial(_jax_primitives.gamma_one, log_space=eqn.params["log_space"])
    if _jax.key_impl_name(keys.dtype).startswith("threefry"):
        return jax.vmap(one)(new.reshape(-1), alpha.reshape(-1)).reshape(alpha.shape)
    pairs = new.reshape(-1), alpha.reshape(-1)
    return lax.map(lambda pair: one(*pair), pairs).reshape(alpha.shape)
