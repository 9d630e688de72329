"""Sort along a split dim by moving every element about twice: a columnsort (Leighton, 1985).

Sorting networks over blocks, and gathering, send some P blocks a device; what goes where in a sample
sort depends on the data, which a static program cannot say.  Columnsort moves by fixed rules:

    sort the block, deal it out round-robin     element k goes to device k mod P       all-to-all
    sort what came, hand it out in chunks       chunk c goes to device c               all-to-all
    sort with a few rows of both neighbours     and keep what belongs here             halo

Why it is right.  A comparison sort is right if it is for zeros and ones.  Dealt round-robin, a device's
zeros spread evenly over all, but for one each: after the second sort any two devices differ by at
most P zeros.  Read across devices (row q: the q-th element of each), at most P rows are mixed, with
only zeros before and only ones behind.  So an element is at most P - 1 rows from its own place, and
sorting a block together with P - 1 rows on either side puts it there.

All this needs one strict order.  Where equal keys can be told apart, they are ordered by position: a
device knows by the slot in which an element arrived where it came from, so positions travel in the
second exchange only.  Padding has the last of all keys and the last of all positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.halo import Device, all_to_all, cut, exchange, pad_dim, where, window_plan
from shardwise.rounds import Plan


@dataclasses.dataclass(frozen=True)
class Columns:
    """The sizes of one sort.

    Attributes:
      shards, block, size: the dim: `size` elements in `shards` blocks of `block`.
      ties: whether equal keys can be told apart, and must be ordered by position.
    """

    shards: int
    block: int
    size: int
    ties: bool

    @property
    def chunk(self) -> int:
        """Elements of one message of an all-to-all; a row has one element of each device."""
        return -(-self.block // self.shards)

    @property
    def filled(self) -> int:
        """A block's size when it divides into chunks."""
        return self.chunk * self.shards

    @property
    def counts(self) -> np.ndarray:
        """How many elements each device's block holds."""
        return np.clip(self.size - np.arange(self.shards) * self.block, 0, self.block)

    @property
    def position(self) -> Any:
        """The dtype of positions; its greatest value is that of padding."""
        return next(
            (
                np.dtype(d)
                for d in ("uint8", "uint16", "uint32")
                if self.shards * self.filled <= np.iinfo(d).max
            ),
            np.dtype("uint64"),
        )

    @property
    def reach(self) -> tuple[int, int]:
        """How many rows before and after its own a device must see.

        Chunks are rounded up, so blocks begin up to `late` rows before where their rows do.
        """
        first = np.arange(self.shards) * self.block // self.shards
        late = int((np.arange(self.shards) * self.chunk - first).max())
        return self.shards - 1 + late, self.shards - 1

    @property
    def halo(self) -> Plan:
        before, after = self.reach
        p, rows = self.shards, self.chunk
        return window_plan(p, rows, p * rows, (rows, -before), before + rows + after)

    def sent(self, itemsize: int) -> float:
        """Bytes one device sends of one dim's elements, `itemsize` bytes each, ids aside."""
        p, extra = self.shards, self.position.itemsize if self.ties else 0
        apart = self.filled * (p - 1) / p
        return apart * (2 * itemsize + extra) + self.halo.rows * p * (itemsize + extra)


def last(dtype: Any) -> Any:
    """What sorts behind everything else of a dtype, or with it."""
    dtype = jnp.dtype(dtype)
    if dtype == np.dtype(bool):
        return np.True_
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.array(complex(np.nan, np.nan), dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        nan = np.array(np.nan, dtype)
        return nan if np.isnan(nan) else np.array(jnp.finfo(dtype).max, dtype)
    return np.array(jnp.iinfo(dtype).max, dtype)


def sort_columns(
    xs: Sequence[Any], dim: int, keys: int, atoms: Sequence[str], sizes: Columns
) -> list[Any]:
    """Local blocks of a dim split over `atoms`, sorted along it by the first `keys` of them."""
    device = Device(atoms)
    xs = _filled(xs, dim, keys, device, sizes)
    xs = _sort(xs, dim, keys)
    p, rows = sizes.shards, sizes.chunk
    xs = [_sent(jnp.swapaxes(_reshaped(x, dim, (rows, p)), dim, dim + 1), dim, device) for x in xs]
    if sizes.ties:
        xs = [*xs[:keys], _positions(xs[0], dim, device, sizes), *xs[keys:]]
        keys += 1
    xs = _sort(xs, dim, keys)
    xs = [_sent(_reshaped(x, dim, (p, rows)), dim, device) for x in xs]
    xs = [_with_neighbours(x, dim, device, sizes, k < keys) for k, x in enumerate(xs)]
    xs = _sort(xs, dim, keys)
    here = np.arange(p)
    start = here * sizes.block - p * np.maximum(here * rows - sizes.reach[0], 0)
    bounds = int(start.min()), int(start.max())
    at = device.at(start if bounds[0] < bounds[1] else bounds[0])
    if sizes.ties:
        xs = [*xs[: keys - 1], *xs[keys:]]
    return [cut(x, dim, at, sizes.block, 0, bounds) for x in xs]


def _sort(xs: Sequence[Any], dim: int, keys: int) -> list[Any]:
    return list(lax.sort(list(xs), dimension=dim, is_stable=True, num_keys=keys))


def _reshaped(x: Any, dim: int, parts: tuple[int, int]) -> Any:
    return x.reshape((*x.shape[:dim], *parts, *x.shape[dim + 1 :]))


def _sent(x: Any, dim: int, device: Device) -> Any:
    """Part i of [.., parts, rows, ..] to device i; what comes, in one dim again.

    The parts go first, so that each is contiguous in memory.
    """
    shape = (*x.shape[:dim], -1, *x.shape[dim + 2 :])
    x = all_to_all(jnp.moveaxis(x, dim, 0), device.atoms)
    return jnp.moveaxis(x, 0, dim).reshape(shape)


def _filled(xs: Sequence[Any], dim: int, keys: int, device: Device, sizes: Columns) -> list[Any]:
    """Blocks of `sizes.filled` elements, those that are none sorting last."""
    out = list(xs)
    if sizes.size < sizes.shards * sizes.block:
        count = device.at(sizes.counts)
        held = lax.iota(jnp.int32, sizes.block) < count
        held = held.reshape([-1 if d == dim else 1 for d in range(xs[0].ndim)])
        out[:keys] = [where(held, x, last(x.dtype)) for x in out[:keys]]
    more = sizes.filled - sizes.block
    return [pad_dim(x, dim, 0, more, last(x.dtype) if k < keys else 0) for k, x in enumerate(out)]


def _positions(x: Any, dim: int, device: Device, sizes: Columns) -> Any:
    """Where in the order of all elements those dealt to this device came from.

    Slot (i, q) holds element `q * shards + me` of device i's sorted block.
    """
    p, rows, dtype = sizes.shards, sizes.chunk, sizes.position
    source = lax.broadcasted_iota(dtype, (p, rows), 0)
    k = lax.broadcasted_iota(dtype, (p, rows), 1) * dtype.type(p) + device.index.astype(dtype)
    position = source * dtype.type(sizes.filled) + k
    if sizes.size < p * sizes.filled:
        counts = jnp.asarray(sizes.counts.astype(dtype)).reshape(p, 1)
        position = jnp.where(k < counts, position, dtype.type(np.iinfo(dtype).max))
    shape = [-1 if d == dim else 1 for d in range(x.ndim)]
    return jnp.broadcast_to(position.reshape(shape), x.shape)


def _with_neighbours(x: Any, dim: int, device: Device, sizes: Columns, key: bool) -> Any:
    """The block and the rows around it that may hold what belongs here."""
    x = _reshaped(x, dim, (sizes.shards, sizes.chunk))
    x = exchange(x, dim + 1, device.atoms, sizes.halo, last(x.dtype) if key else 0)
    return x.reshape((*x.shape[:dim], -1, *x.shape[dim + 2 :]))
