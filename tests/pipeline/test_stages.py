"""Stages that are not alike: a convolutional front end, two blocks, a projection."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.errors import ShardingError
from shardwise.pipeline import pack, pipeline_stages
from tests.pipeline.stacks import same

ROWS, TIME, BANDS, MODEL, CLASSES = 8, 8, 6, 4, 3


def front(p: Any, x: Any) -> Any:
    """[B, T, F] -> [B, T/2, M]: a convolution of stride 2 over time."""
    y = lax.conv_general_dilated(
        x, p["kernel"], (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    return jax.nn.relu(y + p["bias"])


def block(p: Any, x: Any) -> Any:
    scores = jnp.einsum("btm,bsm->bts", x @ p["q"], x)
    return x + jax.nn.softmax(scores) @ x


def project(p: Any, x: Any) -> Any:
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return y.mean(1) @ p


STAGES = [front, block, block, project]


def init() -> list[Any]:
    k = iter(jax.random.split(jax.random.key(0), 5))
    draw = lambda *shape: 0.5 * jax.random.normal(next(k), shape)
    return [
        {"kernel": draw(3, BANDS, MODEL), "bias": jnp.full(MODEL, 0.1)},
        {"q": draw(MODEL, MODEL)}, {"q": draw(MODEL, MODEL)}, draw(MODEL, CLASSES),
    ]  # fmt: skip


def plain(params: Any, x: Any) -> Any:
    for f, p in zip(STAGES, params, strict=True):
        x = f(p, x)
    return x


def loss(params: Any, x: Any) -> Any:
    y = pipeline_stages(
        STAGES, params, sw.annotate(x, P("data")), axis="stage", num_microbatches=4, remat=True
    )
    return jnp.sum(jnp.sin(y))


@pytest.mark.parametrize("mesh", [{"stage": 4, "data": 2}, None], ids=str)
def test_loss_and_gradients(mesh: Any):
    params, x = init(), jax.random.normal(jax.random.key(1), (ROWS, TIME, BANDS))
    want = jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(plain(p, x))), (0, 1)))(
        params, x
    )
    f = jax.value_and_grad(loss, (0, 1))
    packed = pack(params)
    if mesh is None:
        value, (grads, gx) = jax.jit(f)(packed, x)
        same((value, (grads.unpack(), gx)), want)
        return
    g = sw.spmd(f, mesh=sw.device_mesh(mesh))
    value, (grads, gx) = g(packed, x)
    same((value, (grads.unpack(), gx)), want)
    plan = g.plan(packed, x)
    assert plan.fallbacks == [] and plan.in_shardings[0].arrays["float32"] == P("stage", None)
    inside = Counter(
        (c.kind, c.count) for c in plan.collectives if "stage" in c.axes and c.count > 1
    )
    assert inside == {("collective-permute", 7): 2}


def test_packing_and_back():
    params = [{"a": jnp.ones((2, 3)), "n": jnp.arange(3)}, jnp.full(2, 2.0)]
    packed = pack(params)
    assert {d: a.shape for d, a in packed.arrays.items()} == {"float32": (2, 6), "int32": (2, 3)}
    same(packed.unpack(), params, 0)


ERRORS = {
    "batch": ({"num_microbatches": 3}, "3 microbatches do not divide a batch of 8"),
    "weights": ({"params": [1.0]}, "2 stages and weights of 1"),
    "rows": ({"stages": [lambda p, x: x.sum(), lambda p, x: x]}, "stage 0 returns"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str):
    options, text = ERRORS[case]
    options = {
        "stages": [lambda p, x: x * p] * 2,
        "params": [1.0, 2.0],
        "num_microbatches": 2,
        **options,
    }
    with pytest.raises(ShardingError, match=text) as e:
        pipeline_stages(x=jnp.ones((8, 2)), axis="stage", **options)
    assert "test_stages.py" in e.value.where
