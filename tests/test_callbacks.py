"""Calls that leave the program: callbacks, foreign functions, Pallas kernels, and `batched`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.testing import check

XY = sw.device_mesh({"x": 2, "y": 4})
X8 = sw.device_mesh({"x": 8})
ROWS = P("x")


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def host_sin(x: Any) -> Any:
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def run(fn: Callable[..., Any], *args: Any, mesh: Any = XY, ins: Any = ROWS) -> Any:
    out = sw.spmd(fn, mesh=mesh, in_shardings=ins)(*args)
    jax.block_until_ready(out)
    jax.effects_barrier()
    return out


# -- pure callbacks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ins", [P("x"), P(None, "x"), P(("x", "y")), P("y", "x")])
def test_a_pure_callback(ins: P):
    program = lambda x: (host_sin(x * 1) * 2 + x).sum(0)
    plan = check(program, (array(16, 4),), XY, ins, grad=False, wire=True)
    (f,) = plan.fallbacks
    assert (f.op, f.shape, f.bytes) == ("pure_callback", (16, 4), 256)
    assert f.why == "a callback gets its operands whole, on one device"


def test_it_runs_once():
    calls = []

    def host(v: Any) -> Any:
        calls.append(np.shape(v))
        return np.sin(v)

    f = lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + x
    x = array(16, 4)
    for g in (sw.spmd(f, mesh=X8, in_shardings=P("x")), jax.jit(sw.spmd(f, mesh=X8))):
        calls.clear()
        np.testing.assert_allclose(g(x), np.sin(x) + x, rtol=1e-5)
        assert calls == [(16, 4)]


def test_its_result_is_a_pending_sum_finished_where_it_is_needed():
    """Gathered once, 224 bytes; the result scattered straight to the rows' owners, 224 bytes."""
    f = lambda x: host_sin(x) + x
    plan = check(f, (array(16, 4),), X8, P("x"), grad=False, wire=True)
    assert [c.kind for c in plan.collectives] == ["all-gather", "reduce-scatter"]
    assert plan.comm_bytes == 224 + 224
    assert plan.collectives[0].reason.endswith(
        "pure_callback runs on one device, on whole operands"
    )


@pytest.mark.parametrize("dtype", [bool, "int8", "uint32", "float16", "complex64"])
def test_results_of_any_type(dtype: Any):
    host = lambda v: (np.asarray(v) * 10).astype(dtype)
    f = lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, dtype), jnp.abs(x))
    check(f, (array(16, 4),), XY, P("x"), grad=False)


def test_no_operands_and_several_results():
    shapes = (jax.ShapeDtypeStruct((8,), "float32"), jax.ShapeDtypeStruct((), "int32"))
    host = lambda: (np.arange(8, dtype=np.float32), np.int32(5))
    f = lambda x: [x[:, 0] + jax.pure_callback(host, shapes)[0], jax.pure_callback(host, shapes)[1]]
    assert not check(f, (array(8, 4),), XY, P("x"), grad=False).fallbacks


def test_in_loops_branches_and_custom_derivatives():
    @jax.custom_vjp
    def sin(x: Any) -> Any:
        return host_sin(x)

    host_cos = lambda x: jax.pure_callback(np.cos, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    sin.defvjp(lambda x: (sin(x), x), lambda x, g: (g * host_cos(x),))

    def program(x: Any) -> Any:
        x, sums = lax.scan(lambda c, _: (sin(c), c.sum()), x, None, length=3)
        return lax.cond(x[0, 0] > 0, sin, lambda x: x, x), sums

    check(program, (array(16, 4),), XY, P("x"))


def test_vmapped_one_by_one():
    def one(r: Any) -> Any:
        shape = jax.ShapeDtypeStruct(r.shape, r.dtype)
        return jax.pure_callback(np.sin, shape, r, vmap_method="sequential")

    check(lambda x: jax.vmap(one)(x), (array(4, 4),), XY, P("x"), grad=False)


# -- effects ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_an_effect_happens_once(ordered: bool):
    counts: list[float] = []

    def count(v: Any) -> Any:
        counts.append(float(np.sum(v)))
        return np.float32(len(counts))

    shape = jax.ShapeDtypeStruct((), "float32")
    f = lambda x: io_callback(count, shape, x, ordered=ordered) + x
    x = array(16, 4)
    np.testing.assert_allclose(run(f, x), x + 1, rtol=1e-6)
    np.testing.assert_allclose(counts, [x.sum()], rtol=1e-5)


@pytest.mark.parametrize("ordered", [False, True])
def test_debug_callbacks_run_once(ordered: bool):
    """Ordered ones in their order, in a loop too; jax.jit has no ordered ones on several devices."""
    seen: list[tuple[int, Any]] = []
    note = lambda v, i: seen.append((int(i), np.shape(v)))

    def f(x: Any) -> Any:
        jax.debug.callback(note, x, 10, ordered=ordered)

        def step(c: Any, i: Any) -> Any:
            jax.debug.callback(note, c, i, ordered=ordered)
            return c * 2, None

        return lax.scan(step, x, jnp.arange(3))[0]

    run(f, array(16, 4), mesh=X8)
    wanted = [(10, (16, 4)), *((i, (16, 4)) for i in range(3))]
    assert seen == wanted if ordered else sorted(seen) == sorted(wanted)


def test_a_message_is_printed_once(capfd: Any):
    def f(x: Any) -> Any:
        jax.debug.print("the sum is {}", x.sum())
        jax.debug.print("again {}", x[0, 0], ordered=True)
        return x * 2

    run(f, np.ones((16, 4), np.float32), mesh=X8)
    out = capfd.readouterr().out
    assert sorted(out.splitlines()) == ["again 1.0", "the sum is 64.0"]


def test_a_partitioned_callback_sees_every_block():
    seen: list[Any] = []

    def f(x: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(np.shape(v)), x, partitioned=True)
        return x

    run(f, array(16, 4), mesh=X8)
    assert seen == [(2, 4)] * 8
    assert not sw.spmd(f, mesh=X8, in_shardings=P("x")).plan(array(16, 4)).fallbacks


def test_in_gradients():
    seen: list[float] = []

    def loss(x: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        return (x**2).sum()

    x = array(16, 4)
    np.testing.assert_allclose(run(jax.grad(loss), x), 2 * x, rtol=1e-5)
    np.testing.assert_allclose(seen, [x.sum()], rtol=1e-5)


@pytest.mark.parametrize(("axes", "times"), [("x", 2), (None, 8)])
def test_in_a_manual_region_once_for_each_of_the_users_devices(axes: Any, times: int):
    seen: list[Any] = []

    def f(a: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(np.shape(v)), a)
        return host_sin(a)

    g = sw.manual(f, in_specs=P("x"), out_specs=P("x"), axes=axes, check=False)
    x = array(16, 4)
    np.testing.assert_allclose(run(g, x, ins=P("y")), np.sin(x), rtol=1e-5)
    assert seen == [(8, 4)] * times


# -- Pallas ------------------------------------------------------------------------------------------------


def kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * 2 + 1


def twice(x: Any) -> Any:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


def test_a_pallas_kernel():
    f = lambda x: twice(x) + x
    plan = check(f, (array(16, 4),), XY, P("x"), grad=False, wire=True)
    assert [f.why for f in plan.fallbacks] == [
        "nothing is known of what `pallas_call` does along a split dim (sw.batched says so)"
    ]
    local = lambda x: sw.batched(twice)(x) + x
    assert not check(local, (array(16, 4),), XY, P("x"), grad=False, bytes=0).fallbacks


# -- batched -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ins", [P("x"), P(("x", "y")), P("y", "x"), P(None, "x")])
def test_batched_calls_are_local(ins: P):
    f = lambda x: sw.batched(host_sin)(x * 1) * 2
    plan = check(f, (array(16, 4),), XY, ins, grad=False, wire=True)
    whole = ["dim 1 must lie whole for `batched` and was split over x"]
    assert [f.why for f in plan.fallbacks] == (whole if ins == P("y", "x") else [])
    if ins == P(None, "x"):  # what is not a batch dim gives its split to one that is, if it pays
        assert "all-to-all" in {c.kind for c in plan.collectives}


@pytest.mark.parametrize("ins", [P("x"), P(("x", "y"))])
def test_gradients_of_batched(ins: P):
    """Rows' gradients stay; what has no batch dim gets their sum, and its own share once."""

    def f(x: Any, w: Any, n: Any) -> Any:
        return jnp.tanh(x @ w) * n[:, None], x[:, 0].astype(jnp.int32), w * 2

    g = lambda x, w: sw.batched(f, (0, None, 0), (0, 0, None))(jnp.sin(x), w, jnp.arange(16))
    assert check(g, (array(16, 4), array(4, 3)), XY, (ins, None)).comm_bytes == 0


def test_batched_over_another_dim_and_vmapped():
    f = sw.batched(lambda x: jnp.sort(x, 0), 1, 1)
    check(lambda x: f(x * 1), (array(4, 16),), XY, P(None, ("x", "y")), bytes=0)
    g = jax.vmap(sw.batched(lambda r, w: (r * w).sum(), (0, None), None), (0, None))
    check(lambda x, w: g(x * 1, w), (array(8, 4), array(4)), XY, (P("x"), None))
    rows = jax.vmap(sw.batched(lambda r: r / r.sum(-1, keepdims=True)))
    check(lambda x: rows(x * 1), (array(4, 6, 5),), XY, P("x"), bytes=0)


def test_batched_rows_that_do_not_divide_are_brought_together():
    plan = check(lambda x: sw.batched(host_sin)(x * 1), (array(7, 4),), XY, P("x"), grad=False)
    assert [c.op for c in plan.collectives if c.kind == "all-gather"] == ["batched"]


def test_batched_outside_is_the_function():
    assert sw.batched(lambda x: x.sum())(jnp.ones(3)) == 3


def test_batched_in_transformed_functions():
    f = lambda x: sw.batched(jnp.sin)(x) + x
    g, x = sw.spmd(f, mesh=XY, in_shardings=P("x")), array(8, 4)
    np.testing.assert_allclose(jax.jit(g)(x), f(x), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: g(x).sum())(x), np.cos(x) + 1, rtol=1e-5)


def all_rows(x: Any) -> Any:
    return jnp.ones((8, 4)) * x.sum()


ERRORS: dict[str, tuple[Callable[..., Any], str]] = {
    "no such dim": (
        lambda x: sw.batched(jnp.sin, 2)(x),
        """batched: in_dims says dim 2 of a value of 2 dims
  facts value 0 has shape [8, 4]
  hint  None is for values without a batch dim""",
    ),
    "sizes": (
        lambda x: sw.batched(lambda x, y: x, (0, 0))(x, x[0]),
        """batched: in_dims names dims of different sizes
  facts value 0 has 8 rows, value 1 has 4 rows""",
    ),
    "count": (
        lambda x: sw.batched(lambda x, y: x, (0,))(x, x),
        "batched: 1 in_dims for 2 values",
    ),
    "rows": (
        lambda x: sw.batched(lambda x: x[:1])(x),
        """batched: the function does not map over the dims it was said to
  facts it makes 1 rows of 8
  hint  a result without a batch dim has out_dims None""",
    ),
    "does not map": (
        lambda x: sw.batched(all_rows)(x),
        """batched: the function does not map over the dims it was said to
  facts of [[4, 4]] it makes [8, 4], where its rows of the whole have [4, 4]
  hint  take shapes from the arguments; a result without a batch dim has out_dims None""",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors(what: str):
    fn, message = ERRORS[what]
    with pytest.raises(sw.ShardingError) as error:
        sw.spmd(fn, mesh=XY, in_shardings=P("x")).plan(array(8, 4)).jaxpr  # noqa: B018
    assert error.value.where.startswith("test_callbacks.py:")
    lines = [l for l in str(error.value).splitlines() if not l.startswith("  at    ")]
    assert "\n".join(lines) == message
