"""argmax, argmin and the generic reduce over split dims: ties, NaN, padding, and bytes."""

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

MESHES = [{"x": 2, "y": 2}, {"x": 3}, {"x": 8}]
BOTH = [lax.argmax, lax.argmin]


def right(fn: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The splits that the rule allows, all of which must be right."""
    found = check_rule(fn, args, **options)
    assert found["wrong"] == []
    return found["splits"]


def over(op: Callable[..., Any], axis: int, dtype: Any = np.int32) -> Callable[..., Any]:
    return lambda x: op(x, axis, dtype)


def values(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=shape) * 3
    return x > 0 if dtype is bool else x.astype(dtype)


@pytest.mark.parametrize("op", BOTH, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_split(op: Callable[..., Any], mesh: dict[str, int]) -> None:
    right(over(op, 1), values(3, 10), mesh=mesh, limit=9)
    right(over(op, 0), values(5, 3), mesh=mesh, limit=6)


@pytest.mark.parametrize("op", BOTH, ids=lambda f: f.__name__)
def test_ties_take_the_lowest_position(op: Callable[..., Any]) -> None:
    x = np.zeros((5, 10), np.float32)
    x[1, 4] = x[1, 9] = 3.0
    x[2, 3] = x[2, 4] = -3.0
    x[3, ::2] = -0.0
    x[4, 1::2] = -0.0
    for mesh in MESHES[:2]:
        right(over(op, 1), x, mesh=mesh)


@pytest.mark.parametrize("op", BOTH, ids=lambda f: f.__name__)
def test_the_first_nan_wins_and_infinities_are_values(op: Callable[..., Any]) -> None:
    x = values(6, 10)
    x[0, 7] = np.nan
    x[1, 2] = x[1, 8] = np.nan
    x[2, 3], x[2, 9], x[2, 1] = np.inf, np.inf, -np.inf
    x[3] = -np.inf
    x[4] = np.inf
    x[5] = np.copysign(np.nan, -1)
    for mesh in MESHES[:2]:
        right(over(op, 1), x, mesh=mesh)


@pytest.mark.parametrize("op", BOTH, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, np.float16, np.int8, np.int32, np.uint8, np.uint32, bool], ids=str
)
def test_dtypes(op: Callable[..., Any], dtype: Any) -> None:
    x = values(3, 10, dtype=dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        x[0, 2:4], x[0, 5:7] = info.min, info.max
        x[1], x[2] = info.min, info.max
    right(over(op, 1), x, mesh={"x": 3})


@pytest.mark.parametrize("op", BOTH, ids=lambda f: f.__name__)
def test_64_bits_and_the_index_dtype(op: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        x = values(3, 10, dtype=np.float64)
        x[0, 4] = x[0, 8] = np.nan
        right(over(op, 1, np.int64), x, mesh={"x": 3})
        right(over(op, 1, np.uint8), values(3, 10, dtype=np.int64), mesh={"x": 3})


def test_bytes() -> None:
    """Two all-reduces of one 32-bit word for each result: 224 bytes where XLA sends 896."""
    shape = jax.ShapeDtypeStruct((16, 32768), np.float32)
    sent, price, _ = emitted(over(lax.argmax, 1), [shape], {"x": 8}, {1: "x"}, "argmax")
    assert sent == price == 2 * 2 * 16 * 4 * 7 / 8
    half = jax.ShapeDtypeStruct((16, 30), jnp.bfloat16)
    sent, price, _ = emitted(
        over(lax.argmin, 1), [half], {"x": 3, "y": 4}, {1: "x", 0: "y"}, "argmin"
    )
    assert sent == pytest.approx(price) and price == pytest.approx(2 * 2 * 4 * 4 * 2 / 3)


def test_no_bytes_where_the_dim_is_whole() -> None:
    shape = jax.ShapeDtypeStruct((16, 64), np.float32)
    sent, price, _ = emitted(over(lax.argmax, 1), [shape], {"x": 8}, {0: "x"}, "argmax")
    assert sent == price == 0


def test_rules_as_text() -> None:
    shape = jax.ShapeDtypeStruct((3, 8), np.float32)

    def text(f: Callable[..., Any]) -> str:
        return str(rules_of(capture(f, [shape])[0].eqns[-1])[0])

    assert text(over(lax.argmax, 1)) == "a b -> a  special=b"
    assert text(lambda x: fold(x, 1.5, lax.add)) == "a b, () -> a  sum=b"
    assert text(lambda x: fold(x, 1.5, lambda a, b: lax.max(b, a))) == "a b, () -> a  max=b"
    assert text(lambda x: fold(x, 1.5, lambda a, b: a + 2 * b)) == "a b, () -> a  special=b"
    assert text(lambda x: fold(x, 1.5, lambda a, b: a + a)) == "a b, () -> a  special=b"


def fold(x: Any, start: Any, f: Callable[..., Any]) -> Any:
    return lax.reduce(x, jnp.asarray(start, x.dtype), f, (1,))


@pytest.mark.parametrize(
    ("f", "start"),
    [(lax.add, 1.5), (lax.mul, 2.0), (lax.max, 0.5), (lax.min, 0.5)],
    ids=["add", "mul", "max", "min"],
)
def test_the_initial_value_counts_once(f: Callable[..., Any], start: float) -> None:
    for mesh in MESHES[:2]:
        right(lambda x: fold(x, start, f), values(3, 10), mesh=mesh, primitive="reduce")


INTEGER_FOLDS = [lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.add]
FLAG_FOLDS = [lax.bitwise_and, lax.bitwise_or, lax.max, lax.min]


@pytest.mark.parametrize("f", INTEGER_FOLDS, ids=lambda f: f.__name__)
def test_integer_folds(f: Callable[..., Any]) -> None:
    right(lambda x: fold(x, 5, f), values(3, 10, dtype=np.int32), primitive="reduce")


@pytest.mark.parametrize("f", FLAG_FOLDS, ids=lambda f: f.__name__)
def test_flag_folds(f: Callable[..., Any]) -> None:
    for start in (False, True):
        x = values(4, 7, dtype=bool)
        x[0], x[1] = True, False
        found = check_rule(lambda x, s=start: fold(x, s, f), [x], mesh={"x": 3})
        assert found["wrong"] == []


def test_a_fold_of_several_values() -> None:
    """First and last moments together: reduced dims whole, the others free."""
    f = lambda x, y: lax.reduce(
        (x, y), (np.float32(0), np.float32(1)), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)
    )
    splits = right(f, values(6, 5), values(6, 5), primitive="reduce")
    assert any("{0: ('x', 'y')}" in s for s in splits)
