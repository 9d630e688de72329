"""`sw.pipeline`: the unpipelined model's numbers, and one permute a tick."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.pipeline import Schedule, deal, undeal
from tests.pipeline import stacks
from tests.pipeline.stacks import expected, same

MESHES = [
    {"data": 2, "model": 2, "stage": 2},
    {"stage": 4, "data": 2, "model": 1},
    {"stage": 2, "data": 4, "model": 1},
    {"stage": 3, "data": 1, "model": 2},
]


def loss(params: Any, x: Any, **options: Any) -> Any:
    x = sw.annotate(x, P("data"))
    y = sw.pipeline(stacks.layer, params, x, axis="stage", **options)
    return jnp.mean(y * y)


def step(**options: Any) -> Any:
    return jax.value_and_grad(functools.partial(loss, **options), (0, 1))


SCHEDULES = [("gpipe", None), ("circular", 2)]


@pytest.fixture(scope="module")
def plain_model() -> Any:
    """Parameters, a batch, and what the unpipelined model makes of them on one device."""
    params, x = stacks.params(8), stacks.batch()
    return params, x, expected(params, x)


@pytest.mark.parametrize(("schedule", "rounds"), SCHEDULES)
def test_on_one_device(plain_model, schedule, rounds):
    params, x, want = plain_model
    f = step(num_stages=4, num_microbatches=4, schedule=schedule, rounds=rounds, remat=True)
    same(jax.jit(f)(params, x), want)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(("schedule", "rounds"), SCHEDULES)
def test_loss_and_gradients_are_those_of_the_plain_model(plain_model, mesh, schedule, rounds):
    params, x, want = plain_model
    f = step(
        num_stages=mesh["stage"], num_microbatches=4, schedule=schedule, rounds=rounds, remat=True
    )
    g = sw.spmd(f, mesh=sw.device_mesh(mesh))
    same(g(params, x), want)
    plan = g.plan(params, x)
    assert plan.fallbacks == []
    ticks = Schedule(mesh["stage"], 4, rounds or 1).ticks
    shifts = [c for c in plan.collectives if c.axes == ("stage",) and c.count > 1]
    assert Counter((c.kind, c.count) for c in shifts) == {("collective-permute", ticks): 2}
    assert plan.in_shardings[0]["wi"][0] == "stage"


def test_dealt_layers_are_not_moved():
    params, x = stacks.params(8), stacks.batch()
    options = {"num_stages": 4, "num_microbatches": 4, "schedule": "circular"}
    dealt = deal(params, 4, 2)
    same(undeal(dealt, 4, 2), params, 0)
    g = sw.spmd(
        step(dealt=True, **options), mesh=sw.device_mesh({"stage": 4, "data": 2, "model": 1})
    )
    value, (grads, gx) = g(dealt, x)
    same((value, (undeal(jax.tree.map(np.asarray, grads), 4, 2), gx)), expected(params, x))
    once = [c.kind for c in g.plan(dealt, x).collectives if "stage" in c.axes and c.count == 1]
    # x's cotangent and the outputs: finished over stages, once
    assert sorted(set(once)) == ["all-reduce"] and len(once) == 2
