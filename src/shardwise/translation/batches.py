"""Training batches of fixed shapes that depend on (seed, step) alone.

A step compiles once for each shape, so there are few: `lengths` of (source, target), each with as
many rows as make `tokens` tokens.  A pair is put where it fits with the least padding; a batch is
of one shape.

Batch n is a function of the seed and n: nothing is carried from one batch to the next, so a run
that resumes at step n sees the data that it would have seen, and a process builds the rows it
needs without those of others.  Random numbers are Philox's raw bits with (seed, step) as the key, which
numpy keeps the same in all versions.

Pairs are drawn with replacement, with the probabilities of `balance`: language l with p_l, its pairs
evenly.  The draws of a batch are stratified (row i falls in the i-th of equal parts of the
probability), so that each batch has each language in its share, as nearly as rows allow; then rows are
shuffled, because neighbours share a device and a group of the experts' gating.  Which shape comes next
is drawn such that over many batches every pair still has its probability.

Every array is int32, padded with 0:

    {"source": [rows, S], "target": [rows, T], "language": [rows]}

Source and target start with BOS and end with EOS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardwise.translation import balance
from shardwise.translation.catalogues import Pair
from shardwise.translation.vocabulary import PAD, Vocabularies

Batch = dict[str, np.ndarray]
DeviceBatch = dict[str, jax.Array]

LENGTHS = ((8, 6), (12, 8), (16, 12), (24, 16), (32, 24), (64, 48))
"""(source, target) tokens of the default shapes: with these vocabularies English takes fewer."""


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Shapes and draws.

    Attributes:
      tokens: of a batch's sources, or its targets if those are longer; padding included.
      lengths: (source, target) of a row, in tokens with BOS and EOS; what fits in none is left out.
      multiple: rows are a multiple of this: the devices, or groups, that share a batch.
      temperature: how evenly languages are drawn (`balance.shares`).
      seed: of the draws.
    """

    tokens: int = 4096
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    multiple: int = 1
    temperature: float = balance.TEMPERATURE
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or any(min(pair) < 3 for pair in self.lengths):
            raise ValueError(f"rows have at least 3 tokens, in {self.lengths}")
        longest = max(max(pair) for pair in self.lengths)
        if self.multiple < 1 or self.tokens < self.multiple * longest:
            raise ValueError(
                f"{self.tokens} tokens are too few for {max(1, self.multiple)} rows of {longest}"
            )
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"a seed is a whole number below 2^64, not {self.seed}")

    def rows(self, length: tuple[int, int]) -> int:
        """Rows of a batch of that shape."""
        return self.tokens // max(length) // self.multiple * self.multiple


class Shape(NamedTuple):
    """Of a batch: sources [rows, source], targets [rows, target]."""

    rows: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class _Bucket:
    """The pairs of one shape and the running sum of their probabilities."""

    shape: Shape
    source: np.ndarray  # [pairs, shape.source]
    target: np.ndarray
    language: np.ndarray
    numbers: np.ndarray  # positions in the pairs given
    upto: np.ndarray


class Batches:
    """Batches of `pairs`.

        batches = Batches(corpus.train, corpus.languages, vocabularies, BatchOptions(tokens=2048))
        batches.batch(17)["source"]     # int32 [rows, length]

    Attributes:
      options: as given.
      left_out: how many pairs were longer than the largest length.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        languages: Sequence[str],
        vocabularies: Vocabularies,
        options: BatchOptions | None = None,
    ) -> None:
        self.options = options or BatchOptions()
        source, target = tokens(pairs, vocabularies)
        which = _fitting(source, target, self.options.lengths)
        number = {language: i for i, language in enumerate(languages)}
        language = np.array([number[p.language] for p in pairs], np.int32)
        self.left_out = int(np.sum(which < 0))
        if self.left_out == len(pairs):
            raise ValueError(f"none of {len(pairs)} pairs fits in {self.options.lengths} tokens")
        weights = _weights(language, which >= 0, len(languages), self.options.temperature)
        self._buckets: list[_Bucket] = []
        for i, length in enumerate(self.options.lengths):
            numbers = np.flatnonzero(which == i)
            if numbers.size:
                self._buckets.append(
                    _Bucket(
                        shape=Shape(self.options.rows(length), *length),
                        source=padded([source[n] for n in numbers], length[0]),
                        target=padded([target[n] for n in numbers], length[1]),
                        language=language[numbers],
                        numbers=numbers,
                        upto=np.cumsum(weights[numbers]),
                    )
                )
        # A batch draws `rows` pairs, so a shape is drawn in inverse proportion to its rows.
        chances = np.cumsum([b.upto[-1] / b.shape.rows for b in self._buckets])
        self._chances = chances / chances[-1]

    @property
    def shapes(self) -> list[Shape]:
        """Of every batch that may come."""
        return [b.shape for b in self._buckets]

    def shape(self, step: int) -> Shape:
        """Of one batch."""
        return self._draw(step)[0].shape

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Rows `start` to `stop` of a batch; all of them if not given."""
        bucket, drawn = self._draw(step)
        own = drawn[start:stop]
        return {
            "source": bucket.source[own],
            "target": bucket.target[own],
            "language": bucket.language[own],
        }

    def pairs(self, step: int) -> np.ndarray:
        """Which of the pairs given a batch has, row by row."""
        bucket, drawn = self._draw(step)
        return bucket.numbers[drawn]

    def on_devices(self, step: int, sharding: jax.sharding.Sharding) -> DeviceBatch:
        """A batch as arrays over the devices of `sharding`, of all processes.

        Args:
          sharding: of the rows (dim 0), which must divide.  A process builds the rows of its own devices.
        """
        rows, source, target = self.shape(step)
        built: dict[tuple[int, int], Batch] = {}

        def block(name: str, index: Any) -> np.ndarray:  # a slice of each dim
            start, stop, _ = index[0].indices(rows)
            if (start, stop) not in built:
                built[start, stop] = self.batch(step, start, stop)
            return built[start, stop][name][(slice(None), *index[1:])]

        shapes = {"source": (rows, source), "target": (rows, target), "language": (rows,)}
        return {
            name: jax.make_array_from_callback(shape, sharding, lambda i, name=name: block(name, i))
            for name, shape in shapes.items()
        }

    def padding(self) -> dict[str, float]:
        """Expected share of tokens that are padding, in sources, in targets and in both."""
        chance = np.diff(self._chances, prepend=0.0)
        used, size = np.zeros(2), np.zeros(2)
        for p, bucket in zip(chance, self._buckets, strict=True):
            weight = np.diff(bucket.upto, prepend=0.0) / bucket.upto[-1]
            for side, rows in enumerate((bucket.source, bucket.target)):
                used[side] += p * bucket.shape.rows * float(weight @ np.sum(rows != PAD, axis=1))
                size[side] += p * bucket.shape.rows * rows.shape[1]
        source, target = (1 - used / size).tolist()
        return {"source": source, "target": target, "both": float(1 - used.sum() / size.sum())}

    def _draw(self, step: int) -> tuple[_Bucket, np.ndarray]:
        """The bucket of a batch, and the pairs of it that the batch has."""
        if step < 0:
            raise ValueError(f"steps count from 0, not {step}")
        bits = np.random.Philox(key=np.array([self.options.seed, step], np.uint64))
        which = int(np.searchsorted(self._chances, _uniform(bits, 1)[0], side="right"))
        bucket = self._buckets[min(which, len(self._buckets) - 1)]
        rows = bucket.shape.rows
        places = (np.arange(rows) + _uniform(bits, rows)) / rows
        drawn = np.searchsorted(bucket.upto, places * bucket.upto[-1], side="right")
        order = np.argsort(bits.random_raw(rows), kind="stable")
        return bucket, np.minimum(drawn, len(bucket.upto) - 1)[order]


def in_order(
    pairs: Sequence[Pair],
    languages: Sequence[str],
    vocabularies: Vocabularies,
    options: BatchOptions | None = None,
    targets: bool = True,
) -> Iterator[tuple[np.ndarray, Batch]]:
    """Every pair once, in the order of the shapes: (numbers of the pairs or -1, batch).

    What fits in no length goes to the last and is cut, since a translation is wanted all the same.
    Rows that are left over repeat the batch's first source, with an empty target.

    Args:
      targets: for a loss.  Without them batches are for translating: the source alone says what
        shape a pair goes to, and "target" is missing.
    """
    options = options or BatchOptions()
    source, target = tokens(pairs, vocabularies)
    which = _fitting(source, target if targets else [[]] * len(source), options.lengths)
    which[which < 0] = len(options.lengths) - 1
    number = {language: i for i, language in enumerate(languages)}
    for i, length in enumerate(options.lengths):
        numbers = np.flatnonzero(which == i)
        rows = options.rows(length)
        for start in range(0, len(numbers), rows):
            own = numbers[start : start + rows].tolist()
            more = rows - len(own)
            filled = own + own[:1] * more
            batch = {
                "source": padded([source[n] for n in filled], length[0]),
                "language": np.array([number[pairs[n].language] for n in filled], np.int32),
            }
            if targets:
                batch["target"] = padded([target[n] for n in own] + [[]] * more, length[1])
            yield np.array(own + [-1] * more), batch


def tokens(
    pairs: Sequence[Pair], vocabularies: Vocabularies
) -> tuple[list[list[int]], list[list[int]]]:
    """(sources, targets) as tokens."""
    # A target comes once for each language: encoded once.
    unique = sorted({p.target for p in pairs})
    targets = dict(zip(unique, vocabularies.target.encode_all(unique), strict=True))
    return (
        vocabularies.source.encode_all(p.source for p in pairs),
        [targets[p.target] for p in pairs],
    )


def padded(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """int32 [rows, length]; a row that is longer keeps its first tokens and its last (EOS)."""
    out = np.full((len(rows), length), PAD, np.int32)
    for i, row in enumerate(rows):
        if len(row) > length:
            row = [*row[: length - 1], row[-1]]
        out[i, : len(row)] = row
    return out


def _fitting(
    source: list[list[int]], target: list[list[int]], lengths: Sequence[tuple[int, int]]
) -> np.ndarray:
    """For each pair the length in which it fits with the least padding, -1 for none."""
    sizes = np.array([[len(s), len(t)] for s, t in zip(source, target, strict=True)])
    sizes = sizes.reshape(-1, 2)
    which = np.full(len(sizes), -1)
    for i in sorted(range(len(lengths)), key=lambda i: (-sum(lengths[i]), i)):
        which[np.all(sizes <= lengths[i], axis=1)] = i
    return which


def _weights(
    language: np.ndarray, kept: np.ndarray, languages: int, temperature: float
) -> np.ndarray:
    """The probability of each pair; 0 for those not kept."""
    sizes = np.bincount(language[kept], minlength=languages)
    wanted = balance.shares({str(i): int(n) for i, n in enumerate(sizes)}, temperature)
    share = np.array(list(wanted.values()))
    return np.where(kept, share[language] / np.maximum(sizes, 1)[language], 0.0)


def _uniform(bits: np.random.Philox, count: int) -> np.ndarray:
    """Numbers in [0, 1), of 53 bits."""
    return (bits.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
