"""Bubbles and recomputation of GSPMD's Tables 4 and 5, beside the published figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwise import _jax
from shardwise.cost.flops import flops
from shardwise.pipeline.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Row:
    """A published row: its schedule, and the share of the step's time in bubbles and in recomputation."""

    table: int
    model: str
    schedule: Schedule
    bubbles: float
    recompute: float | None = None


PUBLISHED = (
    Row(4, "Transformer 16B, mesh (2,16,8)", Schedule(2, 16), 0.056, 0.223),
    Row(4, "Transformer 16B, mesh (4,16,4)", Schedule(4, 16), 0.148, 0.213),
    Row(4, "Transformer 16B, mesh (4,16,4)", Schedule(4, 32), 0.080, 0.217),
    Row(4, "Transformer 16B, mesh (8,16,2)", Schedule(8, 32), 0.165, 0.222),
    Row(4, "Transformer 16B, mesh (8,8,4)", Schedule(8, 32), 0.161, 0.206),
    Row(5, "Conformer 6.47B, 32 layers", Schedule(8, 64), 0.096),
    Row(5, "Conformer 6.47B, 32 layers", Schedule(8, 16), 0.299),
    Row(5, "Conformer 6.47B, 32 layers", Schedule(8, 16, 4), 0.090),
    Row(5, "Conformer 12.95B, 64 layers", Schedule(16, 128), 0.104),
    Row(5, "Conformer 12.95B, 64 layers", Schedule(16, 32), 0.310),
    Row(5, "Conformer 12.95B, 64 layers", Schedule(16, 32, 4), 0.100),
)
"""Table 5's recomputation is given as ranges only: 21 to 23 % (6.47B) and 23 to 30 % (12.95B)."""


def report() -> str:
    """Both tables as Markdown: bubbles by formula and as published."""
    head = "| table | model | S | M | R | ticks | bubbles | published |\n|---|---|--:|--:|--:|--:|--:|--:|"
    lines = [
        f"| {r.table} | {r.model} | {r.schedule.stages} | {r.schedule.microbatches} "
        f"| {r.schedule.rounds} | {r.schedule.ticks} | {100 * r.schedule.bubble_ratio:.1f} % "
        f"| {100 * r.bubbles:.1f} % |"
        for r in PUBLISHED
    ]
    return "\n".join([head, *lines])


def recomputation(
    layer: Callable[..., Any], params: Any, x: Any, remat: bool | Callable[..., Any] = True
) -> float:
    """The share of a layer's work, forward and backward, that recomputing it for the gradient takes.

    Args:
      layer: `layer(params, x)`, of one layer and one microbatch.
      params, x: arrays or `ShapeDtypeStruct`s.
      remat: as for `pipeline`.

    Returns:
      recomputed FLOPs / all FLOPs: 1/4 where everything is recomputed and products dominate.
    """

    def work(f: Callable[..., Any]) -> float:
        def loss(params: Any, x: Any) -> Any:
            leaves = jax.tree.leaves(f(params, x))
            return sum(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in leaves)

        traced = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(params, x)
        return flops(_jax.open_jaxpr(_jax.dce(traced))[0])

    if remat is False:
        return 0.0
    policy = None if remat is True else remat
    return 1 - work(layer) / work(jax.checkpoint(layer, policy=policy))
