"""Table 5: the pipelined Conformer, GPipe and circular, a stage a core."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.studies import Annotate, Case, Program
from shardwise.models import conformer
from shardwise.models.conformer import ConformerConfig
from shardwise.models.paper import Row

OUTPUTS = 128
"""Characters of an utterance's transcript: one for five frames."""

ADAM = "Adam in float32; the batch split over the stages' devices outside the layers"
TOPOLOGIES = {8: "v3:2x2", 16: "v3:2x4"}
"""Cores -> the smallest pod that libtpu describes with that many."""


def program(row: Row[ConformerConfig], annotate: Annotate) -> Program:
    """One training step: (parameters, moments, batch) -> (the same two, loss), both donated."""
    config = row.config
    assert config.pipelined is not None
    axis = config.pipelined.axis
    params = conformer.abstract_params(config)
    layers = jax.tree.map(lambda _: P(axis), params["layers"])
    placed = jax.tree.map(lambda _: P(), params) | {"layers": layers}
    rows = row.batch, conformer.STRIDE * conformer.PAPER_FRAMES
    batch = {
        "features": jax.ShapeDtypeStruct((*rows, config.features), jnp.float32),
        "frames": jax.ShapeDtypeStruct(rows[:1], jnp.int32),
        "labels": jax.ShapeDtypeStruct((rows[0], OUTPUTS), jnp.int32),
        "characters": jax.ShapeDtypeStruct(rows[:1], jnp.int32),
    }
    given = jax.tree.map(lambda _: P(axis), batch)
    shard = conformer.sharder(annotate, "data", (axis,))
    return Program(
        functools.partial(adam_step, config, shard, annotate),
        (params, (params, params), batch),
        in_shardings=(placed, (placed, placed), given),
        out_shardings=(placed, (placed, placed), P()),
        donate=(0, 1),
    )


def adam_step(
    config: ConformerConfig, shard: Any, annotate: Annotate, params: Any, moments: Any, batch: Any
) -> tuple[Any, Any, jax.Array]:
    """A step of Adam with the moments as they are after many: no correction of their start."""

    def loss(params: Any) -> jax.Array:
        return conformer.loss(config, params, batch, shard=shard, annotate=annotate)[0]

    value, grads = jax.value_and_grad(loss)(params)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    square = jax.tree.map(lambda v, g: 0.98 * v + 0.02 * g * g, moments[1], grads)
    params = jax.tree.map(lambda w, m, v: w - 1e-4 * m / (jnp.sqrt(v) + 1e-9), params, mean, square)
    return params, (mean, square), value


def cases() -> list[Case]:
    """The rows of Table 5."""
    return [
        Case(
            model="conformer",
            table=row.table,
            row=name,
            mesh=row.mesh,
            build=functools.partial(program, row),
            layers=row.config.layers,
            published=row.published,
            assumed=(*row.assumed, ADAM),
            topology=TOPOLOGIES[row.devices],
        )
        for name, row in conformer.PAPER.items()
    ]
