"""Cumulative operations over a split dim: both directions, padding, special values, and bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import emitted
from jax import lax

from shardwise.capture import capture
from shardwise.ops.registry import rules_of
from shardwise.testing.rules import check_rule

EVERY = [lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp]


def right(fn: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The splits that the rule allows, all of which must be right."""
    found = check_rule(fn, args, **options)
    assert found["wrong"] == []
    return found["splits"]


def along(op: Callable[..., Any], axis: int, reverse: bool) -> Callable[..., Any]:
    return lambda x: op(x, axis, reverse=reverse)


def values(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=shape) * 3).astype(dtype)


@pytest.mark.parametrize("op", EVERY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("reverse", [False, True])
def test_every_split(op: Callable[..., Any], reverse: bool) -> None:
    x = values(2, 10)
    splits = right(along(op, 1, reverse), x, tol=1e-4)
    assert any("{1: ('x', 'y')}" in s for s in splits)
    right(along(op, 1, reverse), x, mesh={"x": 3}, tol=1e-4)
    right(along(op, 1, reverse), x, mesh={"x": 8}, tol=1e-4, limit=6)
    right(along(op, 0, reverse), values(9, 2), mesh={"x": 3}, tol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 5, 16])
@pytest.mark.parametrize("reverse", [False, True])
def test_blocks_that_hold_nothing(size: int, reverse: bool) -> None:
    right(along(lax.cumsum, 0, reverse), values(size, 2), mesh={"x": 8}, limit=6)
    right(along(lax.cummax, 0, reverse), values(size, 2), mesh={"x": 8}, limit=6)


@pytest.mark.parametrize("op", EVERY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("reverse", [False, True])
def test_special_values(op: Callable[..., Any], reverse: bool) -> None:
    x = values(4, 10)
    x[0, 3] = np.nan
    x[1, 2], x[1, 7] = np.inf, -np.inf
    x[2] = -np.inf
    x[3, 5] = 0.0
    right(along(op, 1, reverse), x, mesh={"x": 3}, tol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int32, np.uint8, np.complex64], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_dtypes(dtype: Any, reverse: bool) -> None:
    x = values(7, 2, dtype=dtype)
    ops = [lax.cumsum, lax.cumprod] if dtype is np.complex64 else EVERY[:4]
    for op in ops:
        right(along(op, 0, reverse), x, mesh={"x": 3}, tol=1e-1)


def test_the_rule() -> None:
    def rule(op: Callable[..., Any]) -> Any:
        f = along(op, 1, False)
        return rules_of(capture(f, [jax.ShapeDtypeStruct((3, 8), np.float32)])[0].eqns[-1])[0]

    assert str(rule(lax.cumsum)) == "a b -> a b  special=b"
    assert [rule(op).linear for op in EVERY] == [((0,),), (), (), (), ()]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("rows", "shards", "steps"),
    [(4096, 8, 3), (10, 3, 2), (10, 2, 1), (5, 8, 3), (2, 8, 1), (1, 8, 0)],
)  # fmt: skip
def test_bytes(rows: int, shards: int, steps: int, reverse: bool) -> None:
    """One row a permute; blocks that hold nothing are not sent for."""
    shape = jax.ShapeDtypeStruct((rows, 128), np.float32)
    f = along(lax.cumsum, 0, reverse)
    sent, price, _ = emitted(f, [shape], {"x": shards}, {0: "x"}, "cumsum")
    assert sent == price == steps * 128 * 4


def test_bytes_with_another_dim_split() -> None:
    shape = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    f = along(lax.cummax, 0, False)
    sent, price, _ = emitted(f, [shape], {"x": 4, "y": 8}, {0: "x", 1: "y"}, "cummax")
    assert sent == price == 2 * (128 // 8) * 2
