"""`rotate`: a dim turned by an amount known only at run time: what a traced `jnp.roll` comes to.

    rotate(x, s)[r] = x[(r + s) mod n]

`jnp.roll` joins x to itself and takes a dynamic slice of it (`merge` finds that).  Taken op by op, both
steps move everything; the devices of a split dim are a ring, though:

    tied    a -> a   whole blocks go around by the binary digits of the distance, one permute a digit,
                     kept where the digit is set; the rest is one halo from the next block
                     (or, where that sends less, everybody gets everything)
    apart   a -> b   the operand is whole, and each device cuts its block
"""

from __future__ import annotations

from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import Device, cut, iota_of, row_bytes, rows_at, where
from shardwise.ops.moves import APART, TIED, empty, is_tied, zeros
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn
from shardwise.rounds import MAX_GROWTH

rotate_p = jex.Primitive("rotate")


@rotate_p.def_impl
def whole(x: Any, start: Any, *, dimension: int) -> Any:
    """The result from a whole operand; a start out of [0, n] is clamped, as `dynamic_slice` does."""
    n = x.shape[dimension]
    twice = lax.concatenate([x, x], dimension)
    return rows_at(twice, dimension, _amount(start, n), n)


@rotate_p.def_abstract_eval
def _abstract(x: Any, start: Any, *, dimension: int) -> Any:
    return core.ShapedArray(x.shape, x.dtype)


@rule(rotate_p)
def _rotate(eqn: Eqn) -> list[FactorRule]:
    d, y = eqn.params["dimension"], eqn.outvars[0]
    rules = []
    for kind in (TIED, APART):
        b = RuleBuilder()
        outs = b.factors(y.shape)
        ins = list(outs)
        if kind == APART:
            ins[d] = b.factor(y.shape[d])
        rules.append(
            b.build(
                [ins, []], [outs], special=[outs[d]], whole=[ins[d]] if kind == APART else [],
                linear=[[0]], variant=kind,
            )
        )  # fmt: skip
    return rules


def rotate_rows(shards: int, block: int, size: int) -> tuple[str, int]:
    """How `size` rows in blocks go around, "ring" or "gather", and the rows one device sends."""
    padding = shards * block - size
    ring = (shards - 1).bit_length() * block + block - 1 + padding
    gather = (shards - 1) * block
    fits = shards <= MAX_GROWTH or padding >= block
    return ("gather", gather) if fits and gather <= ring else ("ring", ring)


def _amount(start: Any, size: int) -> Any:
    """A start of any integer type, clamped to [0, size] in its own, as int32 below `size`."""
    start = jnp.asarray(start)
    top = min(size, int(jnp.iinfo(start.dtype).max))
    at = lax.clamp(np.zeros((), start.dtype), start, np.asarray(top, start.dtype))
    at = at.astype(jnp.int32)
    return lax.select(at >= size, jnp.zeros_like(at), at)


def _method(ctx: LocalContext, eqn: Eqn) -> tuple[str, int]:
    d = eqn.params["dimension"]
    atoms = ctx.outs[0].sharding.axes[d]
    return rotate_rows(ctx.mesh.size(atoms), ctx.local_out()[d], eqn.outvars[0].shape[d])


@local(rotate_p)
def _rotate_local(ctx: LocalContext, eqn: Eqn, x: Any, start: Any) -> Any:
    d = eqn.params["dimension"]
    n, atoms = eqn.outvars[0].shape[d], ctx.outs[0].sharding.axes[d]
    if empty(ctx):
        return zeros(ctx, x.dtype)
    if not atoms:
        return whole(x, start, dimension=d)
    at, block, shards = _amount(start, n), ctx.local_out()[d], ctx.mesh.size(atoms)
    begin = ctx.block_index(atoms) * block
    tied = is_tied(ctx, d)
    if tied and _method(ctx, eqn)[0] == "ring":
        return _ring(x, d, Device(atoms), shards, n, at, begin)
    if tied:
        x = rows_at(lax.all_gather(x, atoms, axis=d, tiled=True), d, 0, n)
    bounds = (0, (shards - 1) * block + n - 1)
    return cut(lax.concatenate([x, x], d), d, begin + at, block, 0, bounds)


def _ring(x: Any, d: int, device: Device, shards: int, n: int, at: Any, begin: Any) -> Any:
    """My rows of the ring of all blocks, padding included, and past the padding where they wrap."""
    block = x.shape[d]

    def from_ahead(y: Any, distance: int) -> Any:
        return device.receive(y, [((p + distance) % shards, p) for p in range(shards)])

    blocks = lax.div(at, jnp.int32(block))
    for k in range((shards - 1).bit_length()):
        x = where((blocks >> k) & 1 == 1, from_ahead(x, 1 << k), x)
    padding = shards * block - n
    parts, need = [x], block - 1 + padding
    while need > 0:
        rows = min(block, need)
        parts.append(from_ahead(rows_at(x, d, 0, rows), len(parts)))
        need -= rows
    joined = lax.concatenate(parts, d) if len(parts) > 1 else x
    rest = at - blocks * block
    mine = rows_at(joined, d, rest, block)
    if not padding:
        return mine
    wraps = iota_of(mine, d) + begin + at >= n
    return where(wraps, rows_at(joined, d, rest + padding, block), mine)


@comm(rotate_p)
def _rotate_comm(ctx: LocalContext, eqn: Eqn) -> float:
    d = eqn.params["dimension"]
    if empty(ctx) or not ctx.outs[0].sharding.axes[d] or not is_tied(ctx, d):
        return 0.0
    return float(_method(ctx, eqn)[1] * row_bytes(ctx.local_out(), d, eqn.outvars[0].itemsize))
