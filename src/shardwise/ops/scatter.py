"""scatter and its reducing forms: `x.at[i].set`, `.add`, `.min`, `.apply`; gradients of gathers.

    t.at[ids].add(u)     v m, b s 1, b s m -> v m   sum=b,s
    x.at[100:132].set(u) v m, 1, w m -> v m         whole=w

A split addressed dim costs nothing: each device applies the updates that land in its block.  A dim
of the indices is split by having each device apply its own updates to an operand of identities (one
of them to the real one): the result is a pending sum, product, max or min.

No update is aimed out of range to be dropped: XLA merges a slice of an update into the update's own
clamping and loses the difference.  What another block holds becomes an update that changes nothing;
where there is none (set, apply) it goes to one more row, which is then cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.indexing import (
    Indexing,
    Rows,
    block_rows,
    in_range,
    index_factors,
    is_first,
)
from shardwise.ops.reduce import identity
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn


class _Kind(NamedTuple):
    """How an update meets the operand.

    Attributes:
      op: the pending reduction that split updates leave, None where they cannot be combined.
      combine: (old, update) -> new; None where only the primitive knows.
      linear: as in `FactorRule`.
    """

    op: str | None
    combine: Callable[[Any, Any], Any] | None
    linear: tuple[tuple[int, ...], ...] = ()


_BOTH = ((0, 2),)  # a pending sum of the operand and of the updates
_REDUCING = {
    lax.scatter_add_p: _Kind("sum", lax.add, _BOTH),
    lax.scatter_sub_p: _Kind("sum", lax.sub, _BOTH),
    lax.scatter_mul_p: _Kind("prod", lax.mul, ((0,),)),
    lax.scatter_min_p: _Kind("min", lax.min),
    lax.scatter_max_p: _Kind("max", lax.max),
}
_SET = _Kind(None, lambda old, new: new, _BOTH)
_APPLY = _Kind(None, None)
_BOOL = {"min": "and", "max": "or"}
_IDEMPOTENT = ("min", "max", "and", "or")


def _kind(eqn: Eqn) -> _Kind:
    kind = _REDUCING.get(eqn.primitive)
    if kind is None:
        return _SET if eqn.params["update_jaxpr"] is None else _APPLY
    if jnp.issubdtype(eqn.outvars[0].dtype, jnp.bool_):
        return kind._replace(op=_BOOL[kind.op or ""])
    return kind


@rule(lax.scatter_p, *_REDUCING, level="dims")
def _scatter(eqn: Eqn) -> FactorRule:
    """Windows taken whole pass through; dims of the indices leave a pending reduction."""
    _, indices, updates = eqn.invars
    b, kind = RuleBuilder(), _kind(eqn)
    f = index_factors(b, Indexing.of(eqn), indices, updates)
    places = [*f.index, *f.windows]
    return b.build(
        [f.operand, f.indices, f.slices],
        [f.operand],
        reduced=dict.fromkeys(places, kind.op) if kind.op else {},
        whole=[*f.whole, *([] if kind.op else places)],
        linear=kind.linear,
    )


@local(lax.scatter_p, *_REDUCING)
def _scatter_local(ctx: LocalContext, eqn: Eqn, operand: Any, indices: Any, updates: Any) -> Any:
    ix, kind = Indexing.of(eqn), _kind(eqn)
    if kind.op:
        operand = _own_term(ctx, kind.op, operand)
        updates = _mask_padding(ctx, ix, kind.op, updates)
    cut = ix.split(ctx.ins[0]) or ix.opened(ctx.ins[0], ctx.ins[2])
    if not cut:
        padded = any(ctx.ins[2].uneven(d) for d in ix.batch)
        flags = {"unique_indices": False, "indices_are_sorted": False} if padded else {}
        return eqn.primitive.bind(operand, indices, updates, **{**eqn.params, **flags})
    if indices.ndim == 1 and kind.combine:
        return _write_window(ctx, eqn, ix, kind, operand, indices, updates)
    return _write_rows(ctx, eqn, ix, kind, operand, indices, updates)


def _own_term(ctx: LocalContext, op: str, operand: Any) -> Any:
    """The operand on the one device that counts it, the identity on those it reduces with."""
    atoms = [a for f, _ in ctx.rule.reduced for a in ctx.axes(f)]
    if not atoms or op in _IDEMPOTENT:
        return operand
    return jnp.where(is_first(ctx, atoms), operand, identity(op, operand.dtype))


def _mask_padding(ctx: LocalContext, ix: Indexing, op: str, updates: Any) -> Any:
    """Updates that change nothing where an uneven dim of the indices has no index."""
    for k, dim in enumerate(ix.batch):
        if k not in ix.shared.values():
            updates = ctx.mask(updates, ctx.ins[2], dim, identity(op, updates.dtype))
    return updates


def _write_window(
    ctx: LocalContext, eqn: Eqn, ix: Indexing, kind: _Kind, operand: Any, indices: Any, updates: Any
) -> Any:
    """One window: read the part of the block it may touch, blend, write it back (both in range)."""
    assert kind.combine is not None
    start, valid = in_range(indices, ix, drops=_drops(eqn))
    cut = {*ix.split(ctx.ins[0]), *ix.opened(ctx.ins[0], ctx.ins[2])}
    rows = updates.reshape([1 if w is None else updates.shape[w] for w in ix.window])
    starts, keep = [], valid
    for d, n in enumerate(operand.shape):
        at = start[ix.column[d]] if ix.column[d] is not None else start.dtype.type(0)
        if d in cut:
            at, rows, inside = _shift_rows(ctx, ix, d, n, at, rows)
            inside = lax.expand_dims(inside, [i for i in range(operand.ndim) if i != d])
            keep = inside if keep is None else keep & inside
        starts.append(at)
    old = lax.dynamic_slice(operand, starts, rows.shape, allow_negative_indices=False)
    new = kind.combine(old, rows)
    if keep is not None:
        new = jnp.where(keep, new, old)
    return lax.dynamic_update_slice(operand, new, starts, allow_negative_indices=False)


def _shift_rows(
    ctx: LocalContext, ix: Indexing, dim: int, n: int, start: Any, rows: Any
) -> tuple[Any, Any, Any]:
    """Move an update so that it lies where its window meets this block of `n` positions in `dim`.

    Returns:
      the start in the block, the update's rows from there on, and which of them are real.
    """
    w, have = ix.window[dim], rows.shape[dim]
    axes = ctx.ins[0].sharding.axes[dim]
    first = ctx.block_index(axes).astype(start.dtype) * n if axes else start.dtype.type(0)
    skipped = start.dtype.type(0)  # rows of the window that lie in earlier blocks of the update
    if w is not None and (parts := ctx.ins[2].sharding.axes[w]):
        skipped = ctx.block_index(parts).astype(start.dtype) * have
    extent = min(have, n)
    at = lax.clamp(start.dtype.type(0), start + skipped - first, start.dtype.type(n - extent))
    skew = at + first - start - skipped  # the update's row that falls on the first one read
    row = skew + lax.iota(start.dtype, extent)
    real = (row >= 0) & (row < have) & (row + skipped < ix.sizes[dim])
    if have > 1:
        zero, edge = start.dtype.type(0), start.dtype.type(have + extent)
        rows = _pad(rows, dim, extent, extent)
        skew = lax.clamp(zero, skew + start.dtype.type(extent), edge)
        rows = lax.dynamic_slice_in_dim(rows, skew, extent, dim, allow_negative_indices=False)
    return at, rows, real


def _write_rows(
    ctx: LocalContext, eqn: Eqn, ix: Indexing, kind: _Kind, operand: Any, indices: Any, updates: Any
) -> Any:
    """Many windows: those that blocks cut as rows, other blocks' rows idle or to a spare row."""
    layouts = ctx.ins[0], ctx.ins[2]
    opened = ix.opened(*layouts)
    rows = block_rows(ctx, ix, indices, *layouts, drops=_drops(eqn))
    held = rows.held
    if rows.valid is not None:
        held = held & lax.expand_dims(rows.valid, range(rows.valid.ndim, held.ndim))
    kept = [d for d, w in enumerate(ix.window) if w is not None and d not in opened]
    order = [*ix.batch, *(ix.window[d] for d in (*opened, *kept))]
    updates = lax.transpose(updates, order)
    index = rows.index
    spare = None
    if kind.op:
        mask = lax.expand_dims(held, range(held.ndim, updates.ndim))
        updates = jnp.where(mask, updates, identity(kind.op, updates.dtype))
    else:
        spare = _split_column(ix, rows, ctx)
        n = operand.shape[rows.dims[spare]]
        operand = _pad(operand, rows.dims[spare], 0, 1)
        to_spare = held[..., None] | (np.arange(len(rows.dims)) != spare)
        index = jnp.where(to_spare, index, index.dtype.type(n))
    out = eqn.primitive.bind(operand, index, updates, **_row_params(eqn, ix, rows, kept))
    return out if spare is None else _pad(out, rows.dims[spare], 0, -1)


def _split_column(ix: Indexing, rows: Rows, ctx: LocalContext) -> int:
    split = ix.split(ctx.ins[0])
    return next(i for i, d in enumerate(rows.dims) if d in split)


def _pad(x: Any, dim: int, before: int, after: int) -> Any:
    """`x` with rows added at the ends of `dim` (or cut off, where negative)."""
    edges = [(before, after, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, np.zeros((), x.dtype), edges)


def _row_params(eqn: Eqn, ix: Indexing, rows: Rows, kept: Sequence[int]) -> dict[str, Any]:
    """Parameters of the same scatter on rows [batch..., opened..., kept windows...]."""
    n = eqn.params["dimension_numbers"]
    rank = rows.index.ndim - 1
    return {
        **eqn.params,
        "dimension_numbers": n._replace(
            update_window_dims=tuple(range(rank, rank + len(kept))),
            inserted_window_dims=tuple(d for d in ix.indexed if d not in kept),
            scatter_dims_to_operand_dims=rows.dims,
        ),
        "indices_are_sorted": False,
        "unique_indices": False,
        "mode": lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    }


def _drops(eqn: Eqn) -> bool:
    """Whether an update that does not fit is dropped: in every mode but clip."""
    return eqn.params["mode"] != lax.GatherScatterMode.CLIP
