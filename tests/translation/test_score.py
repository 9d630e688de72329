"""Scores by language and level, and the loop that translates a test set."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from shardwise.translation import evaluate
from shardwise.translation.batches import BatchOptions
from shardwise.translation.catalogues import Corpus
from shardwise.translation.score import report, score
from shardwise.translation.vocabulary import Vocabularies

OPTIONS = BatchOptions(tokens=256, multiple=2)


def perfect(corpus: Corpus, vocabularies: Vocabularies, beams: int = 0):
    """A decode function that looks the source up: the loop must lose nothing."""
    known = {(p.language, p.source): p.target for p in corpus.test}

    def decode(batch):
        out = np.zeros((len(batch["source"]), 160), np.int32)
        for row, (ids, number) in enumerate(zip(batch["source"], batch["language"], strict=True)):
            key = (corpus.languages[number], vocabularies.source.decode(ids))
            target = vocabularies.target.encode(known.get(key, ""))
            out[row, : len(target) - 1] = target[1:]
        return np.stack([out] + [out * 0] * (beams - 1), 1) if beams else out

    return decode


@pytest.mark.parametrize("beams", [0, 3])
def test_a_perfect_decoder_is_scored_as_perfect(
    corpus: Corpus, vocabularies: Vocabularies, beams: int
):
    seen = []
    found = evaluate.evaluate(
        corpus,
        perfect(corpus, vocabularies, beams),
        vocabularies,
        BatchOptions(tokens=512, lengths=((16, 8), (160, 8))),
        limit=30,
        fewest=1,
        progress=lambda *done: seen.append(done),
    )
    assert set(found.languages) == set(corpus.languages)
    for one in (*found.languages.values(), *found.levels.values()):
        assert (one.bleu, one.chrf, one.exact) == pytest.approx((100, 100, 100))
    assert found.languages["cs"].pairs == 30
    assert seen[-1] == (found.levels["all"].pairs,) * 2


def test_means_are_over_languages_that_have_enough_pairs():
    languages = ["a"] * 4 + ["b"] * 2 + ["c"]
    references = ["one two"] * 7
    translations = ["one two"] * 4 + ["three four", "one two"] + ["nothing"]
    found = report(
        languages,
        translations,
        references,
        {"a": 9000, "b": 5000, "c": 3},
        {"a": "high", "b": "high", "c": "low"},
        fewest=2,
    )
    assert found.languages["a"].exact == 100 and found.languages["b"].exact == 50
    assert found.levels["high"].exact == 75 and found.levels["high"].pairs == 6
    assert list(found.levels) == ["high", "all"]  # no language of "low" has two pairs
    assert found.levels["all"] == found.levels["high"]
    assert found.levels["high"].chrf == pytest.approx(
        (found.languages["a"].chrf + found.languages["b"].chrf) / 2
    )


def test_short_messages_have_a_bleu():
    """Plain BLEU needs four words; here one that is right is right."""
    assert score(["Monday", "May"], ["Monday", "May"]).bleu == pytest.approx(100)
    assert score(["Monday", "x"], ["Monday", "May"]).bleu == pytest.approx(50)
    with pytest.raises(ValueError, match="1 translations have 2 references"):
        score(["a"], ["a", "b"])


def test_json_and_tables(tmp_path):
    found = report(
        ["a", "b"], ["x y", "z"], ["x y", "w"], {"a": 5, "b": 7}, {"a": "low", "b": "low"}, 1
    )
    found.save(tmp_path / "scores.json")
    saved = json.loads((tmp_path / "scores.json").read_text())
    assert saved["languages"]["a"]["exact"] == 100 and saved["languages"]["b"]["level"] == "low"
    assert saved["levels"]["all"]["pairs"] == 2
    assert "version:" in saved["metrics"]["bleu"] and "eff:yes" in saved["metrics"]["bleu"]

    def text(table) -> str:
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(table)
        return console.export_text()

    levels, languages = text(found.table()), text(found.table(languages=True))
    assert "low" in levels and "BLEU" in levels and "50.0" in levels
    assert languages.index("b ") < languages.index("a  ")  # most training pairs first


def test_limited_takes_the_same_pairs_in_any_order(corpus: Corpus):
    few = evaluate.limited(corpus.test, 7)
    assert few == evaluate.limited(corpus.test[::-1], 7)
    assert max(sum(p.language == l for p in few) for l in corpus.languages) == 7
    assert evaluate.limited(corpus.test, None) == list(corpus.test)


def test_a_decoder_that_gives_something_else(corpus: Corpus, vocabularies: Vocabularies):
    with pytest.raises(ValueError, match=r"decode gave an array of shape \(3,\) for \d+ sources"):
        evaluate.evaluate(corpus, lambda batch: np.zeros(3), vocabularies, OPTIONS, limit=3)


def test_nats_of_a_language_are_over_all_its_tokens():
    found = report(
        ["a", "a", "b"], ["x"] * 3, ["x"] * 3, {"a": 1, "b": 1}, {"a": "low", "b": "low"}, 1,
        nats=[(6.0, 2.0), (2.0, 6.0), (3.0, 1.0)],
    )  # fmt: skip
    assert (found.languages["a"].nats, found.languages["b"].nats) == (1.0, 3.0)
    assert found.levels["low"].nats == 2.0
    assert report(["a"], ["x"], ["x"], {"a": 1}, {"a": "low"}, 1).levels["all"].nats is None
