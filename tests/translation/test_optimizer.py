"""Adafactor on stacks of matrices, against a plain loop over the matrices; and its plan."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwise as sw
from shardwise.nn import encoder_decoder as model
from shardwise.translation.optimizer import OptimizerOptions, adafactor, leading_dims

CONFIG = model.TranslationConfig(
    model=16, hidden=32, heads=4, source_vocab=24, target_vocab=20, experts=4, groups=4,
    encoder_layers=4, decoder_layers=2,
)  # fmt: skip
OPTIONS = OptimizerOptions(factor_from=8, warmup=3, rate=0.5)


def by_hand(options, p, grads):
    """Shazeer and Stern 2018, algorithm 4, on one matrix or vector, in float64."""
    p = np.asarray(p, np.float64)
    rows = cols = full = 0.0
    for t, g in enumerate(np.asarray(grads, np.float64), start=1):
        beta = min(options.beta2, 1 - t**-options.decay)
        square = g * g + 1e-30
        if p.ndim == 2 and min(p.shape) >= options.factor_from:
            rows = beta * rows + (1 - beta) * square.mean(1)
            cols = beta * cols + (1 - beta) * square.mean(0)
            v = rows[:, None] * cols[None] / rows.mean()
        else:
            full = beta * full + (1 - beta) * square
            v = full
        u = g / np.sqrt(v)
        u = u / max(1.0, np.sqrt(np.mean(u * u)) / options.clip)
        size = max(np.sqrt(np.mean(p * p)), 1e-3) if options.relative else 1.0
        p = p - size * options.rate / np.sqrt(max(t, options.warmup)) * u
    return p


def test_each_matrix_by_itself():
    params = model.init(CONFIG, jax.random.key(0))
    optimizer = adafactor(OPTIONS, CONFIG)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    rng = np.random.default_rng(0)
    grads = [
        # Experts whose gradients differ a thousandfold: mixed, the small one would not move.
        jax.tree.map(
            lambda p: (10.0 ** rng.integers(-3, 1, (*p.shape[:2], *[1] * (p.ndim - 2)))
                       * rng.normal(size=p.shape)).astype(np.float32),
            params,
        )
        for _ in range(4)
    ]  # fmt: skip
    got, state = params, optimizer.init(params)
    for g in grads:
        got, state = step(got, state, g)
    for stack, layer, *names in (
        ("encoder", 1, "moe", "w_in"), ("encoder", 1, "moe", "w_out"), ("encoder", 1, "moe", "gate"),
        ("decoder", 0, "w_in"), ("decoder", 0, "ffn_norm"),
    ):  # fmt: skip
        pick = lambda t: _at(t, stack, layer, *names)  # noqa: B023
        n = 1 + (names[0] == "moe" and names[-1] != "gate")
        flat = lambda x: np.asarray(x).reshape(-1, *x.shape[n:])  # noqa: B023
        columns = [flat(pick(g)) for g in grads]
        want = [
            by_hand(OPTIONS, p, [c[i] for c in columns]) for i, p in enumerate(flat(pick(params)))
        ]
        np.testing.assert_allclose(flat(pick(got)), want, rtol=2e-5, atol=1e-6, err_msg=str(names))


def _at(tree, *path):
    for k in path:
        tree = tree[k]
    return tree


def test_a_counter_is_one_number():
    state = jax.eval_shape(adafactor(OPTIONS, CONFIG).init, model.abstract_params(CONFIG))
    factored = state["encoder"][1]["moe"]["w_in"][0]
    assert factored.count.shape == ()
    assert factored.v_row.shape == (2, 4, 16) and factored.v_col.shape == (2, 4, 32)
    paths = jax.tree_util.tree_flatten_with_path(model.abstract_params(CONFIG))[0]
    assert {leading_dims(CONFIG, path) for path, _ in paths} == {0, 1, 2}
    flat = dataclasses.replace(CONFIG, scan=False)
    paths = jax.tree_util.tree_flatten_with_path(model.abstract_params(flat))[0]
    assert {leading_dims(flat, path) for path, _ in paths} == {0, 1}


def test_learning_rate():
    options = OptimizerOptions()
    np.testing.assert_allclose(options.learning_rate(0), 0.01, rtol=1e-6)
    np.testing.assert_allclose(options.learning_rate(9_999), 0.01, rtol=1e-6)
    np.testing.assert_allclose(options.learning_rate(39_999), 0.005, rtol=1e-6)


def test_experts_and_their_moments_stay_where_they_are():
    """Of an update of split experts, only the sums that clip each one's update are ever sent."""
    config = dataclasses.replace(CONFIG, model=32, hidden=64, experts=8)
    optimizer = adafactor(OPTIONS, config)

    def update(params, state, grads):
        grads = sw.annotate(grads, jax.sharding.PartitionSpec(None, "x"))
        params = {"encoder": [{"moe": {"w_in": params}}]}
        updates, state = optimizer.update({"encoder": [{"moe": {"w_in": grads}}]}, state, params)
        return optax.apply_updates(params, updates), state

    w = jax.ShapeDtypeStruct((2, 8, 32, 64), jnp.float32)
    state = jax.eval_shape(optimizer.init, {"encoder": [{"moe": {"w_in": w}}]})
    plan = sw.spmd(update, mesh=sw.abstract_mesh({"x": 8})).plan(w, state, w)
    assert plan.collectives == []
    for name, layout in zip(plan.names, plan.in_layouts, strict=True):
        if "count" not in name and layout.shape != (2, 8, 1):
            assert "x" in layout.sharding.text(plan.axes), name


def test_a_gradient_is_summed_once():
    """It is squared as g * g, which is priced as one value brought, not two."""
    optimizer = adafactor(OPTIONS, CONFIG)

    def step(w, state, x):
        x = sw.annotate(x, jax.sharding.PartitionSpec("x"))
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        updates, state = optimizer.update({"w": grads}, state, {"w": w})
        return w + updates["w"], state

    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 128), (4096, 64)))
    state = jax.eval_shape(optimizer.init, {"w": w})
    plan = sw.spmd(step, mesh=sw.abstract_mesh({"x": 8})).plan(w, state, x)
    assert [c.kind for c in plan.collectives] == ["all-reduce"]


@pytest.mark.parametrize("options", [{"rate": 0}, {"warmup": 0}, {"beta2": 1.0}, {"clip": -1.0}])
def test_settings_that_cannot_be(options):
    with pytest.raises(ValueError, match="above 0"):
        OptimizerOptions(**options)
