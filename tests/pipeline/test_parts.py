"""Part of a model, and several pipelines in one (GSPMD Figure 2): the same axis x is data parallel in the
embedding, stages in both stacks, and data parallel in the softmax."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from tests.pipeline.stacks import same

ROWS, MODEL, HIDDEN, VOCAB, STAGES, MICRO = 16, 8, 16, 12, 4, 4


def init() -> dict[str, Any]:
    k = iter(jax.random.split(jax.random.key(0), 8))
    draw = lambda *shape: 0.3 * jax.random.normal(next(k), shape)
    return {
        "embedding": draw(VOCAB, MODEL),
        "encoder": {"wi": draw(4, MODEL, HIDDEN), "wo": draw(4, HIDDEN, MODEL)},
        "decoder": {"wi": draw(8, MODEL, HIDDEN), "we": draw(8, MODEL, HIDDEN),
                    "wo": draw(8, HIDDEN, MODEL)},
    }  # fmt: skip


def encoder_layer(p: Any, x: Any) -> Any:
    h = jnp.tanh(x @ sw.annotate(p["wi"], P(None, "y")))
    return x + h @ p["wo"]


def decoder_layer(p: Any, x: Any, memory: Any) -> Any:
    h = jnp.tanh(x @ sw.annotate(p["wi"], P(None, "y")) + memory @ p["we"])
    return x + h @ p["wo"]


def stack(layer: Any, params: Any, x: Any, memory: Any = None, **options: Any) -> Any:
    if options:
        return sw.pipeline(layer, params, x, axis="x", num_stages=STAGES, num_microbatches=MICRO,
                           inputs=memory, remat=True, **options)  # fmt: skip
    more = () if memory is None else (memory,)
    return lax.scan(lambda h, p: (layer(p, h, *more), None), x, params)[0]


def loss(params: Any, source: Any, target: Any, piped: bool) -> Any:
    gpipe = {"schedule": "gpipe"} if piped else {}
    circular = {"schedule": "circular"} if piped else {}
    table = params["embedding"]
    source, target = sw.annotate((source, target), P("x"))
    memory = stack(encoder_layer, params["encoder"], table[source], **gpipe)
    h = stack(decoder_layer, params["decoder"], table[target], memory, **circular)
    scores = sw.annotate(h @ table.T, P("x"))
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), target[:, None], 1))


def test_encoder_and_decoder():
    params = init()
    tokens = jax.random.randint(jax.random.key(1), (2, ROWS), 0, VOCAB)
    f = lambda piped: jax.value_and_grad(lambda p, s, t: loss(p, s, t, piped))
    want = jax.jit(f(False))(params, *tokens)
    g = sw.spmd(f(True), mesh=sw.device_mesh({"x": 4, "y": 2}))
    same(g(params, *tokens), want)
    plan = g.plan(params, *tokens)
    assert plan.fallbacks == []
    # stacks are split over x by stages, the batch over x everywhere else
    assert plan.in_shardings[0]["encoder"]["wi"] == P("x", None, "y")
    assert plan.in_shardings[0]["decoder"]["wi"] == P("x", None, "y")
    assert plan.in_shardings[1] == P("x") and plan.in_shardings[2] == P("x")
    inside = Counter((c.kind, c.count) for c in plan.collectives if c.count > 1 and "x" in c.axes)
    # GPipe: 4 + 3 ticks; circular: 2 * 4 + 3; forward and backward each
    assert inside == {("collective-permute", 7): 2, ("collective-permute", 11): 2}
