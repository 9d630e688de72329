"""The translation model's decoder, a step at a time, for flat beam search (GShard appendix A.1).

K hypotheses of a sentence are interleaved in one sequence: step t writes the keys and values of its K
tokens at slots t K ... t K + K - 1, and a mask says which slots are a hypothesis' own past.  Nothing
is ever reordered.

    memory, _ = encode(config, params, source)
    memory = project_memory(config, params, memory)           # once
    cache = init_cache(config, batch, beams, length)
    logits, cache = decode_step(config, params, cache, tokens, t, mask, memory, source != PAD)

Letters of shapes: B sentences, K beams, T steps, S source, N heads, D head dim, L blocks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise.nn import encoder_decoder_layers as model
from shardwise.nn.attention import attend
from shardwise.nn.encoder_decoder_config import TranslationConfig
from shardwise.nn.encoder_decoder_layers import ONE_DEVICE, Hooks, Params, Pass
from shardwise.nn.transformer import rms_norm

Array = jax.Array


def init_cache(config: TranslationConfig, batch: int, beams: int, length: int) -> list[Any]:
    """Empty keys and values: for each layer of a block, {"k", "v": [L, B, K T, N, D]}."""
    blocks = config.decoder_layers // config.moe_every
    shape = (blocks, batch, beams * length, config.heads, config.depth_per_head)
    return [{n: jnp.zeros(shape, config.dtype) for n in "kv"} for _ in range(config.moe_every)]


def project_memory(
    config: TranslationConfig, params: Params, memory: Array, shard: Hooks = ONE_DEVICE
) -> list[Any]:
    """Each decoder layer's keys and values of the encoder's output [B, S, M]: computed once.

    Returns:
      For each layer of a block, (keys, values) [L, B, S, N, D].
    """
    run = Pass(config, shard, train=False)

    def body(h: Array, block: list[Params], _: None) -> tuple[Array, Any]:
        return h, [model.project_kv(run, p, h) for p in block]

    return model.over_blocks(config, body, memory, params["decoder"], None)[1]


def decode_step(
    config: TranslationConfig, params: Params, cache: list[Any], tokens: Array, position: Array,
    mask: Array, memory: Any, memory_mask: Array, shard: Hooks = ONE_DEVICE,
) -> tuple[Array, list[Any]]:  # fmt: skip
    """One step of K hypotheses each of B sentences.

    Args:
      cache: of the steps before (`init_cache`).
      tokens: int32 [B, K], the hypotheses' last tokens.
      position: int32 [], the step t: the place of these tokens in their hypotheses.
      mask: bool [B, K, K T], the slots that a hypothesis sees: one of each step up to t, its own token's
        slot t K + k among them.
      memory: of `project_memory`; or the encoder's output [B, S, M], projected again each step.
      memory_mask: bool [B, S], False at the source's padding.

    Returns:
      Float32 logits [B, K, V] of the next tokens, and the cache with this step's keys and values.
    """
    run = Pass(config, shard, train=False)
    if isinstance(memory, jax.Array):
        memory = project_memory(config, params, memory, shard)
    slot = position * tokens.shape[1]
    valid = jnp.ones(tokens.shape, bool)
    mask, seen = mask[:, None], memory_mask[:, None, None, :]

    def body(h: Array, block: list[Params], extra: Any) -> tuple[Array, Any]:
        written = []
        for p, kept, kv in zip(block, *extra, strict=True):
            q, k, v = model.project_qkv(run, p, h)
            k = lax.dynamic_update_slice_in_dim(kept["k"], k, slot, axis=1)
            v = lax.dynamic_update_slice_in_dim(kept["v"], v, slot, axis=1)
            written.append({"k": k, "v": v})
            h = model.add_heads(run, p, "w_o", h, attend(q, k, v, mask))
            h = model.cross_attention(run, p, h, kv, seen, None)
            h, _ = model.feed_forward(run, p, h, valid, None)
        return h, written

    h = model.embed(run, params, "target_embedding", tokens, position[None], None)
    h, cache = model.over_blocks(config, body, h, params["decoder"], (cache, memory))
    h = rms_norm(h, params["decoder_norm"])
    return model.logits(run, params, h), cache
