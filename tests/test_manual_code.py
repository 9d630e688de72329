"""`manual`, and value by value: `auto_to_manual` and `manual_to_auto` (GSPMD 3.4)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.testing import check

XY = sw.device_mesh({"x": 2, "y": 4})
X8, X6, X3 = (sw.device_mesh({"x": n}) for n in (8, 6, 3))


def array(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return rng.normal(size=shape).astype(np.float32)


def users(plan: sw.Plan) -> list[tuple[str, tuple[str, ...]]]:
    return [(c.kind, c.axes) for c in plan.collectives if c.reason == "the user's own"]


# -- manual ----------------------------------------------------------------------------------------------


def matmul(a: Any, b: Any) -> Any:
    return lax.psum(a @ b, "x"), lax.axis_index("x") + lax.all_gather(a, "x", tiled=True).sum(0)


MATMUL = sw.manual(
    matmul, in_specs=(P(None, "x"), P("x")), out_specs=(P(), P()), axes="x", check=False
)


@pytest.mark.parametrize("ins", [None, (P("y"), P(None, "y")), (P("y", "x"), P("x"))])
def test_manual_over_some_axes(ins: Any):
    a, b = array(8, 16), array(16, 4)
    f = sw.manual(lambda a, b: lax.psum(a @ b, "x"), in_specs=(P(None, "x"), P("x")),
                  out_specs=P(), axes="x")  # fmt: skip
    program = lambda a, b: f(jnp.sin(a), b)
    check(program, (a, b), XY, ins, wire=True)


def test_manual_outside_is_on_one_device():
    total, rows = MATMUL(array(8, 16), array(16, 4))
    np.testing.assert_allclose(total, array(8, 16) @ array(16, 4), rtol=1e-4)
    assert rows.shape == (16,)
    size = sw.manual(lambda a: a * lax.axis_size("x") + lax.axis_index("x"), in_specs=P("x"),
                     out_specs=P("x"))  # fmt: skip
    np.testing.assert_array_equal(size(jnp.ones(4)), jnp.ones(4))
    np.testing.assert_array_equal(jax.grad(lambda a: size(a).sum())(jnp.ones(4)), jnp.ones(4))


def test_manual_outside_is_compiled_once():
    traced = []
    f = sw.manual(lambda a: traced.append(1) or a * 2, in_specs=P("x"), out_specs=P("x"))
    for _ in range(3):
        np.testing.assert_array_equal(f(jnp.ones(4)), 2 * jnp.ones(4))
    assert len(traced) == 1


def test_a_jitted_function_is_traced_again_for_the_mesh():
    size = jax.jit(
        sw.manual(lambda a: a * lax.axis_size("x"), in_specs=P("x"), out_specs=P("x"), axes="x")
    )
    assert size(jnp.ones(4))[0] == 1
    assert sw.spmd(size, mesh=XY)(jnp.ones(4))[0] == 2


# -- value by value --------------------------------------------------------------------------------------


def shifted(x: Any) -> Any:
    """Rows of all devices moved to the next, twice as large."""
    block = sw.auto_to_manual(jnp.sin(x), P("x"))
    ring = [(i, (i + 1) % 8) for i in range(8)]
    block = lax.ppermute(block * 2, "x", ring) + lax.axis_index("x") * jnp.ones((2, 1))
    return sw.manual_to_auto(block, P("x"), shape=x.shape)


def shifted_whole(x: Any) -> Any:
    return jnp.roll(jnp.sin(x) * 2, 2, 0) + jnp.repeat(jnp.arange(8.0), 2)[:, None]


def product(x: Any, w: Any) -> Any:
    """A contraction over x with its own sum, and a factor every device has whole; y is automatic."""
    enter = functools.partial(sw.auto_to_manual, axes="x")
    total = lax.psum(enter(x, P(None, "x")) @ enter(w, P("x")), "x")
    return sw.manual_to_auto(total * enter(w[0], P()), P(), axes="x")


def same(
    fn: Callable[..., Any], whole: Callable[..., Any], args: Any, mesh: Mesh, ins: Any
) -> sw.Plan:
    """Values and gradients of a function that cannot run outside, against those of the whole."""
    run = sw.spmd(fn, mesh=mesh, in_shardings=ins)
    np.testing.assert_allclose(run(*args), whole(*args), rtol=1e-4, atol=1e-4)
    positions = tuple(range(len(args)))
    grad = lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum(), positions)
    got = sw.spmd(grad(fn), mesh=mesh, in_shardings=ins)(*args)
    for g, w in zip(got, grad(whole)(*args), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-3)
    return run.plan(*args)


def test_blocks_and_the_users_collectives():
    plan = same(shifted, shifted_whole, (array(16, 4),), X8, P("x"))
    assert users(plan) == [("collective-permute", ("x",))]
    assert plan.comm_bytes == 2 * 4 * 4


@pytest.mark.parametrize("ins", [None, (P("y", "x"), P("x")), (P("x"), P(None, "y"))])
def test_some_axes_stay_automatic(ins: Any):
    whole = lambda x, w: (x @ w) * w[0]
    same(product, whole, (array(8, 16), array(16, 4)), XY, ins)


def test_in_a_loop_and_vmapped():
    def f(x: Any) -> Any:
        def step(c: Any, row: Any) -> Any:
            block = sw.auto_to_manual(row, P("x"), axes="x")
            return c + sw.manual_to_auto(
                lax.ppermute(block, "x", [(0, 1), (1, 0)]), P("x"), axes="x"
            ), None

        return lax.scan(step, jnp.zeros(x.shape[1]), x)[0]

    same(f, lambda x: jnp.roll(x.sum(0), 4), (array(3, 8),), XY, None)

    def carried(x: Any) -> Any:
        block = sw.auto_to_manual(x, P(None, "x"), axes="x")
        total, _ = lax.scan(lambda c, row: (c + row, None), jnp.zeros(block.shape[1]), block)
        return sw.manual_to_auto(total, P("x"), axes="x")

    same(carried, lambda x: x.sum(0), (array(3, 8),), XY, P("y"))

    def block(r: Any) -> Any:
        return sw.manual_to_auto(sw.auto_to_manual(r, P("x"), axes="x") * 2, P("x"), axes="x")

    same(jax.vmap(block), lambda x: x * 2, (array(4, 8),), XY, P("y"))


def test_outside_they_are_identities():
    x = array(8, 4)
    y = sw.manual_to_auto(sw.auto_to_manual(x, P("x")) * 2, P("x"), shape=(8, 4))
    np.testing.assert_array_equal(y, x * 2)
