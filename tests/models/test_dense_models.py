"""The dense Transformers: the paper's rows, and the pipeline beside the plain model."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.mesh import device_mesh
from shardwise.models import transformer
from shardwise.models.transformer import PAPER, Config, Pipeline
from shardwise.nn.transformer import TransformerConfig

SMALL = TransformerConfig(layers=4, model=16, hidden=32, heads=4, vocab=24, remat="full")
PIPED = Config(SMALL, Pipeline(stages=2, microbatches=2))


def some_tokens(batch=8, seq=8):
    return jax.random.randint(jax.random.key(1), (batch, seq), 0, SMALL.vocab)


@functools.cache
def one_device():
    """Loss and gradients of the model without a pipeline, unpartitioned."""
    config = Config(SMALL)
    params = transformer.init(config, jax.random.key(0))
    return params, jax.jit(jax.value_and_grad(functools.partial(transformer.loss, config)))(
        params, some_tokens()
    )


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_parameter_counts(name):
    row = PAPER[name]
    count = transformer.parameter_count(row.config) / 2**30
    assert count == pytest.approx(row.published["params"], rel=0.02)
    p = row.config.pipeline
    assert p is None or (row.mesh["l"] == p.stages and row.batch % p.microbatches == 0)
    for spec, value in zip(
        jax.tree.leaves(
            transformer.parameter_specs(row.config), is_leaf=lambda s: isinstance(s, P)
        ),
        jax.tree.leaves(transformer.abstract_params(row.config)),
        strict=True,
    ):
        for dim, axes in zip(value.shape, spec, strict=False):
            names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
            assert dim % math.prod(row.mesh[a] for a in names) == 0


def test_a_pipeline_is_the_same_model():
    schedule, mesh = "circular", {"l": 2, "x": 2, "y": 2}
    config = dataclasses.replace(PIPED, pipeline=Pipeline(2, 2, schedule))
    params, (value, grads) = one_device()
    f = functools.partial(transformer.loss, config, annotate=sw.annotate)
    step = sw.spmd(jax.value_and_grad(f), mesh=device_mesh(mesh))
    got, got_grads = step(params, some_tokens())
    np.testing.assert_allclose(got, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), got_grads, grads)


def test_weights_of_a_pipeline_are_gathered_and_reduced_once():
    """And the loop of layers stays a loop: nothing about weights happens in a tick."""
    f = functools.partial(transformer.loss, PIPED, annotate=sw.annotate)
    specs = transformer.parameter_specs(PIPED)
    mesh = sw.abstract_mesh({"l": 2, "x": 2, "y": 2})
    step = sw.spmd(jax.grad(f), mesh=mesh, in_shardings=(specs, P(("l", "x"))), out_shardings=specs)
    big = jax.ShapeDtypeStruct((64, 64), jnp.int32)  # more tokens than a weight has rows
    plan = step.plan(transformer.abstract_params(PIPED), big)
    ticks = PIPED.pipeline.microbatches + PIPED.pipeline.stages - 1
    over_x = [c for c in plan.collectives if c.axes == ("x",)]
    weights = {"all-gather": 0, "reduce-scatter": 0}
    for c in over_x:
        if c.kind in weights:
            weights[c.kind] += 1
            assert c.count == 1
    assert weights == {"all-gather": 8, "reduce-scatter": 4}
    shifts = [c for c in plan.collectives if c.kind == "collective-permute" and c.count > 1]
    assert [c.count for c in shifts] == [ticks, ticks]
    assert not plan.fallbacks


def test_layers_of_a_pipeline_are_stacked():
    with pytest.raises(ValueError, match="scan must be True"):
        Config(dataclasses.replace(SMALL, scan=False), Pipeline(2, 2))
