"""BLEU and chrF of translations, by language and by resource level (GShard Figure 6).

Both are sacrebleu's, over all pairs of a language at once.  Messages are short, many of one word: BLEU
counts only the n-grams that fit in them (`effective_order`), for otherwise a language of
names scores 0 even where every translation is right.  chrF (characters) and the share that is exactly
right tell more about such text than BLEU.

A level's score is the mean of its languages, as the paper averages: each counts the same, however many
pairs it has.  Languages with few test pairs have noisy scores; `fewest` leaves them out of the means.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.translation.catalogues import LEVELS


@dataclasses.dataclass(frozen=True)
class Score:
    """Of one set of pairs.

    Attributes:
      bleu, chrf: 0 to 100.
      exact: share of translations equal to their reference, 0 to 100.
      pairs: how many.
      nats: of a token of the references under the model, EOS included; None if it was not asked.
        It tells models apart long before their translations do.
    """

    bleu: float
    chrf: float
    exact: float
    pairs: int
    nats: float | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """Scores of a test set.

    Attributes:
      languages: language -> score.
      level_of: language -> resource level.
      training: language -> training pairs.
      levels: level, and "all" -> mean of the scores of its languages; `pairs` is their sum.
      fewest: languages with fewer test pairs are not in the means.
      metrics: sacrebleu's signatures, to be quoted with the scores.
    """

    languages: dict[str, Score]
    level_of: dict[str, str]
    training: dict[str, int]
    levels: dict[str, Score]
    fewest: int
    metrics: dict[str, str]

    def json(self) -> dict[str, Any]:
        """As plain values, for `json.dumps`."""
        return {
            "levels": {name: dataclasses.asdict(s) for name, s in self.levels.items()},
            "languages": {
                name: {
                    "level": self.level_of[name],
                    "training_pairs": self.training[name],
                    **dataclasses.asdict(s),
                }
                for name, s in self.languages.items()
            },
            "fewest_pairs_of_a_language_in_the_means": self.fewest,
            "metrics": self.metrics,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `json()` to a file."""
        text = json.dumps(self.json(), indent=1, ensure_ascii=False)
        pathlib.Path(path).write_text(text + "\n", encoding="utf-8")

    def table(self, languages: bool = False) -> Any:
        """A rich Table: a row for each level, or for each language, most training pairs first."""
        try:
            from rich.table import Table
        except ImportError:
            raise ImportError("tables need rich: pip install 'shardwise[translation]'") from None
        columns = ["BLEU", "chrF", "exact %", "nats a token", "pairs"]
        if not languages:
            table = Table("level", "languages", *columns)
            for name, score in self.levels.items():
                counted = _counted(self.languages, self.level_of, name, self.fewest)
                table.add_row(name, str(len(counted)), *_cells(score))
        else:
            table = Table("language", "level", "training pairs", *columns)
            for name in sorted(self.languages, key=lambda name: (-self.training[name], name)):
                level, size = self.level_of[name], self.training[name]
                table.add_row(name, level, f"{size:,}", *_cells(self.languages[name]))
        for column in table.columns[1 if not languages else 2 :]:
            column.justify = "right"
        return table


def score(translations: Sequence[str], references: Sequence[str]) -> Score:
    """Of one set of translations, over all of them at once.

    Raises:
      ValueError: none at all, or as many references as there are not translations.
    """
    if len(translations) != len(references) or not references:
        raise ValueError(
            f"{len(translations)} translations have {len(references)} references: "
            "each has one, and there is at least one"
        )
    bleu, chrf = _metrics()
    exact = sum(t == r for t, r in zip(translations, references, strict=True))
    return Score(
        bleu=bleu.corpus_score(list(translations), [list(references)]).score,
        chrf=chrf.corpus_score(list(translations), [list(references)]).score,
        exact=100 * exact / len(references),
        pairs=len(references),
    )


def report(
    languages: Sequence[str],
    translations: Sequence[str],
    references: Sequence[str],
    training: Mapping[str, int],
    level_of: Mapping[str, str],
    fewest: int = 10,
    nats: Any = None,
) -> Report:
    """Scores by language and level.

    Args:
      languages, translations, references: of each pair.
      training: language -> training pairs, and `level_of` its level (`Corpus.sizes`, `.levels()`).
      fewest: test pairs that a language needs to count in the means.
      nats: (nats, tokens) of each reference, [pairs, 2], or None.
    """
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for language, translation, reference in zip(languages, translations, references, strict=True):
        of = groups.setdefault(language, ([], []))
        of[0].append(translation)
        of[1].append(reference)
    scores = {language: score(*groups[language]) for language in sorted(groups)}
    if nats is not None:
        names, each = np.asarray(languages), np.asarray(nats, float)
        for language, one in scores.items():
            total, tokens = each[names == language].sum(axis=0)
            scores[language] = dataclasses.replace(one, nats=total / max(tokens, 1))
    means = {}
    for level in (*sorted(set(level_of.values()), key=_rank), "all"):
        chosen = _counted(scores, level_of, level, fewest)
        if chosen:
            means[level] = Score(
                bleu=_mean(s.bleu for s in chosen),
                chrf=_mean(s.chrf for s in chosen),
                exact=_mean(s.exact for s in chosen),
                pairs=sum(s.pairs for s in chosen),
                nats=None if nats is None else _mean(s.nats or 0.0 for s in chosen),
            )
    bleu, chrf = _metrics()
    return Report(
        languages=scores,
        level_of={language: level_of[language] for language in scores},
        training={language: training[language] for language in scores},
        levels=means,
        fewest=fewest,
        metrics={"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())},
    )


def _counted(
    scores: Mapping[str, Score], level_of: Mapping[str, str], level: str, fewest: int
) -> list[Score]:
    """The scores that a level's mean is over."""
    return [
        s
        for language, s in scores.items()
        if s.pairs >= fewest and level in ("all", level_of[language])
    ]


def _rank(level: str) -> tuple[int, str]:
    names = list(LEVELS)
    return (names.index(level) if level in names else len(names), level)


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every)


def _cells(s: Score) -> list[str]:
    nats = "" if s.nats is None else f"{s.nats:.3f}"
    return [f"{s.bleu:.1f}", f"{s.chrf:.1f}", f"{s.exact:.1f}", nats, f"{s.pairs:,}"]


@functools.cache
def _metrics() -> tuple[Any, Any]:
    try:
        from sacrebleu.metrics import BLEU, CHRF  # type: ignore[import-not-found]
    except ImportError:
        raise ImportError("scores need sacrebleu: pip install 'shardwise[translation]'") from None
    return BLEU(effective_order=True), CHRF()
