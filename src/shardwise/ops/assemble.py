"""`assemble`: a dim put together from pieces of other arrays; what chains of slices, pads and
concatenations come down to (`merge`).

    roll(x, 1)                  pieces (x, n-1, 1), (x, 0, n-1)
    pad(x, (1, 0))[:-1]         pieces (0, 0, 1), (x, 0, n-1)        # a scalar operand fills

Along a split dim all pieces move in shared rounds, straight from where they are to where they belong:
every spelling of a shift is one collective-permute of the rows that cross a border.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import cut, exchange, row_bytes, where
from shardwise.messages import Messages, Rows, overlaps
from shardwise.ops.moves import APART, TIED, empty, is_tied, zeros
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
    """Each operand is tied (its dim is split like the result's, rows move) or apart (it is whole, and
    every device cuts what it needs of it)."""
    dim, y = eqn.params["dimension"], eqn.outvars[0]
    arrays = [k for k, v in enumerate(eqn.invars) if v.rank]
    fills = [v for v in eqn.invars if not v.rank]
    zero_fill = all(isinstance(v, Lit) and not np.any(np.asarray(v.value)) for v in fills)
    combinations = [(TIED,) * len(arrays), (APART,) * len(arrays)]
    if len(arrays) <= 3:
        combinations += itertools.product((TIED, APART), repeat=len(arrays))
    rules = []
    for kinds in dict.fromkeys(combinations):
        b = RuleBuilder()
        dims = b.factors(y.shape)
        b.sizes[dim] = max(eqn.invars[k].shape[dim] for k in arrays)
        kind_of = dict(zip(arrays, kinds, strict=True))
        ins: list[list[int]] = [[] for _ in eqn.invars]
        parts = []
        for k in arrays:
            f = dims[dim]
            if kind_of[k] == APART:
                f = b.factor(eqn.invars[k].shape[dim])
                parts.append(f)
            ins[k] = [*dims[:dim], f, *dims[dim + 1 :]]
        linear = [arrays] if zero_fill else []
        rules.append(
            b.build(
                ins,
                [dims],
                special=[dims[dim]],
                whole=parts,
                linear=linear,
                variant=" ".join(kinds),
            )
        )
    return rules


@functools.lru_cache(maxsize=4096)
def assemble_plans(
    shards: int,
    blocks: tuple[int, ...],
    sizes: tuple[int, ...],
    pieces: tuple[Piece, ...],
    out: int,
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


def _tied(ctx: LocalContext, eqn: Eqn) -> set[int]:
    """The operands whose rows move between devices."""
    dim = eqn.params["dimension"]
    return {k for k, v in enumerate(eqn.invars) if v.rank and is_tied(ctx, dim, k)}


def _plans(ctx: LocalContext, eqn: Eqn) -> tuple[Plan, ...]:
    dim, tied = eqn.params["dimension"], _tied(ctx, eqn)
    return assemble_plans(
        ctx.mesh.size(ctx.outs[0].sharding.axes[dim]),
        tuple(ctx.local_in(k)[dim] if k in tied else 0 for k in range(len(eqn.invars))),
        tuple(v.shape[dim] if k in tied else 0 for k, v in enumerate(eqn.invars)),
        tuple(eqn.params["pieces"]),
        ctx.local_out()[dim],
    )


@local(assemble_p)
def _assemble_local(ctx: LocalContext, eqn: Eqn, *xs: Any) -> Any:
    dim, pieces = eqn.params["dimension"], eqn.params["pieces"]
    dtype = next(x.dtype for x in xs if x.ndim)
    if empty(ctx):
        return zeros(ctx, dtype)
    atoms, n, tied = ctx.outs[0].sharding.axes[dim], ctx.local_out()[dim], _tied(ctx, eqn)
    if not atoms:
        return whole(*xs, **eqn.params)
    begin, last = ctx.block_index(atoms) * n, (ctx.mesh.size(atoms) - 1) * n
    if not tied:
        return cut(whole(*xs, **eqn.params), dim, begin, n, 0, (0, last))
    plans = _plans(ctx, eqn)
    together = exchange(_joined(xs, tied, dim), dim, atoms, plans[0]) if len(plans) == 1 else None
    moved = iter(plans)
    out, first = together, 0
    row = lax.broadcasted_iota(jnp.int32, _vector(xs, dim, n), dim) + begin
    for k, start, size in pieces:
        if k not in tied or together is None:
            if k in tied:
                part = exchange(xs[k], dim, atoms, next(moved))
            elif xs[k].ndim:
                at = start - first
                part = cut(xs[k], dim, begin + at, n, 0, (at, last + at))
            else:
                part = lax.broadcast_in_dim(xs[k], ctx.local_out(), ())
            here = (row >= first) & (row < first + size)
            out = part if out is None else where(here, part, out)
        first += size
    return out


def _joined(xs: Sequence[Any], tied: set[int], dim: int) -> Any:
    moving = [xs[k] for k in sorted(tied)]
    return moving[0] if len(moving) == 1 else lax.concatenate(moving, dim)


def _vector(xs: Sequence[Any], dim: int, n: int) -> list[int]:
    """A shape that broadcasts along every dim but `dim`."""
    rank = next(x.ndim for x in xs if x.ndim)
    return [n if d == dim else 1 for d in range(rank)]


@comm(assemble_p)
def _assemble_comm(ctx: LocalContext, eqn: Eqn) -> float:
    dim = eqn.params["dimension"]
    if empty(ctx) or not ctx.outs[0].sharding.axes[dim] or not _tied(ctx, eqn):
        return 0.0
    rows = sum(p.rows for p in _plans(ctx, eqn))
    return float(rows * row_bytes(ctx.local_out(), dim, eqn.outvars[0].itemsize))
