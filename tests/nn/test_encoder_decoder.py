"""The translation Transformer: against one device, against itself step by step, and Table 1."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise as sw
from shardwise.errors import ShardingError
from shardwise.mesh import device_mesh
from shardwise.nn import encoder_decoder as model
from shardwise.nn import moe
from shardwise.nn.attention import dropout, sinusoids
from shardwise.nn.gating import GatingConfig

# No limit of capacity: what an expert does with a token depends on no other token.
FREE = GatingConfig(
    4, capacity_factor=None, eval_capacity_factor=None, random_routing=False, aux_scaled=True
)
CONFIG = model.TranslationConfig(
    model=16, hidden=32, heads=4, source_vocab=24, target_vocab=20, experts=4, groups=4, dropout=0.0
)
SMALL = dataclasses.replace(CONFIG, gating=FREE)
ALL_MOE = dataclasses.replace(CONFIG, moe_every=1, encoder_layers=1, decoder_layers=1)
DENSE = dataclasses.replace(CONFIG, experts=0)


def batch_of(size: int = 8, source: int = 7, target: int = 6, seed: int = 0):
    rng = np.random.default_rng(seed)

    def sentences(length: int, vocab: int) -> np.ndarray:
        x = rng.integers(3, vocab, (size, length)).astype(np.int32)
        ends = rng.integers(length // 2, length + 1, size)
        return np.where(np.arange(length) < ends[:, None], x, 0)

    return {"source": sentences(source, 24), "target": sentences(target, 20)}


@functools.lru_cache
def params_of(config):
    return model.init(config, jax.random.key(0))


def value_and_grad(config, **options):
    def f(params, batch, key):
        objective = functools.partial(model.loss, config, batch=batch, key=key, **options)
        return jax.value_and_grad(objective, has_aux=True)(params)

    return f


def logical(tree):
    return jax.tree.map(np.asarray, tree, is_leaf=lambda x: isinstance(x, sw.PaddedArray))


def assert_close(got, want, tolerance=2e-5):
    got, want = logical(got), logical(want)
    for (path, b), a in zip(
        jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True
    ):
        scale = max(float(np.max(np.abs(b), initial=0.0)), 1e-6)
        off = float(np.max(np.abs(a - b), initial=0.0)) / scale
        assert off <= tolerance, f"{jax.tree_util.keystr(path)}: {off}"


# -- partitioned ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "strategy", "mesh"),
    [
        (dataclasses.replace(CONFIG, dropout=0.1, remat="full"), "gshard", {"x": 4}),
        (dataclasses.replace(ALL_MOE, experts=8), "hybrid", {"x": 2, "y": 2}),
        (ALL_MOE, "weights", {"x": 3}),
        (dataclasses.replace(ALL_MOE, dispatch="gather"), "gshard", {"x": 4}),
        (dataclasses.replace(ALL_MOE, experts=0), "hybrid", {"x": 2, "y": 4}),
    ],
    ids=["gshard, noise", "hybrid", "weights, uneven", "gather", "dense"],
)
def test_partitioned_it_is_the_one_device_program(config, strategy, mesh):
    params, batch, key = params_of(config), batch_of(), jax.random.key(1)
    want = jax.jit(value_and_grad(config))(params, batch, key)
    f = value_and_grad(config, annotate=sw.annotate, strategy=strategy, axes=tuple(mesh))
    step = sw.spmd(f, mesh=device_mesh(mesh))
    assert_close(step(params, batch, key), want)
    assert step.plan(params, batch, key).fallbacks == []


@pytest.mark.parametrize("strategy", ["gshard", "weights"])
def test_expert_weights_and_their_gradients_stay_split(strategy):
    config = dataclasses.replace(CONFIG, model=64, hidden=512, experts=8, groups=8, dropout=0.1)
    f = value_and_grad(config, annotate=sw.annotate, strategy=strategy, axes=("x",))
    batch = {k: jax.ShapeDtypeStruct((16, 32), jnp.int32) for k in ("source", "target")}
    key = jax.eval_shape(lambda: jax.random.key(0))
    step = sw.spmd(f, mesh=sw.abstract_mesh({"x": 8}))
    plan = step.plan(model.abstract_params(config), batch, key)
    for name, layout in zip(plan.names, plan.in_layouts, strict=True):
        if "'moe'" in name and "gate" not in name:
            assert layout.sharding.text(plan.axes) == "[-, x, -, -]", name
    _, grads = plan.out_shardings
    assert grads["encoder"][1]["moe"]["w_in"] == jax.sharding.PartitionSpec(None, "x", None, None)
    expert = 64 * 512 * 4
    for c in plan.collectives:
        assert c.kind in ("all-to-all", "all-reduce") or c.bytes < expert, c
        assert c.kind != "all-reduce" or c.bytes < 2 * 3 * 64 * 512 * 4, c


# -- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, DENSE], ids=["experts", "dense"])
def test_a_position_sees_the_past_only(config):
    params, batch = params_of(config), batch_of()
    target = np.maximum(batch["target"], 1)
    memory, _ = model.encode(config, params, batch["source"])
    decode = jax.jit(lambda t: model.decode(config, params, memory, batch["source"], t)[0])
    before, changed = (
        decode(target),
        decode(np.concatenate([target[:, :3], target[:, 3:] % 3 + 4], 1)),
    )
    np.testing.assert_allclose(changed[:, :3], before[:, :3], atol=1e-6)
    assert np.all(np.max(np.abs(changed[:, 3:] - before[:, 3:]), axis=-1) > 1e-3)


def test_padding_does_not_leak():
    """More padding changes nothing, with experts of little capacity: padding takes no slots."""
    gating = GatingConfig(4, min_capacity=1, random_routing=False, aux_scaled=True)
    config = dataclasses.replace(CONFIG, gating=gating, groups=1)
    params, batch = params_of(CONFIG), batch_of()
    more = {k: np.pad(x, ((0, 0), (0, 3))) for k, x in batch.items()}
    # The capacity is that of the tokens' number: the same number of slots for both.
    slots = gating.capacity(batch["source"].size), gating.capacity(more["source"].size)
    wider = dataclasses.replace(gating, capacity_factor=slots[0] / slots[1])
    value = lambda c, b: jax.jit(functools.partial(model.loss, c))(params, b)
    want, metrics = value(config, batch)
    assert metrics["dropped"] > 0.05
    free = dataclasses.replace(config, gating=dataclasses.replace(gating, capacity_factor=None))
    assert_close(value(free, more), value(free, batch))
    got, padded = value(dataclasses.replace(config, gating=wider), more)
    encoder = slice(0, 1)  # whose slots are the same
    np.testing.assert_allclose(padded["load"][encoder], metrics["load"][encoder], atol=1e-6)
    assert np.isfinite(got) and np.isfinite(want)


def test_a_stack_is_the_same_unrolled_and_recomputed():
    config = dataclasses.replace(ALL_MOE, encoder_layers=2)
    params, batch, key = params_of(config), batch_of(), jax.random.key(1)
    want = jax.jit(value_and_grad(config))(params, batch, key)
    dots = dataclasses.replace(config, remat="dots")
    assert_close(jax.jit(value_and_grad(dots))(params, batch, key), want)
    flat = dataclasses.replace(config, scan=False)
    got = jax.jit(value_and_grad(flat))(model.init(flat, jax.random.key(0)), batch, key)
    assert_close(got[0], want[0])
    second = jax.tree.map(lambda x: x[1], want[1]["encoder"])
    assert_close(got[1]["encoder"][1], second)


def test_bfloat16_gates_in_float32():
    half = dataclasses.replace(CONFIG, dtype="bfloat16", gating=FREE)
    params, batch = params_of(half), batch_of()
    jaxpr = jax.make_jaxpr(functools.partial(model.loss, half))(params, batch)
    text = str(jaxpr)
    assert "bf16[4,14,4]" not in text and "f32[4,14,4]" in text  # [G, S, E] of the encoder
    got, want = (jax.jit(functools.partial(model.loss, c))(params, batch)[0] for c in (half, SMALL))
    np.testing.assert_allclose(got, want, rtol=2e-2)


def test_loss_and_metrics():
    """The loss is the mean over targets' own tokens, smoothed as said; the metrics are sums."""
    config = dataclasses.replace(SMALL, label_smoothing=0.2, aux_weight=0.5)
    params, batch = params_of(SMALL), batch_of()
    value, metrics = jax.jit(functools.partial(model.loss, config))(params, batch)
    memory, _ = model.encode(config, params, batch["source"])
    scores, _ = model.decode(config, params, memory, batch["source"], batch["target"])
    logp = np.asarray(jax.nn.log_softmax(scores))[:, :-1]
    labels = batch["target"][:, 1:]
    used = labels != 0
    nats = -np.take_along_axis(logp, labels[..., None], -1)[..., 0][used]
    smoothed = 0.8 * nats - 0.2 * logp.mean(-1)[used]
    np.testing.assert_allclose(metrics["loss"], nats.mean(), rtol=1e-5)
    assert metrics["tokens"] == used.sum()
    layers = 2  # one in each stack
    np.testing.assert_allclose(
        value, smoothed.mean() + 0.5 * layers * metrics["aux_loss"], rtol=1e-5
    )
    assert metrics["load"].shape == (layers, 4)
    np.testing.assert_allclose(metrics["load"].sum(axis=1), 2, rtol=1e-6)  # two experts a token
    routed = (batch["source"] != 0).sum(1) + used.sum(1)
    np.testing.assert_array_equal(metrics["sequence_routed"], routed)
    assert not np.any(metrics["sequence_overflow"])


def test_overflow_of_sequences_adds_up_to_that_of_the_layers():
    gating = GatingConfig(4, capacity_factor=0.3, min_capacity=1, random_routing=False)
    config = dataclasses.replace(CONFIG, gating=gating)
    params, batch = params_of(CONFIG), batch_of()
    encoder = model.encode(config, params, batch["source"], train=True)[1]
    tokens = (batch["source"] != 0).sum()
    assert encoder["overflow"][0] > 0.1
    lost = encoder["sequence_overflow"].sum()
    np.testing.assert_allclose(lost, encoder["overflow"][0] * tokens, rtol=1e-5)


# -- step by step -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [dataclasses.replace(SMALL, decoder_layers=4), dataclasses.replace(DENSE, scan=False)],
    ids=["experts", "dense, unrolled"],
)
def test_step_by_step_it_is_the_full_pass(config):
    """Three hypotheses of each sentence, interleaved; each must get its own full pass's logits."""
    beams, length = 3, 5
    params, batch = params_of(config), batch_of(4)
    source = batch["source"]
    rng = np.random.default_rng(1)
    targets = rng.integers(1, 20, (4, beams, length)).astype(np.int32)
    memory, _ = model.encode(config, params, source)
    full = jax.jit(lambda t: model.decode(config, params, memory, source, t)[0])
    want = np.stack([full(targets[:, k]) for k in range(beams)], axis=1)

    projected = model.project_memory(config, params, memory)
    step = jax.jit(functools.partial(model.decode_step, config))
    cache = model.init_cache(config, 4, beams, length)
    own = np.arange(beams * length) % beams == np.arange(beams)[:, None]
    for t in range(length):
        mask = np.broadcast_to(own & (np.arange(beams * length) < (t + 1) * beams), (4, *own.shape))
        said = projected if t % 2 else memory  # either may be given
        at = jnp.int32(t)
        logits, cache = step(params, cache, targets[:, :, t], at, mask, said, source != 0)
        np.testing.assert_allclose(logits, want[:, :, t], atol=2e-5)


# -- sizes --------------------------------------------------------------------------------------------


def test_sizes_of_the_paper():
    """GShard Table 1: weights as printed (2^30 is its billion, from the sizes it gives)."""
    printed = {
        "moe_2048e_36l": 600, "moe_2048e_12l": 200, "moe_512e_36l": 150, "moe_512e_12l": 50,
        "moe_128e_36l": 37, "moe_128e_12l": 12.5, "moe_2048e_60l": 1000,
    }  # fmt: skip
    assert set(printed) == set(model.PAPER)
    for name, billions in printed.items():
        config = model.PAPER[name]
        expert = 2 * 1024 * 8192
        layers = (config.encoder_layers + config.decoder_layers) // 2
        shapes = model.abstract_params(config)
        experts = sum(
            x.size
            for path, x in jax.tree_util.tree_leaves_with_path(shapes)
            if "moe" in jax.tree_util.keystr(path) and x.ndim == 4
        )
        assert experts == layers * config.experts * expert
        total = model.parameter_count(config)
        np.testing.assert_allclose(total / 2**30, billions, rtol=0.04)
        # the rest: attention, dense layers, gates, norms, vocabularies
        attention, m = 4 * 1024 * 2048, 1024
        rest = 2 * layers * attention + config.decoder_layers * (attention + m)
        rest += layers * (expert + config.experts * m) + 4 * layers * m + 2 * m + 96_000 * m
        assert total == experts + rest


def test_the_dense_model_computes_as_much_a_token():
    """The wide layer's multiplications are those of all experts' slots at a capacity of 1."""
    config = model.TranslationConfig(experts=8, groups=4)
    dense = dataclasses.replace(config, experts=0)
    rows, hidden = model.abstract_params(dense)["encoder"][1]["w_in"].shape[1:]
    groups, tokens = 4, 64
    slots = groups * config.moe.gating.capacity(tokens) * config.experts
    assert slots * config.model * config.hidden == groups * tokens * rows * hidden


def test_dropout_and_positions():
    x = jnp.ones((64, 64))
    y = np.asarray(dropout(x, 0.25, jax.random.key(0)))
    np.testing.assert_allclose(sorted(set(y.ravel())), [0, 4 / 3], rtol=1e-6)
    assert abs(y.mean() - 1) < 0.05
    assert dropout(x, 0.25, None) is x
    s = np.asarray(sinusoids(jnp.arange(5), 8))
    np.testing.assert_allclose(s[3, :4], np.sin(3 / 10_000 ** (np.arange(4) / 3)), rtol=1e-5)
    np.testing.assert_allclose(s[3, 4:], np.cos(3 / 10_000 ** (np.arange(4) / 3)), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_layers": 3}, "encoder_layers must be a multiple of moe_every=2"),
        ({"heads": 3}, "3 heads do not divide a model of 128: give head_dim"),
        ({"experts": -1}, "experts must not be negative: -1"),
        ({"gating": GatingConfig(4)}, "gating has 4 experts, the model 8"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), not 1.0"),
        ({"remat": "all"}, "remat is None, 'full' or 'dots', not 'all'"),
        ({"groups": 0}, "groups must be at least 1, not 0"),
    ],
)
def test_sizes_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        model.TranslationConfig(**options)


def test_strategies_are_those_of_the_layer():
    assert set(model.STRATEGIES) <= set(moe.STRATEGIES)
    with pytest.raises(ShardingError, match="unknown strategy 'both'"):
        model.spec("both", "bsm")
