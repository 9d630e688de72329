"""GSPMD's claim for its Transformer: seven annotations a layer, and every other tensor follows."""

import functools

import jax
import jax.numpy as jnp
import pytest

import shardwise as sw
from shardwise.nn import transformer

CONFIG = transformer.TransformerConfig(
    layers=2, model=64, hidden=256, heads=8, vocab=128, scan=True, remat="full"
)
MESH = sw.abstract_mesh({"x": 2, "y": 4})


@functools.lru_cache
def plan_of(strategy, skip_ends=False):
    ends = {transformer.spec(strategy, "embedding"), transformer.spec(strategy, "logits")}

    def annotate(x, spec):
        if skip_ends and (x.shape[-1] == CONFIG.vocab or x.shape == (CONFIG.vocab, CONFIG.model)):
            assert spec in ends
            return x
        return sw.annotate(x, spec)

    step = functools.partial(transformer.sgd_step, CONFIG, annotate=annotate, strategy=strategy)
    tokens = jax.ShapeDtypeStruct((8, 32), jnp.int32)
    return sw.spmd(step, mesh=MESH).plan(transformer.abstract_params(CONFIG), tokens)


def forward_scan(plan):
    return next(e for e in plan.body.eqns if e.name == "scan").bodies[0]


def equations(body):
    for eqn in body.eqns:
        yield eqn
        for sub in eqn.bodies:
            yield from equations(sub)


def test_a_layer_has_seven_annotations():
    layer = list(equations(forward_scan(plan_of("final"))))
    assert sum(e.name == "annotation" for e in layer) == 7


@pytest.mark.parametrize("strategy", ["final", "attempt2", "attempt1"])
def test_every_other_tensor_of_a_layer_follows(strategy):
    """Nothing of the size of an activation or a weight is left whole in the layers."""
    plan = plan_of(strategy)
    limit = 8 * 32 * 8 * 4  # bytes of one number a head and position: norms' statistics are smaller
    whole = [
        v
        for scan in plan.body.eqns
        if scan.name == "scan"
        for v in scan.bodies[0].variables()
        if v.nbytes >= limit and not plan.completion.sharding(v).used and v.name != "mask"
    ]
    # the causal mask is made from iota wherever it is needed, in any split
    assert [v for v in whole if v.shape != (32, 32)] == []


def test_the_seven_decide_what_lies_outside_the_layers_too():
    all_nine, seven = plan_of("final"), plan_of("final", skip_ends=True)
    assert seven.comm_bytes <= all_nine.comm_bytes
    assert seven.in_shardings[0]["layers"] == all_nine.in_shardings[0]["layers"]
    assert seven.completion.sharding(seven.body.invars[0]).used  # the embedding is split as well


def test_gradient_accumulation_reduces_once_after_the_loop():
    """k microbatches, one reduction: the accumulator stays a pending sum."""

    def f(w, x):
        def body(g, b):
            return g + jax.grad(lambda w: (jnp.tanh(b @ w) ** 2).sum())(w), None

        return jax.lax.scan(body, jnp.zeros_like(w), x.reshape(16, 4, 32).swapaxes(0, 1))[0]

    s = [jax.ShapeDtypeStruct((32, 8), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.float32)]
    P = jax.sharding.PartitionSpec
    plan = sw.spmd(
        f, mesh=sw.abstract_mesh({"x": 8}), in_shardings=(P(), P("x")), out_shardings=P()
    ).plan(*s)
    assert [(c.kind, c.count, c.bytes) for c in plan.collectives] == [
        ("all-reduce", 1, 2 * 32 * 8 * 4 * 7 / 8)
    ]
