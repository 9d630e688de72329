"""The mixture-of-experts models of Tables 6 and 7."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.studies import Annotate, Case, Program
from shardwise.models import moe
from shardwise.models.paper import Row


def cases() -> list[Case]:
    return [
        Case(
            "moe", row.table, name, row.mesh, functools.partial(program, row), row.config.layers,
            row.published, row.assumed,
        )
        for name, row in moe.PAPER.items()
    ]  # fmt: skip


def program(row: Row[Any], annotate: Annotate) -> Program:
    """The training step: gradients and plain descent, parameters donated."""
    strategy = moe.strategy_of(row)
    step = functools.partial(moe.sgd_step, row.config, annotate=annotate, strategy=strategy)
    specs = moe.parameter_specs(row.config, strategy)
    tokens = jax.ShapeDtypeStruct((row.batch, moe.SEQUENCE), jnp.int32)
    args = moe.abstract_params(row.config), tokens, jax.ShapeDtypeStruct((), jnp.uint32)
    return Program(step, args, (specs, P("x"), P()), (specs, P()), donate=(0,))
