"""associative_scan found in what JAX writes for it, and scanned by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import emitted
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise.capture import capture
from shardwise.testing import check
from shardwise.testing.rules import check_rule

Pair = tuple[Any, Any]


def linear(a: Pair, b: Pair) -> Pair:
    """h -> p h + q, one after the other: does not commute."""
    return b[0] * a[0], b[0] * a[1] + b[1]


def last_set(a: Pair, b: Pair) -> Pair:
    """The last value that is set; of different types."""
    return jnp.where(b[1], b[0], a[0]), a[1] | b[1]


def scaled(x: Any, by: Any) -> Any:
    return lax.associative_scan(lambda a, b: a * b * by, x)


def multiply(x: Any) -> Any:
    return lax.associative_scan(jnp.multiply, x)


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def names(fn: Callable[..., Any], *args: Any) -> list[str]:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    return [e.name for e in capture(fn, shapes)[0].eqns]


@pytest.mark.parametrize("n", [4, 5, 6, 7, 8, 12, 33, 100])
def test_found_at_every_size(n: int) -> None:
    assert names(multiply, values(n, 2)) == ["associative_scan"]
    assert names(lambda x: lax.associative_scan(jnp.add, x, axis=1), values(2, n)) == [
        "associative_scan"
    ]


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: lax.associative_scan(linear, (a, b)),
        lambda a, b: lax.associative_scan(linear, (a, b))[1],
        lambda a, b: lax.associative_scan(linear, (a, b))[0],
        lambda a, b: lax.associative_scan(last_set, (a, b > 0)),
        lambda a, b: lax.associative_scan(jnp.logaddexp, a) + b,
        lambda a, b: lax.associative_scan(lambda x, y: x + y + 0.5, a) + b,
        lambda a, b: scaled(a, b[0, 0]),
        lambda a, b: lax.associative_scan(lambda x, y: jnp.maximum(x, y), (a * b)[:, 0]),
    ],
)
def test_found_for_every_function(fn: Callable[..., Any]) -> None:
    """Several arrays, results nobody reads, inner calls, constants, scalars from outside."""
    x, y = values(13, 2), values(13, 2, seed=1)
    assert names(fn, x, y).count("associative_scan") == 1
    spec = P("x")
    check(fn, [x, y], {"x": 3}, (spec, spec), grad=False)


def test_not_found_where_it_is_not_one() -> None:
    def other(x: Any) -> Any:
        pairs = x[0::2] * x[1::2]
        return pairs[0::2] * pairs[1::2]

    def across(x: Any) -> Any:
        return lax.associative_scan(lambda a, b: a + jnp.flip(b, 1), x)

    def matrices(x: Any) -> Any:
        return lax.associative_scan(jnp.matmul, x)

    for fn, shape in ((other, (16,)), (across, (6, 2)), (matrices, (5, 2, 2))):
        assert "associative_scan" not in names(fn, values(*shape))
        check(fn, [values(*shape)], {"x": 2}, P("x"), grad=False)


def test_a_function_that_changes_is_not_one() -> None:
    """A tree like a scan's in all but its last combination: found from the second level on."""

    def fn(x: Any) -> Any:
        calls: list[int] = []

        def f(a: Any, b: Any) -> Any:
            calls.append(0)
            return (lax.min if len(calls) == 8 else lax.max)(a, b)

        return lax.associative_scan(f, x)

    assert names(fn, values(16))[:4] == ["slice", "slice", "max", "associative_scan"]
    check(fn, [values(16)], {"x": 2}, P("x"), grad=False)


def test_what_is_read_inside_stays() -> None:
    """Products of the first level are wanted too: the scan is found from the second level on."""

    def fn(x: Any) -> Any:
        seen: list[Any] = []
        y = lax.associative_scan(lambda a, b: (seen.append(a * b), seen[-1])[1], x)
        return y, seen[0]

    assert names(fn, values(16))[:4] == ["slice", "slice", "mul", "associative_scan"]
    check(fn, [values(16)], {"x": 2}, P("x"), grad=False)


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"x": 3}, {"x": 6}], ids=str)
def test_every_split(mesh: dict[str, int]) -> None:
    """All blocks, NaN in the padding."""
    fn = lambda a, b: lax.associative_scan(linear, (a, b))
    found = check_rule(
        fn, [values(11, 3), values(11, 3, seed=1)], mesh, "associative_scan", limit=6
    )
    assert found["wrong"] == []
    fn = lambda a: lax.associative_scan(jnp.maximum, a, axis=1)
    found = check_rule(fn, [values(2, 5)], mesh, "associative_scan", limit=3)
    assert found["wrong"] == []


def test_gradient_and_reverse() -> None:
    fn = lambda a, b: lax.associative_scan(linear, (a, b), reverse=True)[1]
    check(fn, [values(9, 2), values(9, 2, seed=1)], {"x": 3}, (P("x"), P("x")))


def test_bytes() -> None:
    """One row of each array for each of three permutes: XLA sends 475328 bytes for the product."""
    shape = jax.ShapeDtypeStruct((4096, 128), np.float32)
    sent, price, _ = emitted(multiply, [shape], {"x": 8}, {0: "x"}, "associative_scan")
    assert sent == price == 3 * 128 * 4
    fn = lambda a, b: lax.associative_scan(linear, (a, b))[1]
    mesh = {"x": 4, "y": 2}
    sent, price, _ = emitted(fn, [shape, shape], mesh, {0: "x", 1: "y"}, "associative_scan")
    assert sent == price == 2 * 2 * 64 * 4


def test_whole_program() -> None:
    check(multiply, [values(64, 4)], {"x": 8}, P("x"), P("x"), grad=False, wire=True,
          bytes=3 * 4 * 4, kinds={"collective-permute": 3})  # fmt: skip
