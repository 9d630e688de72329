"""Control flow: bodies are partitioned like any program; what is handed to them lies as agreed."""

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

AXES = {"x": 2, "y": 4}
RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return RNG.uniform(-1, 1, shape).astype(np.float32)


# --- scan ---------------------------------------------------------------------------------------


def layers(h: Any, ws: Any) -> Any:
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), h, ws)


@pytest.mark.parametrize("rows", [8, 6, 3])
@pytest.mark.parametrize(
    "specs",
    [
        (P("x"), P(None, None, "y")),
        (P("y", "x"), P(None, "x", "y")),
        (None, P("x")),
    ],
    ids=str,
)
def test_scan_over_layers(rows: int, specs: Any):
    """Even and uneven rows; weights split in their own dims, or the stack of layers split."""
    check(layers, (f32(rows, 8), f32(4, 8, 8)), AXES, in_shardings=specs)


@pytest.mark.parametrize("options", ["reverse=True", "unroll=2", "unroll=5", "length=5"])
def test_scan_options(options: str):
    def f(h: Any, xs: Any) -> Any:
        xs = None if "length" in options else xs
        step = lambda h, x: (jnp.sin(h) + (0.5 if x is None else x), h * 2)
        return lax.scan(step, h, xs, **eval(f"dict({options})"))

    check(f, (f32(6, 5), f32(5, 6, 5)), AXES, in_shardings=P("y"))


def test_scan_with_nothing_to_do():
    check(
        lambda h: lax.scan(lambda h, _: (h * 2, h), h, None, length=0), (f32(8, 4),), AXES, P("x")
    )
    check(accumulated, (f32(8, 8), f32(0, 8, 8)), AXES, (P(), P(None, "x")), grad=False)


def test_scan_over_the_split_dim():
    """The loop dim is whole inside: a step needs one slice, and all devices take part in it."""
    check(
        lambda x: lax.scan(lambda c, x: (c + x, c), jnp.zeros(5), x),
        (f32(10, 5),),
        AXES,
        P("y", "x"),
    )


def test_carries_of_every_kind():
    """Constants, integers, keys, booleans, values passed on untouched and swapped."""

    def f(a: Any, b: Any, key: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            a, b, i, flag, key, zero = c
            noise = jax.random.bits(key, (4,)).astype(jnp.float32).sum() * 0
            return (b + noise, a, i + 1, ~flag, key, zero), (i, flag, x)

        init = a, b, 0, True, key, jnp.zeros((8, 4))
        (a, b, i, flag, _, zero), ys = lax.scan(step, init, jnp.arange(3))
        return a, b, i, flag, zero, ys

    args = f32(8, 4), f32(8, 4), jax.random.key(0)
    check(f, args, AXES, in_shardings=(P("x"), P("y"), None))


def test_a_carry_annotated_in_the_body():
    """The loop's contract is one sharding: the annotation's, reached once before the loop."""

    def f(h: Any) -> Any:
        return lax.scan(
            lambda h, _: (sw.annotate(jnp.sin(h), P("x", "y")), None), h, None, length=3
        )[0]

    plan = check(f, (f32(8, 8),), AXES)
    assert plan.out_shardings == P("x", "y")
    assert plan.collectives == []


def test_a_body_that_moves_its_carry_every_step():
    def f(h: Any) -> Any:
        step = lambda h, _: (sw.annotate(sw.annotate(h, P("x", None)) * 2, P(None, "x")), None)
        return lax.scan(step, h, None, length=3)[0]

    plan = check(f, (f32(8, 8),), {"x": 2}, wire=True)
    assert sum(c.count for c in plan.collectives) >= 3


def test_nested_scans():
    def f(h: Any, ws: Any) -> Any:
        inner = lambda h, w: (jnp.tanh(h @ w), None)
        return lax.scan(lambda h, ws: (lax.scan(inner, h, ws)[0], h.mean()), h, ws)

    check(f, (f32(6, 4), f32(2, 3, 4, 4)), AXES, in_shardings=(P("x"), P(None, None, None, "y")))


def test_map_and_associative_scan():
    check(lambda x: lax.map(lambda r: jnp.sin(r) - r.mean(), x), (f32(5, 8),), AXES, P(None, "y"))
    check(lambda x: lax.associative_scan(jnp.add, x), (f32(8, 3),), AXES, P("y"))


# --- gradient accumulation ----------------------------------------------------------------------


def accumulated(w: Any, batches: Any) -> Any:
    def loss(w: Any, x: Any) -> Any:
        return (jnp.tanh(x @ w) ** 2).sum()

    step = lambda g, x: (g + jax.grad(loss)(w, x), None)
    return lax.scan(step, jnp.zeros_like(w), batches)[0]


def test_gradients_are_added_up_on_each_device_and_reduced_once():
    """One reduction after the loop, not one in every iteration."""
    args, specs = (f32(8, 8), f32(6, 64, 8)), (P(), P(None, "x"))
    plan = check(accumulated, args, {"x": 4}, in_shardings=specs, grad=False, wire=True)
    assert [(c.kind, c.count) for c in plan.collectives] == [("all-reduce", 1)]
    split = check(accumulated, args, {"x": 4}, specs, P("x"), grad=False, wire=True)
    assert [(c.kind, c.count) for c in split.collectives] == [("reduce-scatter", 1)]


def test_a_sum_that_the_body_reads_is_reduced_in_it():
    def f(x: Any) -> Any:
        step = lambda s, x: (s + jnp.sin(s) + x.sum(), s)
        return lax.scan(step, 0.0, x)

    plan = check(f, (f32(6, 8),), {"x": 4}, in_shardings=P(None, "x"), grad=False)
    assert [c.count for c in plan.collectives if c.kind == "all-reduce"] == [6]


# --- while --------------------------------------------------------------------------------------


def test_while_on_a_reduction_of_split_data():
    def f(x: Any) -> Any:
        go = lambda c: (jnp.abs(c[0]).sum() > 1.0) & (c[1] < 20)
        return lax.while_loop(go, lambda c: (c[0] * 0.5, c[1] + 1), (x, 0))

    plan = check(f, (f32(10, 6),), AXES, in_shardings=P("y", "x"), grad=False)
    assert plan.out_shardings[0] == P("y", "x")


def test_while_with_constants_of_condition_and_body():
    def f(x: Any, limit: Any, w: Any) -> Any:
        go = lambda h: h.sum() < limit.sum()
        return lax.while_loop(go, lambda h: jnp.abs(h @ w) + 1, x)

    specs = P("x"), P("y"), P(None, "y")
    check(f, (f32(8, 8), f32(8) + 50, f32(8, 8)), AXES, in_shardings=specs, grad=False)


def test_fori_loops():
    """A fixed number of steps differentiates; one known only at run time does not, and runs."""
    f = lambda n, x: lax.fori_loop(0, n, lambda i, h: jnp.sin(h) + i, x)
    check(lambda x: f(3, x), (f32(6, 5),), AXES, in_shardings=P("x", "y"))
    check(f, (np.int32(4), f32(6, 5)), AXES, in_shardings=(None, P("x", "y")), grad=False)


def test_vmapped_while_has_a_condition_for_each_row():
    """Rows stop at different times; the loop runs until the last of all devices' rows is done."""

    def f(x: Any) -> Any:
        row = lambda r: lax.while_loop(lambda r: r.sum() < 10, lambda r: r * 1.5 + 1, r)
        return jax.vmap(row)(x)

    check(f, (f32(6, 4),), {"x": 4}, in_shardings=P("x"), grad=False)


# --- cond ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2, 7])
def test_switch(which: int):
    """Branches that want their operand laid out differently, and an index out of range."""

    def f(i: Any, x: Any, w: Any) -> Any:
        branches = [
            lambda x, w: x @ w,
            lambda x, w: jnp.cumsum(x, 0) * w.sum(),
            lambda x, w: jnp.zeros_like(x),
        ]
        return lax.switch(i, branches, x, w)

    check(
        f, (np.int32(which), f32(10, 8), f32(8, 8)), AXES, in_shardings=(None, P("y"), P(None, "x"))
    )


def test_cond_on_split_data_and_collectives_in_one_branch():
    def f(x: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda x: x - x.mean(0), lambda x: x * 2, x)

    for x in (f32(6, 4) + 1, f32(6, 4) - 1):
        check(f, (x,), AXES, in_shardings=P("y", "x"))


def test_cond_in_scan():
    def f(x: Any) -> Any:
        step = lambda c, x: lax.cond(c.sum() > 0, lambda: (c - x, c), lambda: (c + x, x))
        return lax.scan(step, jnp.zeros(8), x)

    check(f, (f32(5, 8),), AXES, in_shardings=P(None, "y"))


# --- checkpoint and custom derivatives ----------------------------------------------------------


@pytest.mark.parametrize("policy", [None, "dots_saveable", "nothing_saveable"])
def test_checkpoint(policy: str | None):
    options = {} if policy is None else {"policy": getattr(jax.checkpoint_policies, policy)}
    block = jax.checkpoint(lambda h, w: jnp.tanh(h @ w) + h, **options)

    def f(h: Any, ws: Any) -> Any:
        return lax.scan(lambda h, w: (block(h, w), None), h, ws)[0]

    check(f, (f32(6, 8), f32(3, 8, 8)), AXES, in_shardings=(P("x"), P(None, None, "y")))


def test_custom_derivatives_in_loops():
    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return jnp.sin(x)

    clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct * jnp.cos(x), -0.1, 0.1),))

    @jax.custom_jvp
    def cube(x: Any) -> Any:
        return x**3

    cube.defjvp(lambda p, t: (cube(p[0]), 3 * p[0] ** 2 * t[0]))

    def f(x: Any) -> Any:
        return lax.scan(lambda h, _: (cube(clipped(h)), None), x, None, length=2)[0]

    check(f, (f32(10, 4),), AXES, in_shardings=P("y", "x"))
