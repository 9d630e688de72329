"""The mixture-of-experts language models: the paper's rows, and a mesh beside one device."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import shardwise as sw
from shardwise.errors import ShardingError
from shardwise.mesh import device_mesh
from shardwise.models import moe
from shardwise.models.moe import PAPER, Config

SMALL = Config(layers=4, model=16, hidden=32, heads=4, vocab=24, experts=4, groups=4, remat="full")
KEY = jax.random.key(3)


def some_tokens():
    return jax.random.randint(jax.random.key(1), (4, 16), 0, SMALL.vocab)


@functools.cache
def one_device():
    params = moe.init(SMALL, jax.random.key(0))
    f = functools.partial(moe.loss, SMALL, key=KEY)
    return params, jax.jit(jax.value_and_grad(f))(params, some_tokens())


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_parameter_counts(name):
    row = PAPER[name]
    count = moe.parameter_count(row.config) / 2**30
    if "params" in row.published:
        # 10B is printed where it is 9.6
        assert count == pytest.approx(row.published["params"], rel=0.05, abs=0.5)
    assert row.config.groups % row.mesh["x"] == 0 and row.batch % row.mesh["x"] == 0


@pytest.mark.parametrize(("strategy", "mesh"), [("gshard", {"x": 4}), ("hybrid", {"x": 4, "y": 2})])
def test_a_mesh_changes_no_number(strategy, mesh):
    params, (value, grads) = one_device()
    f = functools.partial(moe.loss, SMALL, key=KEY, annotate=sw.annotate, strategy=strategy)
    specs = moe.parameter_specs(SMALL, strategy)
    step = sw.spmd(jax.value_and_grad(f), mesh=device_mesh(mesh), in_shardings=(specs, None))
    got, got_grads = step(params, some_tokens())
    np.testing.assert_allclose(got, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), got_grads, grads)
    plan = step.plan(params, some_tokens())
    assert not plan.fallbacks
    # of every MoE layer 2 forward, 2 recomputed, 2 backward
    exchanges = sum(c.count for c in plan.collectives if c.kind == "all-to-all" and "x" in c.axes)
    assert exchanges == 6 * SMALL.layers // 2


def test_an_unknown_strategy():
    with pytest.raises(ShardingError, match="unknown strategy 'no'"):
        moe.spec("no", "bsm")
