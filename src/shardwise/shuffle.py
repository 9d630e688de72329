"""A static rearrangement of the rows of a split dim, by one all-to-all (for what blocks cannot express).

Where a reshape puts a split on another dim, `48@x -> (6, 8@x)`, a device's result is many short runs of
rows, from all devices.  Every device gathers the runs it owes each other one, padded to the largest number
owed, one all-to-all exchanges them, and a second gather puts them in order.  The tables are small
constants, one row a device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.halo import Device

MAX_ROWS = 1 << 16  # rows of a table: larger ones would weigh on the program


@dataclasses.dataclass(frozen=True)
class Split:
    """A run of dims with one of them split: where each of its elements lies.

    Attributes:
      shape: the dims; `dim`: the split one, whose size the shards divide.
    """

    shape: tuple[int, ...]
    dim: int

    def run(self, shards: int) -> int:
        """Consecutive elements that lie on one device, one after the other."""
        return math.prod(self.shape[self.dim :]) // shards

    def place(self, shards: int, run: int) -> tuple[np.ndarray, np.ndarray]:
        """For each run of `run` elements: the device it lies on, and its number there."""
        count = math.prod(self.shape) // run
        longest = self.run(shards) // run
        major, rest = np.divmod(np.arange(count), longest * shards)
        device, inside = np.divmod(rest, longest)
        return device, major * longest + inside


@dataclasses.dataclass(frozen=True, eq=False)
class Shuffle:
    """The tables of one rearrangement.

    Attributes:
      run: elements of a row; `slots`: rows a device sends to each other one.
      send: [device, shards * slots], local rows to send; `order`: [device, rows], where each row of
        the result is among those received.
    """

    run: int
    slots: int
    send: np.ndarray
    order: np.ndarray

    @property
    def elements(self) -> float:
        """Elements one device sends (beside them, the dims that are not rearranged)."""
        shards = len(self.send)
        return self.send.shape[1] * self.run * (shards - 1) / shards


@functools.lru_cache(maxsize=1024)
def plan_shuffle(src: Split, dst: Split, shards: int) -> Shuffle | None:
    """The tables that bring a run of dims from one split to another; None where they are too long."""
    run = math.gcd(src.run(shards), dst.run(shards))
    if math.prod(src.shape) // run > MAX_ROWS:
        return None
    holder, held_at = src.place(shards, run)
    taker, taken_at = dst.place(shards, run)
    pair = holder * shards + taker
    order = np.argsort(pair, kind="stable")
    first = np.searchsorted(pair[order], np.arange(shards * shards))
    slot = np.empty(len(pair), np.int64)
    slot[order] = np.arange(len(pair)) - first[pair[order]]
    slots = int(slot.max()) + 1
    rows = len(pair) // shards
    send = np.zeros((shards, shards * slots), np.int32)
    send[holder, taker * slots + slot] = held_at
    take = np.zeros((shards, rows), np.int32)
    take[taker, taken_at] = holder * slots + slot
    return Shuffle(run, slots, send, take)


def shuffle(x: Any, dim: int, atoms: tuple[str, ...], plan: Shuffle) -> Any:
    """Rearrange dim `dim` of a local block, which holds the flattened run of dims.

    Args:
      x: the local block; `dim` has this device's elements of the source split, in order.
      atoms: what the split is over.
    """
    device = Device(atoms)
    shape = (*x.shape[:dim], x.shape[dim] // plan.run, plan.run, *x.shape[dim + 1 :])
    x = lax.reshape(x, shape)
    x = _rows(x, dim, _mine(plan.send, device))
    x = lax.all_to_all(x, atoms, split_axis=dim, concat_axis=dim, tiled=True)
    x = _rows(x, dim, _mine(plan.order, device))
    return lax.reshape(x, (*x.shape[:dim], x.shape[dim] * plan.run, *x.shape[dim + 2 :]))


def _mine(table: np.ndarray, device: Device) -> Any:
    start = (device.index, np.int32(0))
    row = lax.dynamic_slice(jnp.asarray(table), start, (1, table.shape[1]), allow_negative_indices=False)
    return row[0]


def _rows(x: Any, dim: int, rows: Any) -> Any:
    return jnp.take(x, rows, axis=dim, mode="clip")
