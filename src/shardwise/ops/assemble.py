"""`assemble`: a dim put together from pieces of other arrays; what chains of slices, pads and
concatenations come down to (`merge`).

    roll(x, 1)                  pieces (x, n-1, 1), (x, 0, n-1)
    pad(x, (1, 0))[:-1]         pieces (0, 0, 1), (x, 0, n-1)        # a scalar operand fills

Along a split dim all pieces move in shared rounds, straight from where they are to where they belong:
every spelling of a shift is one collective-permute of the rows that cross a border.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np
from jax import core, lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import cut, exchange, iota_of, row_bytes, where
from shardwise.messages import Messages, Rows, overlaps
from shardwise.ops.moves import APART, TIED, empty, is_tied, split, zeros
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn, Lit
from shardwise.rounds import MAX_ROUNDS, Plan, plan_exchange, plan_rounds

Piece = tuple[int, int, int]  # operand, its first row, number of rows

assemble_p = jex.Primitive("assemble")


@assemble_p.def_impl
def whole(*xs: Any, dimension: int, pieces: Sequence[Piece]) -> Any:
    """The result from whole operands: slices of them, joined."""
    shape = next(x.shape for x in xs if x.ndim)
    parts = []
    for k, start, size in pieces:
        if xs[k].ndim:
            parts.append(lax.slice_in_dim(xs[k], start, start + size, axis=dimension))
        else:
            fill = (*shape[:dimension], size, *shape[dimension + 1 :])
            parts.append(lax.broadcast_in_dim(xs[k], fill, ()))
    return lax.concatenate(parts, dimension)


@assemble_p.def_abstract_eval
def _abstract(*avals: Any, dimension: int, pieces: Sequence[Piece]) -> Any:
    like = next(a for a in avals if a.shape)
    shape = list(like.shape)
    shape[dimension] = sum(n for _, _, n in pieces)
    return core.ShapedArray(tuple(shape), like.dtype)


@rule(assemble_p)
def _assemble(eqn: Eqn) -> list[FactorRule]:
    """Tied: the operands' dim is split like the result's.  Apart: the operands' is whole."""
    dim, y = eqn.params["dimension"], eqn.outvars[0]
    arrays = [v for v in eqn.invars if v.rank]
    fills = [v for v in eqn.invars if not v.rank]
    zero_fill = all(isinstance(v, Lit) and not np.any(np.asarray(v.value)) for v in fills)
    linear = [[k for k, v in enumerate(eqn.invars) if v.rank]] if zero_fill else []
    b = RuleBuilder()
    dims = b.factors(y.shape)
    b.sizes[dim] = max(v.shape[dim] for v in arrays)
    tied = b.build(
        [dims if v.rank else [] for v in eqn.invars], [dims], special=[dims[dim]],
        linear=linear, variant=TIED,
    )  # fmt: skip
    b = RuleBuilder()
    dims = b.factors(y.shape)
    parts = {id(v): b.factor(v.shape[dim]) for v in arrays}
    ins = [[*dims[:dim], parts[id(v)], *dims[dim + 1 :]] if v.rank else [] for v in eqn.invars]
    apart = b.build(
        ins, [dims], special=[dims[dim]], whole=list(parts.values()), linear=linear, variant=APART
    )
    return [tied, apart]


@functools.lru_cache(maxsize=4096)
def assemble_plans(
    shards: int, blocks: tuple[int, ...], sizes: tuple[int, ...], pieces: tuple[Piece, ...], out: int
) -> tuple[Plan, ...]:
    """One plan that moves all pieces at once (their blocks joined), or one for each piece.

    `blocks`, `sizes`: block and size of each operand, 0 for one that fills.
    """
    at = np.cumsum([0, *blocks])
    total = sum(n for _, _, n in pieces)
    wanted = Rows.windows(shards, out, 0, out, total)
    device = np.arange(shards, dtype=np.int64)
    moves, apart, first = [], [], 0
    for k, start, size in pieces:
        if blocks[k]:
            edge = device * blocks[k]
            lo = np.clip(edge, start, start + size)
            hi = np.clip(np.minimum(edge + blocks[k], sizes[k]), lo, start + size)
            held = Rows(lo - start + first, hi - start + first, lo - edge)
            m = overlaps(held, wanted)
            moves.append(Messages(m.src, m.dst, m.src_off + int(at[k]), m.dst_off, m.length))
            apart.append(plan_exchange(held, wanted, blocks[k], out, m))
        first += size
    together = plan_rounds(Messages.join(moves), wanted, int(at[-1]), out)
    if len(together.steps) <= MAX_ROUNDS and together.rows <= sum(p.rows for p in apart):
        return (together,)
    return tuple(apart)


def _plans(ctx: LocalContext, eqn: Eqn) -> tuple[Plan, ...]:
    dim = eqn.params["dimension"]
    return assemble_plans(
        ctx.mesh.size(split(ctx, dim, _array(eqn))[1]),
        tuple(ctx.local_in(k)[dim] if v.rank else 0 for k, v in enumerate(eqn.invars)),
        tuple(v.shape[dim] if v.rank else 0 for v in eqn.invars),
        tuple(eqn.params["pieces"]),
        ctx.local_out()[dim],
    )


def _array(eqn: Eqn) -> int:
    return next(k for k, v in enumerate(eqn.invars) if v.rank)


@local(assemble_p)
def _assemble_local(ctx: LocalContext, eqn: Eqn, *xs: Any) -> Any:
    dim, pieces = eqn.params["dimension"], eqn.params["pieces"]
    array = _array(eqn)
    if empty(ctx):
        return zeros(ctx, xs[array].dtype)
    atoms, n = split(ctx, dim, array)[1], ctx.local_out()[dim]
    if not atoms:
        return whole(*xs, **eqn.params)
    if not is_tied(ctx, dim, array):
        bounds = (0, (ctx.mesh.size(atoms) - 1) * n)
        return cut(whole(*xs, **eqn.params), dim, ctx.block_index(atoms) * n, n, 0, bounds)
    plans = _plans(ctx, eqn)
    if len(plans) == 1:
        joined = [x for x in xs if x.ndim]
        joined = joined[0] if len(joined) == 1 else lax.concatenate(joined, dim)
        return _filled(ctx, eqn, exchange(joined, dim, atoms, plans[0]), xs)
    moved = iter(plans)
    parts = [exchange(xs[k], dim, atoms, next(moved)) if xs[k].ndim else None for k, _, _ in pieces]
    out = next(p for p in parts if p is not None)
    row, first = iota_of(out, dim) + ctx.block_index(atoms) * n, 0
    for part, (_, _, size) in zip(parts, pieces, strict=True):
        if part is not None and part is not out:
            out = where((row >= first) & (row < first + size), part, out)
        first += size
    return _filled(ctx, eqn, out, xs)


def _filled(ctx: LocalContext, eqn: Eqn, out: Any, xs: Sequence[Any]) -> Any:
    """`out` with the pieces that scalars fill."""
    dim, first = eqn.params["dimension"], 0
    atoms, n = split(ctx, dim, _array(eqn))[1], ctx.local_out()[dim]
    row = iota_of(out, dim) + ctx.block_index(atoms) * n
    for k, _, size in eqn.params["pieces"]:
        if not xs[k].ndim:
            fill = lax.broadcast_in_dim(xs[k], out.shape, ())
            out = where((row < first) | (row >= first + size), out, fill)
        first += size
    return out


@comm(assemble_p)
def _assemble_comm(ctx: LocalContext, eqn: Eqn) -> float:
    dim, array = eqn.params["dimension"], _array(eqn)
    if empty(ctx) or not is_tied(ctx, dim, array) or not split(ctx, dim, array)[1]:
        return 0.0
    rows = sum(p.rows for p in _plans(ctx, eqn))
    return float(rows * row_bytes(ctx.local_out(), dim, eqn.outvars[0].itemsize))
