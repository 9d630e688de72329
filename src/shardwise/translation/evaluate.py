"""Translates a held-out set with a decode function, and scores it.

    def decode(batch):  # {"source": int32 [B, S], "language": int32 [B]} -> tokens [B, T] or [B, K, T]
        return search(params, batch["source"], batch["language"]).tokens

    report = evaluate(corpus, decode, vocabularies, BatchOptions(tokens=2048), limit=50)
    print(report.table())

`decode` gets few shapes (`BatchOptions.lengths`), so it compiles a few times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from shardwise.translation import score
from shardwise.translation.batches import Batch, BatchOptions, in_order
from shardwise.translation.catalogues import Corpus, Pair
from shardwise.translation.vocabulary import Vocabularies

Decode = Callable[[Batch], Any]
"""A batch without targets -> tokens [B, T], or hypotheses [B, K, T] with the best first."""

Likelihood = Callable[[Batch], tuple[Any, Any]]
"""A batch with targets -> (nats [B], tokens [B]) of its targets."""


def evaluate(
    corpus: Corpus,
    decode: Decode,
    vocabularies: Vocabularies,
    options: BatchOptions | None = None,
    part: Literal["test", "validation"] = "test",
    limit: int | None = None,
    fewest: int = 10,
    progress: Callable[[int, int], None] | None = None,
    likelihood: Likelihood | None = None,
) -> score.Report:
    """Scores of the translations of a held-out part.

    Args:
      part: "test" or "validation".
      limit: at most so many pairs of each language (`limited`).
      fewest: test pairs that a language needs to count in the means.
      progress: called with (pairs done, pairs in all) after each batch.
      likelihood: of references, for `Score.nats`; of the same pairs.
    """
    pairs = limited(getattr(corpus, part), limit)
    translations = translate(pairs, corpus.languages, decode, vocabularies, options, progress)
    nats = None
    if likelihood:
        nats = likelihoods(pairs, corpus.languages, likelihood, vocabularies, options)
    return score.report(
        [p.language for p in pairs],
        translations,
        [p.target for p in pairs],
        corpus.sizes,
        corpus.levels(),
        fewest,
        nats,
    )


def likelihoods(
    pairs: Sequence[Pair],
    languages: Sequence[str],
    likelihood: Likelihood,
    vocabularies: Vocabularies,
    options: BatchOptions | None = None,
) -> np.ndarray:
    """(nats, tokens) of each pair's target given its source: float [pairs, 2]."""
    out = np.zeros((len(pairs), 2))
    for numbers, batch in in_order(pairs, languages, vocabularies, options):
        real = numbers >= 0
        out[numbers[real]] = np.stack([np.asarray(a) for a in likelihood(batch)], axis=1)[real]
    return out


def translate(
    pairs: Sequence[Pair],
    languages: Sequence[str],
    decode: Decode,
    vocabularies: Vocabularies,
    options: BatchOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """The translation of each pair's source; targets are not looked at.

    Raises:
      ValueError: `decode` gives something else than tokens for each row.
    """
    out = [""] * len(pairs)
    done = 0
    for numbers, batch in in_order(pairs, languages, vocabularies, options, targets=False):
        tokens = np.asarray(decode(batch))
        if tokens.ndim == 3:
            tokens = tokens[:, 0]  # the best of the hypotheses
        if tokens.ndim != 2 or len(tokens) != len(numbers):
            raise ValueError(
                f"decode gave an array of shape {np.shape(tokens)} for {len(numbers)} sources: "
                "it should be [B, T] or [B, K, T]"
            )
        real = numbers >= 0
        for number, row in zip(numbers[real], tokens[real], strict=True):
            out[number] = vocabularies.target.decode(row)
        done += int(np.sum(real))
        if progress:
            progress(done, len(pairs))
    return out


def limited(pairs: Sequence[Pair], limit: int | None) -> list[Pair]:
    """At most `limit` pairs of each language, the same whatever their order.

    Which ones is decided by a hash of the language and the English message: other messages for each
    language, so that a mean over languages does not hang on a few.
    """
    if limit is None:
        return list(pairs)
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.language, []).append(pair)
    return [
        pair
        for language in sorted(groups)
        for pair in sorted(groups[language], key=lambda p: _hash(p))[:limit]
    ]


def _hash(pair: Pair) -> bytes:
    return hashlib.sha256("\0".join((pair.language, pair.target, pair.source)).encode()).digest()
