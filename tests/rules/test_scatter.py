"""scatter and its reducing forms: every split, in and out of range, with duplicates and padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import context
from jax import lax

from shardwise.capture import capture
from shardwise.mesh import MeshAxes, device_mesh
from shardwise.ops.registry import LocalContext, rules_of, run_local
from shardwise.testing import rules
from shardwise.testing.rules import check_rule

MESHES = [{"x": 2, "y": 2}, {"x": 3}, {"x": 8}]
REDUCING = [lax.scatter_add, lax.scatter_sub, lax.scatter_mul, lax.scatter_min, lax.scatter_max]
EVERY = [lax.scatter, *REDUCING]
MODES = ["clip", "drop", "promise_in_bounds"]


def right(fn: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The splits that the rule allows, all of which must be right."""
    found = check_rule(fn, args, **options)
    assert found["wrong"] == []
    return found["splits"]


def rule_of(fn: Callable[..., Any], *args: Any) -> Any:
    avals = [jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for a in args]
    eqns = [e for e in capture(fn, avals, merged=False)[0].eqns if e.name.startswith("scatter")]
    return rules_of(eqns[-1])[0]


def values(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=shape) * 4
    return x.astype(dtype) if dtype is not bool else x > 0


def positions(*at: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.array(at, dtype)


def rows(op: Callable[..., Any], mode: str = "drop") -> Callable[..., Any]:
    """op(x, [n, 1], [n, m]): rows of a matrix by position."""
    dims = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return lambda x, i, u: op(x, i, u, dims, mode=mode)


def window(op: Callable[..., Any], mode: str = "drop") -> Callable[..., Any]:
    """op(x, [1], [w, m]): one window of rows."""
    dims = lax.ScatterDimensionNumbers((0, 1), (), (0,))
    return lambda x, i, u: op(x, i, u, dims, mode=mode)


def windows(op: Callable[..., Any], mode: str = "drop") -> Callable[..., Any]:
    """op(x, [n, 2], [n, w, v]): windows in both dims."""
    dims = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    return lambda x, i, u: op(x, i, u, dims, mode=mode)


def test_rules_as_text() -> None:
    x, i, u = values(8, 3), positions([1], [2]), values(2, 3)
    assert str(rule_of(rows(lax.scatter_add), x, i, u)) == "c d, b a, b d -> c d  sum=b  whole=a"
    assert str(rule_of(rows(lax.scatter_max), x, i, u)) == "c d, b a, b d -> c d  max=b  whole=a"
    assert str(rule_of(rows(lax.scatter), x, i, u)) == "c d, b a, b d -> c d  whole=a,b"
    one = positions(1)
    assert str(rule_of(window(lax.scatter_mul), x, one, u)) == "b d, a, c d -> b d  prod=c  whole=a"
    assert str(rule_of(window(lax.scatter), x, one, u)) == "b d, a, c d -> b d  whole=a,c"
    flags, flag = values(8, 3, dtype=bool), values(2, 3, dtype=bool)
    text = str(rule_of(rows(lax.scatter_max), flags, i, flag))
    assert text == "c d, b a, b d -> c d  or=b  whole=a"


def test_linear_groups() -> None:
    x, i, u = values(8, 3), positions([1], [2]), values(2, 3)
    linear = [rule_of(rows(op), x, i, u).linear for op in EVERY]
    assert linear == [((0, 2),), ((0, 2),), ((0, 2),), ((0,),), (), ()]
    assert rule_of(lambda x, i: x.at[i].apply(jnp.sin), x, positions(1, 2)).linear == ()


@pytest.mark.parametrize("op", EVERY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_rows_with_duplicates_and_out_of_range(op: Callable[..., Any], mode: str) -> None:
    at = positions([9], [-1], [0], [9], [10], [99], [4])
    x, u = values(10, 3), values(7, 3, seed=1)
    right(rows(op, mode), x, at, u, mesh={"x": 3}, tol=1e-4)
    if op in (lax.scatter, lax.scatter_add):
        right(rows(op, mode), x, at, u, mesh={"x": 2, "y": 2}, limit=6)


@pytest.mark.parametrize("op", EVERY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", ["clip", "drop"])
def test_one_window_anywhere(op: Callable[..., Any], mode: str) -> None:
    """Inside a block, over one and two borders, at both ends, partly and wholly outside."""
    for start in (-2, 0, 3, 6, 7) if op is lax.scatter else (-2, 3):
        f = window(op, mode)
        right(f, values(10, 2), positions(start), values(4, 2, seed=1), mesh={"x": 3})


def test_a_window_longer_than_a_block() -> None:
    for op in (lax.scatter, lax.scatter_add):
        right(window(op), values(9, 2), positions(1), values(7, 2, seed=1), mesh={"x": 8}, limit=6)


@pytest.mark.parametrize("op", EVERY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", ["clip", "drop"])
def test_windows_in_two_dims(op: Callable[..., Any], mode: str) -> None:
    at = positions([0, 0], [3, 1], [5, 3], [3, 1], [-1, 2], [4, 4])
    x, u = values(8, 6), values(6, 3, 2, seed=1)
    right(windows(op, mode), x, at, u, limit=30 if op is lax.scatter_add else 5, tol=1e-4)


def test_windows_after_batch_dims_and_between_them() -> None:
    dims = lax.ScatterDimensionNumbers((0, 2), (1,), (1, 0))
    x, u = values(7, 5, 4), values(3, 3, 4, seed=1)
    at = positions([0, 2], [4, 4], [3, 9])
    for op in (lax.scatter, lax.scatter_add):
        right(lambda x, i, u, op=op: op(x, i, u, dims), x, at, u, limit=8)


def test_windows_whose_dims_turn_in_a_cycle() -> None:
    """The dim taken whole comes first, the window that blocks cut last."""
    dims = lax.ScatterDimensionNumbers((0, 2), (), (1,))
    x, i, u = values(3, 7), positions([0], [2], [5], [1]), values(3, 4, 4, seed=1)
    for op in (lax.scatter, lax.scatter_add):
        right(lambda x, i, u, op=op: op(x, i, u, dims), x, i, u, limit=8)


def test_a_window_dim_that_no_index_addresses() -> None:
    """Rows 0 and 1 of a dim without a start of its own."""
    dims = lax.ScatterDimensionNumbers((1, 2), (), (0,))
    x, u = values(6, 7), values(3, 2, 4, seed=1)
    for op in (lax.scatter, lax.scatter_max):
        right(lambda x, i, u, op=op: op(x, i, u, dims), x, positions([1], [4], [3]), u, limit=8)


def test_static_slices_are_set_in_place() -> None:
    for mesh in MESHES:
        few: Any = {"mesh": mesh, "limit": 4}
        right(lambda x, u: x.at[3:8].set(u), values(11, 2), values(5, 2, seed=1), **few)
        right(lambda x, u: x.at[1:9:3].add(u), values(11, 2), values(3, 2, seed=1), **few)
        right(lambda x, u: x.at[7].set(u), values(11, 2), values(2, seed=1), **few)
        right(lambda x, u: x.at[2:4, 1:3].set(u), values(5, 4), values(2, 2, seed=1), **few)


def test_one_row_at_a_position_known_at_run_time() -> None:
    for k in (-1, 0, 5, 10, 11):

        def f(x, u, k):
            return x.at[k].set(u)

        right(f, values(11, 2), values(2, seed=1), np.int32(k), mesh={"x": 3})


def test_shared_batching_dims() -> None:
    put = jax.vmap(lambda x, i, u: x.at[i].set(u))
    at = positions([0, 4, 4], [6, 2, 1], [3, 3, 9])
    right(put, values(3, 7, 2), at, values(3, 3, 2, seed=1), limit=8)

    def take(t, i):
        return jnp.take_along_axis(t, i, 1).sum()

    right(jax.grad(take), values(5, 7), positions([0, 6], [6, 2], [3, 3], [1, 0], [-1, 9]), limit=8)


def test_a_batch_of_dynamic_updates() -> None:
    put = jax.vmap(lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)))
    right(put, values(3, 8, 4), values(3, 3, 4, seed=1), positions(0, 7, 3), limit=8)


def test_rows_paired_with_positions() -> None:
    def f(x, i, u):
        return x.at[jnp.arange(5), i].set(u)

    right(f, values(5, 7), positions(0, 3, 6, 2, 6), values(5, seed=1))


def test_the_gradient_of_an_embedding() -> None:
    grad = jax.grad(lambda t, ids: (t[ids] ** 2).sum())
    for mesh in MESHES:
        ids = positions([0, 1, 1], [9, 3, -1])
        right(grad, values(10, 3), ids, mesh=mesh, limit=8, primitive="scatter-add")


def test_apply() -> None:
    """A function known to the primitive only; duplicates apply it again."""

    def f(x, i):
        return x.at[i].apply(lambda v: v * 2 + 1)

    right(f, values(10, 3), positions(0, 4, 4, 9, 12), mesh={"x": 3})
    right(f, values(10, 3), positions(0, 4, 4, 9, 12))
    right(lambda x: x.at[3:6].apply(jnp.sin), values(10, 3), mesh={"x": 3})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int32, np.uint8, np.complex64], ids=str)
@pytest.mark.parametrize("op", [lax.scatter, lax.scatter_add, lax.scatter_mul])
def test_dtypes(op: Callable[..., Any], dtype: Any) -> None:
    x, u = values(7, 2, dtype=dtype), values(4, 2, dtype=dtype, seed=1)
    right(rows(op), x, positions([0], [6], [6], [7]), u, tol=5e-2, mesh={"x": 3})


@pytest.mark.parametrize("op", [lax.scatter, lax.scatter_min, lax.scatter_max])
def test_flags(op: Callable[..., Any]) -> None:
    x, u = values(7, 2, dtype=bool), values(4, 2, dtype=bool, seed=1)
    right(rows(op), x, positions([0], [6], [6], [3]), u)


@pytest.mark.parametrize("op", EVERY, ids=lambda f: f.__name__)
def test_special_values(op: Callable[..., Any]) -> None:
    x, u = values(7, 2), values(4, 2, seed=1)
    x[1], x[2], x[3] = np.nan, np.inf, -np.inf
    u[0], u[1], u[2] = np.inf, np.nan, -np.inf
    right(rows(op), x, positions([0], [2], [2], [6]), u, mesh={"x": 3})
    right(window(op), x, positions(2), u, mesh={"x": 3})


def test_positions_of_64_bits() -> None:
    with jax.enable_x64(True):
        at = positions([2**33], [-(2**40)], [5], [5], dtype=np.int64)
        x, u = values(9, 2, dtype=np.float64), values(4, 2, dtype=np.float64, seed=1)
        for op in (lax.scatter, lax.scatter_add):
            for mode in ("clip", "drop"):
                right(rows(op, mode), x, at, u, mesh={"x": 3})
                right(window(op, mode), x, at[0], u, mesh={"x": 3})


def test_padding_whose_positions_are_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding of an uneven index dim may hold any position: it must still write nothing."""
    monkeypatch.setattr(rules, "junk", lambda dtype: np.ones((), dtype))
    at, u = positions([0], [2], [2], [6], [1]), values(5, 2, seed=1)
    for op in REDUCING:
        right(rows(op), values(7, 2), at, u, mesh={"x": 3})


def _split_rows(fn: Callable[..., Any], *args: np.ndarray) -> tuple[Any, LocalContext, Any, Any]:
    """The scatter of `fn` with its operand's rows over three devices; indices and updates."""
    eqn = capture(fn, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args], merged=False)[0].eqns[
        -1
    ]
    (rule,) = rules_of(eqn)
    mesh = MeshAxes.of(device_mesh({"x": 3}))
    return eqn, context(eqn, rule, {rule.operands[0][0][0]: mesh.atoms}, mesh), *args[1:]


def test_promises_about_the_indices_are_not_passed_on_where_they_break() -> None:
    """Masked rows repeat a position: `unique` and `sorted` must not be claimed for them."""

    def f(x: Any, i: Any, u: Any) -> Any:
        return x.at[i].add(u, unique_indices=True, indices_are_sorted=True)

    x, u = values(6, 2), values(2, 2, seed=1)
    eqn, ctx, i, _ = _split_rows(f, x, positions(0, 4), u)
    run = lambda *xs: run_local(ctx, eqn, xs)
    jaxpr = jax.make_jaxpr(run, axis_env=[("x", 3)])(x[:2], i[:, None], u)
    (scatter,) = [e for e in jaxpr.eqns if e.primitive.name == "scatter-add"]
    assert not scatter.params["unique_indices"] and not scatter.params["indices_are_sorted"]


def test_sizes_0_and_1() -> None:
    right(rows(lax.scatter_add), values(1, 3), positions([0], [0]), values(2, 3, seed=1))
    right(rows(lax.scatter), values(5, 3), np.zeros((0, 1), np.int32), values(0, 3))
    right(window(lax.scatter), values(5, 3), positions(2), values(1, 3, seed=1))
