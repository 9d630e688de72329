"""`x[arange(n), ids]` and its like become batches of lookups, with the same values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.capture import capture, prune
from shardwise.ops.registry import rules_of
from shardwise.pairing import pair_rows
from shardwise.program import Body, Eqn, Lit, Var

B, V, M = 5, 7, 3


def paired(fn: Callable[..., Any], args: Sequence[np.ndarray]) -> Body:
    body, _ = capture(fn, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args])
    ids = iter(range(10**6, 2 * 10**6))
    pair_rows(body, lambda shape, dtype: Var(next(ids), shape, dtype))
    prune(body)
    return body


def evaluate(body: Body, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    env: dict[Var, Any] = {**dict(zip(body.invars, args, strict=True)), **dict(body.consts)}

    def read(v: Var) -> Any:
        return jnp.asarray(v.value, v.dtype) if isinstance(v, Lit) else jnp.asarray(env[v])

    for e in body.eqns:
        out = e.primitive.bind(*map(read, e.invars), **e.params)
        env.update(zip(e.outvars, out if e.primitive.multiple_results else [out], strict=True))
    return [np.asarray(read(v)) for v in body.outvars]


def indexed(body: Body) -> list[Eqn]:
    return [e for e in body.eqns if e.name == "gather" or e.name.startswith("scatter")]


def check(fn: Callable[..., Any], *args: np.ndarray, rules: list[str]) -> None:
    body = paired(fn, args)
    want = jax.tree.leaves(fn(*map(jnp.asarray, args)))
    for a, b in zip(evaluate(body, args), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert [str(rules_of(e)[0]) for e in indexed(body)] == rules


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def ids(n: int, high: int) -> np.ndarray:
    return np.random.default_rng(1).integers(-high, high, n).astype(np.int32)


def test_one_lookup_a_row() -> None:
    def f(x: Any, i: Any) -> Any:
        return x[jnp.arange(B), i]

    check(f, values(B, V), ids(B, V), rules=["b c, b a -> b  sum=c  whole=a"])
    check(f, values(B, V, M), ids(B, V), rules=["b c d, b a -> b d  sum=c  whole=a"])


def test_its_gradient() -> None:
    def f(x: Any, i: Any) -> Any:
        return jax.grad(lambda x: (x[jnp.arange(B), i] ** 2).sum())(x)

    found = ["b c, b a -> b  sum=c  whole=a", "b c, b a, b -> b c  whole=a"]
    check(f, values(B, V), ids(B, V), rules=found)


@pytest.mark.parametrize("how", ["set", "add", "multiply", "min", "max"])
def test_one_update_a_row(how: str) -> None:
    def f(x: Any, i: Any, u: Any) -> Any:
        return getattr(x.at[jnp.arange(B), i], how)(u)

    check(f, values(B, V), ids(B, V), values(B), rules=["b c, b a, b -> b c  whole=a"])


def test_rows_and_columns_of_a_grid() -> None:
    """Two counters on two dims of the indices, a third position between them."""

    def f(x: Any, i: Any) -> Any:
        return x[jnp.arange(B)[:, None], i, jnp.arange(M)[None]]

    at = np.random.default_rng(1).integers(0, V, (B, M)).astype(np.int32)
    check(f, values(B, V, M), at, rules=["b d c, b c a -> b c  sum=d  whole=a"])


def test_what_is_left_of_three_columns_is_put_together_again() -> None:
    def f(x: Any, i: Any, j: Any) -> Any:
        return x[jnp.arange(B), i, j]

    x = values(B, V, M)
    check(f, x, ids(B, V), ids(B, M), rules=["b c d, b a -> b  sum=c,d  whole=a"])


def test_a_diagonal() -> None:
    def f(x: Any) -> Any:
        return x[jnp.arange(B), jnp.arange(B)]

    check(f, values(B, B), rules=["b c, b a -> b  sum=c  whole=a"])


def test_row_numbers_that_are_constants() -> None:
    rows = np.arange(B)

    def f(x: Any, i: Any) -> Any:
        return x[rows, i]

    check(f, values(B, V), ids(B, V), rules=["b c, b a -> b  sum=c  whole=a"])


def test_other_rows_stay_addressed() -> None:
    """Fewer rows than the operand has, every second row, rows turned round."""
    whole = "c d, b a -> b  sum=c,d  whole=a"
    x, i = values(B + 1, V), ids(B, V)
    check(lambda x, i: x[jnp.arange(B), i], x, i, rules=[whole])
    check(lambda x, i: x[jnp.arange(B)[::-1], i], values(B, V), i, rules=[whole])
    check(lambda x, i: x[jnp.arange(B) * 1, i], values(B, V), i, rules=[whole])
    check(lambda x, i: x[i, jnp.arange(B) // 2], values(V, B), i, rules=[whole])


def test_values_out_of_range_keep_their_meaning() -> None:
    def f(x: Any, i: Any) -> Any:
        return x.at[jnp.arange(B), i].get(mode="fill"), x.at[jnp.arange(B), i].set(0.0, mode="clip")

    found = ["b c, b a -> b  sum=c  whole=a", "b c, b a, b -> b c  whole=a"]
    check(f, values(B, V), np.array([0, 9, -20, 6, 7], np.int32), rules=found)
