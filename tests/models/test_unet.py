"""The 3D U-Net: what it computes, the same on every mesh, and that splitting space sends halos."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.models import unet
from shardwise.models.unet import UNetConfig
from shardwise.testing import check

PERMUTE, REDUCE = "collective-permute", "all-reduce"
TINY = UNetConfig(channels=2, width=2, levels=2, convs=1, norm=None)


def batch_of(config: UNetConfig, count: int, *size: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.normal(size=(count, *size, config.channels)).astype(np.float32),
        "target": rng.integers(0, config.classes, (count, *size)).astype(np.int32),
    }


@functools.cache
def params_of(config: UNetConfig) -> Any:
    """Random parameters, biases and scales too."""
    rng = np.random.default_rng(1)
    shapes = jax.tree.map(lambda p: p.shape, unet.abstract_params(config))
    return jax.tree.map(
        lambda s: (rng.normal(size=s) * (np.prod(s[:-1]) or 1) ** -0.5).astype(np.float32),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )


def planned(
    config: UNetConfig, mesh: dict[str, int], count: int, *size: int, strategy: str = "spatial",
    axes: tuple[str, ...] = ("x", "y", "z"),
) -> sw.Plan:  # fmt: skip
    """The plan of a training step, parameters and their updates whole on every device."""
    params = unet.abstract_params(config)
    batch = {
        "image": jax.ShapeDtypeStruct((count, *size, config.channels), jnp.float32),
        "target": jax.ShapeDtypeStruct((count, *size), jnp.int32),
    }
    step = functools.partial(unet.sgd_step, config, shard=unet.sharder(sw.annotate, strategy, axes))
    whole = jax.tree.map(lambda _: P(), params)
    f = sw.spmd(step, mesh=sw.abstract_mesh(mesh), out_shardings=(whole, P()))
    return f.plan(params, batch)


# ---- what it computes ------------------------------------------------------------------------


def by_hand(config: UNetConfig, params: Any, x: np.ndarray) -> np.ndarray:
    """Logits of a signal [L, C], written out with loops over positions and taps."""

    def conv(x: np.ndarray, p: Any, name: str, j: str = "") -> np.ndarray:
        kernel, half = p[f"{name}{j}"], len(p[f"{name}{j}"]) // 2
        out = np.zeros((len(x), kernel.shape[-1]))
        for i, t in itertools.product(range(len(x)), range(len(kernel))):
            if 0 <= i + t - half < len(x):
                out[i] += x[i + t - half] @ kernel[t]
        return out

    def block(x: np.ndarray, p: Any) -> np.ndarray:
        for j in range(config.convs):
            y = conv(x, p, "kernel", str(j))
            if config.norm:
                y = (y - y.mean(0)) / np.sqrt(y.var(0) + 1e-5) * p[f"scale{j}"]
            x = np.maximum(y + p[f"bias{j}"], 0)
        return x

    length = len(x)
    x = np.pad(x, ((0, -length % config.multiple), (0, 0)))
    kept = []
    for i in range(config.levels):
        x = block(x, params[f"down{i}"])
        if i < config.levels - 1:
            kept.append(x)
            pairs = x.reshape(-1, 2, x.shape[-1])
            if config.down == "max":
                x = pairs.max(1)
            else:
                p = params[f"shrink{i}"]
                x = np.einsum("lti,tio->lo", pairs, p["kernel"]) + p["bias"]
    for i in reversed(range(config.levels - 1)):
        p = params[f"grow{i}"]
        x = (
            np.einsum("li,tio->lto", x, p["kernel"][::-1]).reshape(-1, p["kernel"].shape[-1])
            + p["bias"]
        )
        x = block(np.concatenate([x, kept[i]], -1), params[f"up{i}"])
    return (x @ params["head"]["kernel"][0] + params["head"]["bias"])[:length]


@pytest.mark.parametrize(("norm", "down"), [(None, "max"), ("instance", "stride")])
def test_against_loops(norm: str | None, down: str) -> None:
    config = UNetConfig(channels=2, width=3, levels=3, dims=1, norm=norm, down=down)
    params, batch = params_of(config), batch_of(config, 2, 13)
    loss = jax.jit(functools.partial(unet.loss, config, params))
    got = jax.jit(functools.partial(unet.logits, config, params))(batch["image"])
    want = np.stack([by_hand(config, params, x) for x in batch["image"]])
    np.testing.assert_allclose(got, want, atol=2e-5)
    log_p = want - np.log(np.exp(want).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, batch["target"][..., None], -1)[..., 0]
    np.testing.assert_allclose(loss(batch), nats.mean(), rtol=1e-5)
    weight = (np.arange(13) < 5).astype(np.float32)[None].repeat(2, 0)
    weighted = loss({**batch, "weight": weight})
    np.testing.assert_allclose(weighted, nats[:, :5].mean(), rtol=1e-5)
    soft = np.eye(config.classes, dtype=np.float32)[batch["target"]]
    np.testing.assert_allclose(loss({**batch, "target": soft}), nats.mean(), rtol=1e-5)


def test_parameters() -> None:
    config = UNetConfig(width=4, levels=2, norm="instance", down="stride")
    params = jax.jit(unet.init, static_argnums=0)(config, jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == unet.param_shapes(config)
    assert params["down1"]["kernel0"].shape == (3, 3, 3, 4, 8)
    assert params["up0"]["kernel0"].shape == (3, 3, 3, 8, 4)
    assert params["grow0"]["kernel"].shape == (2, 2, 2, 8, 4)
    assert float(jnp.std(params["up0"]["kernel0"])) == pytest.approx((2 / (27 * 8)) ** 0.5, rel=0.1)
    assert jnp.all(params["down0"]["scale0"] == 1) and jnp.all(params["head"]["bias"] == 0)


def test_no_voxel_sees_further_than_the_reach() -> None:
    for levels, convs, down in ((3, 2, "max"), (2, 1, "stride")):
        config = UNetConfig(width=2, levels=levels, convs=convs, dims=1, norm=None, down=down)
        params = jax.tree.map(np.abs, params_of(config))  # nothing cancels, no ReLU is off
        size = 4 * (config.reach + config.multiple)
        image = np.ones((1, size, 1), np.float32)
        at = range(size // 2, size // 2 + config.multiple)
        logits = functools.partial(unet.logits, config, params)
        some = jax.jit(jax.jacrev(lambda x, f=logits, at=at: f(x)[0, at[0] : at[-1] + 1, 0]))
        reads = np.asarray(some(image))
        reads = [np.flatnonzero(r) for r in reads]
        furthest = max(max(i - r.min(), r.max() - i) for i, r in zip(at, reads, strict=True))
        assert config.reach - config.multiple < furthest <= config.reach


def test_dice() -> None:
    a, b = np.array([[0, 1, 1, 2]]), np.array([[0, 1, 2, 2]])
    np.testing.assert_allclose(unet.dice(a, b, 4), [1, 2 / 3, 2 / 3, 1])
    np.testing.assert_allclose(unet.dice(a, b, 4, np.array([[1.0, 1, 0, 1]])), [1, 1, 1, 1])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kernel": 4}, "odd"),
        ({"levels": 0}, "at least 1"),
        ({"dims": 4}, "1, 2 or 3"),
        ({"norm": "batch"}, "instance"),
        ({"down": "average"}, "stride"),
    ],
)
def test_configurations_that_make_no_sense(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        UNetConfig(**wrong)


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"2 channels is expected.*\[1, 8, 8, 8, 1\]"):
        unet.logits(TINY, params_of(TINY), jnp.zeros((1, 8, 8, 8, 1)))
    with pytest.raises(sw.ShardingError, match="unknown strategy"):
        unet.spec("rows", "image")
    with pytest.raises(sw.ShardingError, match="unknown tensor"):
        unet.spec("spatial", "kernel")
    with pytest.raises(sw.ShardingError, match="3 mesh axes"):
        unet.spec("spatial2", "image", ("x", "y"))


def test_strategies() -> None:
    assert unet.spec("spatial", "image") == P("x", "y")
    assert unet.spec("spatial", "image", ("", "rows")) == P(None, "rows")
    assert unet.spec("last", "image", ("b", "s")) == P("b", None, None, "s")
    assert unet.spec("spatial", "features") is None
    assert {t for s in unet.STRATEGIES.values() for t in s} == set(unet.TENSORS)


# ---- the same on every mesh ------------------------------------------------------------------

MESHES: dict[str, Any] = {
    "uneven": (
        UNetConfig(width=2, levels=3, convs=1, norm=None), {"y": 3}, (2, 13, 5, 4), "spatial", ("", "y"),
    ),
    "two-dims": (
        UNetConfig(width=2, levels=2, convs=1, norm=None, down="stride"), {"x": 2, "y": 2, "z": 2},
        (2, 10, 6, 3), "spatial2", ("x", "y", "z"),
    ),
    "batch-and-space": (
        UNetConfig(width=2, levels=2, convs=1), {"x": 2, "y": 3}, (2, 12, 4, 3), "spatial", ("x", "y"),
    ),
    "pictures": (
        UNetConfig(width=2, levels=3, convs=1, dims=2, remat=True), {"y": 8}, (1, 22, 9), "spatial",
        ("", "y"),
    ),
    "last-dim": (TINY, {"y": 4}, (1, 4, 5, 9), "last", ("", "y")),
}  # fmt: skip


@pytest.mark.parametrize("case", MESHES)
def test_values_and_gradients(case: str) -> None:
    config, mesh, shape, strategy, axes = MESHES[case]
    batch = batch_of(config, *shape)
    shard = unet.sharder(sw.annotate, strategy, axes)

    def run(params: Any, image: Any) -> Any:
        return unet.logits(config, params, image, shard=shard)

    plan = check(run, (params_of(config), batch["image"]), mesh, together=True, tol=2e-4)
    assert plan.fallbacks == []


def test_a_step_is_the_step_of_one_device() -> None:
    config = UNetConfig(width=2, levels=2, convs=1)
    params, batch = params_of(config), batch_of(config, 2, 8, 4, 4)
    step = functools.partial(unet.sgd_step, config)
    shard = unet.sharder(sw.annotate, "spatial", ("x", "y"))
    check(functools.partial(step, shard=shard), (params, batch), {"x": 2, "y": 4}, grad=False)
    after, before = jax.jit(step)(params, batch)
    assert jax.jit(step)(after, batch)[1] < before


# ---- what is sent ----------------------------------------------------------------------------


def sent_by_hand(config: UNetConfig, shards: int, count: int, depth: int, area: int) -> float:
    """Bytes of a step, split along the first spatial dim: two rows of what each 3^3 convolution reads,
    forward; of its cotangent, backward (but of the image's); and every parameter's sum, and the loss's.
    """
    halos = 0
    for i, width in enumerate(config.widths):
        row = 2 * count * area // 4**i * 4
        blocks = [config.widths[i - 1] if i else config.channels]
        blocks += [2 * width] if i < config.levels - 1 else []
        for j, into in enumerate(blocks):
            read = into + (config.convs - 1) * width
            written = (config.convs - (i == j == 0)) * width
            halos += row * (read + written)
    assert depth % (shards * config.multiple) == 0
    numbers = sum(p.size for p in jax.tree.leaves(unet.abstract_params(config))) + 1
    return halos + 2 * numbers * 4 * (shards - 1) / shards


@pytest.mark.parametrize("down", ["max", "stride"])
def test_one_annotation_splits_everything(down: str) -> None:
    """On the image: activations, gradients and result follow it; halos and sums are all that is sent."""
    config = UNetConfig(width=8, levels=3, norm=None, down=down)
    plan = planned(config, {"y": 8}, 2, 128, 32, 32, axes=("", "y"))
    assert plan.fallbacks == []
    assert {c.kind for c in plan.collectives} == {PERMUTE, REDUCE}
    permuted = [c for c in plan.collectives if c.kind == PERMUTE]
    assert {c.shape[1] for c in permuted} == {1}  # one row each
    assert plan.comm_bytes == sent_by_hand(config, 8, 2, 128, 32 * 32)
    activations = [
        v
        for e in plan.body.eqns
        for v in e.outvars
        if v.rank == 5 and v.shape[0] == 2 and v.shape[1] in (128, 64, 32)
    ]
    assert len(activations) > 50
    assert {plan.completion.sharding(v).axes[1] for v in activations} == {("y.0", "y.1", "y.2")}


def test_gradients_of_up_convolutions_send_nothing_but_halos() -> None:
    """Reversing the split dim for them would send whole blocks: a quarter of all that is permuted."""
    config = UNetConfig(width=8, levels=2, convs=1, norm=None, down="stride")
    deep, shallow = (
        planned(c, {"y": 8}, 1, 64, 16, 16, axes=("", "y"))
        for c in (config, UNetConfig(width=8, levels=1, convs=1, norm=None))
    )
    assert all(c.shape[1] == 1 for c in deep.collectives if c.kind == PERMUTE)
    assert deep.comm_bytes == sent_by_hand(config, 8, 1, 64, 256)
    assert shallow.comm_bytes == 2 * 16 * 16 * 4 + 2 * 4 * (8 * 27 + 8 + 8 * 3 + 3 + 1) * 7 / 8


def test_norms_send_their_statistics() -> None:
    """Sums of [B, c]: of a normalisation two forward and two backward, and little else."""
    config = UNetConfig(width=8, levels=2, convs=1, norm="instance")
    plain = UNetConfig(width=8, levels=2, convs=1, norm=None)
    sent, without = (
        planned(c, {"y": 8}, 2, 64, 16, 16, axes=("", "y")).comm_bytes for c in (config, plain)
    )
    each = 2 * (8 + 16 + 8) * 4 * 2 * 7 / 8
    assert without < sent <= without + 6 * each


def test_two_dims_send_less_than_one_where_there_are_many_devices() -> None:
    config = UNetConfig(width=8, levels=2, convs=1, norm=None)
    one = planned(config, {"y": 64}, 1, 128, 128, 32, axes=("", "y"))
    two = planned(
        config, {"y": 8, "z": 8}, 1, 128, 128, 32, strategy="spatial2", axes=("", "y", "z")
    )
    assert {c.kind for c in two.collectives} == {PERMUTE, REDUCE}
    assert two.fallbacks == [] and two.comm_bytes < 0.6 * one.comm_bytes


def test_more_annotations_change_nothing() -> None:
    config = UNetConfig(width=8, levels=2, convs=1, norm=None)
    one, many = (
        planned(config, {"y": 4}, 1, 32, 16, 16, strategy=s, axes=("", "y"))
        for s in ("spatial", "all")
    )
    assert one.comm_bytes == many.comm_bytes and one.flops == many.flops


def test_table_8_falls_with_the_devices() -> None:
    """Its first block, at a sixth of the width: memory and work of a device, from 1 to 8 ways."""
    rows = [r for r in unet.PAPER.values() if r.image == 128 and r.devices in (1, 8)]
    assert [r.published["memory GB"] for r in rows] == [14.3, 4.5]
    config = UNetConfig(width=16, levels=4, convs=1, norm=None, down="stride", dtype="bfloat16")
    one, eight = (
        planned(config, r.mesh, r.batch, *(r.image,) * 3, axes=("", "y" if r.devices > 1 else ""))
        for r in rows
    )
    assert 7.9 < one.flops / eight.flops <= 8
    assert one.peak_memory / eight.peak_memory > 6  # parameters and their gradients are whole
