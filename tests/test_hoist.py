"""What is the same in every iteration is moved once, before the loop, when there is room for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise import spmd
from shardwise.mesh import device_mesh
from shardwise.testing import check

RNG = np.random.default_rng(0)
W = 64 * 64 * 4  # bytes of a weight


def f32(*shape: int) -> np.ndarray:
    return RNG.uniform(-1, 1, shape).astype(np.float32)


def recurrent(w: Any, xs: Any) -> Any:
    return lax.scan(lambda h, x: (jnp.tanh((h + x) @ w), None), jnp.zeros_like(xs[0]), xs)[0]


def sent(plan: Any) -> list[tuple[str, int, float]]:
    return sorted((c.kind, c.count, c.bytes) for c in plan.collectives)


def args(steps: int = 6) -> tuple[np.ndarray, np.ndarray]:
    return f32(64, 64) / 4, f32(steps, 64, 64)


SPECS = P("x"), P(None, "x")


def test_a_weight_is_gathered_once():
    plan = check(recurrent, args(), {"x": 8}, SPECS, P("x"), wire=True)
    assert sent(plan) == [("all-gather", 1, W * 7 / 8)]
    assert "once before the scan" in plan.collectives[0].reason


def test_gathering_once_beats_what_every_iteration_would_send():
    """A short batch: one iteration would rather gather its activations; a hundred would not."""
    for n in (2, 100):
        few = f32(64, 64) / 4, f32(n, 8, 64)
        plan = check(recurrent, few, {"x": 8}, (P("x"), P(None, "x")), P("x"), grad=False)
        bound = n * 8 * 64 * 4 * 2 * 7 / 8
        assert plan.comm_bytes <= min(W * 7 / 8, bound)


def test_not_where_it_does_not_fit():
    """Memory for a loop is an eighth of `memory_limit`: a weight of 16 KiB does not fit in 8."""
    small = check(recurrent, args(), {"x": 8}, SPECS, P("x"), memory_limit=8 * W / 2)
    assert sum(c.count for c in small.collectives) >= 6
    large = check(recurrent, args(), {"x": 8}, SPECS, P("x"), memory_limit=8 * W)
    assert sent(large) == [("all-gather", 1, W * 7 / 8)]


def test_room_is_shared_by_all_constants_of_a_loop():
    def f(u: Any, w: Any, xs: Any) -> Any:
        step = lambda h, x: (jnp.tanh((h + x) @ w) @ u, None)
        return lax.scan(step, jnp.zeros_like(xs[0]), xs)[0]

    three = f32(64, 64) / 4, *args()
    plan = check(f, three, {"x": 8}, (P("x"), *SPECS), P("x"), memory_limit=8 * W * 1.5)
    counts = sorted(c.count for c in plan.collectives)
    assert counts[0] == 1 and counts[-1] == 6


def test_one_step_moves_nothing_out():
    plan = check(recurrent, args(1), {"x": 8}, SPECS, P("x"))
    assert all(c.count == 1 for c in plan.collectives)
    assert all("once before" not in c.reason for c in plan.collectives)
    check(recurrent, args(2), {"x": 3}, SPECS, P("x"))


def test_nested_loops():
    def f(w: Any, xs: Any) -> Any:
        step = lambda h, x: (jnp.tanh((h + x) @ w), None)
        return lax.scan(lambda h, xs: lax.scan(step, h, xs), jnp.zeros_like(xs[0, 0]), xs)[0]

    two = f32(64, 64) / 4, f32(3, 4, 64, 64)
    specs = P("x"), P(None, None, "x")
    plan = check(f, two, {"x": 8}, specs, P("x"), wire=True)
    assert sent(plan) == [("all-gather", 1, W * 7 / 8)]
    g = lambda w, xs: jax.grad(lambda w: f(w, xs).sum())(w)
    plan = check(g, two, {"x": 8}, specs, P("x"), grad=False, wire=True)
    assert sent(plan) == [("all-gather", 1, W * 7 / 8), ("reduce-scatter", 1, W * 7 / 8)]


# --- equations of constants -----------------------------------------------------------------------


def test_what_is_made_of_constants_is_made_before():
    """A running total of a constant, its halo exchange and all."""

    def f(w: Any, xs: Any) -> Any:
        step = lambda h, x: (jnp.tanh(h + x * jnp.cumsum(w, 0)), None)
        return lax.scan(step, jnp.zeros_like(xs[0]), xs)[0]

    plan = check(f, args(), {"x": 8}, SPECS, P("x"), wire=True)
    assert plan.collectives and all(c.count == 1 for c in plan.collectives)
    total = check(
        lambda w, xs: lax.scan(lambda h, x: (jnp.sin(h) * w.sum(0) / 9 + x, None), xs[0], xs)[0],
        args(), {"x": 8}, SPECS, P("x"), wire=True,
    )  # fmt: skip
    assert sent(total) == [("all-reduce", 1, 2 * 64 * 4 * 7 / 8)]


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_a_cast_in_a_checkpoint(prevent_cse: bool):
    """The cast moves out of the checkpoint, so that the weight is gathered before the loop, forward and
    backward, in the narrow type."""

    def half(h: Any, w: Any, x: Any) -> Any:
        return jnp.tanh((h + x).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    block = jax.checkpoint(half, prevent_cse=prevent_cse)

    def f(w: Any, xs: Any) -> Any:
        return lax.scan(lambda h, x: (block(h, w, x), None), jnp.zeros_like(xs[0]), xs)[0]

    plan = check(f, args(), {"x": 8}, SPECS, P("x"), grad=False, tol=3e-2)
    assert sent(plan) == [("all-gather", 1, W / 2 * 7 / 8)]
    g = lambda w, xs: jax.grad(lambda w: f(w, xs).sum())(w)
    plan = check(g, args(), {"x": 8}, SPECS, P("x"), grad=False, tol=3e-2)
    assert [c.count for c in plan.collectives if "once before" in c.reason] == [1, 1]


# --- while ----------------------------------------------------------------------------------------


def test_constants_of_a_while_loop():
    def f(n: Any, w: Any, h: Any) -> Any:
        return lax.fori_loop(0, n, lambda i, h: jnp.tanh(h @ w), h)

    for n in (0, 3):
        plan = check(
            f, (np.int32(n), *(f32(64, 64),) * 2), {"x": 8}, (None, P("x"), P("x")), grad=False
        )
        assert sent(plan) == [("all-gather", 1, W * 7 / 8)]
        assert not plan.collectives[0].per_iteration


def test_constants_of_a_condition():
    def f(x: Any, limit: Any) -> Any:
        go = lambda c: (c[1] < limit.max()) & (c[1] < 9)
        return lax.while_loop(go, lambda c: (jnp.sin(c[0]), c[1] + 1), (x, 0.0))[0]

    plan = check(f, (f32(16, 4), f32(64) + 3), {"x": 8}, (P("x"), P("x")), P("x"), grad=False)
    assert sent(plan) == [("all-reduce", 1, 7.0)]
    assert not plan.collectives[0].per_iteration


def test_sums_of_a_while_loop_are_finished_after_it():
    """Gradients over a number of batches known at run time only."""

    def f(n: Any, w: Any, xs: Any) -> Any:
        loss = lambda w, x: (jnp.tanh(x @ w) ** 2).sum()
        step = lambda i, g: g + jax.grad(loss)(w, xs[i])
        return lax.fori_loop(0, n, step, jnp.zeros_like(w))

    three = np.int32(4), *args()
    plan = check(f, three, {"x": 8}, (None, P(), P(None, "x")), P(), grad=False, wire=True)
    assert sent(plan) == [("all-reduce", 1, 2 * W * 7 / 8)]
    split = check(f, three, {"x": 8}, (None, *SPECS), P("x"), grad=False)
    assert sent(split) == [("all-gather", 1, W * 7 / 8), ("reduce-scatter", 1, W * 7 / 8)]


def test_a_sum_that_the_condition_reads_is_finished_in_the_loop():
    def f(x: Any) -> Any:
        go = lambda c: c[0] < 20
        return lax.while_loop(go, lambda c: (c[0] + (x * c[1]).sum(), c[1] + 1), (0.0, 1.0))

    plan = check(f, (np.abs(f32(64, 4)),), {"x": 8}, (P("x"),), grad=False)
    assert any(c.per_iteration for c in plan.collectives) or len(plan.collectives) == 1


def test_a_plan_is_traced_again():
    """What was decided for a loop holds for the next trace of the plan."""
    f = spmd(recurrent, mesh=device_mesh({"x": 8}), in_shardings=SPECS, out_shardings=P("x"))
    w, xs = args()
    want = jax.jit(recurrent)(w, xs)
    for g in (f, jax.jit(lambda w, xs: f(w, xs) * 1), jax.jit(lambda w, xs: f(w, xs) * 2)):
        got = np.asarray(g(w, xs))
        assert np.allclose(got, want, atol=1e-5) or np.allclose(
            got, 2 * np.asarray(want), atol=1e-5
        )
