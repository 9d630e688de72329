"""gather: embeddings, `take_along_axis`, rows and windows read at positions known at run time.

    t[ids]               v m, b s 1 -> b s m   sum=v
    take_along_axis      b v, b k 1 -> b k     sum=v

A split addressed dim costs nothing inside the op: each device reads what its block holds, and the
result is a pending sum in which every other device's term is zero.  It is finished where, and in
the layout in which, the consumer needs it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.indexing import (
    Indexing,
    Rows,
    block_rows,
    index_factors,
    is_first,
)
from shardwise.ops.reduce import identity
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn

_FILL = lax.GatherScatterMode.FILL_OR_DROP


@rule(lax.gather_p, level="dims")
def _gather(eqn: Eqn) -> FactorRule:
    """Dims of the indices and dims taken whole pass through; addressed dims leave a pending sum."""
    operand, indices = eqn.invars
    b = RuleBuilder()
    f = index_factors(b, Indexing.of(eqn), indices, eqn.outvars[0])
    zero_fill = eqn.params["mode"] != _FILL or eqn.params["fill_value"] == 0
    return b.build(
        [f.operand, f.indices],
        [f.slices],
        reduced={a: pending_op(operand.dtype) for a in f.addressed if a not in f.whole},
        whole=f.whole,
        linear=((0,),) if zero_fill else (),
    )


def pending_op(dtype: Any) -> str:
    """How the terms of values held by one device each are put together."""
    return "or" if jnp.issubdtype(dtype, jnp.bool_) else "sum"


@local(lax.gather_p)
def _gather_local(ctx: LocalContext, eqn: Eqn, operand: Any, indices: Any) -> Any:
    ix = Indexing.of(eqn)
    layouts = ctx.ins[0], ctx.outs[0]
    if not ix.split(ctx.ins[0]) and not ix.opened(*layouts):
        sizes = tuple(
            operand.shape[d] if ix.passed(d) else s for d, s in enumerate(eqn.params["slice_sizes"])
        )
        return lax.gather_p.bind(operand, indices, **{**eqn.params, "slice_sizes": sizes})
    fills = eqn.params["mode"] == _FILL
    if fills:  # JAX compares positions in this type, and so must we
        indices = indices.astype(ix.position_dtype)
    rows = block_rows(ctx, ix, indices, *layouts, drops=fills)
    kept = [d for d, w in enumerate(ix.window) if w is not None and d not in ix.opened(*layouts)]
    out = _gather_rows(eqn, ix, operand, rows, kept)
    out = _mask(ctx, eqn, ix, out, rows, len(kept))
    # `out` is [batch..., opened windows..., kept windows...]: put each dim where it belongs.
    places = [*ix.batch, *(ix.window[d] for d in (*ix.opened(*layouts), *kept))]
    return lax.transpose(out, np.argsort(places))


def _gather_rows(eqn: Eqn, ix: Indexing, operand: Any, rows: Rows, kept: list[int]) -> Any:
    """Gather rows of a block by positions in range: [batch..., opened..., kept windows...]."""
    n = eqn.params["dimension_numbers"]
    rank = rows.index.ndim - 1
    return lax.gather_p.bind(
        operand,
        rows.index,
        dimension_numbers=lax.GatherDimensionNumbers(
            offset_dims=tuple(range(rank, rank + len(kept))),
            collapsed_slice_dims=tuple(d for d in ix.indexed if d not in kept),
            start_index_map=rows.dims,
            operand_batching_dims=n.operand_batching_dims,
            start_indices_batching_dims=n.start_indices_batching_dims,
        ),
        slice_sizes=tuple(
            (operand.shape[d] if ix.passed(d) else ix.sizes[d]) if d in kept else 1
            for d in range(operand.ndim)
        ),
        indices_are_sorted=False,
        unique_indices=False,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        fill_value=None,
    )


def _mask(ctx: LocalContext, eqn: Eqn, ix: Indexing, out: Any, rows: Rows, kept: int) -> Any:
    """Zero what another block holds; where the start was out of range, fill on one device."""
    zero = identity(pending_op(out.dtype), out.dtype)
    shape = [*rows.held.shape, *[1] * kept]
    out = jnp.where(rows.held.reshape(shape), out, zero)
    if rows.valid is None:
        return out
    fill = jnp.asarray(eqn.params["fill_value"], out.dtype)
    atoms = [a for d in ix.split(ctx.ins[0]) for a in ctx.ins[0].sharding.axes[d]]
    if atoms:
        fill = jnp.where(is_first(ctx, atoms), fill, zero)
    valid = rows.valid.reshape([*rows.valid.shape, *[1] * (out.ndim - rows.valid.ndim)])
    return jnp.where(valid, out, fill)
