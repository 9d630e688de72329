"""The Conformer: its parts by NumPy, Table 5's sizes, and that partitioning changes no number."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.errors import ShardingError
from shardwise.models import conformer, conformer_layers
from shardwise.models.conformer import ConformerConfig, Pipelined
from shardwise.pipeline import Schedule
from shardwise.testing import check

SMALL = ConformerConfig(
    layers=4, model=8, heads=2, kernel=3, features=8, vocab=6, front_end="stack", dropout=0.0
)
GPIPE = Pipelined("stage", 2, 2)
CIRCULAR = Pipelined("stage", 2, 4, "circular", 2, dealt=True)
FRAMES = np.array([32, 29, 17, 32, 24, 9, 20, 12], np.int32)


def some(config=SMALL, batch=8, seed=0):
    """A batch in which every transcript has frames enough."""
    rng = np.random.default_rng(seed)
    return {
        "features": rng.normal(size=(batch, 32, config.features)).astype(np.float32),
        "frames": FRAMES[:batch],
        "labels": rng.integers(1, config.vocab, (batch, 2)).astype(np.int32),
        "characters": np.resize(np.array([2, 1], np.int32), batch),
    }


def params_of(config):
    return conformer.init(config, jax.random.key(0))


# ---------------------------------------------------------------- the parts


def test_scores_of_relative_positions():
    q, r = (
        np.random.default_rng(i).normal(size=s) for i, s in enumerate([(2, 5, 3, 4), (9, 3, 4)])
    )
    got = conformer_layers.relative_scores(jnp.asarray(q), jnp.asarray(r))
    i, j = np.indices((5, 5))
    want = np.einsum("bind,ijnd->bnij", q, r[4 - (i - j)])  # r holds distances 4 down to -4
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [1, 4, 5])
def test_depthwise_convolution(kernel):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 6, 3)), rng.normal(size=(kernel, 3))
    before = (kernel - 1) // 2
    wide = np.pad(x, ((0, 0), (before, kernel - 1 - before), (0, 0)))
    want = sum(wide[:, k : k + 6] * w[k] for k in range(kernel))
    got = conformer_layers.depthwise(jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_batch_norm_is_over_valid_frames_and_keeps_running_statistics():
    config = dataclasses.replace(SMALL, norm="batch", momentum=0.9)
    x = np.random.default_rng(0).normal(2.0, 3.0, (2, 4, 8)).astype(np.float32)
    valid = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    p = {"conv_inner.scale": np.full(8, 2.0), "conv_inner.shift": np.full(8, 1.0)}
    state = conformer_layers.init_layer_state(config)
    y, after = conformer_layers.batch_norm(config, jnp.asarray(x), p, valid, state, True)
    mean, variance = x[valid].mean(0), x[valid].var(0)
    np.testing.assert_allclose(y, 2 * (x - mean) / np.sqrt(variance + 1e-6) + 1, atol=1e-4)
    np.testing.assert_allclose(after["mean"], 0.1 * mean, atol=1e-5)
    np.testing.assert_allclose(after["variance"], 0.9 + 0.1 * variance, rtol=1e-5)
    again, kept = conformer_layers.batch_norm(config, jnp.asarray(x), p, valid, after, False)
    np.testing.assert_allclose(
        again, 2 * (x - 0.1 * mean) / np.sqrt(0.9 + 0.1 * variance) + 1, atol=1e-4
    )
    jax.tree.map(np.testing.assert_array_equal, kept, after)


@pytest.mark.parametrize("front_end", ["stack", "conv"])
def test_frames_after_the_end_change_nothing(front_end):
    """What padding holds, and how long it is."""
    config = dataclasses.replace(SMALL, layers=1, front_end=front_end)
    batch, params = some(config), params_of(config)
    value = jax.jit(lambda p, b: conformer.loss(config, p, b)[0])
    features = np.pad(batch["features"], ((0, 0), (0, 4), (0, 0)), constant_values=7.0)
    past = np.arange(36) >= FRAMES[:, None]
    longer = {**batch, "features": np.where(past[..., None], np.float32(9.0), features)}
    np.testing.assert_allclose(value(params, longer), value(params, batch), rtol=1e-5)
    changed = {**batch, "features": batch["features"] + (np.arange(32) == 8)[None, :, None]}
    assert abs(float(value(params, changed)) - float(value(params, batch))) > 1e-4


def test_the_loss_is_ctcs():
    """Minus the log probability of all paths that spell the labels, a character."""
    config = dataclasses.replace(SMALL, layers=1, position="none")
    batch = {k: v[:2] for k, v in some(config).items()}
    batch |= {"features": batch["features"][:, :16], "frames": np.array([16, 9], np.int32)}
    batch |= {"labels": np.array([[2, 3], [4, 0]], np.int32), "characters": np.array([2, 1])}
    value, out = conformer.loss(config, params_of(config), batch)
    p = np.asarray(jax.nn.softmax(out["logits"]), np.float64)
    want = 0.0
    for probabilities, steps, labels in zip(p, (4, 3), ((2, 3), (4,)), strict=True):
        paths = itertools.product(range(config.vocab), repeat=steps)
        spelling = [
            path for path in paths
            if tuple(b for a, b in zip((0, *path), path, strict=False) if b not in (a, 0)) == labels
        ]  # fmt: skip
        want -= np.log(sum(np.prod([q[c] for q, c in zip(probabilities, path, strict=False)])
                           for path in spelling))  # fmt: skip
    np.testing.assert_allclose(value, want / 3, rtol=1e-5)
    np.testing.assert_array_equal(out["valid"], np.arange(4) < np.array([[4], [3]]))


# ---------------------------------------------------------------- the paper


def test_sizes_of_table_5():
    """Parameters in units of 2^30, as printed, and bubbles beside the published."""
    for row in conformer.PAPER.values():
        count = conformer.parameter_count(row.config) / 2**30
        assert round(count, 2) == row.published["params"]
        how = row.config.pipelined
        assert how is not None
        ratio = Schedule(how.stages, how.microbatches, how.rounds).bubble_ratio
        assert abs(ratio - row.published["bubbles"]) < 0.012


def test_two_annotations_and_none_in_a_layer():
    names = []
    one = functools.partial(conformer.loss, dataclasses.replace(SMALL, pipelined=GPIPE))
    shard = lambda x, name: (names.append(name), x)[1]
    jax.eval_shape(functools.partial(one, shard=shard), params_of(SMALL), some())
    said = {n for n in names if conformer.spec("data", n, ("x",)) is not None}
    assert said == {"features", "logits"}
    assert set(names) >= set(conformer.STRATEGIES["model"]) - {"w_position"}


# ---------------------------------------------------------------- partitioned


def gradients(config, shard, key, params, state, batch):
    def loss(params):
        value, out = conformer.loss(config, params, batch, shard=shard, key=key, state=state)
        return value, out["state"]

    (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, grads, state


CASES = {
    "data and model": ({"data": 2, "model": 2}, "model", {"front_end": "conv"}),
    "circular, statistics, dropout": (
        {"stage": 2, "data": 2}, "data",
        {"pipelined": CIRCULAR, "norm": "batch", "position": "none", "dropout": 0.2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients_are_those_of_one_device(case: str):
    mesh, strategy, options = CASES[case]
    config = dataclasses.replace(SMALL, **{"layers": 4 if "pipelined" in options else 2, **options})
    shard = conformer.sharder(sw.annotate, strategy, ("data", "model"))
    key = jax.random.key(3) if config.dropout else None
    args = params_of(config), conformer.init_state(config), some(config)
    plan = check(functools.partial(gradients, config, shard, key), args, mesh, grad=False)
    assert not plan.fallbacks


def test_pipelined_is_the_loop_over_layers():
    config = dataclasses.replace(SMALL, pipelined=CIRCULAR)
    params, batch = params_of(config), some()
    a = jax.jit(lambda p, b: conformer.loss(config, p, b)[0])(params, batch)
    plain = conformer.model_order(config, params)
    b = jax.jit(lambda p, b: conformer.loss(SMALL, p, b)[0])(plain, batch)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, plain, params_of(SMALL))


@functools.cache
def plan_of(pipelined: Pipelined, mesh: tuple[tuple[str, int], ...]):
    config = dataclasses.replace(SMALL, pipelined=pipelined, position="none")
    shard = conformer.sharder(sw.annotate, "data", ("data",))
    step = functools.partial(gradients, config, shard, None)
    placed = jax.tree.map(lambda _: P(), conformer.abstract_params(config))
    placed["layers"] = jax.tree.map(lambda _: P("stage"), placed["layers"])
    return sw.spmd(
        step, mesh=sw.abstract_mesh(dict(mesh)), in_shardings=(placed, None, P("data")),
        out_shardings=(P(), placed, None),
    ).plan(conformer.abstract_params(config), None, some(config))  # fmt: skip


@pytest.mark.parametrize(
    "pipelined", [Pipelined("stage", 4, 4), CIRCULAR], ids=["gpipe", "circular"]
)
def test_one_permute_a_tick_and_nothing_gathered(pipelined: Pipelined):
    """A layer a stage, or two in turn: what a tick sends is the shift; all else is sent once."""
    plan = plan_of(pipelined, (("stage", pipelined.stages), ("data", 2)))
    ticks = Schedule(pipelined.stages, pipelined.microbatches, pipelined.rounds).ticks
    permutes = [c for c in plan.collectives if c.kind == "collective-permute"]
    rows = 8 // pipelined.microbatches // 2  # of a microbatch, a device
    one = ("stage",), ticks, 4 * rows * 8 * SMALL.model
    assert [(c.axes, c.count, c.bytes) for c in permutes] == [one, one]  # forward, backward
    rest = [c for c in plan.collectives if c.kind != "collective-permute"]
    assert all(c.count == 1 for c in rest)
    assert {c.kind for c in rest if "stage" in c.axes} == {"all-reduce"}
    # The last stage's outputs, to all.
    assert sum(c.axes == ("stage",) for c in rest) == 1
    assert not plan.fallbacks


# ---------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"heads": 3}, "3 heads do not divide a model of 8: give head_dim"),
        ({"norm": "group"}, "norm is one of 'batch', 'layer', not 'group'"),
        ({"dropout": 1.0}, "dropout must be in [0, 1), not 1.0"),
    ],
)
def test_configs_that_make_no_model(change, message):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(SMALL, **change)
    assert str(error.value) == message


def test_an_unknown_strategy():
    with pytest.raises(ShardingError) as error:
        conformer.spec("none", "w_in")
    assert str(error.value) == (
        "unknown strategy 'none'\n  facts strategies are data, model\n"
        "  hint  see STRATEGIES for what each one splits"
    )


def test_without_optax_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "optax":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError) as error:
        jax.eval_shape(functools.partial(conformer.loss, SMALL), params_of(SMALL), some())
    assert str(error.value) == "no optax\n  hint  pip install 'shardwise[speech]'"
