"""`pipeline`: a pipelined Transformer's training step, shardwise beside jax.jit with the same annotations.

The same call of `sw.pipeline` for both: what it annotates (the stage dim, and that microbatches are
whole), and the seven tensors of each layer, go through `sw.annotate` or `lax.with_sharding_constraint`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import shardwise as sw
from benchmarks import measure, programs, table
from benchmarks.transformer import SIDES, beside, figure
from shardwise.mesh import device_mesh
from shardwise.nn import transformer

CONFIG = transformer.TransformerConfig(
    layers=8, model=128, hidden=512, heads=4, vocab=512, remat=None
)
SEQ = 64
MESHES = {
    "2x2x2": {"stage": 2, "data": 2, "model": 2},
    "4x2x1": {"stage": 4, "data": 2, "model": 1},
}
SCHEDULES = {"gpipe": {}, "circular": {"schedule": "circular", "rounds": 2}}
HELD = {"default": None, "nothing": 0}
"""What a loop may hold so that weights are gathered and gradients reduced once: `spmd(loop_memory=)`."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """A step: `schedule` of SCHEDULES, on S stages; `microbatches` of `rows` rows each; `held` of HELD."""

    schedule: str
    stages: int
    held: str = "default"
    microbatches: int = 8
    rows: int = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedule", choices=SCHEDULES, help="one schedule (default: both)")
    parser.add_argument(
        "--mesh", choices=MESHES, help="one mesh, stage x data x model (default: all)"
    )
    parser.add_argument("--held", choices=HELD, help="what a loop may hold (default: both)")
    parser.add_argument("--pairs", type=int, default=20, help="paired timing rounds (default 20)")
    parser.add_argument(
        "--compile-only", action="store_true", help="run nothing: bytes and memory as compiled"
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = [
        row
        for schedule in ([args.schedule] if args.schedule else SCHEDULES)
        for mesh in ([args.mesh] if args.mesh else MESHES)
        for held in ([args.held] if args.held else HELD)
        for row in compare(schedule, mesh, held, 0 if args.compile_only else args.pairs)
    ]
    table.show(
        f"pipelined Transformer training step, {CONFIG.layers} layers, {Setup('', 1).microbatches} "
        "microbatches, stages recomputed, 8 devices",
        rows,
        args.json,
        "ratio: shardwise / jax.jit; times are medians, their ratio the median of paired ratios",
    )
    return rows


def step(
    setup: Setup, annotate: Callable[[Any, Any], Any], params: Any, tokens: jax.Array
) -> tuple[Any, jax.Array]:
    """Gradient descent on tokens [B, S]: (new parameters, loss before)."""

    def shard(x: Any, name: str) -> Any:
        return annotate(x, transformer.spec("final", name, ("data", "model")))

    def objective(params: Any) -> jax.Array:
        embedding = shard(params["embedding"], "embedding")
        h = shard(embedding[tokens], "bsm")
        h = sw.pipeline(
            functools.partial(transformer.layer, CONFIG, shard), params["layers"], h,
            axis="stage", num_stages=setup.stages, num_microbatches=setup.microbatches, remat=True,
            annotate=annotate, **SCHEDULES[setup.schedule],
        )  # fmt: skip
        h = transformer.rms_norm(shard(h, "bsm"), params["norm"])
        scores = shard(jnp.einsum("bsm,vm->bsv", h, embedding), "logits")
        nats = jax.nn.logsumexp(scores[:, :-1], -1)
        target = jax.nn.one_hot(tokens[:, 1:], CONFIG.vocab, dtype=scores.dtype)
        return jnp.mean(nats - jnp.sum(scores[:, :-1] * target, -1))

    value, grads = jax.value_and_grad(objective)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def partitioned(side: str, setup: Setup, mesh: Any) -> Any:
    if side == "shardwise":
        return sw.spmd(
            functools.partial(step, setup, sw.annotate), mesh=mesh, loop_memory=HELD[setup.held]
        )
    return jax.jit(functools.partial(step, setup, programs.jit_annotate(mesh)))


def compare(schedule: str, mesh: str, held: str, pairs: int) -> list[dict[str, Any]]:
    """The rows of one schedule on one mesh; no `pairs`: of what needs no run."""
    devices = device_mesh(MESHES[mesh])
    setup = Setup(schedule, MESHES[mesh]["stage"], held)
    sizes = CONFIG, setup.microbatches * setup.rows, SEQ
    steps = {side: partitioned(side, setup, devices) for side in SIDES}
    label = {"schedule": schedule, "mesh": mesh, "held": held}
    if pairs:
        return beside(label, steps, programs.arguments(*sizes), pairs)
    values = programs.abstract_arguments(*sizes)
    ours, theirs = (measure.Compiled.of(steps[s].lower(*values).compile()) for s in SIDES)
    return [
        figure(label, "wire MB a step", ours.wire.bytes / 1e6, theirs.wire.bytes / 1e6),
        figure(label, "temporary MB", ours.temp_bytes / 1e6, theirs.temp_bytes / 1e6),
    ]
