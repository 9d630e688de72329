"""Ragged dots: every split of rows, groups and contracted dims, empty groups, and rows of no group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise.testing import check
from shardwise.testing.rules import check_rule

Numbers = lax.RaggedDotDimensionNumbers
KEPT = Numbers((((1,), (1,)), ((), ())), [0], [0])
CONTRACT = Numbers((((0,), (0,)), ((), ())), [0], [])
MESHES: list[tuple[dict[str, int], int | None]] = [
    ({"x": 2, "y": 2}, 9), ({"x": 3}, None)
]  # fmt: skip


def values(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def right(fn: Any, *args: Any, **options: Any) -> list[str]:
    found = check_rule(fn, args, primitive="ragged_dot_general", tol=1e-4, **options)
    assert found["wrong"] == []
    return found["splits"]


def dot(numbers: Any) -> Any:
    return lambda a, b, s: lax.ragged_dot_general(a, b, s, numbers)


@pytest.mark.parametrize(("mesh", "limit"), MESHES)
@pytest.mark.parametrize("sizes", [[3, 0, 5, 2, 1], [0, 0, 0, 4, 0], [9, 0, 0, 0, 2]])
def test_rows_in_groups(mesh: dict[str, int], limit: int | None, sizes: list[int]) -> None:
    sizes_ = np.array(sizes, np.int32)  # the second: rows of no group
    right(dot(KEPT), values(11, 4), values(5, 4, 3), sizes_, mesh=mesh, limit=limit)


@pytest.mark.parametrize(("mesh", "limit"), MESHES)
@pytest.mark.parametrize("sizes", [[3, 0, 5, 2, 1], [0, 0, 0, 4, 0]])
def test_contracted_rows_in_groups(
    mesh: dict[str, int], limit: int | None, sizes: list[int]
) -> None:
    sizes_ = np.array(sizes, np.int32)
    right(dot(CONTRACT), values(11, 4), values(11, 3), sizes_, mesh=mesh, limit=limit)


def test_batches_with_sizes_of_their_own() -> None:
    numbers = Numbers((((2,), (2,)), ((0,), (1,))), [1], [0])
    sizes = np.array([[2, 3, 1], [0, 4, 2], [6, 0, 0]], np.int32)
    a, b = values(3, 6, 4), values(3, 3, 4, 2)
    right(dot(numbers), a, b, sizes, mesh={"x": 2})
    right(dot(numbers), a, b, sizes[0], limit=6)
    numbers = Numbers((((1,), (1,)), ((0,), (0,))), [1], [])
    right(dot(numbers), a, values(3, 6, 2), sizes, mesh={"x": 2})


def test_a_ragged_batch() -> None:
    numbers = Numbers((((2,), (1,)), ((0,), (0,))), [0], [])
    right(dot(numbers), values(5, 2, 4), values(5, 4, 3), np.array([2, 3], np.int32), limit=8)


MOE = (values(64, 16), values(8, 16, 32), np.array([5, 9, 0, 20, 8, 2, 12, 8], np.int32))


@pytest.mark.parametrize(
    ("specs", "kinds"),
    [
        ((P("x"), None, None), {}),  # rows
        ((None, P(None, None, "x"), None), {}),  # columns of every expert
        ((None, P("x"), None), {"all-reduce": 1}),  # experts
        ((P(None, "x"), P(None, "x"), None), {"all-reduce": 1}),  # contracted
    ],
)
def test_mixture_of_experts(specs: Any, kinds: dict[str, int]) -> None:
    out = P("x") if specs[0] == P("x") else P(None, "x") if not kinds else P()
    plan = check(lax.ragged_dot, MOE, {"x": 4}, specs, out, tol=1e-4)
    assert Counter(c.kind for c in plan.collectives) == kinds
    assert not plan.fallbacks


def test_two_axes_and_split_sizes() -> None:
    specs = (P("y"), P("x"), P("x"))
    plan = check(lax.ragged_dot, MOE, {"x": 2, "y": 4}, specs, P("y"), tol=1e-4, wire=True)
    assert not plan.fallbacks


def test_low_precision_and_jit() -> None:
    a, b, sizes = MOE
    f = jax.jit(lambda a, b, s: lax.ragged_dot(a, b, s, preferred_element_type=jnp.float32))
    args = (a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), sizes)
    check(f, args, {"x": 4}, (P("x"), None, None), P("x"), grad=False, kinds=[])
