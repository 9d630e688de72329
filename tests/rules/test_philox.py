"""Bits of XLA's generators: any split gives the one-device bits, and blocks make blocks only."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise import spmd
from shardwise.mesh import device_mesh
from shardwise.testing import check
from shardwise.testing.rules import check_rule

KEY = np.array([1, 2, 3, 4], np.uint32)


def bits(shape: tuple[int, ...], dtype: Any = np.uint32, algorithm: Any = None) -> Any:
    kind = lax.RandomAlgorithm.RNG_DEFAULT if algorithm is None else algorithm
    return lambda key: lax.rng_bit_generator(key, shape, dtype, algorithm=kind)


def right(fn: Any, *args: Any, **options: Any) -> list[str]:
    found = check_rule(fn, args, **options)
    assert found["wrong"] == []
    return found["splits"]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32], ids=lambda d: d.__name__)
def test_every_split(dtype: Any) -> None:
    splits = right(bits((6, 16), dtype), KEY, mesh={"x": 2, "y": 2}, limit=4)
    assert any("1:" in s for s in splits)
    right(bits((3, 7), dtype), KEY, mesh={"x": 3})


def test_wide_elements() -> None:
    with jax.enable_x64(True):
        right(bits((6, 8), np.uint64), KEY, mesh={"x": 3})
        right(bits((5, 3), np.uint64), KEY, mesh={"x": 2})


def test_the_counter_carries() -> None:
    top = 0xFFFFFFFF
    for key in ([1, 2, top, 4], [1, 2, top - 1, top], [top, 2, top, top]):
        right(bits((40,)), np.array(key, np.uint32), mesh={"x": 2})


def test_other_algorithms_are_cut() -> None:
    right(bits((6, 7), np.uint32, lax.RandomAlgorithm.RNG_THREE_FRY), KEY, mesh={"x": 4}, limit=4)


def test_nothing_of_global_size_is_made() -> None:
    fn = bits((1 << 12, 1 << 10))
    plan = spmd(fn, mesh=device_mesh({"x": 8}), out_shardings=(P(), P("x"))).plan(KEY)
    largest = max(v.aval.size for e in plan.jaxpr.eqns for v in e.outvars)
    assert largest <= (1 << 22) // 8 and not plan.collectives


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_random_numbers_of_rbg_keys(impl: str) -> None:
    def f(seed: Any) -> Any:
        key, other = jax.random.split(jax.random.key(seed, impl=impl))
        return jax.random.normal(key, (8, 24)), jax.random.bernoulli(other, 0.3, (10, 3))

    check(f, (7,), {"x": 4}, None, (P("x"), P("x")), kinds=[], grad=False)
    check(f, (7,), {"x": 2, "y": 4}, None, (P("x", "y"), P()), kinds=[], grad=False)


def test_hidden_state_gives_one_value() -> None:
    f = spmd(
        lambda: lax.rng_uniform(0.0, 1.0, (16,)), mesh=device_mesh({"x": 4}), out_shardings=P()
    )
    blocks = [np.asarray(s.data) for s in f().addressable_shards]
    assert all((b == blocks[0]).all() for b in blocks)
    assert len(np.unique(blocks[0])) == 16
