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
    colors = _colored(out_slot // width, in_slot // width, count, width)
    pairs, sent, placed = [], [], []
    for r in range(width):
        mine = colors == r
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
    places = np.stack(
        [i.reshape(-1) for i in np.indices(per_block)], axis=-1
    )  # [R, dims], row-major
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


def _colored(senders: np.ndarray, receivers: np.ndarray, count: int, colors: int) -> np.ndarray:
    """A round for every edge, so that no device sends or receives twice in one.

    Edges are taken one by one.  Where the sender's free round a is not free at the receiver, the
    path of edges in rounds a, b, a, ... that starts there is swapped (b free at the receiver); it
    cannot end at the sender, since it arrives at senders by edges of round a only.
    """
    if colors == 1:
        return np.zeros(len(senders), np.int64)
    out = np.full((count, colors), -1)  # edge by sender and round
    into = np.full((count, colors), -1)  # edge by receiver and round
    color = np.full(len(senders), -1)
    for edge, (s, t) in enumerate(zip(senders.tolist(), receivers.tolist(), strict=True)):
        a, b = int(np.argmin(out[s])), int(np.argmin(into[t]))
        if into[t, a] >= 0:
            _swap_path(out, into, color, senders, receivers, t, a, b)
        out[s, a] = into[t, a] = edge
        color[edge] = a
    return color


def _swap_path(
    out: np.ndarray,
    into: np.ndarray,
    color: np.ndarray,
    senders: np.ndarray,
    receivers: np.ndarray,
    start: int,
    a: int,
    b: int,
) -> None:
    """Swap rounds a and b along the path that leaves receiver `start` by its edge of round a."""
    path = []
    edge, at_sender, wanted = into[start, a], True, b
    while edge >= 0:
        path.append(edge)
        edge = out[senders[edge], wanted] if at_sender else into[receivers[edge], wanted]
        at_sender, wanted = not at_sender, a if wanted == b else b
    for e in path:
        out[senders[e], color[e]] = into[receivers[e], color[e]] = -1
    for e in path:
        color[e] = a + b - color[e]
        out[senders[e], color[e]] = into[receivers[e], color[e]] = e
