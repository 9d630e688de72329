"""The 3D U-Net of GSPMD's section 5.6 (Table 8): images split in space by one annotation.

Down a ladder of resolutions by convolutions, up again by transposed ones, every level of the way up
given what the way down had there (Çiçek et al., arXiv 1606.06650).  A volume of 256^3 voxels does not
fit a device; split along a spatial dim it does, and the only annotation needed is the image's: every
activation, every gradient and the result follow it, and all that is sent in the middle of the model is
halos, a row or two of a block from its neighbours.

    config = UNetConfig(classes=3, width=16, levels=3)
    params = init(config, jax.random.key(0))
    f = sw.spmd(partial(logits, config, shard=sharder(sw.annotate, "spatial")), mesh=mesh)
    f(params, image)                                   # [B, D, H, W, 3], split along D

The model is plain functions and knows no devices, only where an annotation belongs: `shard(value, name)`
on the tensors of TENSORS, and a strategy says which are annotated, and how.

Letters of shapes: B batch, D H W space, C channels of the image, K classes.  `dims` of 2 or 1 makes the
same model of pictures or of signals, with fewer letters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise.models.unet_config import (
    PAPER,
    PAPER_CONFIG,
    STRATEGIES,
    TENSORS,
    ImageRow,
    Shard,
    UNetConfig,
    identity,
    sharder,
    spec,
)
from shardwise.nn.strategies import descend

__all__ = [
    "PAPER",
    "PAPER_CONFIG",
    "STRATEGIES",
    "TENSORS",
    "ImageRow",
    "Shard",
    "UNetConfig",
    "abstract_params",
    "block",
    "class_probabilities",
    "convolve",
    "dice",
    "grow",
    "identity",
    "init",
    "logits",
    "loss",
    "max_pool",
    "normalize",
    "param_shapes",
    "sgd_step",
    "sharder",
    "spec",
]

Array = jax.Array
Params = dict[str, Any]

# ---- parameters ------------------------------------------------------------------------------


def _blocks(config: UNetConfig) -> Iterator[tuple[str, int, int, int]]:
    """(name, channels in, channels out, convolutions) of every block, from the image on."""
    widths = config.widths
    for i, (into, out) in enumerate(zip((config.channels, *widths), widths, strict=False)):
        yield f"down{i}", into, out, config.convs
    for i in reversed(range(config.levels - 1)):
        yield f"up{i}", 2 * widths[i], widths[i], config.convs


def param_shapes(config: UNetConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of the parameters, kernels as [space..., channels in, channels out].

    Returns:
      `downI` and `upI`, the blocks of level I: `kernelJ`, `biasJ` and, with a norm, `scaleJ` of
      convolution J; `shrinkI`, from level I to the next (strided); `growI`, from level I + 1 back to
      it; `head`, from the first level to classes.
    """
    space, twos = (config.kernel,) * config.dims, (2,) * config.dims
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, into, out, convs in _blocks(config):
        block = shapes[name] = {}
        for j in range(convs):
            block[f"kernel{j}"] = (*space, into if j == 0 else out, out)
            block[f"bias{j}"] = (out,)
            if config.norm:
                block[f"scale{j}"] = (out,)
    for i, (fine, coarse) in enumerate(zip(config.widths, config.widths[1:], strict=False)):
        shapes[f"grow{i}"] = {"kernel": (*twos, coarse, fine), "bias": (fine,)}
        if config.down == "stride":
            shapes[f"shrink{i}"] = {"kernel": (*twos, fine, fine), "bias": (fine,)}
    ones = (1,) * config.dims
    shapes["head"] = {"kernel": (*ones, config.width, config.classes), "bias": (config.classes,)}
    return shapes


def init(config: UNetConfig, key: Array) -> Params:
    """Random float32 parameters, as `param_shapes`: kernels by He's rule, biases 0, scales 1."""
    shapes = param_shapes(config)
    leaves = [(block, name) for block in shapes for name in shapes[block]]
    params: Params = {block: {} for block in shapes}
    for (block, name), k in zip(leaves, jax.random.split(key, len(leaves)), strict=True):
        shape = shapes[block][name]
        if name.startswith("kernel"):
            # A transposed convolution of stride 2 reads one tap of every two.
            fan_in = math.prod(shape[:-1]) / (2**config.dims if block.startswith("grow") else 1)
            params[block][name] = math.sqrt(2 / fan_in) * jax.random.normal(k, shape)
        else:
            params[block][name] = (jnp.ones if name.startswith("scale") else jnp.zeros)(shape)
    return params


def abstract_params(config: UNetConfig) -> Params:
    """The parameters as `ShapeDtypeStruct`s: for planning a model that need not fit anywhere."""
    return jax.eval_shape(functools.partial(init, config), jax.random.key(0))


# ---- the model -------------------------------------------------------------------------------


def _numbers(dims: int) -> tuple[str, str, str]:
    space = "DHW"[3 - dims :]
    return f"N{space}C", f"{space}IO", f"N{space}C"


def convolve(x: Array, kernel: Array, stride: int = 1) -> Array:
    """[B, D, H, W, c] by [k, k, k, c, o]: windows at every `stride`-th voxel, [B, D/s, H/s, W/s, o]."""
    dims = x.ndim - 2
    return lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (stride,) * dims, "SAME", dimension_numbers=_numbers(dims)
    )


def grow(x: Array, kernel: Array) -> Array:
    """[B, D, H, W, c] by [2, 2, 2, c, o]: every voxel becomes 2^3, [B, 2D, 2H, 2W, o].

    As in `lax.conv_transpose`, the last tap makes the first of the two.
    """
    dims = x.ndim - 2
    return lax.conv_transpose(
        x, kernel.astype(x.dtype), (2,) * dims, "SAME", dimension_numbers=_numbers(dims)
    )


def max_pool(x: Array) -> Array:
    """The largest of every 2^3 voxels: [B, D, H, W, c] -> [B, D/2, H/2, W/2, c]."""
    window = (1, *(2,) * (x.ndim - 2), 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


def normalize(x: Array, scale: Array) -> Array:
    """x [B, D, H, W, c] less its mean over space, over its deviation, times scale [c], in float32."""
    space = tuple(range(1, x.ndim - 1))
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=space, keepdims=True)
    variance = jnp.mean(jnp.square(y), axis=space, keepdims=True)
    return (y * (lax.rsqrt(variance + 1e-5) * scale)).astype(x.dtype)


def block(config: UNetConfig, p: Mapping[str, Array], x: Array) -> Array:
    """Convolution, norm, ReLU, `convs` times: [B, d, h, w, c] -> [B, d, h, w, o]."""
    for j in range(config.convs):
        y = convolve(x, p[f"kernel{j}"])
        if config.norm:
            y = normalize(y, p[f"scale{j}"])
        x = jax.nn.relu(y + p[f"bias{j}"].astype(y.dtype))
    return x


def _biased(x: Array, p: Mapping[str, Array]) -> Array:
    return x + p["bias"].astype(x.dtype)


def logits(
    config: UNetConfig,
    params: Params,
    image: Array,
    *,
    shard: Shard = identity,
    key: Array | None = None,
    train: bool = True,
) -> Array:
    """Float32 logits [B, D, H, W, K] of the class of every voxel of `image` [B, D, H, W, C].

    Sizes that are no multiple of 2^(levels - 1) are padded with zeros behind, and the logits cut.

    Args:
      shard: the annotation hook, called as `shard(value, name)` for the tensors of TENSORS.
      key, train: as other models'; nothing here is random, or differs in training.

    Raises:
      ValueError: the image has another rank or number of channels than the configuration says.
    """
    del key, train
    if image.ndim != config.dims + 2 or image.shape[-1] != config.channels:
        raise ValueError(
            f"an image of {config.dims} spatial dims and {config.channels} channels is expected, "
            f"[B, space..., C], not {list(image.shape)}"
        )
    size = image.shape[1:-1]
    ends = [(0, 0, 0), *((0, -s % config.multiple, 0) for s in size), (0, 0, 0)]
    x = shard(image, "image").astype(config.dtype)
    x = lax.pad(x, jnp.zeros((), x.dtype), ends)
    run = functools.partial(block, config)
    run = jax.checkpoint(run) if config.remat else run
    skips = []
    for i in range(config.levels):
        x = shard(run(params[f"down{i}"], x), "features")
        if i < config.levels - 1:
            skips.append(x)
            shrink = params.get(f"shrink{i}")
            x = _biased(convolve(x, shrink["kernel"], 2), shrink) if shrink else max_pool(x)
    for i in reversed(range(config.levels - 1)):
        up = params[f"grow{i}"]
        x = _biased(grow(x, up["kernel"]), up)
        x = lax.concatenate([x, skips[i]], x.ndim - 1)
        x = shard(run(params[f"up{i}"], x), "features")
    y = _biased(convolve(x, params["head"]["kernel"]), params["head"]).astype(jnp.float32)
    return shard(y[tuple(slice(n) for n in (y.shape[0], *size, config.classes))], "logits")


def loss(
    config: UNetConfig,
    params: Params,
    batch: Mapping[str, Array],
    *,
    shard: Shard = identity,
    key: Array | None = None,
    train: bool = True,
) -> Array:
    """Mean cross entropy, in nats, over the voxels that count.

    Args:
      batch: "image" [B, D, H, W, C]; "target", classes as integers [B, D, H, W] or probabilities
        [B, D, H, W, K]; and, if wanted, "weight" [B, D, H, W], what each voxel counts.
    """
    scores = logits(config, params, batch["image"], shard=shard, key=key, train=train)
    log_p = jax.nn.log_softmax(scores)
    nats = -jnp.sum(log_p * class_probabilities(batch["target"], config.classes), axis=-1)
    weight = batch.get("weight")
    if weight is None:
        return jnp.mean(nats)
    return jnp.sum(nats * weight) / jnp.maximum(jnp.sum(weight), 1e-6)


def class_probabilities(target: Array, classes: int) -> Array:
    """Integers [...] as one-hot float32 [..., K]; probabilities as they are."""
    target = jnp.asarray(target)
    if jnp.issubdtype(target.dtype, jnp.floating):
        return target
    # A comparison, not a gather: nothing to look up where space is split.
    one_hot = target[..., None] == lax.broadcasted_iota(
        target.dtype, (*target.shape, classes), target.ndim
    )
    return one_hot.astype(jnp.float32)


def dice(predicted: Array, target: Array, classes: int, weight: Array | None = None) -> Array:
    """Dice coefficient of each class, [K]: 2 |A and B| / (|A| + |B|) of two integer maps [...].

    A class in neither map has 1; `weight` [...] leaves out voxels (0) or counts them (1).
    """
    a, b = class_probabilities(predicted, classes), class_probabilities(target, classes)
    w = jnp.ones(predicted.shape) if weight is None else weight
    over = tuple(range(predicted.ndim))
    both, total = (jnp.sum(v * w[..., None], axis=over) for v in (a * b, a + b))
    return jnp.where(total > 0, 2 * both / jnp.maximum(total, 1), 1.0)


def sgd_step(
    config: UNetConfig,
    params: Params,
    batch: Mapping[str, Array],
    *,
    shard: Shard = identity,
    rate: float = 0.1,
) -> tuple[Params, Array]:
    """One step of plain gradient descent: (new parameters, loss before the step)."""
    objective = functools.partial(loss, config, batch=batch, shard=shard)
    return descend(objective, params, rate)
