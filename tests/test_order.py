"""Of two dots that read the same value, the one with more to follow comes first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.capture import capture
from shardwise.program import Body, Lit

S = jax.ShapeDtypeStruct


def dots(body: Body) -> list[tuple[int, ...]]:
    return [e.outvars[0].shape for e in body.eqns if e.name == "dot_general"]


def in_order(body: Body) -> bool:
    known = {*body.invars, *(v for v, _ in body.consts)}
    for eqn in body.eqns:
        if not all(isinstance(v, Lit) or v in known for v in eqn.invars):
            return False
        known.update(eqn.outvars)
    return True


def test_the_gradient_that_goes_on_comes_before_the_weights():
    def back(dy, x, w):
        return x.T @ dy, jnp.tanh(dy @ w.T)

    body, _ = capture(back, [S((32, 4), "f4"), S((32, 8), "f4"), S((8, 4), "f4")])
    assert dots(body) == [(32, 8), (8, 4)]
    assert in_order(body)


def test_a_dot_waits_for_its_operands():
    def back(dy, x, w):
        dw = x.T @ dy
        return dw, jnp.tanh(dy @ (w + dw).T)

    body, _ = capture(back, [S((32, 4), "f4"), S((32, 8), "f4"), S((8, 4), "f4")])
    assert dots(body) == [(8, 4), (32, 8)]
    assert in_order(body)


def test_bodies_too_and_chains():
    def layer(h, w):
        return jnp.tanh(h @ w), ()

    def loss(ws, x):
        return jax.lax.scan(layer, x, ws)[0].sum()

    body, _ = capture(jax.grad(loss), [S((3, 8, 8), "f4"), S((32, 8), "f4")])
    scans = [e for e in body.eqns if e.name == "scan"]
    backward = scans[-1].bodies[0]
    assert dots(backward) == [(32, 8), (8, 8)]
    assert in_order(backward)


def test_a_layer_of_equations_is_not_pulled_along():
    def back(dy, x, w):
        dw = x.T @ dy
        for _ in range(20):
            w = jnp.sin(w)
        return dw, jnp.tanh(dy @ w.T)

    body, _ = capture(back, [S((32, 4), "f4"), S((32, 8), "f4"), S((8, 4), "f4")])
    assert dots(body) == [(8, 4), (32, 8)]
    assert in_order(body)


def test_a_gathered_activation_is_not_kept_for_the_gradient_of_the_weights():
    """The cotangent is gathered for the layer's input; the weights' gradient uses that too, and the
    activation as it lies."""

    def step(w, x, dy):
        y, back = jax.vjp(lambda w, x: x @ w, w, sw.annotate(x, P("x", "y")))
        dw, dx = back(sw.annotate(dy, P("x", "y")))
        return jnp.sum(y), sw.annotate(dw, P("y", None)), sw.annotate(jnp.tanh(dx), P("x", "y"))

    mesh = sw.abstract_mesh({"x": 2, "y": 4})
    args = [S(s, "f4") for s in ((256, 256), (1024, 256), (1024, 256))]
    plan = sw.spmd(step, mesh=mesh, in_shardings=(P(None, "y"), None, None)).plan(*args)
    large = [c for c in plan.collectives if c.bytes > 100_000]
    assert [c.kind for c in large] == ["all-gather"] * 2  # the activation, then the cotangent
    (weights,) = (
        choice
        for eqn, (choice, _) in plan.partitioner.eqn_choices.items()
        if eqn.name == "dot_general" and eqn.outvars[0].shape == (256, 256)
    )
    assert sorted(l.sharding.text(plan.axes) for l in weights.ins) == ["[x, -]", "[x, y]"]
    cotangent, activation = weights.ins
    assert activation.sharding.axes[1] and not cotangent.sharding.axes[1]
