"""Annotations of what a loop adds up are put on the sum; gradients of rolls are one move; what a loop may
hold is the user's to say."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.testing import check

STEPS, ROWS, IN, OUT = 4, 256, 16, 8
RNG = np.random.default_rng(0)
ARGS = (
    RNG.standard_normal((IN, OUT), np.float32),
    RNG.standard_normal((STEPS, ROWS, IN), np.float32),
)
SPECS = (P("x"), P(None, "x"))  # weights split over the axis of the batch
W = IN * OUT * 4  # bytes


def accumulated(layer: Any) -> Any:
    """The gradient of a weight over microbatches."""

    def f(w: Any, xs: Any) -> Any:
        total = lambda w: lax.scan(lambda t, x: (t + layer(w, x).sum(), None), 0.0, xs)[0]
        return jax.grad(total)(w)

    return f


def annotated(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ sw.annotate(w, P("x")))


half = lambda a: a.astype(jnp.float16)
LAYERS = {
    "plain": annotated,
    "cast after": lambda w, x: jnp.tanh(half(x) @ half(sw.annotate(w, P("x")))).astype("f4"),
    "cast before": lambda w, x: jnp.tanh(half(x) @ sw.annotate(half(w), P("x"))).astype("f4"),
    "checkpoint": jax.checkpoint(annotated),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_gradient_added_up_is_scattered_once(layer: str):
    f = accumulated(LAYERS[layer])
    plan = check(f, ARGS, {"x": 4}, SPECS, grad=False, tol=1e-2 if "cast" in layer else None)
    sums = [c for c in plan.collectives if c.kind == "reduce-scatter"]
    assert [c.count for c in sums] == [1]
    assert plan.out_shardings == P("x", None)


def test_what_a_loop_may_hold_is_the_users_to_say():
    f = accumulated(annotated)
    counts = {}
    for room in (0, 2 * W):
        plan = check(f, ARGS, {"x": 4}, SPECS, grad=False, loop_memory=room)
        counts[room] = {c.kind: c.count for c in plan.collectives}
    assert counts[2 * W] == {"all-gather": 1, "reduce-scatter": 1}
    assert counts[0]["reduce-scatter"] == STEPS


def test_a_value_read_elsewhere_keeps_its_annotation():
    def f(w: Any, xs: Any) -> Any:
        def step(total: Any, x: Any) -> Any:
            term = sw.annotate(w * x.sum(), P("x"))
            return total + term, term[0, 0]

        return lax.scan(step, jnp.zeros_like(w), xs)

    check(f, ARGS, {"x": 4}, SPECS, grad=False)


@pytest.mark.parametrize("shift", [1, -1, 3])
def test_the_gradient_of_a_roll_is_one_move(shift: int):
    x = RNG.standard_normal((8, 4), np.float32)

    def f(x: Any, c: Any) -> Any:
        return jax.vjp(lambda x: jnp.roll(x, shift, 0), x)[1](c)[0]

    plan = check(f, (x, x + 1), {"x": 8}, (P("x"), P("x")), grad=False)
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("collective-permute", 16)]


def test_sums_that_overlap_are_sums():
    def f(x: Any) -> Any:
        return jnp.pad(x, ((0, 3), (0, 0))) + jnp.pad(x, ((2, 1), (0, 0)), constant_values=0)

    check(f, (RNG.standard_normal((5, 4), np.float32),), {"x": 8}, (P("x"),))
