"""`moe-tpu`: GShard's 600B mixture of experts, compiled for 2048 TPU v3 cores, with no TPU.

36 layers, 18 of them with 2048 experts, M 1024, H 8192, one expert and 4096 tokens a core, bfloat16
activations, full remat; GShard's own three annotations in each MoE layer, and none that undoes what
a partitioner does with them.  Two programs:

    stack          a decoder of 36 layers on embedded tokens, plain gradient descent
    translation    encoder and decoder of 18 layers each, embeddings, dropout, Adafactor

jax.jit's program of the former wants 41.5 GB a core, since its backward pass gathers every expert's
weights (and so there is no row beside ours: the compiler refuses it).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardwise as sw
from benchmarks import programs, table, tpu
from shardwise.nn import encoder_decoder
from shardwise.nn import encoder_decoder_layers as layers
from shardwise.nn.attention import causal
from shardwise.nn.transformer import rms_norm
from shardwise.translation.step import StepOptions, initial_state, make_step

PROGRAMS = ("stack", "translation")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One compilation: the program, the side that partitions it, the pod."""

    program: str
    side: str = "shardwise"
    experts: int = 2048
    topology: str = "v3:32x32"
    layers: int = 36
    batch_per_core: int = 4
    seq: int = 1024

    @property
    def config(self) -> encoder_decoder.TranslationConfig:
        """Of the paper's model."""
        paper = encoder_decoder.PAPER["moe_2048e_36l"]
        return dataclasses.replace(
            paper, experts=self.experts, groups=self.experts, dtype="bfloat16", remat="full",
            encoder_layers=self.layers // 2, decoder_layers=self.layers // 2,
            dropout=0.0 if self.program == "stack" else paper.dropout,
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--program", choices=PROGRAMS, help="default: both, in turn")
    parser.add_argument("--jit", action="store_true", help="jax.jit beside (it is refused)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for program in (args.program,) if args.program else PROGRAMS:
        ours = tpu.in_a_process(Settings(program), "benchmarks.moe_tpu")
        theirs = {}
        if args.jit:
            theirs = tpu.in_a_process(Settings(program, "jit"), "benchmarks.moe_tpu")
        rows += [{"program": program, **row} for row in tpu.compared(ours, theirs)]
    table.show(
        "GShard's MoE(2048E, 36L), training step, 2048 TPU v3 cores",
        rows,
        args.json,
        "never run: seconds are the compiler's cycles at 0.94 GHz and bytes over two 82 GB/s links",
    )
    return rows


# ---- the programs --------------------------------------------------------------------------------


def lowerable(s: Settings, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """The training step, ready to `.lower`, and the shapes of its arguments."""
    annotate = sw.annotate if s.side == "shardwise" else programs.jit_annotate(mesh)
    make = stack if s.program == "stack" else translation
    step, values = make(s, annotate)
    specs = tuple(jax.tree_util.tree_map_with_path(_spec, v) for v in values)
    if s.side == "shardwise":
        return sw.spmd(step, mesh=mesh, in_shardings=specs, donate_argnums=(0,)), values
    placed = programs.shardings_of(mesh, specs)
    return jax.jit(step, in_shardings=placed, donate_argnums=(0,)), values


def _spec(path: Any, value: Any) -> P:
    """Experts and batch over x; what both sides are told of their arguments."""
    names = [getattr(k, "key", getattr(k, "name", None)) for k in path]
    if "moe" in names and "gate" not in names and value.ndim > 2:
        return P(None, "x")
    return P("x") if names in (["source"], ["target"], ["language"], ["h"]) else P()


def stack(s: Settings, annotate: Any) -> tuple[Any, tuple[Any, ...]]:
    """`step(params, {"h": [B, S, M]}, seed) -> (params, loss)`."""
    config = s.config

    def init(key: Any) -> Any:
        keys = jax.random.split(key, s.layers // config.moe_every)
        block = functools.partial(layers.init_block, config, False)
        return {"encoder": jax.vmap(block)(keys), "norm": jnp.ones((config.model,))}

    run = layers.Pass(config, layers.Hooks(annotate, "gshard", ("x",)), train=True)

    def loss(params: Any, h: Any, seed: Any) -> Any:
        past, valid = causal(h.shape[1]), jnp.ones(h.shape[:2], bool)

        def block(h: Any, block: Any, key: Any) -> Any:
            stats = None
            for p, k in zip(block, jax.random.split(key, len(block)), strict=True):
                h = layers.self_attention(run, p, h, past, None)
                h, stats = layers.feed_forward(run, p, h, valid, k)
            return h, stats

        keys = jax.random.split(jax.random.key(seed), s.layers // config.moe_every)
        block = jax.checkpoint(block, prevent_cse=False)
        h, stats = layers.over_blocks(config, block, run.shard(h, "bsm"), params["encoder"], keys)
        h = rms_norm(h, params["norm"]).astype(jnp.float32)
        return jnp.mean(h**2) + 0.01 * jnp.sum(stats["aux_loss"])

    def step(params: Any, batch: Any, seed: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch["h"], seed)
        return jax.tree.map(lambda w, g: w - 0.01 * g, params, grads), value

    rows = s.experts * s.batch_per_core
    h = jax.ShapeDtypeStruct((rows, s.seq, config.model), jnp.dtype(config.dtype))
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    return step, (jax.eval_shape(init, jax.random.key(0)), {"h": h}, seed)


def translation(s: Settings, annotate: Any) -> tuple[Any, tuple[Any, ...]]:
    """`step(state, batch) -> (state, metrics)`: the job's own training step."""
    options = StepOptions(s.config, languages=100)
    rows = s.experts * s.batch_per_core
    tokens = jax.ShapeDtypeStruct((rows, s.seq), jnp.int32)
    languages = jax.ShapeDtypeStruct((rows,), jnp.int32)
    batch = {"source": tokens, "target": tokens, "language": languages}
    state = jax.eval_shape(functools.partial(initial_state, options))
    return make_step(options, annotate, ("x",)), (state, batch)


def compiled(s: Settings) -> dict[str, Any]:
    mesh = tpu.pod(s.topology, {"x": s.experts})
    step, values = lowerable(s, mesh)
    return tpu.figures(step, values, s.side == "shardwise")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    print(json.dumps(compiled(Settings(**json.loads(sys.argv[1])))))
