"""Random keys, and the counters that random bits are made from.

A counter-based generator hashes a key with the position of each number, so that bits do not depend
on the sharding when positions are global.  Capture writes its bits out as such arithmetic; what is
left here are the positions themselves and what is done with keys.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise import _jax, _jax_primitives
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.elementwise import pointwise
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn
from shardwise.sharding import Layout

_P = _jax_primitives.key_primitives()
_WORD = 32


@rule(_P["iota_2x32_shape"], level="broadcast")
def _iota_2x32(eqn: Eqn) -> FactorRule:
    """`-> i j, i j`: the high and low words of each element's row-major position."""
    b = RuleBuilder()
    dims = b.factors(eqn.params["shape"])
    return b.build([], [dims, dims])


@local(_P["iota_2x32_shape"])
def _iota_2x32_local(ctx: LocalContext, eqn: Eqn) -> tuple[Any, Any]:
    """Positions of the block's elements, from one vector a dim: nothing of global size is made."""
    block = ctx.local_out()
    high, low = positions(ctx, ctx.outs[0])
    return jnp.broadcast_to(high, block), jnp.broadcast_to(low, block)


def positions(ctx: LocalContext, layout: Layout, every: int = 1) -> tuple[Any, Any]:
    """High and low words of the row-major positions of a block's elements, to be broadcast.

    Args:
      every: of the last dim only each so-manyth.
    """
    shape = layout.shape
    high = low = jnp.zeros((), jnp.uint32)
    small = math.prod(shape) <= 1 << _WORD
    for d in range(len(shape)):
        at = ctx.global_iota(layout, d).astype(jnp.uint32)
        at = at[::every] if d == len(shape) - 1 else at
        at = at.reshape([-1 if i == d else 1 for i in range(len(shape))])
        stride = math.prod(shape[d + 1 :])
        if small:
            low = low + at * np.uint32(stride)
            continue
        h, l = times(at, stride)
        low = low + l
        high = high + h + (low < l).astype(jnp.uint32)
    return high, low


def run_of(ctx: LocalContext, layout: Layout, every: int) -> tuple[Any, Any] | None:
    """High and low words of each so-manyth position over `every`, as vectors, where a block is one run.

    It is where only the first dim (of more than one element) is split.  What is computed from a vector
    compiles in half the time of what is computed from a block's rows and columns.
    """
    first = next((d for d, n in enumerate(layout.shape) if n != 1), 0)
    block = layout.local_shape(ctx.mesh)
    count, rest = divmod(math.prod(block), every)
    if rest or any(block[d] != n for d, n in enumerate(layout.shape) if d != first):
        return None
    at = ctx.block_index(layout.sharding.axes[first]) if layout.shape else 0
    high, low = times(jnp.asarray(at, jnp.uint32), count)
    each = low + lax.iota(np.uint32, count)
    return high + (each < low).astype(jnp.uint32), each


def times(x: Any, n: int) -> tuple[Any, Any]:
    """High and low words of a uint32 times a constant below 2**64, modulo 2**64.

    The product is taken in 64 bits whatever the user's `jax_enable_x64`: in halves of 32-bit words it
    is five times the operations, and XLA took three times as long to compile a generator's rounds.
    """
    top, word = divmod(n, 1 << _WORD)
    with jax.enable_x64(True):
        product = lax.convert_element_type(x, np.uint64) * np.uint64(word)
        high = lax.convert_element_type(product >> np.uint64(_WORD), np.uint32)
        low = lax.convert_element_type(product, np.uint32)
    return (high + x * np.uint32(top) if top else high), low


def _independent(key_dtype: Any, use: str) -> bool:
    """Whether a generator treats each key of an array by itself, whatever the others are.

    The counter-based ones do.  `rbg` under vmap draws all bits from the first key, and `unsafe_rbg`
    splits and folds that way too; of a generator we do not know we assume the same.
    """
    name = _jax.key_impl_name(key_dtype)
    return name.startswith(("threefry", "philox")) or (name == "rbg" and use != "bits")


@rule(_P["random_seed"], _P["random_clone"], level="elementwise")
def _same_dims(eqn: Eqn) -> FactorRule:
    """`i -> i`: a key for each seed; a key for each key."""
    return pointwise(eqn)


@rule(_P["random_wrap"], level="elementwise")
def _wrap(eqn: Eqn) -> FactorRule:
    """`i w -> i  whole=w`: the words of a key make one element."""
    b = RuleBuilder()
    dims = b.factors(eqn.invars[0].shape)
    rank = eqn.outvars[0].rank
    return b.build([dims], [dims[:rank]], whole=dims[rank:])


@rule(_P["random_unwrap"], level="elementwise")
def _unwrap(eqn: Eqn) -> FactorRule:
    """`i -> i w  whole=w`."""
    b = RuleBuilder()
    dims = b.factors(eqn.outvars[0].shape)
    rank = eqn.invars[0].rank
    return b.build([dims[:rank]], [dims], whole=dims[rank:])


@rule(_P["random_fold_in"], level="elementwise")
def _fold_in(eqn: Eqn) -> FactorRule:
    """`i, i -> i`: a message into each key."""
    r = pointwise(eqn)
    if _independent(eqn.invars[0].dtype, "fold_in"):
        return r
    return dataclasses.replace(r, whole=frozenset(range(len(r.sizes))))


@rule(_P["random_split"], level="dims")
def _split(eqn: Eqn) -> FactorRule:
    """`i -> i n`: new keys from each."""
    keys = eqn.invars[0]
    b = RuleBuilder()
    dims, new = b.factors(keys.shape), b.factors(eqn.params["shape"])
    whole = [] if _independent(keys.dtype, "split") else dims
    return b.build([dims], [dims + new], whole=whole)


@local(_P["random_split"])
def _split_local(ctx: LocalContext, eqn: Eqn, keys: Any) -> Any:
    """Keys are few and cheap: make those of all blocks, keep this one's."""
    out = eqn.primitive.bind(keys, **eqn.params)
    for d in range(keys.ndim, out.ndim):
        if ctx.outs[0].sharding.axes[d]:
            at = lax.min(ctx.global_iota(ctx.outs[0], d), jnp.int32(out.shape[d] - 1))
            out = out.at[(slice(None),) * d + (at,)].get(mode="promise_in_bounds")
    return out


@rule(_P["random_bits"], level="dims")
def _bits(eqn: Eqn) -> FactorRule:
    """`i -> i n  whole=n`: of generators whose bits depend on the shape drawn at once."""
    keys = eqn.invars[0]
    b = RuleBuilder()
    dims, new = b.factors(keys.shape), b.factors(eqn.params["shape"])
    return b.build(
        [dims], [dims + new], whole=new if _independent(keys.dtype, "bits") else dims + new
    )
