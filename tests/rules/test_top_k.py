"""top_k and approx_top_k over split dims: ties, NaN, padding, k beyond a block, and bytes."""

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

MESHES = [{"x": 2, "y": 2}, {"x": 3}, {"x": 6}]


def right(fn: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The splits that the rule allows, all of which must be right."""
    found = check_rule(fn, args, **options)
    assert found["wrong"] == []
    return found["splits"]


def top(k: int, axis: int = -1) -> Callable[..., Any]:
    return lambda x: lax.top_k(x, k, axis=axis)


def values(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Few distinct values: most have equals."""
    x = np.random.default_rng(0).integers(-3, 4, size=shape)
    return x > 0 if dtype is bool else x.astype(dtype)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("k", [1, 3, 7, 14])
def test_every_split(k: int, mesh: dict[str, int]) -> None:
    """Of 14 elements: fewer than a block, more than one, all."""
    splits = right(top(k), values(3, 14), mesh=mesh, limit=6)
    assert any("merged {1: ('x" in s for s in splits)


def test_another_axis_and_several_dims() -> None:
    right(top(5, 0), values(14, 3), mesh={"x": 4}, limit=4)
    right(top(2, 1), values(2, 9, 3), mesh={"a": 2, "b": 2}, limit=6)


def test_nothing_and_a_single_element() -> None:
    right(top(0), values(3, 5), mesh={"x": 2})
    right(top(1), values(3, 1), mesh={"x": 2})


@pytest.mark.parametrize("k", [2, 9])
def test_total_order(k: int) -> None:
    """-0.0 below 0.0, NaN above all, NaN with a sign below all: even below padding."""
    x = values(5, 10)
    x[0, 7], x[0, 3] = np.nan, np.inf
    x[1, ::2], x[1, 1::2] = 0.0, -0.0
    x[2] = -np.inf
    x[3] = -np.nan
    x[4, 9], x[4, 8] = np.inf, -np.nan
    for mesh in MESHES[:2]:
        right(
            lambda x: [bits(v) for v in lax.top_k(x, k)], x, mesh=mesh, primitive="top_k", limit=6
        )


def bits(x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.uint32)


@pytest.mark.parametrize(
    "dtype",
    [jnp.bfloat16, np.float16, jnp.float8_e4m3fn, np.int8, np.uint8, np.int32, bool],
    ids=str,
)
def test_dtypes(dtype: Any) -> None:
    x = values(3, 10, dtype=dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        x[0], x[1, 2:4] = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    right(top(4), x, mesh={"x": 3})


@pytest.mark.parametrize("op", [lax.approx_max_k, lax.approx_min_k], ids=lambda f: f.__name__)
@pytest.mark.parametrize("k", [3, 7])
def test_approximate(op: Callable[..., Any], k: int) -> None:
    """On CPUs it is exact."""
    x = values(3, 14)
    x[0, 2], x[1, 5:9], x[2] = np.inf, -np.inf, np.inf if op is lax.approx_min_k else -np.inf
    right(lambda x: op(x, k), x, mesh={"x": 3})
    right(lambda x: op(x, k, reduction_dimension=0), x.T, mesh={"x": 2, "y": 2}, limit=3)
    right(lambda x: op(x, k, aggregate_to_topk=False), x, mesh={"x": 3})


def test_bytes() -> None:
    """k candidates for each atom of two: 3072 bytes, where gathering them all is 7168."""
    shape = jax.ShapeDtypeStruct((16, 32768), np.float32)
    sent, price, _ = emitted(top(8), [shape], {"x": 8}, {1: "x"}, "top_k")
    assert sent == price == 3 * 16 * 8 * 8
    sent, price, _ = emitted(top(8), [shape], {"x": 6, "y": 2}, {1: "x", 0: "y"}, "top_k")
    assert sent == pytest.approx(price) and price == (1 + 2) * 8 * 8 * 8


def test_bytes_where_k_exceeds_a_block() -> None:
    """Whole blocks are sent without positions, and never more of them than there are."""
    shape = jax.ShapeDtypeStruct((2, 64), jnp.bfloat16)
    sent, price, _ = emitted(top(16), [shape], {"x": 8}, {1: "x"}, "top_k")
    assert sent == price == 2 * (8 * 2 + 16 * 2 + 16 * 6)
    sent, price, _ = emitted(top(64), [shape], {"x": 8}, {1: "x"}, "top_k")
    assert sent == price == 2 * 2 * (8 + 16 + 32)


def test_rules_as_text() -> None:
    shape = jax.ShapeDtypeStruct((3, 8), np.float32)
    rules = rules_of(capture(top(2), [shape])[0].eqns[-1])
    assert [str(r) for r in rules] == [
        "a b -> a c, a c  special=b  whole=c",
        "a b -> a c, a c  whole=b,c",
    ]
