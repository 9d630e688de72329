"""Sorting, selecting and scanning in whole programs: values, gradients, collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise.testing import check

X8 = {"x": 8}


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ties(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(-3, 4, shape).astype(np.float32)


def test_sort_of_one_dim() -> None:
    """Never gathered, its gradient either: 50 in blocks of 7, over 8."""
    plan = check(jnp.sort, [values(4096)], X8, P("x"), P("x"), wire=True)
    assert not plan.fallbacks and all(c.kind != "all-gather" for c in plan.collectives)
    check(jnp.sort, [ties(50)], {"x": 3}, P("x"), P("x"))
    check(lambda x: jnp.sort(x, descending=True), [ties(50)], {"x": 6}, P("x"), P("x"), grad=False)


def test_argsort_moves_two_blocks() -> None:
    n = 4096
    sent = 2 * n / 8 * 7 / 8 * 8 + 2 * 7 * 8 * 8
    check(jnp.argsort, [ties(n)], X8, P("x"), P("x"), bytes=sent, wire=True,
          kinds={"all-to-all": 4, "collective-permute": 4})  # fmt: skip
    check(lambda x: jnp.argsort(x, descending=True), [ties(100)], X8, P("x"), P("x"))


def test_rows_are_moved_to_another_dim() -> None:
    there = 64 * 1024 * 4 / 8 * 7 / 8
    f = lambda x: jnp.sort(x, axis=1)
    check(f, [values(64, 1024)], X8, P(None, "x"), P(None, "x"),
          bytes=2 * there, kinds={"all-to-all": 2}, wire=True)  # fmt: skip
    check(f, [values(6, 30)], {"x": 2, "y": 4}, P("x", "y"), P("x", "y"))
    check(f, [values(2, 30)], {"x": 2, "y": 3}, P("y", "x"), P("y", "x"))


def test_a_whole_result_and_few_elements() -> None:
    check(jnp.sort, [values(16)], X8, P("x"), P("x"), kinds=["all-gather"], grad=False)
    check(jnp.sort, [values(64)], X8, P("x"), P(), grad=False)


def test_several_keys_and_payload() -> None:
    a, b, c = ties(60), ties(60)[::-1].copy(), values(60)
    specs = (P("x"), P("x"), P("x"))
    check(lambda a, b: jnp.lexsort((a, b)), [a, b], X8, specs[:2], P("x"))
    f = lambda a, b, c: lax.sort((a, b, c), num_keys=2)
    check(f, [a, b, c], {"x": 2, "y": 2}, (P(("x", "y")),) * 3, (P(("y", "x")),) * 3)
    check(f, [a, b, c], {"x": 5}, (P("x"), P(), P("x")), specs)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.median(x, axis=0),
        lambda x: jnp.percentile(x, 30.0, axis=0),
        lambda x: jnp.quantile(x, jnp.array([0.1, 0.9]), axis=0, method="nearest"),
        lambda x: jnp.nanmedian(x, axis=0),
        lambda x: jnp.median(x),
    ],
    ids=["median", "percentile", "quantile", "nanmedian", "of all"],
)
def test_quantiles(f: Callable[..., Any]) -> None:
    check(f, [values(37, 8)], {"x": 4}, P("x"))
    x = values(37, 8)
    x[5, 3] = np.nan
    check(f, [x], {"x": 2, "y": 3}, P("y", "x"), grad=False)


def test_median_sends_each_element_once() -> None:
    """One all-to-all, and no way back: XLA sends 57596 bytes."""
    plan = check(lambda x: jnp.median(x, axis=0), [values(4096, 16)], X8, P("x"), P(), grad=False)
    assert plan.comm_bytes == 28672 + 2 * 16 * 7 / 8 + 56


def test_searchsorted_and_unique() -> None:
    x = np.sort(values(40))
    check(jnp.searchsorted, [x, values(9)], {"x": 4}, (P("x"), P()), grad=False)
    check(lambda x: jnp.unique(x, size=9), [ties(40)], {"x": 4}, P("x"), grad=False)


def test_random_orders() -> None:
    key = jax.random.key_data(jax.random.key(3))

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda k, x: f(jax.random.wrap_key_data(k), x)

    shuffled = wrap(jax.random.permutation)
    check(shuffled, [key, values(64)], X8, (P(), P("x")), P("x"), grad=False)
    check(shuffled, [key, values(30, 4)], {"x": 3}, (P(), P("x")), P("x"), grad=False)
    few = wrap(lambda k, x: jax.random.choice(k, x, (5,), replace=False))
    check(few, [key, values(64)], X8, (P(), P("x")), grad=False)
    check(
        wrap(jax.random.categorical),
        [key, values(4, 30)],
        {"x": 3},
        (P(), P(None, "x")),
        grad=False,
    )


@pytest.mark.parametrize("mesh", [{"x": 8}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
def test_top_k(mesh: dict[str, int]) -> None:
    """Values and gradients, where the dim is split over all axes, and where it does not divide."""
    axes = tuple(mesh)
    for k in (3, 20):
        check(lambda x, k=k: lax.top_k(x, k), [values(4, 50)], mesh, P(None, axes))
    check(lambda x: lax.approx_max_k(x, 3), [values(4, 50)], mesh, P(None, axes))


def test_top_k_gathers_candidates_only() -> None:
    check(lambda x: lax.top_k(x, 8), [values(16, 4096)], X8, P(None, "x"), (P(), P()),
          bytes=3 * 16 * 8 * 8, kinds={"all-gather": 6}, wire=True, grad=False)  # fmt: skip


def test_top_k_of_split_rows_is_local() -> None:
    plan = check(
        lambda x: lax.top_k(x, 3), [values(16, 20)], X8, P("x"), (P("x"), P("x")), kinds=[]
    )
    assert not plan.fallbacks


CUMULATIVE = [lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp]


@pytest.mark.parametrize("op", CUMULATIVE, ids=lambda f: f.__name__)
def test_cumulative(op: Callable[..., Any]) -> None:
    """On meshes of 6 and 3, and over two axes, in either direction."""
    check(lambda x: op(x, axis=0), [values(31, 3)], {"x": 6}, P("x"), P("x"), grad=op is lax.cumsum)
    two = P(("y", "x"))
    check(lambda x: op(x, axis=0), [values(31, 3)], {"x": 2, "y": 3}, two, two, grad=False)
    back = lambda x: op(x, axis=1, reverse=True)
    check(back, [values(2, 7)], {"x": 3}, P(None, "x"), P(None, "x"))
