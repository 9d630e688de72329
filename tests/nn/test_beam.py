"""Flat beam search: the same hypotheses and scores as a search that reorders its cache, and as all."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.nn.beam import Beams, flat_beam_search

BOS, EOS, WIDTH = 1, 2, 8


class Decoder:
    """One attention layer and a memory: enough for a hypothesis's whole past to matter."""

    def __init__(
        self,
        vocab: int,
        length: int,
        batch: int,
        seed: int = 0,
        sharp: float = 3.0,
        end: float = 0.0,
    ):
        rng = np.random.default_rng(seed)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
        self.embedding, self.position = draw(vocab, WIDTH), draw(length, WIDTH)
        self.query, self.key, self.value = (draw(WIDTH, WIDTH) * WIDTH**-0.5 for _ in range(3))
        self.out = sharp * draw(WIDTH, vocab) * WIDTH**-0.5
        self.memory = draw(batch, WIDTH)
        self.end = np.zeros((batch, vocab), np.float32)  # some sequences end sooner
        self.end[:, EOS] = end + self.memory[:, 0] * (end > 0) * 3
        self.vocab, self.length, self.batch = vocab, length, batch

    def cache(self, beams: int) -> dict[str, jax.Array]:
        shape = (self.batch, beams * self.length, WIDTH)
        return {"k": jnp.full(shape, jnp.nan), "v": jnp.full(shape, jnp.nan)}

    def step(self, given, cache, tokens, t, mask):
        """The contract of `flat_beam_search`; slots that the mask leaves out may hold anything."""
        beams, memory, end = tokens.shape[1], given[:, :WIDTH], given[:, None, WIDTH:]
        x = jnp.asarray(self.embedding)[tokens] + jnp.asarray(self.position)[t] + memory[:, None]
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, t * beams, 1)
        cache = {"k": write(cache["k"], x @ self.key), "v": write(cache["v"], x @ self.value)}
        scores = jnp.einsum("bkd,bsd->bks", x @ self.query, cache["k"])
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        values = jnp.where(jnp.any(mask, 1)[..., None], cache["v"], 0.0)
        return (x + jnp.einsum("bks,bsd->bkd", weights, values)) @ self.out + end, cache

    @property
    def given(self) -> np.ndarray:
        """[batch, WIDTH + vocab]: what an encoder would give."""
        return np.concatenate([self.memory, self.end], 1)

    def search(self, beams: int, given=None, **more) -> Beams:
        given = self.given if given is None else given
        return flat_beam_search(
            functools.partial(self.step, given),
            self.cache(beams),
            jnp.full((self.batch,), BOS),
            beams=beams,
            length=self.length,
            eos=EOS,
            **more,
        )

    def log_probs(self, b: int, tokens: list[int], k: np.ndarray, v: np.ndarray):
        """NumPy: of what follows `tokens`, with the past's keys and values and its own added."""
        x = self.embedding[tokens[-1]] + self.position[len(tokens) - 1] + self.memory[b]
        k, v = np.vstack([k, x @ self.key]), np.vstack([v, x @ self.value])
        weights = np.exp(k @ (x @ self.query))
        logits = ((x + (weights / weights.sum()) @ v) @ self.out + self.end[b]).astype(np.float64)
        return logits - np.log(np.sum(np.exp(logits))), k, v


def penalty(n: int, alpha: float) -> float:
    return ((5 + n) / 6) ** alpha


def plain(decoder: Decoder, b: int, beams: int, length: int, alpha: float):
    """A beam search in lists: every hypothesis has its own keys and values, copied when it branches.

    Returns [(score, tokens)], finished ones and then others, best first.
    """
    nothing = np.zeros((0, WIDTH), np.float32)
    live = [(0.0, [BOS], nothing, nothing)]
    done: list[tuple[float, list[int]]] = []
    for _ in range(length):
        grown = []
        for score, tokens, k, v in live:
            logs, k, v = decoder.log_probs(b, tokens, k, v)
            grown += [(score + logs[i], [*tokens, i], k, v) for i in range(decoder.vocab)]
        grown = [g for g in grown if g[0] > -np.inf]
        grown = sorted(grown, key=lambda g: -g[0])[: 2 * beams]
        done += [(g[0] / penalty(len(g[1]) - 1, alpha), g[1][1:]) for g in grown if g[1][-1] == EOS]
        done = sorted(done, key=lambda d: -d[0])[:beams]
        live = [g for g in grown if g[1][-1] != EOS][:beams]
    rest = [(g[0] / penalty(length, alpha), g[1][1:]) for g in live]
    return (done + rest)[:beams]


def everything(
    decoder: Decoder, b: int, length: int, alpha: float
) -> Iterator[tuple[float, list[int]]]:
    """Every finished sequence of at most `length` tokens, with its score."""
    for n in range(length):
        others = [i for i in range(decoder.vocab) if i != EOS]
        for body in itertools.product(others, repeat=n):
            k = v = np.zeros((0, WIDTH), np.float32)
            tokens, score = [BOS], 0.0
            for token in (*body, EOS):
                logs, k, v = decoder.log_probs(b, tokens, k, v)
                score += logs[token]
                tokens.append(token)
            yield score / penalty(n + 1, alpha), tokens[1:]


def as_lists(found: Beams, b: int) -> list[list[int]]:
    """Tokens of each hypothesis, without what follows EOS."""
    rows = np.asarray(found.tokens[b]).tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_equal_to_a_search_that_copies_keys_and_values(beams: int, alpha: float):
    decoder = Decoder(vocab=11, length=7, batch=5)
    found = jax.jit(lambda: decoder.search(beams, alpha=alpha))()
    for b in range(decoder.batch):
        want = plain(decoder, b, beams, decoder.length, alpha)
        assert as_lists(found, b) == [tokens for _, tokens in want]
        np.testing.assert_allclose(found.scores[b], [s for s, _ in want], rtol=2e-5)
        assert found.finished[b].tolist() == [tokens[-1] == EOS for _, tokens in want]
    assert len({len(h) for b in range(5) for h in as_lists(found, b)}) > 1  # lengths do differ


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_beam_wide_enough_finds_every_sequence_in_order(alpha: float):
    decoder = Decoder(vocab=4, length=4, batch=3, seed=1, sharp=1.0)
    beams = 4 * 3**3 // 2  # twice as many candidates as 3^3 prefixes have continuations
    found = jax.jit(lambda: decoder.search(beams, alpha=alpha))()
    for b in range(decoder.batch):
        every = sorted(everything(decoder, b, decoder.length, alpha), key=lambda e: -e[0])
        assert len(every) == 1 + 3 + 9 + 27
        assert as_lists(found, b)[: len(every)] == [tokens for _, tokens in every]
        np.testing.assert_allclose(found.scores[b, : len(every)], [s for s, _ in every], rtol=2e-5)
        assert found.finished[b].tolist() == [i < len(every) for i in range(beams)]


def test_one_beam_is_greedy():
    decoder = Decoder(vocab=11, length=7, batch=4, seed=2)
    found = jax.jit(lambda: decoder.search(1, alpha=0.0, early_stop=False))()
    for b in range(decoder.batch):
        tokens, k, v = [BOS], np.zeros((0, WIDTH), np.float32), np.zeros((0, WIDTH), np.float32)
        ends = []
        for _ in range(decoder.length):
            logs, k, v = decoder.log_probs(b, tokens, k, v)
            ends.append([*tokens[1:], EOS])
            logs[EOS] = -np.inf
            tokens.append(int(np.argmax(logs)))
        assert as_lists(found, b)[0] in [*ends, tokens[1:]]


def steps_of(decoder: Decoder, **more) -> tuple[int, Beams]:
    """How many steps a search took, and what it found."""
    steps = []

    def step(cache, tokens, t, mask):
        jax.debug.callback(lambda t: steps.append(int(t)), t)
        return decoder.step(decoder.given, cache, tokens, t, mask)

    start = jnp.full((decoder.batch,), BOS)
    found = jax.jit(
        lambda: flat_beam_search(
            step, decoder.cache(3), start, beams=3, length=decoder.length, eos=EOS, **more
        )
    )()
    jax.effects_barrier()
    return len(steps), found


def test_stopping_early_changes_nothing_and_stops():
    decoder = Decoder(vocab=7, length=16, batch=4, seed=3, end=9.0)
    few, early = steps_of(decoder)
    all_of_them, full = steps_of(decoder, early_stop=False)
    assert few < all_of_them == 16
    for a, b in zip(early, full, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 4.0])
def test_each_sequence_alone_may_stop_early(alpha: float):
    """No other sequence keeps the loop going: 64 searches, each with its own condition (vmap)."""
    many = Decoder(vocab=5, length=8, batch=64, seed=6, end=2.0).given
    one = Decoder(vocab=5, length=8, batch=1, seed=6, end=2.0)

    def found(early_stop: bool) -> Beams:
        each = lambda given: one.search(2, given=given[None], alpha=alpha, early_stop=early_stop)
        return jax.jit(jax.vmap(each))(many)

    for a, b in zip(found(True), found(False), strict=True):
        np.testing.assert_array_equal(a, b)


def test_hypotheses_that_never_end():
    decoder = Decoder(vocab=9, length=4, batch=3, seed=4, end=-np.inf)
    found = jax.jit(lambda: decoder.search(3))()
    for b in range(3):
        want = plain(decoder, b, 3, 4, 0.6)
        assert as_lists(found, b) == [tokens for _, tokens in want]
        np.testing.assert_allclose(found.scores[b], [s for s, _ in want], rtol=2e-5)
    assert not np.any(found.finished)


def test_fewer_hypotheses_than_beams():
    found = jax.jit(lambda: Decoder(vocab=3, length=1, batch=2).search(5, pad=7))()
    real = np.isfinite(np.asarray(found.scores))
    assert real.tolist() == [[True] * 3 + [False] * 2] * 2
    assert sorted(np.asarray(found.tokens)[0, :3, 0].tolist()) == [0, 1, EOS]
    assert np.all(np.asarray(found.tokens)[~real] == 7)
    assert np.asarray(found.finished).tolist() == [[True] + [False] * 4] * 2


def test_keys_and_values_are_written_once_and_never_moved():
    """In the whole search, what has the shape of a cache is made by the decoder and nothing else."""
    decoder = Decoder(vocab=7, length=5, batch=2)
    shape = decoder.cache(3)["k"].shape
    made: dict[str, int] = {}

    def count(jaxpr) -> None:
        for eqn in jaxpr.eqns:
            for v in eqn.outvars:
                if getattr(v.aval, "shape", None) == shape:
                    made[eqn.primitive.name] = made.get(eqn.primitive.name, 0) + 1
            for inner in eqn.params.values():
                if hasattr(inner, "jaxpr"):
                    count(inner.jaxpr)

    count(jax.make_jaxpr(lambda: decoder.search(3))().jaxpr)
    made.pop("while"), made.pop("broadcast_in_dim"), made.pop("jit", None)
    assert made == {"dynamic_update_slice": 2, "select_n": 1}  # the test's own: values masked


@pytest.mark.parametrize(("batch", "early_stop"), [(8, False), (8, True), (6, True)])
def test_split_over_the_batch_it_is_local(batch: int, early_stop: bool):
    decoder = Decoder(vocab=11, length=10, batch=batch, seed=5, end=4.0)

    def search(given):
        return decoder.search(3, given=sw.annotate(given, P("x")), early_stop=early_stop)

    split = sw.spmd(search, mesh=sw.device_mesh({"x": 4}))
    found, want = split(decoder.given), jax.jit(search)(decoder.given)
    # Devices would stop at different steps: the first sequence's is not the last.
    lengths = [max(map(len, as_lists(want, b))) for b in range(batch)]
    assert min(lengths) < 5 and max(lengths) == 10
    np.testing.assert_array_equal(found.tokens, want.tokens)
    np.testing.assert_array_equal(found.finished, want.finished)
    np.testing.assert_allclose(found.scores, want.scores, rtol=1e-5)
    plan = split.plan(decoder.given)
    assert [(c.kind, c.bytes, c.count) for c in plan.collectives] == (
        [("all-reduce", 1.5, 1)] if early_stop else []  # whether any sequence goes on: a boolean
    )
    assert plan.fallbacks == []
    assert plan.out_shardings.tokens == P("x", None, None)


def test_a_split_vocabulary_is_not_gathered():
    """Of logits [B, K, V] split over V, only candidates and the softmax's two numbers are sent."""
    decoder = Decoder(vocab=200, length=4, batch=4, seed=7)

    def search(given):
        def step(*a):
            logits, cache = decoder.step(given, *a)
            return sw.annotate(logits, P("x", None, "y")), cache

        start = jnp.full((4,), BOS)
        cache = decoder.cache(3)
        return flat_beam_search(step, cache, start, beams=3, length=4, eos=EOS, early_stop=False)

    split = sw.spmd(search, mesh=sw.device_mesh({"x": 2, "y": 4}))
    found, want = split(decoder.given), jax.jit(search)(decoder.given)
    np.testing.assert_array_equal(found.tokens, want.tokens)
    np.testing.assert_allclose(found.scores, want.scores, rtol=1e-5)
    plan = split.plan(decoder.given)
    assert plan.fallbacks == []
    rows = 2 * 3  # hypotheses of a device's sequences
    sent = [(c.kind, c.bytes) for c in plan.collectives if c.source.startswith("beam.py")]
    assert sent.count(("all-reduce", 4 * rows * 2 * 3 / 4)) == 2  # the softmax's maximum and sum
    # The best 2K = 6 scores and tokens, a factor of the 4 devices at a time.
    gathers = [bytes for kind, bytes in sent if kind == "all-gather"]
    assert sum(gathers) == 2 * 2 * (4 * rows * 6) and len(sent) == 2 + len(gathers)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"beams": 0}, "beams and length must be at least 1, not 0 and 4"),
        ({"beams": 2, "alpha": -1.0}, "alpha must not be negative, not -1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Decoder(vocab=5, length=4, batch=2).search(**more)
