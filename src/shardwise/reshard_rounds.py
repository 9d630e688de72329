"""Which device sends which piece to which in a permute or an exchange: static tables.

Source and target cut some dims into blocks, numbered by different mesh atoms.  Cutting both to
their common *pieces*, every device holds R pieces and wants R, and every piece is held by as many
devices as want it.  Who sends to whom is then a graph in which every device has R edges out and R
in; such a graph falls into R permutations (Koenig), one collective-permute each.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from shardwise.messages import edge_colouring

Positions = tuple[
    tuple[int, ...], ...
]  # per dim the atoms (by position) it is cut over, major first


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The permutes of an exchange.

    Attributes:
      cut, paste: per dim the number of pieces in a source block and in a target block.
      pairs: per round the (sender, receiver) pairs; every device is in both places once.
      sent, placed: per round, int32[devices, dims]: which piece of its block a device sends, and
        where in its new block the piece that it gets belongs.
    """

    cut: tuple[int, ...]
    paste: tuple[int, ...]
    pairs: tuple[list[tuple[int, int]], ...]
    sent: tuple[np.ndarray, ...]
    placed: tuple[np.ndarray, ...]


@functools.lru_cache(maxsize=1024)
def rounds(source: Positions, target: Positions, sizes: tuple[int, ...]) -> Rounds:
    """The rounds from blocks over `source` to blocks over `target`, on devices of shape `sizes`.

    Devices are numbered in row-major order.  Both sides cut the dims into equally many blocks in
    all, and a piece is a cell of the grid that both cuts make together.
    """
    count = math.prod(sizes)
    coordinates = np.indices(sizes).reshape(len(sizes), count)
    shards = [(_size(s, sizes), _size(t, sizes)) for s, t in zip(source, target, strict=True)]
    grid = tuple(math.lcm(*pair) for pair in shards)
    cut = tuple(g // s for g, (s, _) in zip(grid, shards, strict=True))
    paste = tuple(g // t for g, (_, t) in zip(grid, shards, strict=True))
    held, holder_at = _pieces(source, cut, grid, coordinates, sizes)
    wanted, wanter_at = _pieces(target, paste, grid, coordinates, sizes)
    out_slot, in_slot = _matched(held, wanted)
    width = held.shape[1]
    colour = np.zeros_like(out_slot)
    if width > 1:
        colour = edge_colouring(out_slot // width, in_slot // width, np.ones_like(out_slot))
    pairs, sent, placed = [], [], []
    for r in range(width):
        mine = colour == r
        outs, ins = out_slot[mine], in_slot[mine]
        pairs.append(list(zip((outs // width).tolist(), (ins // width).tolist(), strict=True)))
        for table, slots, at in ((sent, outs, holder_at), (placed, ins, wanter_at)):
            rows = np.zeros((count, len(grid)), np.int32)
            rows[slots // width] = at[slots % width]
            table.append(rows)
    return Rounds(cut, paste, tuple(pairs), tuple(sent), tuple(placed))


def _size(positions: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    return math.prod(sizes[i] for i in positions)


def _pieces(
    blocks: Positions,
    per_block: tuple[int, ...],
    grid: tuple[int, ...],
    coordinates: np.ndarray,
    sizes: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """The pieces in each device's block.

    Returns:
      int[devices, R]: the pieces' numbers in the grid; int[R, dims]: their places in the block.
    """
    places = np.indices(per_block).reshape(len(per_block), -1).T
    number = np.zeros((coordinates.shape[1], len(places)), np.int64)
    for d, positions in enumerate(blocks):
        block = np.zeros(coordinates.shape[1], np.int64)
        for i in positions:
            block = block * sizes[i] + coordinates[i]
        number = number * grid[d] + block[:, None] * per_block[d] + places[None, :, d]
    return number, places


def _matched(held: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every piece its holders paired with its wanters, a device with itself where it can be.

    Returns slots, device * R + place in its block: of the sender and of the receiver.
    """
    count, width = held.shape
    device = np.repeat(np.arange(count), width)
    have, want = held.reshape(-1) * count + device, wanted.reshape(-1) * count + device
    by_have, by_want = np.argsort(have, kind="stable"), np.argsort(want, kind="stable")
    both = np.intersect1d(have, want)
    own_have, own_want = np.isin(have[by_have], both), np.isin(want[by_want], both)
    senders = np.concatenate([by_have[own_have], by_have[~own_have]])
    receivers = np.concatenate([by_want[own_want], by_want[~own_want]])
    return senders, receivers
