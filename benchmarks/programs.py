"""The programs that are measured, and the two ways to partition them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardwise as sw
from shardwise.nn import transformer

DENSE = transformer.TransformerConfig(
    layers=4, model=256, hidden=1024, heads=8, vocab=1024, scan=True, remat="full"
)
"""The dense Transformer of the table; batch 16, sequence 128, mesh x=2 y=4."""
BATCH, SEQ, MESH = 16, 128, {"x": 2, "y": 4}


def jit_annotate(mesh: Mesh) -> transformer.Annotate:
    """The annotation of a program that jax.jit partitions."""
    return lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def training_step(
    config: transformer.TransformerConfig, strategy: str, annotate: transformer.Annotate
) -> Callable[..., Any]:
    """step(params, tokens) -> (params, loss): gradient descent under a strategy's annotations."""
    return functools.partial(transformer.sgd_step, config, annotate=annotate, strategy=strategy)


def partitioned(side: str, config: Any, strategy: str, mesh: Mesh) -> Any:
    """The step, ready to lower or to call: `side` is "shardwise" or "jit"."""
    if side == "shardwise":
        return sw.spmd(training_step(config, strategy, sw.annotate), mesh=mesh)
    return jax.jit(training_step(config, strategy, jit_annotate(mesh)))


def arguments(config: Any, batch: int, seq: int) -> tuple[Any, jax.Array]:
    """Parameters and tokens, on one device."""
    params = jax.jit(functools.partial(transformer.init, config))(jax.random.key(0))
    return params, jax.random.randint(jax.random.key(1), (batch, seq), 0, config.vocab)


def abstract_arguments(config: Any, batch: int, seq: int) -> tuple[Any, jax.ShapeDtypeStruct]:
    """The same as shapes."""
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return transformer.abstract_params(config), tokens


def shardings_of(mesh: Mesh, specs: Any) -> Any:
    """A tree of PartitionSpec as NamedSharding on a mesh (None stays None)."""
    return jax.tree.map(
        lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec)
    )
