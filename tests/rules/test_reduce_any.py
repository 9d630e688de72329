"""The generic reduce with a body of any kind: values on every split, what it sends, no identity needed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise.testing import check
from shardwise.testing.rules import check_rule

X = np.random.default_rng(0).uniform(0.1, 1, (5, 7)).astype(np.float32)
I = np.tile(np.arange(10, dtype=np.int32), (3, 1))


def two(x: Any, y: Any, dims: tuple[int, ...] = (1,)) -> Any:
    """Initial values that are no identities: each counts once."""
    return lax.reduce((x, y), (2.0, 0.5), lambda a, b: (a[0] + b[0], a[1] * b[1]), dims)


def best(x: Any, i: Any) -> Any:
    """argmax by hand."""

    def larger(a: Any, b: Any) -> Any:
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jax.tree.map(lambda p, q: jnp.where(first, p, q), a, b)

    return lax.reduce((x, i), (-jnp.inf, jnp.iinfo(jnp.int32).max), larger, (1,))


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"x": 3}], ids=str)
def test_every_split(mesh: dict[str, int]):
    every = lambda x, y: two(x, y, (0, 1))
    cases = ((two, X, X), (every, X, X), (best, I * X[0, 0] % 1, I), (two, X[:2, :0], X[:2, :0]))
    for f, *args in cases:
        found = check_rule(f, args, mesh, "reduce", limit=5)
        assert found["wrong"] == [] and len(found["splits"]) > 1


def test_only_results_are_gathered():
    """Two results of 5 floats from each of 4 devices: 2 * 5 * 4 bytes * 3."""
    check(two, (X, X), {"x": 2, "y": 2}, P(None, ("x", "y")), grad=False, wire=True,
          kinds={"all-gather": 2}, bytes=120)  # fmt: skip
    check(best, (I * X[0, 0] % 1, I), {"x": 2, "y": 3}, P("x", "y"), grad=False, wire=True,
          kinds={"all-gather": 2}, bytes=32)  # fmt: skip
