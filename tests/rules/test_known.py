"""Indices written into the program, turned dims, split updates that overwrite: right, and few bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise import spmd
from shardwise.capture import capture
from shardwise.mesh import device_mesh
from shardwise.ops.rotate import rotate_p, rotate_rows
from shardwise.testing import check
from shardwise.testing.rules import check_rule

ROW = 4 * 4  # bytes of a row of the arrays below


def values(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * 9).astype(dtype)


def names(fn: Callable[..., Any], *args: Any) -> list[str]:
    avals = [jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for a in args]
    return [e.name for e in capture(fn, avals)[0].eqns]


# ---- turned by a run-time amount -------------------------------------------------------------------


def turned(x: Any, i: Any) -> Any:
    return rotate_p.bind(x, i, dimension=0)


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"x": 3}, {"x": 8}], ids=str)
@pytest.mark.parametrize("n", [16, 13, 9, 1])
def test_every_split_of_a_turned_dim(n: int, mesh: dict[str, int]) -> None:
    for start in (n - 1, n // 2, -4, n + 3):
        args = [values(n, 2), np.int32(start)]
        assert check_rule(turned, args, mesh, "rotate", merged=True, limit=3)["wrong"] == []


def test_what_a_turned_dim_sends() -> None:
    assert rotate_rows(8, 512, 4096) == ("ring", 4 * 512 - 1)
    assert rotate_rows(2, 8, 16) == ("gather", 8)
    assert rotate_rows(16, 8, 128) == ("ring", 5 * 8 - 1)


def test_a_roll_by_a_traced_amount_is_one_rotation() -> None:
    roll = lambda a, i: jnp.roll(a, i, 0)
    a = values(64, 1)  # no other dim can take the split
    assert "rotate" in names(roll, a, np.int32(0)) and "concatenate" not in names(
        roll, a, np.int32(0)
    )
    for i in (5, -70):
        check(
            roll, [a, np.int32(i)], {"x": 8}, (P("x"), P()), P("x"),
            kinds={"collective-permute": 4}, bytes=(4 * 8 - 1) * 4, wire=True, grad=i > 0,
        )  # fmt: skip
    wide = spmd(roll, mesh=device_mesh({"x": 8}), in_shardings=(P("x"), P()), out_shardings=P("x"))
    there_and_back = 2 * 64 * 8 * 4 / 8 * 7 / 8
    assert wide.plan(values(64, 8), np.int32(5)).comm_bytes == there_and_back


@pytest.mark.parametrize("i", [1, 2, 7, 12])
def test_an_uneven_ring_closes_past_its_padding(i: int) -> None:
    roll, args = lambda a, i: jnp.roll(a, i, 0), [values(13, 1), np.int32(i)]
    sent = (3 * 2 + 1 + 3) * 4  # three digits of 2 rows, a halo of 1 and the 3 rows of padding
    check(roll, args, {"x": 8}, (P("x"), P()), P("x"), bytes=sent, wire=True, grad=False)


def test_a_roll_of_two_dims_and_of_an_uneven_one() -> None:
    both = lambda a, i: jnp.roll(a, (i, 2 * i), (0, 1))
    check(both, [values(13, 8), np.int32(5)], {"x": 2, "y": 4}, (P("y", "x"), P()), P("y", "x"))


# ---- indices written into the program --------------------------------------------------------------

N = 24
MOVES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "set window": (lambda a, u: a.at[3:9].set(u), [(N, 4), (6, 4)]),
    "set row": (lambda a, u: a.at[-2].set(u), [(N, 4), (4,)]),
    "set block": (lambda a, u: a.at[2:20, 1:3].set(u), [(N, 4), (18, 2)]),
    "set rows": (lambda a, u: a.at[np.arange(5, 11)].set(u), [(N, 4), (6, 4)]),
    "set rows back": (lambda a, u: a.at[np.arange(20, 2, -1)].set(u), [(N, 4), (18, 4)]),
    "set every second": (lambda a, u: a.at[1::2].set(u), [(N, 4), (12, 4)]),
    "add every second": (lambda a, u: a.at[::2].add(u), [(N, 4), (12, 4)]),
    "add window": (lambda a, u: a.at[1:-1].add(u), [(N, 4), (22, 4)]),
    "min window": (lambda a, u: a.at[1:-1].min(u), [(N, 4), (22, 4)]),
    "interleave": (lambda a, b: jnp.zeros((2 * N, 4)).at[::2].set(a).at[1::2].set(b), [(N, 4)] * 2),
    "rows": (lambda a: a[np.arange(3, 20)], [(N, 4)]),
    "rows back": (lambda a: a[np.arange(N)[::-1].copy()], [(N, 4)]),
    "rows rolled": (lambda a: a[np.roll(np.arange(N), 5)], [(N, 4)]),
    "one row often": (lambda a: a[np.full(7, 5)], [(N, 4)]),
    "rows in a square": (lambda a: a[np.arange(N).reshape(4, 6)], [(N, 4)]),
    "columns": (lambda a: a[:, np.arange(N)[::-1].copy()], [(4, N)]),
    "clipped": (lambda a: jnp.take(a, np.arange(-3, 30), axis=0, mode="clip"), [(N, 4)]),
}


@pytest.mark.parametrize("case", MOVES)
def test_known_indices_are_moves(case: str) -> None:
    f, shapes = MOVES[case]
    args = [values(*s, seed=k) for k, s in enumerate(shapes)]
    left = {n for n in names(f, *args) if n == "gather" or n.startswith("scatter")}
    assert not left
    specs = tuple(P("x") if a.shape[0] == N else P() for a in args)
    plan = check(f, args, {"x": 8}, specs, grad=case in ("set window", "add every second"))
    assert not plan.fallbacks


def test_known_indices_that_are_left_alone() -> None:
    """Out of range (the update is dropped), doubled, or a few rows here and there."""
    a, u = values(N, 4), values(3, 4)
    dims = lax.ScatterDimensionNumbers((0, 1), (), (0,))
    past = lambda a, u: lax.scatter(a, jnp.array([N - 2]), u, dims, mode="drop")
    doubled = lambda a, u: a.at[np.array([1, 1, 4])].set(u)
    few = lambda a: a[np.array([1, 7, 3])]
    assert "scatter" in names(past, a, u) and "scatter" in names(doubled, a, u)
    assert "gather" in names(few, a)
    check(past, [a, u], {"x": 8}, (P("x"), P()), P("x"), grad=False)


def test_a_window_set_moves_only_rows_that_cross_borders() -> None:
    """Rows 1..62 of the result come from the stencil: one row goes each way, and one back each way."""
    f = lambda a: a.at[1:-1].set((a[2:] + a[:-2]) / 2)
    check(f, [values(64, 4)], {"x": 8}, (P("x"),), P("x"), bytes=3 * ROW, wire=True, grad=False)


def test_moves_that_change_nothing_are_dropped() -> None:
    a = values(8, 4)
    assert names(lambda a: jnp.concatenate([a[:3], a[3:]]) + 1, a) == ["add"]
    assert names(lambda a: jnp.roll(a, 0, 0) + 1, a) == ["add"]
    assert names(lambda a: jnp.concatenate([a[:0], a]) + 1, a) == ["add"]
    check(lambda a: jnp.pad(a, ((2, 3), (0, 0)), mode="edge"), [a], {"x": 8}, (P("x"),))


def test_tiled_rows_are_joined_copies() -> None:
    """Gathered once where the copies are wanted whole; moved where they are split."""
    f, a = lambda a: jnp.tile(a, (2, 1)), values(64, 4)
    check(f, [a], {"x": 8}, (P("x"),), P(), kinds=["all-gather"], bytes=56 * ROW, grad=False)
    check(f, [a], {"x": 8}, (P("x"),), P("x"), bytes=16 * ROW, grad=False)


# ---- dynamic slices that must not merge (XLA's clamp) ----------------------------------------------


@pytest.mark.parametrize("off", [4, 8, 12])
def test_an_update_inside_a_slice_that_misses_it(off: int) -> None:
    """user report 3: a drop-mode write outside of the slice changes nothing."""

    def f(x: Any, off: Any, i: Any) -> Any:
        y = lax.dynamic_slice(x, (off, 0), (4, 1))
        return y.at[(i - off)[None]].set(7.0, mode="drop", wrap_negative_indices=False)

    x = np.arange(16, dtype=np.float32).reshape(16, 1)
    got = spmd(f, mesh=device_mesh({"x": 4}), in_shardings=(P("x"), P(), P()))
    want = x[off : off + 4]  # by NumPy: jax on one device merges the slices wrongly
    np.testing.assert_array_equal(np.asarray(got(x, np.int32(off), np.int32(3))), want)


# ---- split updates that overwrite ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["clip", "drop"])
@pytest.mark.parametrize("mesh", [{"x": 3}, {"x": 2, "y": 2}], ids=str)
def test_the_last_of_split_updates_wins(mesh: dict[str, int], mode: str) -> None:
    x, u = values(10, 2), values(7, 2, seed=1)
    at = np.array([[9], [-1], [0], [9], [10], [0], [4]], np.int32)
    dims = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    found = check_rule(
        lambda x, i, u: lax.scatter(x, i, u, dims, mode=mode), [x, at, u], mesh, limit=12
    )
    assert found["wrong"] == []
    assert any(" last {1:" in s for s in found["splits"])


def test_split_windows_overwrite_in_order() -> None:
    """Windows that overlap, and index dims that are split both: numbered row by row."""
    dims = lax.ScatterDimensionNumbers((2,), (), (0,))
    at = np.array([[[0], [2], [1]], [[1], [6], [2]]], np.int32)
    f = lambda x, i, u: lax.scatter(x, i, u, dims)
    args = [values(8), at, values(2, 3, 3, seed=1)]
    assert check_rule(f, args, {"x": 2, "y": 2}, limit=14)["wrong"] == []


def test_split_updates_of_a_small_array_send_it_and_the_indices() -> None:
    f = lambda x, i, u: x.at[i].set(u)
    args = [values(8, 4), np.arange(64, dtype=np.int32) % 5, values(64, 4, seed=1)]
    plan = check(
        f, args, {"x": 8}, (P(), P("x"), P("x")), P("x"), grad=False, wire=True,
        kinds=["all-gather", "reduce-scatter"], bytes=56 * 4 + 7 * ROW,
    )  # fmt: skip
    assert not plan.fallbacks
