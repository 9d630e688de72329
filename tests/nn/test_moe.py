"""The mixture-of-experts layer: against a loop over tokens, by gathers as by einsums, partitioned."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.nn import gating, moe
from shardwise.nn.gating import GatingConfig
from shardwise.nn.moe import MoeConfig
from shardwise.testing import check

KEY = jax.random.key(5)


def config_of(experts=8, k=2, dispatch="einsum", dtype="float32", **gate):
    return MoeConfig(8, 12, GatingConfig(experts, k, **gate), dispatch=dispatch, dtype=dtype)


def arguments(config, groups=8, tokens=8):
    x = jax.random.normal(jax.random.key(1), (groups, tokens, config.model))
    return jax.jit(functools.partial(moe.init, config))(jax.random.key(0)), x


def program(config, strategy="none", axis=None, axes=("x", "y")):
    """The layer's results and its auxiliary loss, annotated."""

    def run(params, x):
        shard = moe.sharder(sw.annotate, strategy, axes)
        y, stats = moe.layer(config, params, x, key=KEY, shard=shard, axis=axis)
        return y, stats.aux_loss

    return run


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3])
def test_each_token_is_the_weighted_sum_of_its_experts(k):
    config = config_of(4, k, capacity_factor=0.5 / k, min_capacity=1)
    params, x = arguments(config, 2, 16)

    @jax.jit
    def both(params, x):
        logits = jnp.einsum("gsm,me->gse", x, params["gate"])
        routing = gating.gate(config.gating, logits, key=jax.random.split(KEY)[1])
        return moe.layer(config, params, x, key=KEY), routing

    (y, stats), routing = jax.tree.map(np.asarray, both(params, x))
    w_in, w_out, tokens = (np.asarray(v) for v in (params["w_in"], params["w_out"], x))
    want = np.zeros(x.shape)
    for g, s, j in np.ndindex(2, 16, k):
        e = routing.expert[g, s, j]
        hidden = np.maximum(tokens[g, s] @ w_in[e], 0)
        want[g, s] += routing.weight[g, s, j] * (hidden @ w_out[e])
    np.testing.assert_allclose(y, want, atol=1e-5)
    lost = ~routing.kept.any(-1)
    assert lost.any() and (y[lost] == 0).all()  # overflow: the residual's alone
    assert float(stats.overflow) == pytest.approx(lost.mean())


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_activations(activation):
    config = dataclasses.replace(config_of(1, 1), activation=activation)
    params, x = arguments(config, 1, 4)
    y, _ = moe.layer(config, params, x, key=KEY)
    gates = jnp.ones((1, 4, 1))  # one expert: the softmax is 1
    want = gates * (getattr(jax.nn, activation)(x @ params["w_in"][0]) @ params["w_out"][0])
    np.testing.assert_allclose(y, want, atol=1e-5)


def test_gating_is_in_float32_under_bfloat16():
    config = config_of(4, dtype="bfloat16")
    params, x = arguments(config, 1, 16)
    y, stats = moe.layer(config, params, x, key=KEY)
    read = x.astype(jnp.bfloat16).astype(jnp.float32)
    logits = jnp.einsum("gsm,me->gse", read, params["gate"])
    want = gating.gate(config.gating, logits, key=jax.random.split(KEY)[1]).stats
    assert y.dtype == jnp.bfloat16
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(stats))
    np.testing.assert_allclose(stats.entropy, want.entropy, rtol=1e-6)
    np.testing.assert_array_equal(stats.load, want.load)


def test_padding_goes_nowhere():
    """Tokens among padding get what they get alone; capacity enough for both."""
    config = config_of(4, capacity_factor=None, random_routing=False)
    params, x = arguments(config, 1, 8)
    valid = jnp.array([[True, False, True, True, False, True, False, True]])
    y, stats = moe.layer(config, params, x, valid=valid)
    alone, short = moe.layer(config, params, x[valid][None])
    np.testing.assert_allclose(y[valid], alone[0], atol=1e-5)
    assert (y[~valid] == 0).all()
    for a, b in zip(jax.tree.leaves(stats), jax.tree.leaves(short), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("axis", [None, "x"])
def test_gathers_equal_einsums_on_one_device(k, axis):
    """In value and gradient; outside a mesh, the manual subgraph is the program of one device."""
    config = config_of(6, k)
    args = arguments(config, 4, 16)

    def objective(config, axis, params, x):
        y, stats = moe.layer(config, params, x, key=KEY, axis=axis)
        return jnp.sum(jnp.sin(y)) + stats.aux_loss

    einsum, gather = (
        jax.jit(jax.value_and_grad(functools.partial(objective, *c), argnums=(0, 1)))(*args)
        for c in ((config, None), (dataclasses.replace(config, dispatch="gather"), axis))
    )
    for a, b in zip(jax.tree.leaves(einsum), jax.tree.leaves(gather), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


# --- partitioned ----------------------------------------------------------------------------------

WAYS = {"einsum": ("einsum", None), "gather": ("gather", None), "manual": ("gather", "x")}


@pytest.mark.parametrize(
    ("way", "experts", "devices"),
    [
        *(("einsum", e, d) for e, d in ((8, 8), (16, 8), (2, 8), (6, 8), (10, 4), (5, 3))),
        *(("gather", e, d) for e, d in ((8, 8), (6, 8))),
        *(("manual", e, d) for e, d in ((8, 8), (6, 8), (10, 4))),
    ],
)
def test_experts_more_or_fewer_than_devices(way, experts, devices):
    """Values and gradients of one device; weights stay where they are."""
    dispatch, axis = WAYS[way]
    config = config_of(experts, dispatch=dispatch)
    args = arguments(config, devices * 2 if devices < 8 else 8, tokens=32)
    plan = check(program(config, "gshard", axis), args, {"x": devices}, tol=1e-4, together=True)
    kinds = [c.kind for c in plan.collectives]
    assert kinds.count("all-to-all") == 4  # two forward, two backward
    assert set(kinds) <= {"all-to-all", "all-reduce"} and not plan.fallbacks
    params = plan.in_shardings[0][0]
    assert params["w_in"] == params["w_out"] == P("x", None, None)


@pytest.mark.parametrize("groups", [5, 12])
@pytest.mark.parametrize("way", ["einsum", "manual"])
def test_groups_that_do_not_divide(way, groups):
    dispatch, axis = WAYS[way]
    config = config_of(6, dispatch=dispatch)
    check(
        program(config, "all", axis), arguments(config, groups), {"x": 4}, tol=1e-4, together=True
    )


@pytest.mark.parametrize(
    ("way", "experts"), [("einsum", 4), ("einsum", 6), ("gather", 4), ("manual", 6)]
)
def test_experts_that_are_split_themselves(way, experts):
    """GSPMD's hybrid: E on x, H on y."""
    dispatch, axis = WAYS[way]
    config = config_of(experts, dispatch=dispatch)
    plan = check(
        program(config, "hybrid", axis),
        arguments(config),
        {"x": 4, "y": 2},
        tol=1e-4,
        together=True,
    )
    params = plan.in_shardings[0][0]
    assert params["w_in"] == P("x", None, "y") and params["w_out"] == P("x", "y", None)
    assert not plan.fallbacks


def test_one_axis_for_groups_and_experts_of_two():
    config = config_of(8, dispatch="gather")
    axes = (("x", "y"), "z")
    run = program(config, "all", ("x", "y"), axes)
    check(run, arguments(config), {"x": 2, "y": 4}, tol=1e-4, together=True)


def test_the_papers_operators_by_hand():
    """`auto_to_manual` and `manual_to_auto` around the rows' way there, as in GShard 3.2."""
    config = config_of(8)
    params, x = arguments(config)

    def by_hand(params, x):
        logits = jnp.einsum("gsm,me->gse", x, params["gate"])
        routing = gating.gate(config.gating, logits, key=jax.random.split(KEY)[1])
        rows, place, weight = (
            sw.auto_to_manual(v, P("x"), axes="x")
            for v in (x, gating.places(routing), routing.weight)
        )
        sent = moe.to_slots(rows, place, 8, routing.capacity)
        sent = lax.all_to_all(jnp.moveaxis(sent, 1, 0), "x", 0, 1, tiled=True)
        shape = (8, 8, routing.capacity, config.model)
        inputs = sw.manual_to_auto(sent, P("x"), axes="x", shape=shape)
        hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", inputs, params["w_in"]))
        out = jnp.einsum("egch,ehm->gecm", hidden, params["w_out"])
        out = sw.auto_to_manual(out, P(None, "x"), axes="x")
        out = lax.all_to_all(out, "x", 0, 1, tiled=True)
        y = moe.to_tokens(out, place, weight)
        return sw.manual_to_auto(y, P("x"), axes="x", shape=x.shape)

    want = jax.jit(program(config))(params, x)[0]
    got = sw.spmd(by_hand, mesh=sw.device_mesh({"x": 8}))(params, x)
    np.testing.assert_allclose(got, want, atol=1e-5)


# --- errors and tables ----------------------------------------------------------------------------


def test_specs():
    assert moe.spec("gshard", "groups") == P("x", None, None)
    assert moe.spec("gshard", "gate") == P(None, None)
    assert moe.spec("gshard", "w_in") is None
    assert moe.spec("hybrid", "w_out", ("experts", "inside")) == P("experts", "inside", None)
    with pytest.raises(sw.ShardingError, match="unknown strategy 'best'"):
        moe.spec("best", "gate")
    with pytest.raises(sw.ShardingError, match="unknown tensor 'w'"):
        moe.spec("all", "w")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": 0}, "model must be at least 1, not 0"),
        ({"activation": "tan"}, "activation is one of 'relu', 'gelu', 'silu', not 'tan'"),
        ({"dispatch": "sort"}, "dispatch is 'einsum' or 'gather', not 'sort'"),
    ],
)
def test_settings(wrong, message):
    with pytest.raises(ValueError) as e:
        dataclasses.replace(config_of(), **wrong)
    assert str(e.value) == message


def test_shapes_that_are_wrong():
    config = config_of()
    params, x = arguments(config)
    with pytest.raises(ValueError, match=r"x is groups of tokens \[G, S, 8\], not \[64, 8\]"):
        moe.layer(config, params, x.reshape(64, 8), key=KEY)
    with pytest.raises(ValueError, match=r"w_in is \[8, 8, 12\], not \[4, 8, 12\]"):
        moe.layer(config, {**params, "w_in": params["w_in"][:4]}, x, key=KEY)
    with pytest.raises(ValueError, match="axis is for dispatch='gather'"):
        moe.layer(config, params, x, key=KEY, axis="x")
