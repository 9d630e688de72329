"""Equal layers under `jax.checkpoint`: captured once, emitted once where they lie alike."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import _jax, hlo, partition, repeats
from shardwise.capture import capture
from shardwise.mesh import device_mesh
from shardwise.ops.registry import rules_of

LAYERS = 4
MESH = {"x": 2, "y": 4}


def layer(p: Any, h: jax.Array) -> jax.Array:
    w_in, w_out = sw.annotate(p[0], P("x", "y")), sw.annotate(p[1], P("y", "x"))
    return sw.annotate(h + jnp.tanh(h @ w_in) @ w_out, P("x", "y"))


def loss(params: Any, h: jax.Array) -> jax.Array:
    body = jax.checkpoint(layer)
    for p in params:
        h = body(p, h)
    return jnp.sum(h * h)


grads = jax.value_and_grad(loss, argnums=(0, 1))


def arguments(rows: int = 8) -> tuple[Any, jax.Array]:
    draw = np.random.default_rng(0).normal
    params = [
        (draw(size=(16, 32)).astype("f") / 8, draw(size=(32, 16)).astype("f") / 8)
        for _ in range(LAYERS)
    ]
    return params, jnp.asarray(draw(size=(rows, 16)), "f")


def assert_equal(got: Any, want: Any) -> None:
    is_padded = lambda x: isinstance(x, sw.PaddedArray)
    for a, b in zip(jax.tree.leaves(got, is_leaf=is_padded), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


def calls(jaxpr: Any) -> list[Any]:
    """The functions that equal bodies are called as, one for each call."""
    found = []
    for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] == "remat2":
            found.append(eqn.params["jaxpr"])
    return found


def emitted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "run", lambda p, eqn, body, values: p.run(body, values))


def test_the_layers_bodies_are_captured_once_and_have_variables_of_their_own():
    params, h = arguments()
    leaves, tree = jax.tree.flatten((params, h))
    body, _ = capture(lambda *xs: grads(*jax.tree.unflatten(tree, xs)), leaves)
    bodies = [b for e in body.eqns for b in e.bodies]
    assert len(bodies) == LAYERS and {b.origin for b in bodies} == {bodies[0]}
    variables = [v for b in bodies for v in b.variables()]
    assert len(set(variables)) == len(variables)
    for b in bodies[1:]:
        for mine, first in zip(b.eqns, bodies[0].eqns, strict=True):
            assert str(mine.primitive) == str(first.primitive)
            assert rules_of(mine) is rules_of(first)


@pytest.mark.parametrize("rows", [8, 7])
def test_layers_that_lie_alike_are_calls_of_one_function(rows: int):
    params, h = arguments(rows)
    f = sw.spmd(grads, mesh=device_mesh(MESH))
    found = calls(f.plan(params, h).jaxpr)
    assert len(found) == LAYERS
    assert len({id(j) for j in found}) == 1
    assert_equal(f(params, h), grads(params, h))


@pytest.mark.parametrize("rows", [8, 7])
def test_the_plan_and_the_compiled_program_are_those_of_layers_emitted_apart(
    rows: int, monkeypatch: pytest.MonkeyPatch
):
    params, h = arguments(rows)
    shared = sw.spmd(grads, mesh=device_mesh(MESH))
    plan, text = shared.plan(params, h), shared.lower(params, h).compile().as_text()
    collectives, listing, peak = plan.collectives, plan.explain(), plan.peak_memory
    emitted_apart(monkeypatch)
    apart = sw.spmd(grads, mesh=device_mesh(MESH))
    other = apart.plan(params, h)
    assert not calls(other.jaxpr)
    assert collectives == other.collectives
    assert len({c.reason for c in collectives}) > LAYERS  # each layer's own names
    assert listing == other.explain()
    assert plan.flops == other.flops
    assert peak <= 1.25 * other.peak_memory
    wire = hlo.wire_bytes(apart.lower(params, h).compile().as_text())
    assert hlo.wire_bytes(text) == wire


def test_a_layer_that_lies_differently_is_emitted_on_its_own():
    params, h = arguments()

    def other(params: Any, h: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda w, h: h + jnp.tanh(h @ w) @ w.T)
        for i, (w, _) in enumerate(params):
            h = body(sw.annotate(w, P(None, "y") if i == 1 else P("x", "y")), h)
        return jnp.sum(h * h)

    fn = jax.value_and_grad(other, argnums=(0, 1))
    f = sw.spmd(fn, mesh=device_mesh(MESH))
    found = calls(f.plan(params, h).jaxpr)
    assert len(found) == LAYERS
    assert 1 < len({id(j) for j in found}) < LAYERS
    assert_equal(f(params, h), fn(params, h))


def test_layers_with_fallbacks_report_one_each(monkeypatch: pytest.MonkeyPatch):
    params, h = arguments()
    plan = sw.spmd(grads, mesh=device_mesh(MESH)).plan(params, h)
    assert not plan.fallbacks
    monkeypatch.setattr(partition, "rules_of", lambda e: () if e.name == "tanh" else rules_of(e))
    f = sw.spmd(grads, mesh=device_mesh(MESH))
    plan = f.plan(params, h)
    assert len({b.value for b in plan.fallbacks}) == 2 * LAYERS  # forward, and recomputed
    assert_equal(f(params, h), grads(params, h))


def test_equal_layers_in_the_body_of_a_scan():
    params, h = arguments()
    stacks = jax.tree.map(lambda *w: jnp.stack(w), *params)
    stacks = jax.tree.map(lambda w: w.reshape(LAYERS // 2, 2, *w.shape[1:]), stacks)

    def scanned(stacks: Any, h: jax.Array) -> jax.Array:
        def two(h: jax.Array, p: Any) -> Any:
            body = jax.checkpoint(layer)
            for i in range(2):
                h = body((p[0][i], p[1][i]), h)
            return h, None

        h, _ = lax.scan(two, h, stacks)
        return jnp.sum(h * h)

    fn = jax.value_and_grad(scanned, argnums=(0, 1))
    f = sw.spmd(fn, mesh=device_mesh(MESH))
    assert_equal(f(stacks, h), fn(stacks, h))
    assert f.plan(stacks, h).comm_bytes == pytest.approx(
        hlo.wire_bytes(f.lower(stacks, h).compile().as_text()), rel=0.02
    )


def test_a_layer_whose_results_are_wanted_elsewhere_is_emitted_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
):
    params, h = arguments()

    def summed(ws: Any, h: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda w, h: h + jnp.tanh(h @ w) @ w.T)
        for w in ws:
            h = body(w, sw.annotate(h, P("x", None)))
        return jnp.sum(h * h)

    def fn(ws: Any, h: jax.Array) -> Any:
        found = list(jax.grad(summed)(ws, h))
        found[1] = sw.annotate(found[1], P("x", "y"))
        return found

    weights = [w for w, _ in params]
    f = sw.spmd(fn, mesh=device_mesh(MESH), in_shardings=P())
    plan = f.plan(weights, h)
    assert len({id(j) for j in calls(plan.jaxpr)}) == 2
    assert_equal(f(weights, h), fn(weights, h))
    collectives = plan.collectives
    emitted_apart(monkeypatch)
    other = sw.spmd(fn, mesh=device_mesh(MESH), in_shardings=P()).plan(weights, h)
    assert collectives == other.collectives
