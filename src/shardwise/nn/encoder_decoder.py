"""GShard's translation model: an encoder-decoder Transformer, every other feed-forward layer MoE.

Plain functions over a pytree of arrays that know nothing of devices; as in `nn.transformer`, they
call `annotate(x, spec)` where an annotation belongs, and a strategy says what is split.

    config = TranslationConfig(experts=8)
    params = init(config, jax.random.key(0))
    batch = {"source": ..., "target": ...}     # int32 [B, S] and [B, T], 0 is padding
    value, metrics = loss(config, params, batch, key=jax.random.key(1), annotate=sw.annotate)

GShard 3.4.7 and appendix A.2 give the sizes and dropout of inputs, residuals and attention.  What
they do not say is taken from the authors' code as far as it is known: norms before each part
(without them 36 layers do not train) that only scale; no biases.  Positions are sinusoids, not
learned: they hold no parameters, and a translation may be longer than any seen in training.

A stack is a loop over *blocks*, each of `moe_every` layers whose last has experts, so that one
compiled body serves a stack of any depth.

Letters of shapes: B batch, S source, T target, M model, H hidden, N heads, D head dim, E experts,
V vocabulary, G groups, L blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise.nn.attention import causal
from shardwise.nn.decoding import decode_step as decode_step
from shardwise.nn.decoding import init_cache as init_cache
from shardwise.nn.decoding import project_memory as project_memory
from shardwise.nn.encoder_decoder_config import PAPER as PAPER
from shardwise.nn.encoder_decoder_config import STRATEGIES as STRATEGIES
from shardwise.nn.encoder_decoder_config import TranslationConfig as TranslationConfig
from shardwise.nn.encoder_decoder_config import spec as spec
from shardwise.nn.encoder_decoder_layers import (
    ONE_DEVICE,
    PAD,
    Hooks,
    Params,
    Pass,
    cross_attention,
    embed,
    feed_forward,
    identity,
    init_block,
    logits,
    over_blocks,
    project_kv,
    self_attention,
    split_key,
)
from shardwise.nn.transformer import rms_norm

Array = jax.Array


def init(config: TranslationConfig, key: Array) -> Params:
    """Random float32 parameters; the same values whether blocks are stacked or a list.

    Returns:
      {"source_embedding": [V, M], "target_embedding": [V, M], "encoder", "encoder_norm": [M],
      "decoder", "decoder_norm": [M]} and, untied, "unembedding": [V, M].  A stack is a block, a list
      of `moe_every` layers, of arrays [L, ...] when `config.scan`, else a list of L blocks.
    """
    k_source, k_target, k_out, k_encoder, k_decoder = jax.random.split(key, 5)
    m, scale = config.model, config.model**-0.5

    def stack(key: Array, decoder: bool) -> Any:
        layers = config.decoder_layers if decoder else config.encoder_layers
        keys = jax.random.split(key, layers // config.moe_every)
        block = functools.partial(init_block, config, decoder)
        return jax.vmap(block)(keys) if config.scan else [block(k) for k in keys]

    params: Params = {
        "source_embedding": scale * jax.random.normal(k_source, (config.source_vocab, m)),
        "target_embedding": scale * jax.random.normal(k_target, (config.target_vocab, m)),
        "encoder": stack(k_encoder, False),
        "encoder_norm": jnp.ones((m,)),
        "decoder": stack(k_decoder, True),
        "decoder_norm": jnp.ones((m,)),
    }
    if not config.tied:
        params["unembedding"] = scale * jax.random.normal(k_out, (config.target_vocab, m))
    return params


def abstract_params(config: TranslationConfig) -> Params:
    """The parameters as `ShapeDtypeStruct`s: for planning a model that need not fit anywhere."""
    return jax.eval_shape(functools.partial(init, config), jax.random.key(0))


def parameter_count(config: TranslationConfig) -> int:
    """How many numbers the parameters are."""
    return sum(p.size for p in jax.tree.leaves(abstract_params(config)))


# -- stacks ------------------------------------------------------------------------------------------


def _stack(
    run: Pass, name: str, params: Params, h: Array, layer: Callable[..., Any], key: Array | None
) -> tuple[Array, dict[str, Array]]:
    """A stack on h [B, S, M], normed; and its MoE layers' statistics, [L, ...] each."""
    config, blocks = run.config, params[name]
    count = len(blocks) if not config.scan else jax.tree.leaves(blocks)[0].shape[0]

    def body(h: Array, block: list[Params], key: Array | None) -> tuple[Array, Any]:
        stats = None
        for p, k in zip(block, split_key(key, len(block)), strict=True):
            h, stats = layer(p, h, k)
        return h, stats

    if config.remat:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        body = jax.checkpoint(
            body, prevent_cse=not config.scan, policy=policy if config.remat == "dots" else None
        )
    keys = None if key is None else jax.random.split(key, count)
    h, stats = over_blocks(config, body, h, blocks, keys)
    return rms_norm(h, params[name + "_norm"]), stats or {}


def encode(
    config: TranslationConfig, params: Params, source: Array, *, key: Array | None = None,
    train: bool = False, shard: Hooks = ONE_DEVICE,
) -> tuple[Array, dict[str, Array]]:  # fmt: skip
    """The encoder on source [B, S] (0 is padding): (memory [B, S, M], statistics)."""
    run = Pass(config, shard, train)
    k_embed, k_stack = split_key(key, 2)
    source = shard(source, "tokens")
    valid = source != PAD
    mask = valid[:, None, None, :]

    def layer(p: Params, h: Array, key: Array | None) -> tuple[Array, Any]:
        k_attention, k_ffn = split_key(key, 2)
        h = self_attention(run, p, h, mask, k_attention)
        return feed_forward(run, p, h, valid, k_ffn)

    positions = jnp.arange(source.shape[1])
    h = embed(run, params, "source_embedding", source, positions, k_embed)
    return _stack(run, "encoder", params, h, layer, k_stack)


def decode(
    config: TranslationConfig, params: Params, memory: Array, source: Array, target: Array, *,
    valid: Array | None = None, key: Array | None = None, train: bool = False,
    shard: Hooks = ONE_DEVICE,
) -> tuple[Array, dict[str, Array]]:  # fmt: skip
    """The decoder on target [B, T]: (float32 logits [B, T, V] of the next token, statistics).

    Args:
      memory, source: the encoder's output [B, S, M], and its tokens.
      valid: bool [B, T], the positions whose logits are used; None: all but padding.  No expert takes
        the others.
    """
    run = Pass(config, shard, train)
    k_embed, k_stack = split_key(key, 2)
    target = shard(target, "tokens")
    used = target != PAD if valid is None else valid
    seen = (source != PAD)[:, None, None, :]
    past = causal(target.shape[1])

    def layer(p: Params, h: Array, key: Array | None) -> tuple[Array, Any]:
        k_self, k_cross, k_ffn = split_key(key, 3)
        h = self_attention(run, p, h, past, k_self)
        h = cross_attention(run, p, h, project_kv(run, p, memory), seen, k_cross)
        return feed_forward(run, p, h, used, k_ffn)

    positions = jnp.arange(target.shape[1])
    h = embed(run, params, "target_embedding", target, positions, k_embed)
    h, stats = _stack(run, "decoder", params, h, layer, k_stack)
    return logits(run, params, h), stats


# -- the loss ----------------------------------------------------------------------------------------


def loss(
    config: TranslationConfig,
    params: Params,
    batch: dict[str, Array],
    *,
    key: Array | None = None,
    train: bool = True,
    annotate: Callable[[Array, P], Array] = identity,
    strategy: str = "gshard",
    axes: tuple[str, ...] = ("x", "y"),
) -> tuple[Array, dict[str, Array]]:
    """What training minimises: cross entropy a token plus the weighted auxiliary losses.

    Args:
      batch: "source" [B, S], "target" [B, T] int32; a target starts with BOS, ends with EOS.
      key: of dropout and random routing; None for neither dropout nor (it then must be off) the other.
      train: False: the evaluation's capacity, no noise.
      annotate, strategy, axes: the hook, which tensors it is called on, and the axes' names.

    Returns:
      The loss and float32 metrics: "loss" [] (nats a token, without label smoothing and auxiliary
      losses), "tokens" [], and both of each sequence, "sequence_nats", "sequence_tokens" [B]; of the
      MoE layers (absent in a dense model) "aux_loss", "overflow", "dropped", "second", "entropy" []
      means over layers, "load" [layers, E], encoder first, and "sequence_overflow",
      "sequence_routed" [B]: a sequence's tokens, counted once a layer, that no expert took, and
      all of them.
    """
    shard = Hooks(annotate, strategy, axes)
    k_encoder, k_decoder = split_key(key, 2)
    source, target = batch["source"], batch["target"]
    labels = jnp.pad(target[:, 1:], ((0, 0), (0, 1)), constant_values=PAD)
    used = labels != PAD
    memory, first = encode(config, params, source, key=k_encoder, train=train, shard=shard)
    scores, second = decode(
        config, params, memory, source, target, valid=used, key=k_decoder, train=train, shard=shard
    )
    nats, smoothed = cross_entropy(scores, labels, config.label_smoothing)
    by_sequence = jnp.sum(jnp.where(used, nats, 0.0), axis=1)
    lengths = jnp.sum(used, axis=1, dtype=jnp.float32)
    tokens = jnp.maximum(jnp.sum(lengths), 1.0)
    total = jnp.sum(jnp.where(used, smoothed, 0.0)) / tokens
    metrics = {
        "loss": jnp.sum(by_sequence) / tokens, "tokens": tokens,
        "sequence_nats": by_sequence, "sequence_tokens": lengths,
    }  # fmt: skip
    if config.experts:
        layers = {k: jnp.concatenate([first[k], second[k]]) for k in first}
        total = total + config.aux_weight * jnp.sum(layers["aux_loss"])
        metrics["load"] = layers["load"]
        for name in ("aux_loss", "overflow", "dropped", "second", "entropy"):
            metrics[name] = jnp.mean(layers[name])
        routed = jnp.sum(source != PAD, axis=1) * first["aux_loss"].shape[0]
        routed = routed + jnp.sum(used, axis=1) * second["aux_loss"].shape[0]
        metrics["sequence_overflow"] = jnp.sum(layers["sequence_overflow"], axis=0)
        metrics["sequence_routed"] = routed.astype(jnp.float32)
    return total, lax.stop_gradient(metrics)


def cross_entropy(scores: Array, labels: Array, smoothing: float) -> tuple[Array, Array]:
    """Nats of each label [B, T] under float32 logits [B, T, V], and the same with label smoothing.

    Smoothed, a label has probability 1 - smoothing, and the vocabulary shares the rest evenly.
    """
    # Picking the label's score with a comparison, not a gather, keeps a split V where it is.
    is_label = lax.broadcasted_iota(labels.dtype, scores.shape, 2) == labels[..., None]
    picked = jnp.sum(jnp.where(is_label, scores, 0.0), axis=-1)
    norm = jax.nn.logsumexp(scores, axis=-1)
    nats = norm - picked
    if not smoothing:
        return nats, nats
    return nats, (1.0 - smoothing) * nats + smoothing * (norm - jnp.mean(scores, axis=-1))
