"""Sort over split dims: every order, dtype and number of operands, ties, padding, and bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import context, emitted
from jax import lax

from shardwise.capture import capture
from shardwise.mesh import MeshAxes, device_mesh
from shardwise.ops.registry import rules_of, run_local
from shardwise.ops.sort import ranked_p
from shardwise.ops.sort_columns import Columns
from shardwise.testing.rules import block, check_rule, find_eqn, junk, run_blocks, valid_part

MESHES = [{"x": 2, "y": 2}, {"x": 3}]


def right(fn: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The splits that the rule allows, all of which must be right."""
    found = check_rule(fn, args, **options)
    assert found["wrong"] == []
    return found["splits"]


def by_columns(fn: Callable[..., Any], *args: Any, mesh: dict[str, int]) -> None:
    """The sort of `fn`, its dim split over all axes, is what one device gives, bit by bit."""
    axes = MeshAxes.of(device_mesh(mesh))
    eqn, _ = find_eqn(capture(fn, args)[0], "sort")
    rule, d = rules_of(eqn)[0], eqn.params["dimension"]
    assert rule.variant == "columns"
    xs = [np.asarray(a) for a in args]
    ctx = context(eqn, rule, {rule.operands[0][d][0]: axes.atoms}, axes)
    devices = range(axes.device_count)
    blocks = [
        [block(x, lay, i, axes, junk(x.dtype)) for i in devices]
        for x, lay in zip(xs, ctx.ins, strict=True)
    ]
    got = run_blocks(lambda *xs: run_local(ctx, eqn, xs), blocks, axes)
    want = eqn.primitive.bind(*map(jnp.asarray, xs), **eqn.params)
    for g, w, lay in zip(got, want, ctx.outs, strict=True):
        parts = [valid_part(g[i], lay, i, axes) for i in devices]
        whole = np.concatenate(parts, axis=d)
        assert whole.dtype == w.dtype
        np.testing.assert_array_equal(whole.view(np.uint8), np.asarray(w).view(np.uint8))


def along(dim: int = 0, keys: int = 1, stable: bool = True) -> Callable[..., Any]:
    return lambda *xs: lax.sort(xs, dimension=dim, num_keys=keys, is_stable=stable)


def values(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Few distinct values: most have equals."""
    x = np.random.default_rng(seed).integers(-3, 4, size=shape)
    return x > 0 if dtype is bool else x.astype(dtype)


def positions(n: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(n).astype(dtype)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_split(mesh: dict[str, int]) -> None:
    splits = right(along(1), values(3, 22), mesh=mesh, limit=6)
    assert any("columns {1: ('x" in s for s in splits)
    right(along(), values(11), positions(11), mesh=mesh, primitive="sort", limit=4)


@pytest.mark.parametrize(
    ("shards", "n"),
    [
        (2, 1), (2, 9), (3, 5), (3, 40), (4, 64), (5, 23), (5, 125), (6, 6), (6, 100), (7, 343),
        (7, 50), (8, 3), (8, 9), (8, 64), (8, 200), (8, 1000),
    ],
)  # fmt: skip
def test_every_size(shards: int, n: int) -> None:
    """Blocks smaller than the mesh, halos wider than a block, chunks that do not divide, blocks that
    hold nothing."""
    by_columns(along(), values(n, seed=n), positions(n), mesh={"x": shards})


@pytest.mark.parametrize(
    "order", ["sorted", "reversed", "blocks reversed", "equal", "one, then many"]
)
def test_orders(order: str) -> None:
    n, k = 8 * 24, 24
    x = {
        "sorted": np.arange(n),
        "reversed": np.arange(n)[::-1],
        "blocks reversed": np.arange(n).reshape(8, k)[::-1].reshape(-1),
        "equal": np.zeros(n),
        "one, then many": np.where(np.arange(n) == n - 1, -1, np.arange(n) % 8),
    }[order]
    by_columns(along(), x.astype(np.int32), positions(n), mesh={"x": 8})


def test_zeros_and_ones() -> None:
    """What the method's proof is about: counts of zeros that leave the most rows mixed."""
    p, block = 6, 60
    rng = np.random.default_rng(0)
    rows = [np.arange(p * block) >= k for k in (1, 31, 179, 180, 181, 329)]
    each = [np.arange(block)[None] >= rng.integers(0, block, (p, 1)) for _ in range(20)]
    each += [np.arange(block)[None] >= (np.arange(p)[:, None] * p + r) for r in range(p)]
    x = np.stack([*rows, *(e.reshape(-1) for e in each)]).astype(np.int32)
    by_columns(along(1), x, mesh={"x": p})


def test_reach_is_needed() -> None:
    """Some order does leave an element as far from its place as the halo reaches, or nearly."""
    assert Columns(8, 512, 4096, True).reach == (7, 7)
    assert Columns(8, 511, 4088, True).reach == (7 + 7 - 7 * 7 // 8, 7)


def test_several_operands_and_keys() -> None:
    n = 50
    a, b, c = values(n), values(n, dtype=np.int8, seed=1), positions(n, np.int32)[::-1].copy()
    for mesh in ({"x": 3}, {"x": 2, "y": 2}):
        by_columns(along(keys=2), a, b, c, mesh=mesh)
        by_columns(along(keys=2), b, values(n, dtype=np.uint8, seed=2), mesh=mesh)
    by_columns(along(), b, positions(n, np.int32), mesh={"x": 3})  # no floats at all
    by_columns(along(keys=1, stable=False), c, a, b, mesh={"x": 5})


def test_the_middle_dim_and_other_dims_split() -> None:
    x = values(4, 30, 3)
    by_columns(along(1), x, mesh={"x": 5})
    right(along(1), x, mesh={"a": 2, "b": 2}, limit=4)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_zeros_nans_and_infinities_keep_their_order(mesh: dict[str, int]) -> None:
    """-0.0 and 0.0 are equal, all NaN are; among equals the order they had stays."""
    x = values(43)
    x[::5], x[1::5], x[2::7] = -0.0, 0.0, np.inf
    x[3], x[11], x[30], x[41] = np.nan, -np.nan, np.nan, -np.nan
    by_columns(along(), x, mesh=mesh)
    by_columns(along(), x[::-1].copy(), positions(43), mesh=mesh)


@pytest.mark.parametrize(
    "dtype",
    [jnp.bfloat16, np.float16, jnp.float8_e4m3fn, np.int8, np.uint8, np.uint32, bool, np.complex64],
    ids=str,
)  # fmt: skip
def test_dtypes(dtype: Any) -> None:
    """The greatest values of a dtype stand beside padding."""
    x = values(23, dtype=dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        x[2:4], x[5:7] = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    elif dtype is not bool:
        x[2:4], x[5:7] = np.nan, x[5:7] * 0 + 100
    by_columns(along(), x, mesh={"x": 3})
    by_columns(along(), x, positions(23), mesh={"x": 3})


def test_narrow_and_wide_dtypes() -> None:
    by_columns(along(), jnp.asarray(values(13), jnp.int4), mesh={"x": 3})
    with jax.enable_x64(True):
        by_columns(
            along(keys=2), values(13, dtype=np.float64), values(13, dtype=np.int64), mesh={"x": 3}
        )


def test_greatest_keys_before_padding() -> None:
    """Equal to padding in the key, and before it: the other operand shows."""
    x = np.full(19, np.iinfo(np.int32).max, np.int32)
    by_columns(along(), x, positions(19), mesh={"x": 4})
    by_columns(along(), np.full(19, np.nan, np.float32), positions(19), mesh={"x": 4})


# -- positions as a key --------------------------------------------------------------------------------


def sorts(fn: Callable[..., Any], *shapes: Any) -> list[Any]:
    body, _ = capture(fn, [jax.ShapeDtypeStruct(s, np.float32) for s in shapes])
    return [e for e in body.eqns if e.name == "sort"]


def test_positions_become_a_key() -> None:
    for fn in (jnp.argsort, lambda x: jnp.argsort(x, axis=1), lambda x: jnp.argsort(x, axis=0)):
        (eqn,) = sorts(fn, (6, 5))
        assert eqn.primitive is ranked_p and eqn.params["num_keys"] == 2
    (eqn,) = sorts(lambda x, y: jnp.lexsort((x, y)), (7,), (7,))
    assert eqn.primitive is ranked_p and eqn.params["num_keys"] == 3


def test_what_does_not_count_along_the_dim_is_no_key() -> None:
    def across(x: Any) -> Any:
        return lax.sort((x, lax.broadcasted_iota(jnp.int32, (6, 5), 1)), dimension=0, num_keys=1)

    narrow = lambda x: lax.sort((x, lax.iota(jnp.uint8, 256)), num_keys=1)
    for fn, shape in (
        (across, (6, 5)),
        (lambda x: lax.sort((x, lax.iota(jnp.int32, 6) * 2), num_keys=1), (6,)),
        (lambda x: lax.sort((x, lax.iota(jnp.float32, 6)), num_keys=1), (6,)),
        (narrow, (256,)),
    ):
        (eqn,) = sorts(fn, shape)
        assert eqn.primitive is lax.sort_p and eqn.params["num_keys"] == 1


def test_positions_between_other_operands() -> None:
    n = 30

    def fn(x: Any, y: Any) -> Any:
        return lax.sort((x, y, lax.iota(jnp.int32, n)), num_keys=1)

    (eqn,) = sorts(fn, (n,), (n,))
    assert eqn.primitive is ranked_p and eqn.params["num_keys"] == 2
    body, _ = capture(fn, [jax.ShapeDtypeStruct((n,), np.float32)] * 2)
    assert [v.dtype for v in body.outvars] == [np.float32, np.float32, np.int32]
    right(fn, values(n), values(n, seed=1), mesh={"x": 3})


# -- bytes -----------------------------------------------------------------------------------------------


def test_bytes() -> None:
    """About two blocks: of 65536 over 8 devices a gather takes 229376 bytes for each operand."""
    n = jax.ShapeDtypeStruct((1 << 16,), np.float32)
    around = 2 * 7 * 8  # rows of eight before and after
    sent, price, _ = emitted(jnp.argsort, [n], {"x": 8}, {0: "x"}, "sort")
    assert sent == price == 2 * 8192 * 7 / 8 * 8 + around * 8
    whole = jax.ShapeDtypeStruct((1 << 16,), np.int32)
    sent, price, _ = emitted(along(), [whole], {"x": 8}, {0: "x"}, "sort")
    assert sent == price == 2 * 8192 * 7 / 8 * 4 + around * 4
    sent, price, _ = emitted(along(), [n], {"x": 8}, {0: "x"}, "sort")  # positions: -0.0 and 0.0
    assert sent == price == 8192 * 7 / 8 * (4 + 8) + around * 8


@pytest.mark.parametrize("n", [1 << 10, 1000, 100, 64, 20, 3])
def test_bytes_are_what_the_price_says(n: int) -> None:
    x = jax.ShapeDtypeStruct((4, n), np.float32)
    for mesh in ({"x": 8}, {"x": 6}, {"x": 2}):
        sent, price, _ = emitted(along(1), [x, x], mesh, {1: "x"}, "sort")
        assert sent == pytest.approx(price)
    sent, price, _ = emitted(along(1), [x, x], {"x": 4, "y": 2}, {1: "x", 0: "y"}, "sort")
    assert sent == pytest.approx(price)


def test_no_temporary_grows_with_the_mesh() -> None:
    n = jax.ShapeDtypeStruct((1 << 16,), np.float32)
    _, _, jaxpr = emitted(jnp.argsort, [n], {"x": 64}, {0: "x"}, "sort")
    largest = max(v.aval.size for e in jaxpr.jaxpr.eqns for v in e.outvars)
    assert largest <= 1024 + 2 * 63 * 64


def test_rules_as_text() -> None:
    (eqn,) = sorts(lambda x: jnp.sort(x, axis=0), (3, 8))
    assert [f"{r} {r.variant}" for r in rules_of(eqn)] == [
        "a b -> a b  special=a columns",
        "c b -> a b  whole=c whole",
    ]
