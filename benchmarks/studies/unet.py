"""Table 8: the 3D U-Net, its images split in space 1 to 32 ways, by one annotation on the image."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.studies import Annotate, Case, Program
from shardwise.models import unet

STRATEGY = "spatial"
TOPOLOGIES = {1: "v3:2x2", 2: "v3:2x2", 4: "v3:2x2", 8: "v3:2x2", 16: "v3:2x4", 64: "v3:4x8"}
"""Cores -> the smallest pod that libtpu describes with that many or more."""


def program(row: unet.ImageRow, annotate: Annotate) -> Program:
    """One training step of a row: (parameters, batch) -> (parameters, loss), parameters donated."""
    config, space = row.config, (row.image,) * row.config.dims
    axes = tuple(name if size > 1 else "" for name, size in row.mesh.items())
    batch = {
        "image": jax.ShapeDtypeStruct((row.batch, *space, config.channels), jnp.float32),
        "target": jax.ShapeDtypeStruct((row.batch, *space), jnp.int32),
    }
    params = unet.abstract_params(config)
    whole = jax.tree.map(lambda _: P(), params)
    image = unet.spec(STRATEGY, "image", axes) or P()
    # The image's spec is the annotation of the model; the target is fed the same way.
    given: dict[str, Any] = {"image": image, "target": image}
    shard = unet.sharder(annotate, STRATEGY, axes)
    return Program(
        functools.partial(unet.sgd_step, config, shard=shard),
        (params, batch),
        in_shardings=(whole, given),
        out_shardings=(whole, P()),
        donate=(0,),
    )


def cases() -> list[Case]:
    """The rows of Table 8."""
    return [
        Case(
            model="unet",
            table=row.table,
            row=name,
            mesh=row.mesh,
            build=functools.partial(program, row),
            layers=2 * row.config.levels - 1,
            published=row.published,
            assumed=row.assumed,
            topology=TOPOLOGIES[row.devices],
            # One row: a compilation takes libtpu ten minutes, whoever partitioned it.
            compile=row.devices == 16,
        )
        for name, row in unet.PAPER.items()
    ]
