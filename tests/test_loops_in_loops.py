"""Stacks that a loop inside a loop goes through, as a pipeline's ticks go through a stage's layers: what is
the same in every iteration of the outer loop is moved once, and what it adds up is reduced once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.testing import check

LAYERS, MODEL, TICKS, BATCH = 3, 32, 4, 128
W = LAYERS * MODEL * MODEL * 4  # bytes of all weights, float32
MESH = {"x": 8}


def arrays(stages: int = 0) -> tuple[np.ndarray, np.ndarray]:
    r = np.random.default_rng(0)
    lead = (stages,) if stages else ()
    ws = r.normal(size=(*lead, LAYERS, MODEL, MODEL)) / MODEL**0.5
    xs = r.normal(size=(TICKS, *lead, BATCH, MODEL))
    return ws.astype(np.float32), xs.astype(np.float32)


def layer(w: Any, h: Any) -> Any:
    w = sw.annotate(w, P("x")).astype(jnp.bfloat16)
    return jnp.tanh(h.astype(jnp.bfloat16) @ w).astype(jnp.float32)


def stage(ws: Any, h: Any, remat: bool) -> Any:
    body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    return lax.scan(lambda h, w: (body(w, h), None), h, ws)[0]


def ticks(run: Callable[..., Any], ws: Any, xs: Any) -> Any:
    return lax.scan(lambda h, x: (run(ws, h + x), None), jnp.zeros_like(xs[0]), xs)[0]


def gradient(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ws, xs: jax.grad(lambda ws: ticks(run, ws, xs).sum())(ws)


def sent(plan: Any) -> list[tuple[str, int, float]]:
    return sorted((c.kind, c.count, c.bytes) for c in plan.collectives)


@pytest.mark.parametrize("remat", [False, True])
def test_weights_are_gathered_and_their_gradients_reduced_once(remat: bool):
    """In the narrow type the layers read; the gradients in the wide one they are added up in."""
    f = gradient(lambda ws, h: stage(ws, h, remat))
    plan = check(
        f, arrays(), MESH, (P(None, "x"), P(None, "x")), P(None, "x"), grad=False, tol=5e-2
    )
    gather, scatter = ("all-gather", 1, W / 2 * 7 / 8), ("reduce-scatter", 1, W * 7 / 8)
    assert sent(plan) == [gather, gather, scatter]


def test_under_vmap_the_layers_are_the_second_dim_of_the_sum():
    """vmap puts the stages before the layers: [stages, layers, M, M] is added to slice by slice."""

    def run(ws: Any, h: Any) -> Any:
        return jax.vmap(lambda ws, h: stage(ws, h, True))(ws, h)

    specs = P(None, None, "x"), P(None, None, "x")
    plan = check(gradient(run), arrays(2), MESH, specs, specs[0], grad=False, tol=5e-2)
    gather, scatter = ("all-gather", 1, 2 * W / 2 * 7 / 8), ("reduce-scatter", 1, 2 * W * 7 / 8)
    assert sent(plan) == [gather, gather, scatter]
    assert writes(plan.jaxpr) == [(2, LAYERS, MODEL, MODEL)]


def writes(jaxpr: Any, depth: int = 0) -> list[tuple[int, ...]]:
    """Shapes of the carries that a loop in a loop writes slices into."""
    out = []
    for e in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if e.primitive.name == "dynamic_update_slice" and depth == 2:
            out.append(e.outvars[0].aval.shape)
        inner = e.params.get("jaxpr")
        if inner is not None:
            out += writes(inner, depth + (e.primitive.name == "scan"))
    return out


@pytest.mark.parametrize("whole_tick", [False, True], ids=["layer", "tick"])
def test_slices_are_added_to_the_sum_where_they_are_made(whole_tick: bool):
    """No stack of a tick's gradients is ever made, whatever is recomputed."""

    def run(ws: Any, h: Any) -> Any:
        if whole_tick:
            return jax.checkpoint(lambda ws, h: stage(ws, h, False))(ws, h)
        return stage(ws, h, True)

    specs = P(None, "x"), P(None, "x")
    plan = check(gradient(run), arrays(), MESH, specs, specs[0], grad=False, tol=5e-2)
    assert writes(plan.jaxpr) == [(LAYERS, MODEL, MODEL)]


def test_where_there_is_no_room_for_it_it_happens_in_every_iteration():
    f = gradient(lambda ws, h: stage(ws, h, True))
    step = sw.spmd(f, mesh=sw.abstract_mesh(MESH), in_shardings=(P(None, "x"), P(None, "x")),
                   loop_memory=W / 8)  # fmt: skip
    plan = step.plan(*arrays())
    assert plan.collectives and all("once before" not in c.reason for c in plan.collectives)
    assert any(c.count == TICKS * LAYERS for c in plan.collectives)


def test_what_computes_stays_in_the_inner_loop():
    """A slice's square is no matter of layout: the stack of squares is not made."""

    def run(ws: Any, h: Any) -> Any:
        return lax.scan(lambda h, w: (jnp.tanh(h @ (w * w)), None), h, ws)[0]

    step = sw.spmd(lambda ws, xs: ticks(run, ws, xs), mesh=sw.abstract_mesh(MESH))
    outer = next(e for e in step.plan(*arrays()).body.eqns if e.name == "scan")
    assert [e.name for e in outer.bodies[0].eqns].count("mul") == 0


def test_the_gradient_of_a_layer_chosen_in_the_loop_is_added_to_the_sum_itself():
    """As in a circular pipeline's rounds: no zeros for the layers that were not chosen, in no iteration."""
    stages, ticks = 2, 4 * TICKS

    def stage(ws: Any, h: Any, i: Any) -> Any:
        return layer(lax.dynamic_index_in_dim(ws, i, 0, keepdims=False), h)

    def loss(ws: Any, xs: Any) -> Any:
        def step(h: Any, item: Any) -> Any:
            x, i = item
            return jax.vmap(stage)(ws, h + x, (i + jnp.arange(stages)) % LAYERS), None

        return lax.scan(step, jnp.zeros_like(xs[0]), (xs, jnp.arange(ticks)))[0].sum()

    ws, xs = arrays(stages)
    specs = P(None, None, "x"), P(None, None, "x")
    args = ws, np.tile(xs, (4, 1, 1, 1))
    plan = check(jax.grad(loss), args, MESH, specs, specs[0], grad=False, tol=5e-2)
    assert ("reduce-scatter", 1, stages * W * 7 / 8) in sent(plan)
    assert made("scatter-add", plan.jaxpr) == [(stages, LAYERS, MODEL, MODEL)]
    assert ws.shape not in made("broadcast_in_dim", plan.jaxpr)
    assert plan.partitioner.accumulators == {}  # none is left for another trace to meet


def made(name: str, jaxpr: Any, inside: bool = False) -> list[tuple[int, ...]]:
    """Shapes of what equations of this name make in loops."""
    out = []
    for e in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if inside and e.primitive.name == name:
            out += [v.aval.shape for v in e.outvars]
        if (inner := e.params.get("jaxpr")) is not None:
            out += made(name, inner, inside or e.primitive.name == "scan")
    return out
