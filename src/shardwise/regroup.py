"""`regroup`: rows of a split dim brought into any order of positions known when planning.

What a reshape needs whose blocks do not line up.  Splitting 48 rows over 4 devices, viewed as
(6, 8) and split over the 8, wants on each device 6 runs of 2 rows from all over:

    device 0 holds 0 .. 11 and wants 0 1, 8 9, 16 17, 24 25, 32 33, 40 41

Rows for one receiver travel together: packed by a local gather, sent in rounds of
collective-permute or in one all-to-all of equal messages, whichever sends less, and put in place by
one more local gather.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.halo import Device, all_to_all
from shardwise.messages import Ints, edge_colouring, repeats
from shardwise.rounds import MAX_COLOURED, MAX_ROUNDS

Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Regrouping:
    """How rows find their place.

    Attributes:
      rows: rows one device sends, ring convention.
      rounds: for each collective-permute its (source, destination) pairs, and per device the local
        rows it packs: a table [devices, rows of the message].
      everywhere: the table of the all-to-all instead, [devices, devices * rows of a message], or
        None.
      place: per device, for each row of its result, where in (its own block, what it received in
        order) the row lies: a table [devices, rows].
    """

    rows: int
    rounds: tuple[tuple[Pairs, Ints], ...]
    everywhere: Ints | None
    place: Ints


@dataclasses.dataclass(frozen=True, eq=False)
class _Traffic:
    """Every row that some device wants of another: `number` counts the rows of one pair."""

    src: Ints
    dst: Ints
    row: Ints
    number: Ints


def plan_regrouping(index: Ints, block: int) -> Regrouping:
    """The plan by which device p gets row `index[p, i]` of the dim as its row i.

    Args:
      index: [devices, rows of a result block]; -1 where nothing is wanted.
      block: rows of a source block: row g of the dim is row `g % block` of device `g // block`.
    """
    shards = len(index)
    me = np.arange(shards)[:, None]
    wanted = np.where(index < 0, me * block, index)  # anything of one's own will do
    key = (wanted // block * shards + me) * block + wanted % block
    distinct, where = np.unique(key, return_inverse=True)
    pair, row = distinct // block, distinct % block
    t = _Traffic(pair // shards, pair % shards, row, repeats(pair))
    remote = t.src != t.dst
    pairs, count = np.unique(pair[remote], return_counts=True)
    colour = np.arange(len(pairs))
    if len(pairs) <= MAX_COLOURED:
        colour = edge_colouring(pairs // shards, pairs % shards, count)
    longest = np.zeros(int(colour.max(initial=-1)) + 1, np.int64)
    np.maximum.at(longest, colour, count)
    largest = int(count.max(initial=0))
    if len(longest) <= MAX_ROUNDS and longest.sum() <= (shards - 1) * largest:
        each = np.zeros(len(distinct), np.int64)
        each[remote] = colour[np.searchsorted(pairs, pair[remote])]
        rounds, base = _rounds(t, remote, each, longest, shards)
        rows, table = int(longest.sum()), None
        at = base[each] if len(base) else each
    else:
        rounds, rows, at = (), (shards - 1) * largest, t.src * largest
        table = np.zeros((shards, shards * largest), np.int32)
        r = remote
        table[t.src[r], t.dst[r] * largest + t.number[r]] = t.row[r]
    pool = np.where(remote, block + at + t.number, t.row)
    return Regrouping(rows, rounds, table, pool[where.reshape(index.shape)])


def _rounds(
    t: _Traffic, remote: Ints, colour: Ints, longest: Ints, shards: int
) -> tuple[tuple[tuple[Pairs, Ints], ...], Ints]:
    """The rounds, and where each one's message starts among all that is received."""
    out = []
    for c, length in enumerate(longest.tolist()):
        mine = remote & (colour == c)
        src, dst = t.src[mine], t.dst[mine]
        table = np.zeros((shards, length), np.int64)
        table[src, t.number[mine]] = t.row[mine]
        pairs = np.unique(np.stack([src, dst], 1), axis=0)
        out.append((tuple((int(s), int(d)) for s, d in pairs), table))
    return tuple(out), np.cumsum(longest) - longest


def regroup(x: Any, dim: int, atoms: Sequence[str], plan: Regrouping) -> Any:
    """Carry out a plan on the local block of a dim split over `atoms`; inside `shard_map`."""
    device = Device(atoms)

    def pick(y: Any, table: Ints) -> Any:
        entries = jnp.asarray(table, jnp.int32)
        mine = lax.dynamic_index_in_dim(entries, device.index, keepdims=False)
        return jnp.take(y, mine, axis=dim, mode="clip")

    pool = [x]
    for pairs, table in plan.rounds:
        pool.append(device.receive(pick(x, table), pairs))
    if plan.everywhere is not None:
        sent = pick(x, plan.everywhere)
        pool.append(all_to_all(sent, device.atoms, dim))
    return pick(lax.concatenate(pool, dim) if len(pool) > 1 else x, plan.place)
