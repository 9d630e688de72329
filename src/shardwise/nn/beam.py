"""Beam search that never moves keys and values: flat beam search (GShard, appendix A.1).

A beam search keeps K hypotheses of each sequence.  When they are ranked anew, a decoder that keeps keys
and values for each hypothesis copies all of them into the new order, at every step and in every layer.
Here the hypotheses are interleaved in one sequence of K * T slots instead: step t writes the keys and
values of its K tokens at slots t*K to t*K + K - 1, where they stay, and each hypothesis has a mask of
the slots that are its own past.  Only the mask and the tokens, a few bytes a slot, follow the ranking.
Attention is K times as long, over a cache that is read once for all K queries.

The decoder is any function

    decode_step(cache, tokens [B, K], t, mask [B, K, K*T]) -> (logits [B, K, V], cache)

that feeds the K tokens at position t (an int32 scalar, traced), writes their keys and values at slots
t*K + k of the cache, and lets query k attend to the slots that mask[:, k] has, its own included.
What does not change (the encoder's output, parameters) it closes over; it has no K.

The ranking: a hypothesis that ends is put among the K best finished ones, by its log probability
over ((5 + n) / 6)^alpha for n tokens, EOS included (Wu et al. 2016, equation 14; no coverage); those
that go on are ranked by log probability.  The result is that of a beam search with a cache for each
hypothesis.

Nothing here mixes sequences, so the search is local wherever B is split; with `early_stop` the loop's
condition is one all-reduce of a boolean a step.  Where V is split, devices exchange the softmax's
maximum and sum and their best 2K tokens of each hypothesis, and the logits stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
DecodeStep = Callable[[Any, Array, Array, Array], tuple[Array, Any]]


class Beams(NamedTuple):
    """The hypotheses of each sequence, best first.

    Attributes:
      tokens: int32 [B, K, T], without BOS; EOS, where there is one, and then `pad`.
      scores: float32 [B, K], log probability over the length penalty; -inf where there are
        fewer than K hypotheses (a vocabulary smaller than K at the first step).
      finished: bool [B, K], whether EOS came within T tokens.  Those that did come first.
    """

    tokens: Array
    scores: Array
    finished: Array


class _State(NamedTuple):
    t: Array
    cache: Any
    last: Array  # [B, K] the tokens to feed
    mask: Array  # [B, K, K*T] slots of each hypothesis's past
    live: Array  # [B, K, T] tokens of those that go on
    live_scores: Array  # [B, K] log probabilities, descending
    done: Array  # [B, K, T] tokens of those that ended
    done_scores: Array  # [B, K] over the penalty, descending


def flat_beam_search(
    decode_step: DecodeStep,
    cache: Any,
    start: Array,
    *,
    beams: int,
    length: int,
    eos: int,
    pad: int = 0,
    alpha: float = 0.6,
    early_stop: bool = True,
) -> Beams:
    """The `beams` best continuations of each sequence that a beam search finds.

    Args:
      decode_step: the decoder, see above.
      cache: what `decode_step` takes, empty, with room for `beams * length` slots.
      start: int32 [B], the token to feed first (BOS).
      beams: K.  1 is greedy search.
      length: T, the most tokens of a hypothesis, EOS included.
      alpha: of the length penalty; 0 ranks by log probability alone.
      early_stop: stop when no hypothesis can get among the finished ones of any sequence, which
        gives the same result sooner.  Without it the number of steps is always `length`.

    Raises:
      ValueError: sizes below 1, a negative alpha, or logits of fewer than two tokens.
    """
    if beams < 1 or length < 1:
        raise ValueError(f"beams and length must be at least 1, not {beams} and {length}")
    if alpha < 0:
        raise ValueError(f"alpha must not be negative, not {alpha}: longer would be worse twice")
    batch = start.shape[0]
    none = jnp.full((batch, beams), -jnp.inf, jnp.float32)
    tokens = jnp.full((batch, beams, length), pad, jnp.int32)
    first = lax.broadcasted_iota(jnp.int32, (batch, beams), 1) == 0
    state = _State(
        t=jnp.zeros((), jnp.int32),
        cache=cache,
        last=jnp.broadcast_to(start.astype(jnp.int32)[:, None], (batch, beams)),
        mask=jnp.zeros((batch, beams, beams * length), bool),
        live=tokens,
        live_scores=jnp.where(first, 0.0, none),  # one empty hypothesis, not K equal ones
        done=tokens,
        done_scores=none,
    )

    def step(state: _State) -> _State:
        return _step(decode_step, state, eos, alpha)

    def goes_on(state: _State) -> Array:
        # A log probability only falls, and the penalty is largest for the longest hypothesis.
        best = state.live_scores[:, 0] / _penalty(length, alpha)
        return (state.t < length) & jnp.any(best > state.done_scores[:, -1])

    if early_stop:
        state = lax.while_loop(goes_on, step, state)
    else:
        state = lax.fori_loop(0, length, lambda _, s: step(s), state)
    return _result(state, length, alpha, pad)


def _step(decode_step: DecodeStep, state: _State, eos: int, alpha: float) -> _State:
    """Feeds one token to every hypothesis, and ranks what may follow."""
    _, beams, slots = state.mask.shape
    own = lax.broadcasted_iota(jnp.int32, (1, beams, slots), 2) == (
        state.t * beams + lax.broadcasted_iota(jnp.int32, (1, beams, slots), 1)
    )
    mask = state.mask | own
    logits, cache = decode_step(state.cache, state.last, state.t, mask)
    vocab = logits.shape[-1]
    if vocab < 2:
        raise ValueError(f"a beam search needs two tokens at least, and the logits have {vocab}")
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    # The best 2K of all are among the best 2K of each hypothesis, which devices that share the
    # vocabulary find by exchanging candidates.  At most K of them end, one of each hypothesis: K are
    # left to go on.
    logs, tokens = lax.top_k(logs, min(2 * beams, vocab))
    scores = (state.live_scores[:, :, None] + logs).reshape(len(logs), -1)
    scores, place = lax.top_k(scores, 2 * beams)
    parent = place // logs.shape[-1]
    token = jnp.take_along_axis(tokens.reshape(len(logs), -1), place, 1).astype(jnp.int32)
    position = lax.broadcasted_iota(jnp.int32, (1, 1, state.live.shape[-1]), 2)
    tokens = jnp.where(position == state.t, token[:, :, None], _rows(state.live, parent))

    ends = jnp.where(token == eos, scores / _penalty(state.t + 1, alpha), -jnp.inf)
    done_scores, chosen = lax.top_k(jnp.concatenate([state.done_scores, ends], 1), beams)
    done = _rows(jnp.concatenate([state.done, tokens], 1), chosen)

    live_scores, chosen = lax.top_k(jnp.where(token == eos, -jnp.inf, scores), beams)
    parent = jnp.take_along_axis(parent, chosen, 1)
    return _State(
        t=state.t + 1,
        cache=cache,
        last=jnp.take_along_axis(token, chosen, 1),
        mask=_rows(mask, parent),
        live=_rows(tokens, chosen),
        live_scores=live_scores,
        done=done,
        done_scores=done_scores,
    )


def _result(state: _State, length: int, alpha: float, pad: int) -> Beams:
    """Finished hypotheses, and after them, where there are fewer than K, the unfinished ones."""
    beams = state.done_scores.shape[1]
    finished = jnp.sum(state.done_scores > -jnp.inf, axis=1, keepdims=True)
    place = lax.broadcasted_iota(jnp.int32, state.done_scores.shape, 1)
    chosen = jnp.where(place < finished, place, beams + place - finished)
    live_scores = state.live_scores / _penalty(length, alpha)
    scores = jnp.concatenate([state.done_scores, live_scores], 1)
    scores = jnp.take_along_axis(scores, chosen, 1)
    tokens = _rows(jnp.concatenate([state.done, state.live], 1), chosen)
    tokens = jnp.where(scores[:, :, None] > -jnp.inf, tokens, pad)
    return Beams(tokens, scores, place < finished)


def _penalty(length: Array | int, alpha: float) -> Array:
    return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** alpha


def _rows(x: Array, place: Array) -> Array:
    """x [B, K, N] at place [B, J] of dim 1: [B, J, N]."""
    return jnp.take_along_axis(x, place[:, :, None], 1)
