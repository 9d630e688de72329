"""The Conformer, a speech model of convolutions and attention, as pipelined in GSPMD 5.3 (Table 5).

    config = ConformerConfig(layers=8, model=96)
    params = init(config, jax.random.key(0))
    batch = {"features": ..., "frames": ..., "labels": ..., "characters": ...}
    value, out = loss(config, params, batch, key=jax.random.key(1))

Plain functions over a pytree of arrays that know nothing of devices; `shard(value, name)` is called where
an annotation belongs, and a strategy says what is split.  With `config.pipelined` the layers run in
`sw.pipeline`, and nothing else changes: the front end, the head and the loss see whole batches, so that
the stages' devices can be data parallel there (GSPMD 3.3, Figure 2).

The layer is Gulati et al.'s (arXiv 2005.08100).  Norms come first, each with a shift, and biases are in
every linear layer but queries, keys and values, as in the authors' code.  The objective is CTC (Graves et
al. 2006): GSPMD prints none for this model, and the paper's transducer needs a second network.  Where
GSPMD's table is silent, `conformer_config` says what was chosen.

Letters of shapes: B batch, T frames, F bands, S frames after the front end (a quarter), M model, V outputs,
U characters, L layers, C channels.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise.annotate import annotate as sw_annotate
from shardwise.models.conformer_config import PAPER as PAPER
from shardwise.models.conformer_config import PAPER_FRAMES as PAPER_FRAMES
from shardwise.models.conformer_config import STRATEGIES as STRATEGIES
from shardwise.models.conformer_config import (
    Annotate,
    Array,
    Params,
    Shard,
    one_device,
)
from shardwise.models.conformer_config import ConformerConfig as ConformerConfig
from shardwise.models.conformer_config import Pipelined as Pipelined
from shardwise.models.conformer_config import sharder as sharder
from shardwise.models.conformer_config import spec as spec
from shardwise.models.conformer_layers import State, init_layer, init_layer_state, layer
from shardwise.nn.attention import dropout
from shardwise.pipeline import deal, pipeline, undeal

STRIDE = 4
"""Frames that become one in the front end."""


def init(config: ConformerConfig, key: Array) -> Params:
    """Random float32 parameters.

    Returns:
      {"front": ..., "layers": ..., "head": {"w": [M, V], "b": [V]}}; layers are stacked, [L, ...],
      in the order in which they are stored (`Pipelined.dealt`).
    """
    k_front, k_layers, k_head = jax.random.split(key, 3)
    layers = [init_layer(config, k) for k in jax.random.split(k_layers, config.layers)]
    head = config.model**-0.5 * jax.random.normal(k_head, (config.model, config.vocab))
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *layers)
    how = config.pipelined
    return {
        "front": _init_front(config, k_front),
        "layers": deal(stacked, how.stages, how.rounds) if how and how.dealt else stacked,
        "head": {"w": head, "b": jnp.zeros(config.vocab)},
    }


def _init_front(config: ConformerConfig, key: Array) -> Params:
    f, c, m = config.features, config.channels or config.model, config.model
    if config.front_end == "stack":
        shapes = {"w": (STRIDE, f, m)}
    else:
        bands = -(-f // STRIDE)
        shapes = {"w1": (3, 3, 1, c), "w2": (3, 3, c, c), "w": (bands, c, m)}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    fan_in = {name: shape[0] * shape[1] * (shape[2] if len(shape) == 4 else 1)
              for name, shape in shapes.items()}  # fmt: skip
    params = {n: fan_in[n] ** -0.5 * jax.random.normal(keys[n], s) for n, s in shapes.items()}
    return params | {n.replace("w", "b"): jnp.zeros(s[-1]) for n, s in shapes.items()}


def init_state(config: ConformerConfig) -> State | None:
    """Running statistics of all layers, [L, ...], where batch norm keeps some; else None."""
    if config.norm != "batch":
        return None
    one = init_layer_state(config)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (config.layers, *x.shape)), one)


def model_order(config: ConformerConfig, params: Params) -> Params:
    """The parameters with the layers in the model's order, for a config that is not pipelined."""
    how = config.pipelined
    if how is None or not how.dealt:
        return params
    return {**params, "layers": undeal(params["layers"], how.stages, how.rounds)}


def abstract_params(config: ConformerConfig) -> Params:
    """The parameters as `ShapeDtypeStruct`s: for planning a model that need not fit anywhere."""
    return jax.eval_shape(functools.partial(init, config), jax.random.key(0))


def parameter_count(config: ConformerConfig) -> int:
    return sum(x.size for x in jax.tree.leaves(abstract_params(config)))


def shorter(frames: Any) -> Any:
    """How many frames the front end makes of so many."""
    return (frames + STRIDE - 1) // STRIDE


def front_end(
    config: ConformerConfig, p: Params, features: Array, frames: Array
) -> tuple[Array, Array]:
    """Frames [B, T, F] to [B, S, M], and which of them are valid, bool [B, S]."""
    x = _masked(features.astype(config.dtype), frames)
    batch, time, bands = x.shape
    if config.front_end == "stack":
        x = jnp.pad(x, ((0, 0), (0, -time % STRIDE), (0, 0)))
        x = x.reshape(batch, -1, STRIDE, bands)
        y = jnp.einsum("bskf,kfm->bsm", x, p["w"].astype(x.dtype))
    else:
        x = _convolve(x[..., None], p["w1"], p["b1"])
        x = _masked(x, (frames + 1) // 2)
        x = _convolve(x, p["w2"], p["b2"])
        y = jnp.einsum("bsfc,fcm->bsm", x, p["w"].astype(x.dtype))
    return y + p["b"].astype(y.dtype), valid_frames(y.shape[1], shorter(frames))


def _convolve(x: Array, w: Array, b: Array) -> Array:
    """3x3 with a stride of 2 over frames and bands, and ReLU: [B, T, F, C] -> [B, T/2, F/2, C]."""
    y = lax.conv_general_dilated(
        x, w.astype(x.dtype), (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(y + b.astype(x.dtype))


def valid_frames(time: int, frames: Array) -> Array:
    """bool [B, T]: the first `frames` of each row."""
    return lax.broadcasted_iota(jnp.int32, (frames.shape[0], time), 1) < frames[:, None]


def _masked(x: Array, frames: Array) -> Array:
    valid = valid_frames(x.shape[1], frames)
    return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def encode(
    config: ConformerConfig, params: Params, features: Array, frames: Array, *,
    shard: Shard = one_device, key: Array | None = None, state: State | None = None,
    train: bool = True, annotate: Annotate = sw_annotate,
) -> tuple[Array, Array, State | None]:  # fmt: skip
    """The head's outputs.

    Args:
      features: [B, T, F], log-mel frames.
      frames: int [B], how many of the T are of the utterance.
      shard: called on every tensor that may carry an annotation, with its name.
      key: of dropout; None for none.
      state: running statistics of batch norm, of `init_state`.
      train: batch norm by the batch's statistics.
      annotate: what puts a spec on the stages: for `jax.jit` its `with_sharding_constraint`.

    Returns:
      float32 [B, S, V], which frames are valid (bool [B, S]), and the new state.
    """
    k_front, k_layers = (None, None) if key is None else jax.random.split(key)
    h, valid = front_end(config, params["front"], shard(features, "features"), frames)
    h = dropout(h, config.dropout, k_front)
    h, state = _over_layers(
        config, params["layers"], h, valid, shard, k_layers, state, train, annotate
    )
    head = params["head"]
    scores = jnp.einsum(
        "bsm,mv->bsv", h, head["w"].astype(h.dtype), preferred_element_type=jnp.float32
    )
    return shard(scores + head["b"], "logits"), valid, state


def _over_layers(
    config: ConformerConfig, layers: Params, h: Array, valid: Array, shard: Shard, key: Array | None,
    state: State | None, train: bool, annotate: Annotate,
) -> tuple[Array, State | None]:  # fmt: skip
    """All layers, in a loop or pipelined: h [B, S, M], and the running statistics."""

    def one(p: Params, h: Array, valid: Array, state: State | None, key: Array | None) -> Any:
        return layer(config, shard, p, h, valid, state, key, train)

    remat: Any = bool(config.remat)
    if config.remat == "dots":
        remat = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    if config.pipelined is None:
        if remat:
            one = jax.checkpoint(one, prevent_cse=False, policy=None if remat is True else remat)
        keys = None if key is None else _layer_keys(key, config.layers)
        return lax.scan(lambda h, a: one(a[0], h, valid, *a[1:]), h, (layers, state, keys))

    def stage(p: Params, h: Array, valid: Array, *rest: Any) -> Any:
        before = rest[0] if state is not None else None
        h, after = one(p, h, valid, before, rest[-1] if key is not None else None)
        return h if state is None else (h, after)

    how = config.pipelined
    out = pipeline(
        stage, layers, h, axis=how.axis, num_stages=how.stages, num_microbatches=how.microbatches,
        schedule=how.schedule, rounds=how.rounds, inputs=valid, state=state, key=key,
        remat=remat, dealt=how.dealt, annotate=annotate,
    )  # fmt: skip
    return (out, None) if state is None else out


def _layer_keys(key: Array, layers: int) -> Array:
    """Those of a pipeline with one microbatch."""
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, i), 0))(jnp.arange(layers))


def loss(
    config: ConformerConfig, params: Params, batch: dict[str, Array], *,
    shard: Shard = one_device, key: Array | None = None, state: State | None = None,
    train: bool = True, annotate: Annotate = sw_annotate,
) -> tuple[Array, dict[str, Any]]:  # fmt: skip
    """CTC's loss of a batch, in nats a character.

    Args:
      batch: features [B, T, F], frames int [B], labels int [B, U] (from 1: 0 is the blank), characters
        int [B], how many labels count.
      shard, key, state, train, annotate: as in `encode`.

    Returns:
      The loss, and {"logits": float32 [B, S, V], "valid": bool [B, S], "state": ...}.

    Raises:
      ImportError: optax is not installed; the message names the extra.
    """
    scores, valid, state = encode(
        config, params, batch["features"], batch["frames"], shard=shard, key=key, state=state,
        train=train, annotate=annotate,
    )  # fmt: skip
    labels, characters = batch["labels"], batch["characters"]
    padding = 1.0 - valid_frames(labels.shape[1], characters).astype(jnp.float32)
    each = _optax().ctc_loss(scores, 1.0 - valid.astype(jnp.float32), labels, padding)
    value = jnp.sum(each) / jnp.maximum(jnp.sum(characters), 1)
    return value, {"logits": scores, "valid": valid, "state": state}


def _optax() -> Any:
    try:
        import optax
    except ImportError as e:
        raise ImportError("no optax\n  hint  pip install 'shardwise[speech]'") from e
    return optax
