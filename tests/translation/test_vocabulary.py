"""Subword vocabularies: lossless, deterministic, of the training text alone, cached by content."""

from __future__ import annotations

import dataclasses
import pickle
import threading

import numpy as np
import pytest

from shardwise.translation import balance, vocabulary
from shardwise.translation.catalogues import Corpus
from shardwise.translation.vocabulary import BOS, EOS, PAD, Vocabularies, VocabularyOptions, train


def test_every_text_comes_back_even_with_characters_never_seen(
    corpus: Corpus, vocabularies: Vocabularies
):
    for pair in (*corpus.test, *corpus.validation):
        assert vocabularies.source.decode(vocabularies.source.encode(pair.source)) == pair.source
        assert vocabularies.target.decode(vocabularies.target.encode(pair.target)) == pair.target
    for text in ("ᏣᎳᎩ 🙂 \u0f40", "%(name)s <b>x</b>", "1\u202f000"):
        assert vocabularies.source.decode(vocabularies.source.encode(text)) == text


def test_tokens(vocabularies: Vocabularies, small: VocabularyOptions):
    assert (len(vocabularies.source), len(vocabularies.target)) == (small.source, small.target)
    ids = vocabularies.target.encode("Republic of Korea")
    assert (ids[0], ids[-1]) == (BOS, EOS) and min(ids[1:-1]) > EOS
    assert vocabularies.target.encode_all(["Republic of Korea", ""]) == [ids, [BOS, EOS]]
    # What follows EOS is not text; PAD and BOS are none anywhere.
    row = np.array([PAD, *ids, *ids, PAD], np.int32)
    assert vocabularies.target.decode(row) == "Republic of Korea"
    assert "".join(vocabularies.target.pieces("a b")) == "▁a▁b"
    with pytest.raises(ValueError, match="token 800 is not in a vocabulary of 800"):
        vocabularies.target.decode([BOS, 800])
    # Bytes that are no text do not fail: a model may write any tokens.
    assert "\ufffd" in vocabularies.target.decode([BOS, 4 + 0xE0, 4 + 0x41, EOS])


def test_the_same_text_gives_the_same_model(
    corpus: Corpus, vocabularies: Vocabularies, small: VocabularyOptions
):
    again = train(corpus, small)
    assert again == vocabularies
    assert again.source.fingerprint == vocabularies.source.fingerprint
    assert pickle.loads(pickle.dumps(again)) == again


def test_held_out_text_is_not_trained_on(
    corpus: Corpus, vocabularies: Vocabularies, small: VocabularyOptions
):
    without = dataclasses.replace(corpus, test=(), validation=())
    assert train(without, small) == vocabularies


def test_the_cache(
    corpus: Corpus, tmp_path, monkeypatch: pytest.MonkeyPatch, small: VocabularyOptions
):
    first = train(corpus, small, tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    trained = []
    monkeypatch.setattr(vocabulary, "_train", lambda *a: trained.append(a) or first.source.model)
    assert train(corpus, small, tmp_path) == first and trained == []
    # Other text of one side: that side is trained again.
    other = [corpus.train[0]._replace(source="quite another text"), *corpus.train[1:]]
    train(dataclasses.replace(corpus, train=tuple(other)), small, tmp_path)
    assert [len(texts) for texts, *_ in trained] == [len(vocabulary._weighted_sources(corpus, 2.0))]
    train(corpus, dataclasses.replace(small, target=900), tmp_path)
    assert [size for _, size, *_ in trained] == [1500, 900]


def test_processes_that_share_a_cache(corpus: Corpus, tmp_path, small: VocabularyOptions):
    found: list[Vocabularies] = []
    some = dataclasses.replace(corpus, train=corpus.train[::4])
    options = dataclasses.replace(small, source=900, target=500)
    threads = [
        threading.Thread(target=lambda: found.append(train(some, options, tmp_path)))
        for _ in range(3)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found[0] == found[1] == found[2]
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".model", ".model"]


def test_a_high_temperature_gives_small_languages_more_of_the_vocabulary(
    corpus: Corpus, small: VocabularyOptions
):
    def tokens(temperature: float) -> int:
        options = dataclasses.replace(small, temperature=temperature)
        model = train(corpus, options).source
        return sum(map(len, model.encode_all(p.source for p in corpus.train if p.language == "so")))

    assert tokens(5.0) < tokens(1.0)


def test_shares_of_languages():
    sizes = {"a": 900, "b": 100, "none": 0}
    assert balance.shares(sizes, 1.0) == pytest.approx({"a": 0.9, "b": 0.1, "none": 0.0})
    assert balance.shares(sizes, 2.0) == pytest.approx({"a": 0.75, "b": 0.25, "none": 0.0})
    assert balance.shares(sizes, 1e6)["b"] == pytest.approx(0.5, abs=1e-5)
    assert balance.shares({"a": 10**9, "b": 1}, 0.01)["a"] == 1.0  # no overflow
    with pytest.raises(ValueError, match="temperature must be positive, not 0"):
        balance.shares(sizes, 0)
    with pytest.raises(ValueError, match="no language has pairs"):
        balance.shares({"a": 0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"source": 260},
            "a source vocabulary of 260 has no room: 260 tokens are special or bytes",
        ),
        ({"target_coverage": 0.0}, "target_coverage is a share above 0, not 0.0"),
        ({"kind": "word"}, "kind is 'bpe' or 'unigram', not 'word'"),
    ],
)
def test_wrong_options(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        VocabularyOptions(**options)


def test_a_vocabulary_larger_than_the_text(corpus: Corpus, small: VocabularyOptions):
    with pytest.raises(ValueError, match=r"no bpe vocabulary of 90000 tokens from .* texts: .*<="):
        train(corpus, dataclasses.replace(small, source=90000))
