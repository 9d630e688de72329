"""Batches: functions of (seed, step) alone, every pair with its probability, little padding."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise.translation import balance
from shardwise.translation.batches import Batches, BatchOptions, Shape, in_order, padded
from shardwise.translation.catalogues import Corpus, Pair
from shardwise.translation.vocabulary import BOS, EOS, PAD, Vocabularies

OPTIONS = BatchOptions(tokens=512, multiple=4)


@pytest.fixture(scope="module")
def batches(corpus: Corpus, vocabularies: Vocabularies) -> Batches:
    return Batches(corpus.train, corpus.languages, vocabularies, OPTIONS)


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def test_a_row_is_a_pair(batches: Batches, corpus: Corpus, vocabularies: Vocabularies):
    for step in range(8):
        batch, shape = batches.batch(step), batches.shape(step)
        assert shape in batches.shapes and shape.rows % 4 == 0
        assert batch["source"].shape == (shape.rows, shape.source)
        assert batch["target"].shape == (shape.rows, shape.target)
        assert {v.dtype for v in batch.values()} == {np.dtype(np.int32)}
        for row, number in enumerate(batches.pairs(step)):
            pair: Pair = corpus.train[number]
            assert corpus.languages[batch["language"][row]] == pair.language
            for side, text in (("source", pair.source), ("target", pair.target)):
                ids = batch[side][row]
                assert getattr(vocabularies, side).decode(ids) == text
                used = int(np.sum(ids != PAD))
                assert ids[0] == BOS and ids[used - 1] == EOS and not ids[used:].any()


def test_a_batch_depends_on_the_seed_and_the_step_alone(
    batches: Batches, corpus: Corpus, vocabularies: Vocabularies
):
    again = Batches(corpus.train, corpus.languages, vocabularies, OPTIONS)
    want = [batches.batch(step) for step in range(12)]
    for step in (11, 3, 3, 0):  # in any order, as often as one likes
        assert equal(again.batch(step), want[step])
    assert not any(equal(want[0], b) for b in want[1:])
    other = dataclasses.replace(OPTIONS, seed=1)
    other = Batches(corpus.train, corpus.languages, vocabularies, other)
    assert not all(equal(other.batch(step), want[step]) for step in range(12))


def test_the_draws_are_those_of_earlier_versions():
    """A run that resumes under another numpy or jax must see the same data."""
    pairs = [Pair("x", chr(97 + i % 26) * (1 + i % 7), "t" * (1 + i % 5), "") for i in range(200)]

    class Letters:
        def encode_all(self, texts):
            return [[BOS, *map(ord, text), EOS] for text in texts]

    options = BatchOptions(tokens=48, lengths=((5, 4), (10, 8)), multiple=2, seed=7)
    batches = Batches(pairs, ["x"], Vocabularies(Letters(), Letters()), options)  # type: ignore[arg-type]
    assert [batches.shape(s) for s in (3, 5)] == [Shape(4, 10, 8), Shape(8, 5, 4)]
    assert batches.pairs(3).tolist() == [37, 115, 53, 183]


def test_rows_of_one_process_are_rows_of_the_batch(batches: Batches):
    whole = batches.batch(5)
    rows = batches.shape(5).rows
    parts = [batches.batch(5, i * rows // 4, (i + 1) * rows // 4) for i in range(4)]
    assert equal({k: np.concatenate([p[k] for p in parts]) for k in whole}, whole)


def test_a_process_builds_its_own_rows_only(batches: Batches, monkeypatch: pytest.MonkeyPatch):
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    sharding = NamedSharding(Mesh(devices, ("x", "y")), P("x"))
    built = []
    build = batches.batch
    monkeypatch.setattr(batches, "batch", lambda step, *r: built.append(r) or build(step, *r))
    found = batches.on_devices(6, sharding)
    rows = batches.shape(6).rows
    # Once for each part of the rows, though two devices hold it and there are three arrays.
    assert sorted(built) == [(i * rows // 4, (i + 1) * rows // 4) for i in range(4)]
    assert equal({k: np.asarray(v) for k, v in found.items()}, build(6))
    assert all(v.sharding.is_equivalent_to(sharding, v.ndim) for v in found.values())


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_languages_come_in_their_shares(
    corpus: Corpus, vocabularies: Vocabularies, temperature: float
):
    options = BatchOptions(tokens=2048, temperature=temperature)
    batches = Batches(corpus.train, corpus.languages, vocabularies, options)
    drawn = np.concatenate([batches.batch(s)["language"] for s in range(400)])
    found = np.bincount(drawn, minlength=5) / len(drawn)
    want = list(balance.shares(corpus.sizes, temperature).values())
    np.testing.assert_allclose(found, want, atol=0.015)


def test_every_pair_of_a_language_is_as_likely(batches: Batches, corpus: Corpus):
    drawn = np.concatenate([batches.pairs(s) for s in range(3000)])
    counts = np.bincount(drawn, minlength=len(corpus.train))
    too_long = set(np.flatnonzero(counts == 0).tolist())
    assert len(too_long) == batches.left_out
    for language in ("cs", "so"):
        own = [i for i, p in enumerate(corpus.train) if p.language == language]
        own = counts[[i for i in own if i not in too_long]]
        # Counts of pairs of one probability: their variance is about their mean, or less.
        assert 0.4 < own.var() / own.mean() < 2.5


def test_each_batch_has_each_language_and_rows_are_mixed(batches: Batches):
    step = next(s for s in range(50) if batches.shape(s).rows == max(r for r, *_ in batches.shapes))
    language = batches.batch(step)["language"]
    assert set(language.tolist()) >= {0, 2, 3}
    assert np.sum(np.diff(language) != 0) > 10  # not sorted: neighbours share a device


def test_padding_is_what_is_said(batches: Batches):
    rows = [batches.batch(s) for s in range(1500)]
    for side in ("source", "target"):
        tokens = np.concatenate([b[side].ravel() for b in rows])
        assert np.mean(tokens == PAD) == pytest.approx(batches.padding()[side], abs=0.01)
    assert batches.padding()["both"] < 0.4


def test_padding_is_little_and_one_shape_is_much_worse(corpus: Corpus, vocabularies: Vocabularies):
    one = dataclasses.replace(OPTIONS, lengths=((64, 48),))
    single = Batches(corpus.train, corpus.languages, vocabularies, one)
    assert single.padding()["both"] > 0.7
    assert len({single.shape(s) for s in range(20)}) == 1


def test_pairs_that_are_too_long_are_left_out_and_counted(
    corpus: Corpus, vocabularies: Vocabularies
):
    options = BatchOptions(tokens=256, lengths=((12, 8), (6, 8)))
    batches = Batches(corpus.train, corpus.languages, vocabularies, options)
    long = [
        len(vocabularies.source.encode(p.source)) > 12
        or len(vocabularies.target.encode(p.target)) > 8
        for p in corpus.train
    ]
    assert batches.left_out == sum(long) > 0
    assert {s.source for s in batches.shapes} == {6, 12}
    assert not any(long[n] for s in range(50) for n in batches.pairs(s))


@pytest.mark.parametrize("targets", [True, False])
def test_in_order_every_pair_comes_once(corpus: Corpus, vocabularies: Vocabularies, targets: bool):
    pairs = corpus.test[:150]
    options = BatchOptions(tokens=128, lengths=((8, 6), (16, 8)))
    seen = []
    for numbers, batch in in_order(pairs, corpus.languages, vocabularies, options, targets):
        assert batch["source"].shape in [(16, 8), (8, 16)]
        assert ("target" in batch) is targets
        for row, number in enumerate(numbers):
            if number < 0:  # left over: a source that can be decoded, nothing to learn from
                assert np.array_equal(batch["source"][row], batch["source"][0])
                assert not targets or not batch["target"][row].any()
                continue
            seen.append(int(number))
            text = vocabularies.source.decode(batch["source"][row])
            assert pairs[number].source.startswith(text.rstrip("\ufffd"))
            assert EOS in batch["source"][row]
    assert sorted(seen) == list(range(150))


def test_translating_does_not_see_the_target(corpus: Corpus, vocabularies: Vocabularies):
    pairs = corpus.test[:60]
    blind = [p._replace(target="x") for p in pairs]
    args = (corpus.languages, vocabularies, OPTIONS, False)
    for (n1, b1), (n2, b2) in zip(in_order(pairs, *args), in_order(blind, *args), strict=True):
        assert np.array_equal(n1, n2) and equal(b1, b2)


def test_rows_are_cut_before_their_end():
    assert padded([[1, 5, 2], [1, 5, 6, 7, 8, 2]], 4).tolist() == [[1, 5, 2, 0], [1, 5, 6, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ((2, 8),)}, "rows have at least 3 tokens"),
        ({"tokens": 128, "multiple": 4}, "128 tokens are too few for 4 rows of 64"),
        ({"seed": -1}, "a seed is a whole number below 2\\^64, not -1"),
    ],
)
def test_wrong_options(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        BatchOptions(**options)


def test_errors_of_batches(batches: Batches, corpus: Corpus, vocabularies: Vocabularies):
    with pytest.raises(ValueError, match="steps count from 0, not -1"):
        batches.batch(-1)
    tiny = BatchOptions(lengths=((3, 3),))
    long = [p for p in corpus.train if len(p.source) > 30]
    with pytest.raises(
        ValueError, match=rf"none of {len(long)} pairs fits in \(\(3, 3\),\) tokens"
    ):
        Batches(long, corpus.languages, vocabularies, tiny)
