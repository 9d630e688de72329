"""A partitioned function under JAX's transformations: values of transforming the plain function."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
W = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8)) / 4, jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(4, 6)), jnp.float32)
V = jnp.asarray(np.random.default_rng(2).normal(size=(6, 8)), jnp.float32)

Fn = Callable[..., Any]


def loss(w: Any, x: Any) -> Any:
    """Batch over x, features over y: summing needs both, the gradients one each."""
    w, x = sw.annotate(w, P(None, "y")), sw.annotate(x, P("x", None))
    h = jnp.tanh(x @ w)
    return jnp.sum(h * h) + jnp.sum(jnp.sin(w))


f = sw.spmd(loss, mesh=MESH)


def twice(x: Any) -> Any:
    return jnp.stack([x, x + 1])


def hvp(g: Fn) -> Fn:
    return lambda w, x: jax.jvp(jax.grad(lambda w: g(w, x)), (w,), (V,))[1]


def grad_of_grad(g: Fn) -> Fn:
    return lambda w, x: jax.grad(lambda w: jnp.vdot(jax.grad(g)(w, x), V))(w)


def scanned(g: Fn) -> Fn:
    return lambda w, x: jax.lax.scan(lambda c, t: (c + g(w * c, t), c), 0.5, twice(x) / 9)[0]


TRANSFORMATIONS: dict[str, Callable[[Fn], Fn]] = {
    "jit": jax.jit,
    "grad": lambda g: jax.grad(g, (0, 1)),
    "value_and_grad": jax.value_and_grad,
    "jit(grad)": lambda g: jax.jit(jax.grad(g, (0, 1))),
    "jvp": lambda g: lambda w, x: jax.jvp(lambda w: g(w, x), (w,), (V,)),
    "linearize": lambda g: lambda w, x: jax.linearize(lambda w: g(w, x), w)[1](V),
    "vjp": lambda g: lambda w, x: jax.vjp(g, w, x)[1](2.0),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": lambda g: jax.hessian(g, argnums=1),
    "jvp(grad)": hvp,
    "jit(jvp(grad))": lambda g: jax.jit(hvp(g)),
    "grad(grad)": grad_of_grad,
    "jit(grad(grad))": lambda g: jax.jit(grad_of_grad(g)),
    "vmap": lambda g: lambda w, x: jax.vmap(g, (None, 0))(w, twice(x)),
    "vmap, inner dim": lambda g: (
        lambda w, x: jax.vmap(g, (None, 1))(w, jnp.moveaxis(twice(x), 0, 1))
    ),
    "vmap(grad)": lambda g: lambda w, x: jax.vmap(jax.grad(g), (None, 0))(w, twice(x)),
    "grad(vmap)": lambda g: jax.grad(
        lambda w, x: jnp.sum(jax.vmap(g, (None, 0))(w, twice(x)) ** 2)
    ),
    "vmap(vmap)": lambda g: (
        lambda w, x: jax.vmap(jax.vmap(g, (None, 0)), (0, None))(twice(w), twice(x))
    ),
    "grad(checkpoint)": lambda g: jax.grad(jax.checkpoint(g), (0, 1)),
    "jit(grad(checkpoint))": lambda g: jax.jit(jax.grad(jax.checkpoint(g))),
    "grad(checkpoint, keeping products)": lambda g: jax.grad(
        jax.checkpoint(g, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "grad(grad(checkpoint))": lambda g: grad_of_grad(jax.checkpoint(g)),
    "scan": scanned,
    "grad(scan)": lambda g: jax.grad(scanned(g)),
    "grad(scan(checkpoint))": lambda g: jax.grad(scanned(jax.checkpoint(g))),
    "grad(cond)": lambda g: jax.grad(
        lambda w, x: jax.lax.cond(x[0, 0] < 1, lambda: g(w, x), lambda: g(2 * w, x))
    ),
    "closure over a tracer": lambda g: jax.grad(lambda w, x: jax.jit(lambda x: g(w, x))(x)),
}


def assert_equal(ours: Any, theirs: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5),
        ours,
        theirs,
    )


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_values(name: str):
    transform = TRANSFORMATIONS[name]
    assert_equal(transform(f)(W, X), transform(loss)(W, X))


# --- what lies inside the function ---------------------------------------------------------------


def in_scan(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda c, t: (jnp.tanh(c @ w[:, :6] + t), c), x, twice(x))[1] ** 2)


def in_checkpoint(w: Any, x: Any) -> Any:
    return jnp.sum(jax.checkpoint(lambda h: jnp.sin(jnp.tanh(h @ w)))(x) ** 2)


def in_cond(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.cond(x[0, 0] < 9, lambda: jnp.tanh(x @ w), lambda: x @ w))


@jax.custom_vjp
def clipped(h: Any) -> Any:
    return jnp.sin(h)


clipped.defvjp(lambda h: (jnp.sin(h), h), lambda h, ct: (jnp.clip(ct * h, -0.1, 0.1),))


def in_custom_vjp(w: Any, x: Any) -> Any:
    return jnp.sum(clipped(x @ w) ** 2)


@jax.custom_jvp
def doubled(h: Any) -> Any:
    return jnp.sin(h)


doubled.defjvp(lambda p, t: (jnp.sin(p[0]), 2 * t[0] * jnp.cos(p[0])))


def in_custom_jvp(w: Any, x: Any) -> Any:
    return jnp.sum(doubled(x @ w) ** 2)


def in_spmd(w: Any, x: Any) -> Any:
    return f(w, x) ** 2


def in_jit(w: Any, x: Any) -> Any:
    return jax.jit(loss)(w, x) ** 2


BODIES = [in_scan, in_checkpoint, in_cond, in_custom_vjp, in_custom_jvp, in_spmd, in_jit]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)
def test_gradients_of_what_lies_inside(body: Fn):
    def fn(w: Any, x: Any) -> Any:
        return body(sw.annotate(w, P(None, "y")), sw.annotate(x, P("x", None)))

    g = sw.spmd(fn, mesh=MESH)
    assert_equal(jax.jit(jax.value_and_grad(g, (0, 1)))(W, X), jax.value_and_grad(fn, (0, 1))(W, X))
    batched = jax.vmap(jax.grad(fn), (None, 0))(W, twice(X))
    assert_equal(jax.vmap(jax.grad(g), (None, 0))(W, twice(X)), batched)


def test_closing_over_traced_and_other_arrays():
    table = jnp.arange(8.0)

    def under(wrap: Callable[[Fn], Fn]) -> Any:
        return jax.grad(lambda w: wrap(lambda x: jnp.sum(jnp.tanh(x @ w) * table))(X))(W)

    assert_equal(under(lambda fn: sw.spmd(fn, mesh=MESH)), under(lambda fn: fn))


def test_integers_trees_and_values_kept_beside():
    def fn(p: Any, ids: Any, scale: float) -> Any:
        h = jnp.tanh(sw.annotate(p["w"], P("x", "y"))[ids]) * scale
        return jnp.sum(h), {"picked": ids + 1, "h": h}

    g = sw.spmd(fn, mesh=MESH, static_argnums=2)
    p, ids = {"w": W, "unused": X}, jnp.asarray([5, 0, 3], jnp.int32)
    ours = jax.jit(lambda p: jax.value_and_grad(g, has_aux=True)(p, ids, 3.0))(p)
    assert_equal(ours, jax.value_and_grad(fn, has_aux=True)(p, ids, 3.0))


def test_uneven_dims():
    def fn(w: Any, x: Any) -> Any:
        return jnp.tanh(sw.annotate(x, P("y", None)) @ sw.annotate(w, P(None, ("x", "y"))))

    w, x = W[:, :7], X[:3]
    g = sw.spmd(fn, mesh=MESH, out_shardings=P("y", "x"))
    assert_equal(jax.jit(g)(w, x), fn(w, x))
    squares = lambda g: lambda w: jnp.sum(g(w, x) ** 2)
    assert_equal(jax.grad(squares(g))(w), jax.grad(squares(fn))(w))


def test_part_of_an_axis():
    """What jit gives, JAX names by whole axes of the mesh, or fails (`IndivisibleError`)."""

    def fn(x: Any) -> Any:
        return jnp.sin(sw.annotate(x, P("x", "y[0:2]")))

    x = jnp.arange(12.0).reshape(2, 6)
    placed = jax.device_put(x, jax.NamedSharding(MESH, P("x")))
    g = jax.jit(lambda x: (sw.spmd(fn, mesh=MESH)(x), x + 1))
    for array in x, placed:
        ours = g(array)
        assert_equal(ours, (jnp.sin(x), x + 1))
        assert ours[0].sharding == jax.NamedSharding(MESH, P("x"))


def test_vmap_with_a_named_axis():
    def fn(w: Any, x: Any) -> Any:
        return jax.lax.psum(loss(w, x), "i") + jax.lax.axis_index("i")

    run = lambda g: jax.vmap(g, (None, 0), axis_name="i")(W, twice(X))
    assert_equal(run(sw.spmd(fn, mesh=MESH)), run(fn))


def test_vmap_over_a_mesh_axis():
    def fn(x: Any) -> Any:
        return jnp.sin(sw.annotate(x, P("y")))

    g = jax.jit(jax.vmap(sw.spmd(fn, mesh=MESH), spmd_axis_name="x"))
    x = jnp.arange(32.0).reshape(4, 8)
    assert_equal(g(x), jnp.sin(x))
    assert g(x).sharding.shard_shape(x.shape) == (2, 2)


def test_without_jit():
    with jax.disable_jit():
        ours = jax.grad(f, (0, 1))(W, X)
    assert_equal(ours, jax.grad(loss, (0, 1))(W, X))
    assert all(g.sharding.device_set == set(MESH.devices.flat) for g in ours)


def test_inside_shard_map_is_refused():
    block = jax.shard_map(lambda x: f(W, x)[None], mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(sw.ShardingError) as e:
        block(twice(X)[0])
    assert str(e.value) == (
        "spmd inside shard_map: a device's block cannot be partitioned again\n"
        "  facts the enclosing shard_map is manual over x, y\n"
        "  hint  call the function itself there, or put shard_map inside what spmd partitions"
    )


# --- both passes are partitioned -----------------------------------------------------------------


def parts(g: Fn, *args: Any) -> tuple[int, set[str]]:
    """How many partitioned stretches a function compiles to, and the collectives in them."""
    lowered = jax.jit(g).lower(*args)
    kinds = re.findall(r"(all-reduce|all-gather|reduce-scatter)\(", lowered.compile().as_text())
    return len(re.findall(r"= sdy\.manual_computation", lowered.as_text())), set(kinds)


def test_forward_and_backward_are_partitioned():
    def squares(w: Any, x: Any) -> Any:
        w, x = sw.annotate(w, P("y", None)), sw.annotate(x, P("x", None))
        return jnp.sin(x @ w)  # forward sums over y, backward over x

    g = sw.spmd(squares, mesh=MESH)
    assert parts(g, W, X) == (1, {"all-reduce"})
    assert parts(lambda w, x: jax.vjp(g, w, x)[1](x @ w), W, X)[0] == 2
    assert parts(jax.grad(f), W, X)[0] == 2


def test_a_product_kept_by_checkpoint_is_not_made_again():
    keep = jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)

    def products(g: Fn) -> int:
        return jax.jit(jax.value_and_grad(g)).lower(W, X).as_text().count("stablehlo.dot_general")

    assert products(keep) == products(f) == 2
    assert products(jax.checkpoint(f)) == 3


def test_what_nobody_reads_is_not_computed():
    def fn(w: Any, x: Any) -> Any:
        return jnp.sin(x @ w), jnp.cos(x) @ w

    text = jax.jit(lambda w, x: sw.spmd(fn, mesh=MESH)(w, x)[0]).lower(W, X).as_text()
    assert text.count("stablehlo.dot_general") == 1
    assert "cosine" not in text
