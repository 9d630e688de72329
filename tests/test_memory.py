"""`plan.peak_memory`: what is alive at once on one device, of programs whose buffers can be counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.cost import memory

N = 64
ARRAY = N * N * 4  # bytes of a float32[N, N]
f32 = jax.ShapeDtypeStruct((N, N), jnp.float32)


def peak(f: Callable[..., Any], *args: Any, devices: int = 1, **options: Any) -> int:
    mesh = sw.abstract_mesh({"x": devices})
    return sw.spmd(f, mesh=mesh, **options).plan(*args).peak_memory


def test_arguments_results_and_what_lies_between():
    assert peak(lambda x: (x @ x) @ x, f32) == 3 * ARRAY


def test_a_device_holds_its_blocks():
    f = lambda x: jnp.sin(jnp.cos(x))
    assert peak(f, f32, devices=4, in_shardings=P("x")) == 2 * ARRAY // 4


@pytest.mark.parametrize("donated", [(), 0, 1, (0, 1)], ids=str)
def test_a_result_lies_in_a_donated_argument_of_its_shape_and_type(donated: Any):
    """The second argument is of no result's type."""
    bf16 = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
    got = peak(lambda w, g: w - g.astype(jnp.float32), f32, bf16, donate_argnums=donated)
    assert got == ARRAY * (1.5 if donated in (0, (0, 1)) else 2.5)


def test_a_donated_argument_holds_one_result():
    assert peak(lambda w: (w + 1, w + 2), f32, donate_argnums=0) == 2 * ARRAY


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=str)
def test_another_shape_or_order_of_dims_is_no_copy(order: tuple[int, ...]):
    """A matter of layout, which the compiler chooses."""

    def f(x: Any) -> Any:
        y = x.reshape(8, 8, N).transpose(order)
        return lax.scan(lambda s, w: (s @ w.T @ w, None), jnp.ones((8, N)), y)[0].sum()

    assert peak(f, f32) < 1.75 * ARRAY


@pytest.mark.parametrize("jitted", [False, True])
def test_a_carry_that_slices_are_written_into_is_there_once(jitted: bool):
    """Also where a function under `jax.jit` writes them, as JAX's own are."""

    def write(s: Any, row: Any, i: Any) -> Any:
        return lax.dynamic_update_slice(s, row, (i, 0))

    put = jax.jit(write) if jitted else write

    def f(x: Any) -> Any:
        def step(s: Any, i: Any) -> Any:
            return put(s, lax.dynamic_slice(s, (i, 0), (1, N)) + 1, i), None

        return lax.scan(step, x @ x, jnp.arange(N))[0]

    rows = 4 * N * 4
    assert memory.peak_memory(jax.make_jaxpr(f)(f32)) <= 3 * ARRAY + rows


def test_a_carry_that_is_made_anew_is_there_twice():
    def f(x: Any) -> Any:
        return lax.scan(lambda s, _: (s @ s, None), x @ x, None, length=3)[0]

    assert peak(f, f32) >= 4 * ARRAY
