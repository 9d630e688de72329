"""FFT: transformed dims that are split are moved by all-to-alls, never gathered where another dim is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise.testing import check
from shardwise.testing.rules import check_rule


def values(*shape: int, dtype: Any = np.complex64) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.normal(size=shape)
    return x.astype(dtype)


@pytest.mark.parametrize(
    ("shape", "mesh", "spec", "bytes"),
    [
        ((16, 64), {"x": 8}, P(None, "x"), 2 * 16 * 64 * 8 / 8 * 7 / 8),
        ((14, 64), {"x": 8}, P(None, "x"), 2 * 16 * 64 * 8 / 8 * 7 / 8),  # 14 rows padded to 16
        ((14, 20), {"x": 8}, P(None, "x"), 2 * 16 * 24 * 8 / 8 * 7 / 8),
        ((2, 4, 64), {"x": 8}, P(None, None, "x"), 2 * 8 * 64 * 8 / 8 * 7 / 8),  # 2 and 4 share x
        ((2, 3, 64), {"x": 2, "y": 4}, P("x", None, "y"), 2 * 2 * 4 * 64 * 8 / 8 * 3 / 4),
    ],
)
def test_a_split_transform_moves_to_the_batch(
    shape: tuple[int, ...], mesh: dict[str, int], spec: P, bytes: float
) -> None:
    plan = check(
        jnp.fft.fft, (values(*shape),), mesh, (spec,), kinds={"all-to-all": 2}, bytes=bytes
    )
    assert not plan.fallbacks


def right(fn: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    found = check_rule(fn, args, **options)
    assert found["wrong"] == []
    return found["splits"]


@pytest.mark.parametrize("fn", [jnp.fft.fft, jnp.fft.ifft, jnp.fft.rfft, jnp.fft.irfft])
def test_every_split(fn: Callable[..., Any]) -> None:
    dtype = np.float32 if fn is jnp.fft.rfft else np.complex64
    for shape, mesh, limit in (
        ((2, 9), {"x": 3}, None), ((2, 12), {"x": 2, "y": 2}, 9), ((48,), {"x": 2, "y": 2}, None)
    ):  # fmt: skip
        x = values(*shape, dtype=dtype)
        splits = right(fn, x, mesh=mesh, primitive="fft", tol=1e-4, limit=limit)
        assert fn is jnp.fft.irfft or any("four steps" in s for s in splits)
    right(fn, values(6, dtype=dtype), mesh={"x": 6}, primitive="fft", tol=1e-4)  # rows of one


def sent(p: Any) -> dict[str, int]:
    return dict(Counter(c.kind for c in p.collectives))


@pytest.mark.parametrize(("kind", "dtype"), [("fft", np.complex64), ("rfft", np.float32)])
def test_a_vector_in_four_steps(kind: str, dtype: Any) -> None:
    x = values(1 << 12, dtype=dtype)
    plan = check(getattr(jnp.fft, kind), (x,), {"x": 8}, (P("x"),), P("x"), wire=True)
    assert sent(plan) == {"all-to-all": 3}
    assert not plan.fallbacks


def test_a_vector_that_cannot_be_cut_so_is_gathered_and_reported() -> None:
    plan = check(jnp.fft.irfft, (values(33),), {"x": 8}, (P("x"),), grad=False)
    assert sent(plan) == {"all-gather": 1}
    assert [f.op for f in plan.fallbacks] == ["fft"]


@pytest.mark.parametrize(
    ("fn", "shape", "mesh", "spec", "count"),
    [
        (jnp.fft.fft2, (16, 24), {"x": 8}, P("x", None), 2),
        (jnp.fft.fft2, (16, 24), {"x": 8}, P(None, "x"), 2),
        (jnp.fft.ifft2, (12, 20), {"x": 8}, P("x", None), 2),  # neither dim divides
        (jnp.fft.fft2, (8, 16, 24), {"x": 8}, P(None, "x", None), 2),  # to the batch, in one call
        (jnp.fft.fftn, (8, 12, 16), {"x": 2, "y": 4}, P("x", "y", None), 3),
        (jnp.fft.rfft2, (16, 24), {"x": 8}, P("x", None), 2),
        (jnp.fft.irfft2, (16, 13), {"x": 8}, P("x", None), 2),
        (jnp.fft.irfft2, (16, 13), {"x": 4}, P(None, "x"), 2),
    ],
)
def test_several_dims_in_passes(
    fn: Callable[..., Any], shape: tuple[int, ...], mesh: dict[str, int], spec: P, count: int
) -> None:
    dtype = np.float32 if fn is jnp.fft.rfft2 else np.complex64
    plan = check(fn, (values(*shape, dtype=dtype),), mesh, (spec,), spec, wire=True)
    assert sent(plan) == {"all-to-all": count}
    assert not plan.fallbacks


def test_a_transform_wanted_transposed_is_one_all_to_all() -> None:
    plan = check(
        jnp.fft.fft2, (values(16, 24),), {"x": 8}, (P("x"),), P(None, "x"), grad=False,
        kinds={"all-to-all": 1}, bytes=16 * 24 * 8 / 8 * 7 / 8,
    )  # fmt: skip
    assert not plan.fallbacks


def test_layouts_of_neighbours_do_not_reach_the_transform():
    """XLA's FFT on CPUs takes rows only, and its layouts follow slices and transposes of short dims."""

    def f(x, keep, at):
        x = jnp.where(keep, lax.cummax(jnp.roll(x, 3, 1), 1, True), 0)
        x = lax.dynamic_slice(x, (at, at), (2, 1))
        return jnp.fft.irfft(jnp.fft.rfft(x, axis=0) * 0.5, axis=0)

    x, keep = np.arange(3, dtype=np.float32)[:, None], np.array([[True], [False], [True]])
    specs = (P("x", None), P(None, None), None)
    check(f, (x, keep, np.int32(2)), {"x": 7}, specs, P("x", None), together=True)


def test_a_vector_that_does_not_divide_is_gathered_and_said_to_be():
    x = values(10, dtype=np.complex64)
    plan = check(jnp.fft.fft, (x,), {"x": 4}, P("x"), tol=1e-4, grad=False)
    assert [f.why for f in plan.fallbacks] == [
        "dim 0 must lie whole for `fft` and was split over x"
    ]
    assert not check(jnp.fft.fft, (values(16, dtype=np.complex64),), {"x": 4}, P("x")).fallbacks
