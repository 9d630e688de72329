"""The dense Transformers of Tables 2 to 4."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.studies import Annotate, Case, Program
from shardwise.models import transformer
from shardwise.models.paper import Row

LOOP_MEMORY = 6.5 * 2**30
"""Bytes that a pipeline's ticks may hold: gathered weights 2 GiB, sums of gradients 4 GiB."""


def cases() -> list[Case]:
    return [case(name, row) for name, row in transformer.PAPER.items()]


def case(name: str, row: Row[Any]) -> Case:
    flags = {"loop_memory": LOOP_MEMORY} if row.config.pipeline else {}
    return Case(
        "transformer", row.table, name, row.mesh, functools.partial(program, row),
        row.config.layers.layers, row.published, row.assumed, flags=flags,
    )  # fmt: skip


def program(row: Row[Any], annotate: Annotate) -> Program:
    """The training step: gradients and plain descent, parameters donated."""
    step = functools.partial(transformer.sgd_step, row.config, annotate=annotate)
    specs = transformer.parameter_specs(row.config)
    tokens = jax.ShapeDtypeStruct((row.batch, transformer.SEQUENCE), jnp.int32)
    batch = P(("l", "x")) if row.config.pipeline else P("x")
    args = transformer.abstract_params(row.config), tokens
    return Program(step, args, (specs, batch), (specs, P()), donate=(0,))
