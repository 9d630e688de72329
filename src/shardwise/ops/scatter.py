"""scatter and its reducing forms: `x.at[i].set`, `.add`, `.min`, `.apply`; gradients of gathers.

    t.at[ids].add(u)     v m, b s 1, b s m -> v m   sum=b,s
    x.at[ids].set(u)     v m, b 1, b m -> v m       sum=b special=b, or whole=b

A split addressed dim costs nothing: each device applies the updates that land in its block.  A dim
of the indices is split by having each device apply its own updates to an operand of identities (one
of them to the real one): the result is a pending sum, product, max or min.  Where updates overwrite,
the last one wins, as on one device: every device gathers the indices (not the updates), finds for each
position the number of the last update that lands there, and gives the positions that are its own:
again a pending sum.

No update is aimed out of range to be dropped: XLA merges a slice of an update into the update's own
clamping and loses the difference.  What another block holds becomes an update that changes nothing;
where there is none (set, apply) it goes to one more row, which is then cut off.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
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
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn, Var
from shardwise.sharding import Layout


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
LAST = "last"  # the rule by which split updates overwrite
_IDEMPOTENT = ("min", "max", "and", "or")


def _kind(eqn: Eqn) -> _Kind:
    kind = _REDUCING.get(eqn.primitive)
    if kind is None:
        return _SET if eqn.params["update_jaxpr"] is None else _APPLY
    if jnp.issubdtype(eqn.outvars[0].dtype, jnp.bool_):
        return kind._replace(op=_BOOL[kind.op or ""])
    return kind


@rule(lax.scatter_p, *_REDUCING, level="dims")
def _scatter(eqn: Eqn) -> list[FactorRule]:
    """Windows taken whole pass through; dims of the indices leave a pending reduction."""
    operand, indices, updates = eqn.invars
    b, kind = RuleBuilder(), _kind(eqn)
    f = index_factors(b, Indexing.of(eqn), indices, updates)
    places = [*f.index, *f.windows]

    def build(reduced: dict[int, str], **kw: Any) -> FactorRule:
        whole = [*f.whole, *(p for p in places if p not in reduced)]
        values = [f.operand, f.indices, f.slices]
        return b.build(values, [f.operand], reduced=reduced, whole=whole, **kw)

    if kind.op:
        return [build(dict.fromkeys(places, kind.op), linear=kind.linear)]
    rules = [build({}, linear=kind.linear)]
    numbers = [n for k, n in enumerate(indices.shape[:-1]) if f.indices[k] in f.index]
    if kind.combine and isinstance(operand.dtype, np.dtype) and 1 < math.prod(numbers) < 2**31:
        op = "or" if operand.dtype == np.bool_ else "sum"
        rules.append(build(dict.fromkeys(f.index, op), special=f.index, variant=LAST))
    return rules


@local(lax.scatter_p, *_REDUCING)
def _scatter_local(ctx: LocalContext, eqn: Eqn, operand: Any, indices: Any, updates: Any) -> Any:
    if ctx.rule.variant == LAST and any(ctx.axes(f) for f, _ in ctx.rule.reduced):
        return _last_wins(ctx, eqn, operand, indices, updates)
    return _apply(ctx, eqn, operand, indices, updates)


def _apply(ctx: LocalContext, eqn: Eqn, operand: Any, indices: Any, updates: Any) -> Any:
    """The updates at hand applied to this device's block."""
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


# ---- split updates that overwrite ------------------------------------------------------------------


def _last_wins(ctx: LocalContext, eqn: Eqn, operand: Any, indices: Any, updates: Any) -> Any:
    """What my updates write where the last update is mine, zero where it is another's; and what no
    update reaches, on one device."""
    ix = Indexing.of(eqn)
    number = _last_number(ctx, eqn, ix, indices)
    mine = number >= 0
    places, rest = _places(ix, eqn.invars[1]), number
    for k, n in reversed(list(enumerate(places))):
        at, rest = lax.rem(rest, np.int32(n)), lax.div(rest, np.int32(n))
        if k not in ix.shared.values() and ctx.ins[1].sharding.axes[k]:
            rows = ctx.local_in(1)[k]
            first = ctx.block_index(ctx.ins[1].sharding.axes[k]) * rows
            mine &= (at >= first) & (at < first + rows)
    atoms = [a for f, _ in ctx.rule.reduced for a in ctx.axes(f)]
    untouched = (number < 0) & is_first(ctx, atoms)
    for k, w in enumerate(ix.batch):
        if k not in ix.shared.values() and ctx.ins[1].uneven(k):
            indices, updates = _repeat_last(ctx, k, indices, k), _repeat_last(ctx, k, updates, w)
    written = _apply(ctx, eqn, operand, indices, updates)
    shape = operand.shape
    zero = jnp.zeros(shape, operand.dtype)
    kept = jnp.where(jnp.broadcast_to(untouched, shape), operand, zero)
    return jnp.where(jnp.broadcast_to(mine, shape), written, kept)


def _places(ix: Indexing, indices: Var) -> list[int]:
    """The sizes by which updates are numbered, in the order they are applied in: shared dims count
    as 1, since theirs never meet."""
    shared = ix.shared.values()
    return [1 if k in shared else n for k, n in enumerate(indices.shape[:-1])]


def _repeat_last(ctx: LocalContext, k: int, x: Any, dim: int) -> Any:
    """`x` with the last real row of indices dim `k` in place of padding: writing it again changes
    nothing."""
    layout = ctx.ins[1]
    n = layout.local_shape(ctx.mesh)[k]
    real = layout.shape[k] - ctx.block_index(layout.sharding.axes[k]) * n
    row = jnp.minimum(lax.iota(jnp.int32, n), lax.clamp(jnp.int32(0), real - 1, jnp.int32(n - 1)))
    return jnp.take(x, row, axis=dim, mode="clip")


def _last_number(ctx: LocalContext, eqn: Eqn, ix: Indexing, indices: Any) -> Any:
    """For each position of my block (dims taken whole have one) the number of the last update that
    lands there, -1 where none does: a scatter-max of numbers, all indices gathered."""
    kept = set(ix.shared.values())
    for k, n in enumerate(eqn.invars[1].shape[:-1]):
        if k not in kept and (axes := ctx.ins[1].sharding.axes[k]):
            indices = lax.all_gather(indices, axes, axis=k, tiled=True)
            indices = lax.slice_in_dim(indices, 0, n, axis=k)
    passed = [d for d in range(len(ix.shape)) if ix.passed(d)]
    windows = [ix.window[d] for d in passed]
    gone = {ix.batch[k] for k in range(len(ix.batch)) if k not in kept} | set(windows)
    operand = _narrowed(ctx.ins[0], passed, passed)
    updates = _narrowed(ctx.ins[2], windows, gone)
    scatter_max = _numbering(eqn, operand.shape, updates.shape)
    numbered = dataclasses.replace(ctx, ins=(operand, ctx.ins[1], updates), outs=(operand,))
    number = jnp.zeros((), jnp.int32)
    places = _places(ix, eqn.invars[1])
    local = updates.local_shape(ctx.mesh)
    for k, n in enumerate(places):
        if n > 1:
            number = number * n + lax.broadcasted_iota(jnp.int32, local, ix.batch[k])
    block = jnp.full(operand.local_shape(ctx.mesh), -1, jnp.int32)
    return _apply(numbered, scatter_max, block, indices, jnp.broadcast_to(number, local))


def _narrowed(layout: Layout, ones: Sequence[Any], whole: Any) -> Layout:
    """A layout with dims of size 1 in place of `ones`, and the dims `whole` not split."""
    shape = tuple(1 if d in ones else n for d, n in enumerate(layout.shape))
    sharding = layout.sharding.tiling
    for d in whole:
        sharding = sharding.with_dim(d, ())
    padded = tuple(1 if d in ones else n for d, n in enumerate(layout.padded))
    return Layout(shape, padded, sharding)


def _numbering(eqn: Eqn, operand: tuple[int, ...], updates: tuple[int, ...]) -> Eqn:
    """The scatter-max of numbers that goes where the updates of `eqn` go."""
    p, index = eqn.params, eqn.invars[1]
    f = functools.partial(lax.scatter_max, dimension_numbers=p["dimension_numbers"], mode=p["mode"])
    values = [(operand, jnp.int32), (index.shape, index.dtype), (updates, jnp.int32)]
    jaxpr = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(s, d) for s, d in values))
    (made,) = jaxpr.eqns
    ins = [Var(-1, s, np.dtype(d)) for s, d in values]
    return Eqn(made.primitive, ins, [ins[0]], dict(made.params), [], eqn.info, eqn.id)


@comm(lax.scatter_p)
def _scatter_comm(ctx: LocalContext, eqn: Eqn) -> float:
    if ctx.rule.variant != LAST:
        return 0.0
    shared, index = Indexing.of(eqn).shared.values(), ctx.ins[1]
    have = list(ctx.local_in(1))
    sent, size = 0, math.prod(have) * eqn.invars[1].itemsize
    for k in range(len(have) - 1):
        if k in shared or not index.sharding.axes[k]:
            continue
        shards = ctx.mesh.size(index.sharding.axes[k])
        sent += size * (shards - 1)
        size = size * shards * index.shape[k] // index.padded[k]
    return float(sent)
