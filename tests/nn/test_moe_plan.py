"""What MoE layers send: two all-to-alls a pass, and never a weight.  Plans of up to 2048 devices."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.nn import moe
from shardwise.nn.gating import GatingConfig
from shardwise.nn.moe import MoeConfig

LAYERS, SEQ, MODEL, HIDDEN = 2, 64, 64, 128
UNROLLED = "unrolled"


def stack(config, shard, axis, loop, remat, params, x, key):
    """Residual MoE layers, their mean square as the loss, auxiliary losses added, and statistics."""

    def one(h, p, key):
        y, stats = moe.layer(config, p, h, key=key, shard=shard, axis=axis)
        return h + y, stats

    if remat:
        one = jax.checkpoint(one, prevent_cse=loop == UNROLLED)
    keys = jax.random.split(key, LAYERS)
    if loop == UNROLLED:
        stats = []
        for i in range(LAYERS):
            x, s = one(x, params[i], keys[i])
            stats.append(s)
        aux = sum(s.aux_loss for s in stats)
    else:
        x, stats = lax.scan(lambda h, pk: one(h, *pk), x, (params, keys))
        aux = jnp.sum(stats.aux_loss)
    return jnp.mean(x * x) + 0.01 * aux, stats


@functools.lru_cache
def plan_of(
    devices, strategy, loop=UNROLLED, remat=False, dispatch="einsum", experts=None, hybrid=1
):
    mesh = sw.abstract_mesh({"x": devices, **({"y": hybrid} if hybrid > 1 else {})})
    config = MoeConfig(MODEL, HIDDEN, GatingConfig(experts or devices), dispatch=dispatch)
    one = jax.eval_shape(functools.partial(moe.init, config), jax.random.key(0))
    params = [one] * LAYERS
    if loop != UNROLLED:
        params = jax.eval_shape(lambda p: jax.tree.map(lambda *w: jnp.stack(w), *p), params)
    x = jax.ShapeDtypeStruct((devices, SEQ, MODEL), jnp.float32)
    axis = "x" if dispatch == "gather" else None
    shard = moe.sharder(sw.annotate, strategy)
    step = functools.partial(stack, config, shard, axis, loop, remat)
    ins = (None, P("x"), None) if strategy in ("weights", "none") else None
    return sw.spmd(
        jax.value_and_grad(step, argnums=(0, 1), has_aux=True), mesh=mesh, in_shardings=ins
    ).plan(params, x, jax.eval_shape(lambda: jax.random.key(0)))


def sent(plan):
    """Kind -> how often, loops multiplied out; and the bytes of what is not an all-to-all."""
    kinds = Counter()
    for c in plan.collectives:
        kinds[c.kind] += c.count
    return dict(kinds), sum(c.bytes * c.count for c in plan.collectives if c.kind != "all-to-all")


SIZES = [8, 128, 2048]
STRATEGIES = ["gshard", "all", "weights"]


@pytest.mark.parametrize("remat", [False, True], ids=["saved", "remat"])
@pytest.mark.parametrize("loop", [UNROLLED, "scan"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("devices", SIZES)
def test_two_all_to_alls_a_pass_and_no_weight(devices, strategy, loop, remat):
    """Two forward, two backward, two where remat repeats the forward; besides them, for each layer,
    the gradient of the gate [M, E] and the sums of the statistics, and the loss."""
    plan = plan_of(devices, strategy, loop, remat)
    kinds, small = sent(plan)
    a_layer = 6 if remat else 4
    assert kinds.pop("all-to-all") == a_layer * LAYERS
    assert set(kinds) == {"all-reduce"} and not plan.fallbacks
    ring = 2 * (devices - 1) / devices
    gate = MODEL * devices * 4
    statistics = (devices + 7) * 4
    assert small == pytest.approx(ring * (LAYERS * (gate + statistics) + 4))
    slots = plan_capacity(devices) * devices
    (size,) = {c.bytes for c in plan.collectives if c.kind == "all-to-all"}
    assert size == pytest.approx(slots * MODEL * 4 * (devices - 1) / devices)


def plan_capacity(devices):
    return GatingConfig(devices).capacity(SEQ)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_and_their_gradients_stay_where_they_are(strategy):
    plan = plan_of(128, strategy)
    out = plan.out_shardings[1][0]
    for params in (*plan.in_shardings[0], *out):
        assert params["w_in"] == params["w_out"] == P("x", None, None)


@pytest.mark.parametrize("loop", [UNROLLED, "scan"])
@pytest.mark.parametrize("devices", SIZES)
def test_the_manual_dispatch_sends_the_same(devices, loop):
    einsum, gather = (
        sent(plan_of(devices, "gshard", loop, False, d)) for d in ("einsum", "gather")
    )
    assert einsum == gather


def test_split_experts_send_a_sum_over_their_axis_more():
    """E on x, H on y: the experts' outputs, and their inputs' gradients, are sums over y.  Scattered
    before the all-to-all and gathered after, they make that smaller than for experts that are whole."""
    plan = plan_of(8, "hybrid", hybrid=4)
    kinds, _ = sent(plan)
    assert kinds["all-to-all"] == 4 * LAYERS and not plan.fallbacks
    for layer in (*plan.in_shardings[0], *plan.out_shardings[1][0]):
        assert layer["w_in"] == P("x", None, "y") and layer["w_out"] == P("x", "y", None)
    slots = plan_capacity(8) * 8 * MODEL * 4
    sums, moves = 2 * slots * (2 * 3 / 4), 4 * slots * 7 / 8
    assert sum(c.bytes for c in plan.collectives) < LAYERS * (sums + moves)
    assert max(c.bytes for c in plan.collectives) <= 2 * slots


@pytest.mark.parametrize("experts", [6, 10, 16])
def test_uneven_experts_send_their_padding_only(experts):
    plan = plan_of(8, "gshard", experts=experts)
    kinds, _ = sent(plan)
    assert kinds["all-to-all"] == 4 * LAYERS
    padded = -(-experts // 8) * 8
    slots = GatingConfig(experts).capacity(SEQ) * padded
    assert {c.bytes for c in plan.collectives if c.kind == "all-to-all"} == {
        slots * MODEL * 4 * 7 / 8
    }
