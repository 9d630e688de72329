"""Windows: pooling along split dims by halos, its gradients, and single windows as reductions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import emitted
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise import _jax_primitives
from shardwise.testing import check
from shardwise.testing.rules import check_rule

BIND = _jax_primitives.lax_primitives("windowed_reductions")
INIT = {"sum": (lax.add, 0.0), "max": (lax.max, -np.inf), "min": (lax.min, np.inf)}


def values(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def ties(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 3, size=shape).astype(np.float32)


def right(fn: Any, *args: Any, **options: Any) -> list[str]:
    found = check_rule(fn, args, tol=1e-4, **options)
    assert found["wrong"] == []
    return found["splits"]


def pool(kind: str, size: int, stride: int = 1, low: int = 0, high: int = 0, base: int = 1,
         dilation: int = 1) -> Any:  # fmt: skip
    f, init = INIT[kind]

    def pooled(x: Any) -> Any:
        return lax.reduce_window(
            x, np.asarray(init, x.dtype)[()], f, (size, 1), (stride, 1), ((low, high), (0, 0)),
            base_dilation=(base, 1), window_dilation=(dilation, 1),
        )  # fmt: skip

    return pooled


GEOMETRY = [
    (2, 2, 0, 0, 1, 1),
    (3, 1, 1, 1, 1, 1),
    (3, 2, 0, 1, 1, 1),
    (2, 3, 0, 0, 1, 1),  # rows in no window
    (5, 1, 4, 0, 1, 1),  # all earlier ones of five
    (3, 1, -1, 2, 1, 1),  # negative padding
    (3, 2, 2, 2, 1, 2),
    (2, 1, 1, 1, 3, 1),
    (11, 1, 0, 0, 1, 1),  # one window
    (9, 1, -1, -1, 1, 1),
]


@pytest.mark.parametrize("geometry", GEOMETRY, ids=str)
def test_every_split(geometry: tuple[int, ...]) -> None:
    for kind, mesh in (("sum", {"x": 3}), ("max", {"x": 4})):
        splits = right(pool(kind, *geometry), values(11, 2), mesh=mesh, limit=4)
        assert splits


def test_more_devices_than_rows_and_integers() -> None:
    right(pool("min", 3, 2, 1, 1), values(5, 1), mesh={"x": 8}, limit=3)
    f = lambda x: lax.reduce_window(x, 0, lax.add, (3, 1), (1, 1), "SAME")
    right(f, np.arange(20, dtype=np.int32).reshape(10, 2), mesh={"x": 4}, limit=4)


def test_a_generic_reduction_and_its_initial_value() -> None:
    def f(x: Any) -> Any:
        return lax.reduce_window(x, 0.5, lambda a, b: a * b + a, (3, 1), (2, 1), "SAME")

    right(f, values(10, 2), mesh={"x": 4}, primitive="reduce_window", limit=4)
    g = lambda x: lax.reduce_window(x, 5.0, lax.add, (3, 1), (1, 1), "SAME")
    right(g, values(10, 2), mesh={"x": 4}, primitive="reduce_window", limit=4)


def test_several_operands() -> None:
    def larger(a: Any, b: Any) -> Any:
        keep = a[0] >= b[0]
        return lax.select(keep, a[0], b[0]), lax.select(keep, a[1], b[1])

    def f(x: Any, i: Any) -> Any:
        start = (np.float32(-np.inf), np.int32(-1))
        return lax.reduce_window((x, i), start, larger, (3, 1), (2, 1), ((1, 1), (0, 0)))

    index = np.arange(20, dtype=np.int32).reshape(10, 2)
    right(f, values(10, 2), index, mesh={"x": 4}, primitive="reduce_window", limit=4)


def test_two_window_dims() -> None:
    def f(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (2, 1), "SAME")

    right(f, values(9, 8), primitive="reduce_window_max", limit=24)


SCATTER = [(2, 2, 0, 0), (3, 1, 1, 1), (3, 2, 0, 1), (2, 3, 0, 0), (4, 1, 3, 0), (3, 2, 1, 1)]


@pytest.mark.parametrize("geometry", SCATTER, ids=str)
def test_select_and_scatter_add(geometry: tuple[int, ...]) -> None:
    """Ties included: the first row in the window's order wins, on whichever device it lies."""
    size, stride, low, high = geometry
    rows = 11
    count = (rows + low + high - size) // stride + 1

    def f(source: Any, operand: Any) -> Any:
        return BIND["select_and_scatter_add"].bind(
            source, operand, select_prim=lax.ge_p, window_dimensions=(size, 1),
            window_strides=(stride, 1), padding=((low, high), (0, 0)),
        )  # fmt: skip

    for mesh in ({"x": 3}, {"x": 4}):
        right(f, values(count, 2), ties(rows, 2), mesh=mesh, limit=3)


def test_select_and_gather_add() -> None:
    def f(tangents: Any, operand: Any) -> Any:
        return BIND["select_and_gather_add"].bind(
            tangents, operand, select_prim=lax.le_p, window_dimensions=(3, 1),
            window_strides=(2, 1), padding=((1, 1), (0, 0)), base_dilation=(1, 1),
            window_dilation=(1, 1),
        )  # fmt: skip

    right(f, values(10, 2), ties(10, 2), mesh={"x": 2, "y": 2}, limit=8)


def max_pool(size: int, stride: int) -> Any:
    return lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, size, size, 1), (1, stride, stride, 1), "SAME"
    )


def mean_pool(x: Any) -> Any:
    total = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    ones = lax.reduce_window(jnp.ones_like(x), 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return total / ones


@pytest.mark.parametrize(
    "f",
    [max_pool(2, 2), max_pool(3, 2), max_pool(3, 1), mean_pool],
    ids=["2/2", "3/2", "3", "mean"],
)
def test_pooling_of_images_and_its_gradient(f: Any) -> None:
    plan = check(f, (ties(2, 16, 12, 3),), {"x": 2, "y": 2}, (P(None, "x", "y"),), wire=True)
    assert {c.kind for c in plan.collectives} <= {"collective-permute"}
    assert not plan.fallbacks


def test_pools_that_tile_their_dim_send_nothing() -> None:
    x = values(4, 64, 8, 3)
    check(max_pool(2, 2), (x,), {"x": 8}, (P(None, "x"),), kinds=[], bytes=0)
    check(jax.grad(lambda x: max_pool(2, 2)(x).sum()), (x,), {"x": 8}, (P(None, "x"),), kinds=[])


def test_overlapping_pools_send_a_row() -> None:
    x = jax.ShapeDtypeStruct((64, 16), np.float32)
    sent, price, _ = emitted(pool("max", 3, 1, 1, 1), [x], {"x": 8}, {0: "x"}, "reduce_window_max")
    assert sent == price == 2 * 16 * 4


def test_one_window_over_the_dim_is_a_pending_reduction() -> None:
    def mean(x: Any) -> Any:
        return lax.reduce_window(x, 0.0, lax.add, (1, 64, 1), (1, 1, 1), "VALID") / 64

    plan = check(mean, (values(2, 64, 8),), {"x": 8}, (P(None, "x"),), P())
    assert Counter(c.kind for c in plan.collectives) == {"all-reduce": 1}
    assert plan.comm_bytes == 2 * 2 * 8 * 4 * 7 / 8


@pytest.mark.parametrize("kind", INIT)
def test_windows_of_all_earlier_rows_are_cumulative(kind: str) -> None:
    for low, high in ((63, 0), (0, 63)):
        f = pool(kind, 64, 1, low, high)
        plan = check(f, (values(64, 2),), {"x": 8}, (P("x"),), P("x"), grad=kind == "sum")
        assert plan.comm_bytes == 3 * 2 * 4  # a row a step, log2(8) steps


def test_functions_we_know_nothing_of_move_to_the_batch() -> None:
    def f(operand: Any, source: Any) -> Any:
        return BIND["select_and_scatter"].bind(
            operand, source, jnp.float32(0), **_bodies(), window_dimensions=(1, 2),
            window_strides=(1, 2), padding=((0, 0), (0, 0)),
        )  # fmt: skip

    specs = (P(None, "x"), P(None, "x"))
    plan = check(f, (values(8, 16), values(8, 8)), {"x": 4}, specs, grad=False)
    assert {c.kind for c in plan.collectives} == {"all-to-all"}
    assert not plan.fallbacks


def _bodies() -> dict[str, Any]:
    s = jax.ShapeDtypeStruct((), np.float32)
    select, scatter = (jax.make_jaxpr(g)(s, s) for g in (lax.ge, lax.add))
    return {
        "select_jaxpr": select.jaxpr, "select_consts": (),
        "scatter_jaxpr": scatter.jaxpr, "scatter_consts": (),
    }  # fmt: skip
