"""What gather and scatter share: how indices address an operand, and a block of it.

Both relate three values: the *operand*, the *indices* (their last dim holds one vector of start
positions) and the *slices* (what gather returns; what scatter writes).  Every operand dim is

  shared    a batching dim: it is also a dim of the indices and of the slices,
  passed    taken whole, so that it is a dim of the slices,
  indexed   addressed: a window of `sizes[dim]` positions from a start, which the index vector gives
            (or from 0).  The window is a dim of the slices, or of size 1 and left out.

An indexed dim may be split: each device clamps the *global* start as one device would, and takes
its own block's positions from it, always in range, with a mask of those it really holds.  Windows
that may cross blocks are first opened into single rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.factors import RuleBuilder
from shardwise.ops.registry import LocalContext
from shardwise.program import Eqn, Var
from shardwise.sharding import Layout

Dims = list[int | None]


@dataclasses.dataclass(frozen=True)
class Indexing:
    """The dimension numbers of a gather or a scatter, in one form for both.

    Attributes:
      shape: the operand's global shape.
      sizes: per operand dim, the size of the slices in it.
      column: per operand dim, its place in the index vector; None: slices start at 0.
      window: per operand dim, its dim in the slices; None when it has none (size 1, or shared).
      batch: per indices dim but the last, its dim in the slices.
      shared: operand dim -> indices dim, for batching dims.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    column: tuple[int | None, ...]
    window: tuple[int | None, ...]
    batch: tuple[int, ...]
    shared: dict[int, int]

    @staticmethod
    def of(eqn: Eqn) -> Indexing:
        """Of a gather or scatter equation."""
        n = eqn.params["dimension_numbers"]
        operand = eqn.invars[0]
        if hasattr(n, "offset_dims"):
            slices, windows, dropped = eqn.outvars[0], n.offset_dims, n.collapsed_slice_dims
            starts, batching = n.start_index_map, n.start_indices_batching_dims
        else:
            slices, windows, dropped = eqn.invars[2], n.update_window_dims, n.inserted_window_dims
            starts, batching = n.scatter_dims_to_operand_dims, n.scatter_indices_batching_dims
        shared = dict(zip(map(int, n.operand_batching_dims), map(int, batching), strict=True))
        gone = {*map(int, dropped), *shared}
        places = iter(map(int, windows))
        window = tuple(None if d in gone else next(places) for d in range(operand.rank))
        columns = {int(d): i for i, d in enumerate(starts)}
        return Indexing(
            operand.shape,
            tuple(1 if w is None else slices.shape[w] for w in window),
            tuple(columns.get(d) for d in range(operand.rank)),
            window,
            tuple(d for d in range(slices.rank) if d not in window),
            shared,
        )

    def passed(self, dim: int) -> bool:
        return self.window[dim] is not None and self.sizes[dim] == self.shape[dim]

    @property
    def indexed(self) -> tuple[int, ...]:
        dims = range(len(self.shape))
        return tuple(d for d in dims if d not in self.shared and not self.passed(d))

    @property
    def columns(self) -> tuple[int, ...]:
        """The operand dims of the index vector, in its order."""
        mapped = [(c, d) for d, c in enumerate(self.column) if c is not None]
        return tuple(d for _, d in sorted(mapped))

    @property
    def position_dtype(self) -> Any:
        """int32, or int64 when a dim has more positions than that."""
        large = max(self.shape, default=0) > np.iinfo(np.int32).max
        return np.int64 if large else np.int32

    def split(self, operand: Layout) -> tuple[int, ...]:
        """The indexed dims that are split on the operand."""
        return tuple(d for d in self.indexed if operand.sharding.axes[d])

    def opened(self, operand: Layout, slices: Layout) -> tuple[int, ...]:
        """The indexed dims whose windows are cut by blocks of the operand or of the slices."""
        cut = set(self.split(operand))
        return tuple(
            d for d in self.indexed
            if (w := self.window[d]) is not None and (d in cut or slices.sharding.axes[w])
        )  # fmt: skip


@dataclasses.dataclass
class IndexFactors:
    """The factors of the three values, and which factor is what.

    Attributes:
      operand, indices, slices: per dim its factor (None for a dim of size 1 that is nothing's).
      addressed: those of indexed operand dims.
      index: those of indices dims that are not shared: one for each place that is read or written.
      windows: those of windows of indexed dims, in the slices.
      whole: those no rule may split: the index vector, and all of the above where blocks cannot be
        combined.
    """

    operand: Dims
    indices: Dims
    slices: Dims
    addressed: list[int]
    index: list[int]
    windows: list[int]
    whole: list[int]


def index_factors(b: RuleBuilder, ix: Indexing, indices: Var, slices: Var) -> IndexFactors:
    """Make the factors of a gather or scatter.

    Values of an extended dtype (random keys) cannot be masked: their indexed dims stay whole.
    """
    vector = b.factor(indices.shape[-1])
    batch = b.factors(indices.shape[:-1])
    operand: Dims = [None] * len(ix.shape)
    out: Dims = [None] * slices.rank
    for k, w in enumerate(ix.batch):
        out[w] = batch[k]
    addressed, windows = [], []
    for d, size in enumerate(ix.shape):
        w = ix.window[d]
        if d in ix.shared:
            operand[d] = batch[ix.shared[d]]
        elif w is not None and ix.passed(d):
            operand[d] = out[w] = b.factor(size)
        else:
            if size != 1:
                operand[d] = b.factor(size)
                addressed.append(operand[d])
            if w is not None and ix.sizes[d] != 1:
                out[w] = b.factor(ix.sizes[d])
                windows.append(out[w])
    index = [f for k, f in enumerate(batch) if k not in ix.shared.values()]
    whole = [vector]
    if 0 in ix.shape or jnp.issubdtype(slices.dtype, jax.dtypes.extended):
        whole += addressed + windows
    return IndexFactors(operand, [*batch, vector], out, addressed, index, windows, whole)


def in_range(indices: Any, ix: Indexing, drops: bool) -> tuple[Any, Any | None]:
    """Start positions clamped into the operand, and which were in range (None unless `drops`).

    Positions become int32 (int64 only for dims past its range), after clamping in their own type:
    an unsigned position past 2**31 is past the end, not negative.
    """
    limits = np.array([ix.shape[d] - ix.sizes[d] for d in ix.columns], np.int64)
    top = np.minimum(limits, jnp.iinfo(indices.dtype).max).astype(indices.dtype)
    valid = jnp.all((indices >= 0) & (indices <= top), axis=-1) if drops else None
    return clamp(indices, top).astype(ix.position_dtype), valid


def clamp(index: Any, last: np.ndarray) -> Any:
    """`index` moved into 0..last, `last` one value for each of its last dim."""
    if len(set(last.tolist())) == 1:
        return lax.clamp(last.dtype.type(0), index, last[0])
    return jnp.minimum(jnp.maximum(index, 0), last)


class Rows(NamedTuple):
    """What a device does of each slice: positions in its block, and which of them are its own.

    Attributes:
      index: [batch..., opened..., columns], always in range of the block.
      held: [batch..., opened...], whether the block holds the position.
      valid: [batch...], whether the global start was in range; None where it is clamped instead.
      dims: the operand dims of the columns.
    """

    index: Any
    held: Any
    valid: Any | None
    dims: tuple[int, ...]


def block_rows(
    ctx: LocalContext, ix: Indexing, indices: Any, operand: Layout, slices: Layout, drops: bool
) -> Rows:
    """Turn global starts into rows of this device's block, opening the windows that blocks cut."""
    start, valid = in_range(indices, ix, drops)
    opened = ix.opened(operand, slices)
    unmapped = tuple(d for d in opened if ix.column[d] is None)
    dims = (*ix.columns, *unmapped)
    column = {d: np.eye(len(dims), dtype=start.dtype)[i] for i, d in enumerate(dims)}
    if unmapped:
        edges = [(0, 0, 0)] * (start.ndim - 1) + [(0, len(unmapped), 0)]
        start = lax.pad(start, start.dtype.type(0), edges)
    batch = start.ndim - 1
    index, inside = lax.expand_dims(start, range(batch, batch + len(opened))), []
    for i, d in enumerate(opened):
        w = ix.window[d]
        assert w is not None
        at = ctx.global_iota(slices, w).astype(start.dtype)
        at = lax.expand_dims(at, range(1, len(opened) - i))
        index = index + at[..., None] * column[d]
        if slices.uneven(w):
            inside.append(at < ix.sizes[d])
    block = operand.local_shape(ctx.mesh)
    for d in ix.split(operand):
        first = ctx.block_index(operand.sharding.axes[d]).astype(start.dtype) * block[d]
        index = index - first * column[d]
    extent = [1 if d in opened else min(ix.sizes[d], block[d]) for d in dims]
    last = np.array([block[d] - e for d, e in zip(dims, extent, strict=True)], start.dtype)
    held = jnp.all((index >= 0) & (index <= last), axis=-1)
    for ok in inside:
        held = held & ok
    return Rows(clamp(index, last), held, valid, dims)


def is_first(ctx: LocalContext, atoms: Sequence[str]) -> Any:
    """Whether this device, of those that differ over `atoms`, is to add what all of them hold."""
    return ctx.block_index(ctx.mesh.sort(atoms)) == 0
