"""gather: every split of every dim, in the spellings programs use, in and out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwise.capture import capture
from shardwise.ops.registry import rules_of
from shardwise.testing import rules
from shardwise.testing.rules import check_rule

MESHES = [{"x": 2, "y": 2}, {"x": 3}, {"x": 8}]
MODES = ["clip", "fill", "promise_in_bounds"]


def right(fn: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The splits that the rule allows, all of which must be right."""
    found = check_rule(fn, args, primitive="gather", **options)
    assert found["wrong"] == []
    return found["splits"]


def rule_text(fn: Callable[..., Any], *args: Any) -> str:
    avals = [jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for a in args]
    body, _ = capture(fn, avals, merged=False)
    (eqn,) = [e for e in body.eqns if e.name == "gather"]
    return str(rules_of(eqn)[0])


def table(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=shape) * 4
    return x.astype(dtype) if dtype is not bool else x > 0


def positions(*values: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.array(values, dtype)


def embed(t: Any, ids: Any) -> Any:
    return t[ids]


def windows(size: tuple[int, ...], mode: str = "clip", **kw: Any) -> Callable[..., Any]:
    """Windows of `size` from rows of starts, one start for each of the operand's dims."""
    n = len(size)
    dims = lax.GatherDimensionNumbers(tuple(range(1, n + 1)), (), tuple(range(n)))
    return lambda x, i: lax.gather(x, i, dims, size, mode=mode, **kw)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("rows", [8, 10])
def test_embedding(mesh: dict[str, int], rows: int) -> None:
    ids = positions([0, 1], [9, 3], [-1, 5])
    right(embed, table(rows, 3), ids, mesh=mesh, limit=8)


def test_the_rule_of_an_embedding_sums_over_the_vocabulary() -> None:
    assert rule_text(embed, table(8, 3), positions([1, 2])) == "d e, b c a -> b c e  sum=d  whole=a"


def test_the_rule_of_take_along_axis_ties_batching_dims() -> None:
    text = rule_text(lambda t, i: jnp.take_along_axis(t, i, 1), table(6, 5), positions(*[[1]] * 6))
    assert text == "b d, b c a -> b c  sum=d  whole=a"


def test_windows_are_factors_of_their_own() -> None:
    text = rule_text(windows((2, 3)), table(6, 3), positions([1, 0]))
    assert text == "c e, b a -> b d e  sum=c  whole=a"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_positions_out_of_range(mode: str, mesh: dict[str, int]) -> None:
    dims = lax.GatherDimensionNumbers((1,), (0,), (0,))
    ids = positions([0], [-3], [9], [10], [99], [4])
    right(
        lambda t, i: lax.gather(t, i, dims, (1, 3), mode=mode),
        table(10, 3), ids, mesh=mesh, limit=8,
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_windows_that_blocks_cut(mode: str) -> None:
    """Windows across one, two and all borders, and clamped at both ends."""
    starts = positions([-1, 0], [3, 1], [6, 1], [7, 0], [6, 2], [0, 0])
    for mesh in MESHES[:2]:
        right(windows((4, 2), mode), table(10, 3), starts, mesh=mesh, limit=9)


def test_a_window_dim_that_no_index_addresses() -> None:
    dims = lax.GatherDimensionNumbers((1, 2), (), (0,))
    right(
        lambda x, i: lax.gather(x, i, dims, (2, 4)), table(6, 7), positions([1], [4], [3]), limit=10
    )


def test_windows_between_batch_dims() -> None:
    """Offset dims that do not come last: dims must be put back in their places."""
    dims = lax.GatherDimensionNumbers((0, 2), (1,), (1, 0))
    starts = positions([0, 2], [4, 5], [3, 9])
    right(lambda x, i: lax.gather(x, i, dims, (3, 1, 4)), table(7, 5, 4), starts, limit=10)


def test_windows_whose_dims_turn_in_a_cycle() -> None:
    """The dim taken whole comes first, the window that blocks cut last."""
    dims = lax.GatherDimensionNumbers((0, 2), (), (1,))
    right(lambda x, i: lax.gather(x, i, dims, (3, 4)), table(3, 7), positions([0], [2], [5], [1]))


@pytest.mark.parametrize("mode", MODES)
def test_full_windows_that_are_addressed_too(mode: str) -> None:
    """vmap of a dynamic slice: a dim taken whole, with a start that must come out as 0."""
    starts = positions([0, 0], [1, 0], [2, 3])
    right(windows((2, 5), mode), table(6, 5), starts, mesh={"x": 3})


def test_take_along_axis() -> None:
    ids = positions([0, 6], [6, 2], [3, 3], [1, 0], [-1, 9])
    for mesh in MESHES[:2]:
        right(lambda t, i: jnp.take_along_axis(t, i, 1), table(5, 7), ids, mesh=mesh)


def test_rows_paired_with_positions() -> None:
    ids = positions(0, 3, 6, 2, 6)
    right(lambda t, i: t[jnp.arange(5), i], table(5, 7), ids)


def test_positions_around_a_slice() -> None:
    right(
        lambda t, i, j: t[i, :, j], table(4, 3, 5), positions(1, 3, 0), positions(4, 4, 2), limit=12
    )


def test_a_batch_of_dynamic_slices() -> None:
    cut = jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 0), (3, 4)))
    right(cut, table(3, 8, 4), positions(0, 7, 3), limit=10)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, np.int32, np.uint8, bool, np.complex64], ids=lambda d: np.dtype(d).name
)
def test_dtypes(dtype: Any) -> None:
    ids = positions(0, 4, 6, 6, 9)
    right(lambda t, i: jnp.take(t, i, axis=0), table(7, 2, dtype=dtype), ids, mesh={"x": 3})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int64], ids=str)
def test_position_dtypes(dtype: Any) -> None:
    ids = positions([0], [4], [120], [9], dtype=dtype)
    if dtype == np.uint32:
        ids[2] = 3_000_000_000
    for mode in MODES:
        f = windows((3,), mode)
        with jax.enable_x64(dtype == np.int64):
            right(f, table(130), ids, mesh={"x": 3})


def test_positions_stay_exact_with_64_bits() -> None:
    with jax.enable_x64(True):
        ids = positions([2**33], [-(2**40)], [5], dtype=np.int64)
        right(windows((2,), "clip"), table(9, dtype=np.float64), ids, mesh={"x": 3})


def test_special_values() -> None:
    t = np.array([[np.nan], [np.inf], [-np.inf], [1e38], [-0.0]], np.float32)
    right(embed, t, positions(0, 1, 2, 3, 4, 3), mesh={"x": 3})


def test_a_fill_value_of_its_own_comes_once() -> None:
    f = windows((2,), "fill", fill_value=7)
    right(f, table(9), positions([-1], [8], [3], [7]), mesh={"x": 3})
    right(f, table(9, dtype=np.int32), positions([-1], [8], [3], [7]))


def test_linear_where_nothing_nonzero_is_filled_in() -> None:
    def linear(f: Callable[..., Any]) -> Any:
        avals = [jax.ShapeDtypeStruct(s, d) for s, d in (((9,), np.float32), ((3, 1), np.int32))]
        return rules_of(capture(f, avals, merged=False)[0].eqns[-1])[0].linear

    assert linear(windows((2,), "clip")) == ((0,),)
    assert linear(windows((2,), "fill", fill_value=0)) == ((0,),)
    assert linear(windows((2,), "fill")) == ()


def test_atoms_in_another_order_than_the_mesh() -> None:
    """The block number follows the order in which a dim lists its atoms."""
    fn, args = embed, [table(10, 3), positions([0], [9], [4])]
    assert _ordered(fn, args, ("y", "x")) == ""


def _ordered(fn: Callable[..., Any], args: list[np.ndarray], atoms: tuple[str, ...]) -> str:
    from shardwise.mesh import MeshAxes, device_mesh

    mesh = MeshAxes.of(device_mesh({"x": 2, "y": 3}))
    body, _ = capture(fn, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args], merged=False)
    eqn = next(e for e in body.eqns if e.name == "gather")
    values = rules._operand_values(eqn, body, args)
    want = [np.asarray(eqn.primitive.bind(*map(jnp.asarray, values), **eqn.params))]
    (rule,) = rules_of(eqn)
    factor = rule.operands[0][0][0]
    return rules.check_assignment(eqn, rule, {factor: atoms}, values, want, mesh)


def test_sizes_0_and_1() -> None:
    right(embed, table(1, 3), positions(0, 0))
    right(windows((1, 2)), table(5, 2), np.zeros((0, 2), np.int32))
    right(windows((2, 0)), table(5, 0), positions([0, 0], [4, 0]))


def test_random_keys_are_gathered_whole() -> None:
    """Keys cannot be summed, so their addressed dims are not split; others are."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (6, 2)))
    body, _ = capture(embed, [keys, jax.ShapeDtypeStruct((3,), np.int32)], merged=False)
    (rule,) = rules_of(body.eqns[-1])
    assert str(rule) == "c d, b a -> b d  whole=a,c"
