"""Choosing a layout: what is not searched for could not have been chosen; sums finished in time."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import choose
from shardwise.mesh import MeshAxes, abstract_mesh
from shardwise.nn import transformer
from shardwise.reshard import least_bytes, reshard_bytes
from shardwise.sharding import Layout, Sharding


def test_the_bound_is_below_what_is_sent():
    mesh = MeshAxes.of(abstract_mesh({"x": 2, "y": 3}))
    x, y = mesh.atoms
    splits = [(), (x,), (y,), (x, y), (y, x)]
    tilings = [
        Sharding((a, b)) for a, b in itertools.product(splits, splits) if not set(a) & set(b)
    ]
    seen = 0
    pending = [
        Sharding(((x,), ())).with_partial((y,)),
        Sharding(((), ())).with_partial((x,)),
    ]
    for src in [*tilings, *pending]:
        layout = Layout((12, 18), (12, 18), src)
        for dst in tilings:
            least, sent = least_bytes(layout, dst, 4, mesh), reshard_bytes(layout, dst, 4, mesh)
            assert least <= sent
            seen += least == sent > 0
    assert seen > 20  # and mostly it is that


@pytest.mark.parametrize("strategy", ["final", "attempt1"])
def test_leaving_searches_out_changes_no_choice(strategy, monkeypatch):
    config = transformer.TransformerConfig(
        layers=2, model=32, hidden=64, heads=4, vocab=64, remat="full"
    )
    params = transformer.abstract_params(config)
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)

    def explained():
        def step(params, tokens):
            return transformer.sgd_step(config, params, tokens, sw.annotate, strategy)

        return sw.spmd(step, mesh=abstract_mesh({"x": 2, "y": 4})).plan(params, tokens).explain()

    bounded = explained()
    monkeypatch.setattr(choose, "least_bytes", lambda *_: 0.0)  # everything is searched for
    assert explained() == bounded


def plan(f, *shapes):
    step = sw.spmd(f, mesh=abstract_mesh({"d": 4}), in_shardings=(P(), P("d")))
    return step.plan(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


def test_a_sum_is_finished_before_it_widens():
    def grad(w, x):
        loss = lambda w: jnp.sum(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        g = jax.grad(loss)(w)
        return w - jnp.tanh(g)

    (c,) = plan(grad, (64, 32), (4096, 64)).collectives
    assert (c.kind, c.dtype, c.bytes) == ("all-reduce", "bfloat16", 2 * 64 * 32 * 2 * 3 / 4)


def test_a_sum_that_another_reads_finished_is_finished_once():
    def f(w, x):
        g = x.T @ x @ w  # [64, 64] pending over d, then read three times
        return 0.5 * g, g * g

    assert [c.kind for c in plan(f, (64, 64), (4096, 64)).collectives].count("all-reduce") == 1


@pytest.mark.parametrize("draw", [jax.random.normal, jax.random.bernoulli])
def test_random_values_are_not_drawn_whole_to_save_a_few_bytes(draw):
    """They can be made anywhere and nothing is sent, but not for nothing: each device draws its rows."""

    def f(x, key):
        return x @ draw(key, shape=(64, 64)).astype(jnp.float32)

    key = jax.eval_shape(lambda: jax.random.key(0))
    spmd = sw.spmd(
        f, mesh=abstract_mesh({"d": 8}), in_shardings=(P(None, "d"), P()), out_shardings=P()
    )
    p = spmd.plan(jax.ShapeDtypeStruct((16, 64), jnp.float32), key)
    drawn = [e.outvars[0].aval.shape for e in p.jaxpr.eqns if e.primitive.name == "threefry2x32"]
    assert drawn and set(drawn) == {(8, 64)}
    assert [(c.kind, c.bytes) for c in p.collectives] == [("all-reduce", 2 * 16 * 64 * 4 * 7 / 8)]


def test_the_result_a_user_fixed_is_priced_as_asked_for():
    """A replicated result is asked for whole: its sum costs an all-reduce, not the scatter of a value
    nobody has a wish for, so gathering the small operand is cheaper."""

    def f(x, w):
        return x @ w

    spmd = sw.spmd(
        f, mesh=abstract_mesh({"d": 4}), in_shardings=(P(None, "d"), P()), out_shardings=P()
    )
    p = spmd.plan(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 64), (64, 64))))
    assert [(c.kind, c.bytes) for c in p.collectives] == [("all-gather", 16 * 64 * 4 * 3 / 4)]
