"""What a layer may be given and give back: side inputs, state, keys, auxiliary outputs; sizes that do not
divide.  The reference is a plain loop over layers and microbatches, written out here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.errors import ShardingError
from shardwise.pipeline import deal
from tests.pipeline import stacks
from tests.pipeline.stacks import MODEL, same

ROWS, MICRO, LAYERS = 6, 3, 5  # 5 layers: the last stages have layers that do nothing
SCHEDULES = {"gpipe": {"schedule": "gpipe"}, "circular": {"schedule": "circular", "rounds": 2}}


def layer(p: Any, x: Any, inputs: Any, state: Any, key: Any) -> Any:
    """Uses and returns everything."""
    y = x * jnp.tanh(p) + inputs["bias"] + state["mean"]
    keep = jax.random.bernoulli(key, 0.8, y.shape)
    y = jnp.where(keep & inputs["mask"][:, None], y / 0.8, x)
    new = {"mean": 0.5 * state["mean"] + 0.1 * y.mean(0), "count": state["count"] + 1}
    return y, new, {"loss": jnp.sum(y * y), "rows": inputs["mask"].sum()}


def values() -> tuple[Any, ...]:
    k = jax.random.split(jax.random.key(0), 4)
    params = jax.random.normal(k[0], (LAYERS, MODEL))
    x = jax.random.normal(k[1], (ROWS, MODEL))
    inputs = {
        "bias": jax.random.normal(k[2], (ROWS, MODEL)),
        "mask": jnp.arange(ROWS) % 3 > 0,
    }
    state = {"mean": jax.random.normal(k[3], (LAYERS, MODEL)), "count": jnp.zeros(LAYERS, int)}
    return params, x, inputs, state, jax.random.key(7)


def plain(params: Any, x: Any, inputs: Any, state: Any, key: Any, stack: bool) -> Any:
    """Microbatch after microbatch through layer after layer."""
    rows = lambda tree: jax.tree.map(lambda a: jnp.stack([a[m::MICRO] for m in range(MICRO)]), tree)

    def microbatch(state: Any, item: Any) -> Any:
        m, h, mine = item

        def one(h: Any, item: Any) -> Any:
            i, p, st = item
            k = jax.random.fold_in(jax.random.fold_in(key, i), m)
            h, st, aux = layer(p, h, mine, st, k)
            return h, (st, aux)

        h, (state, aux) = lax.scan(one, h, (jnp.arange(LAYERS), params, state))
        return state, (h, aux)

    state, (h, aux) = lax.scan(microbatch, state, (jnp.arange(MICRO), rows(x), rows(inputs)))
    out = x
    for m in range(MICRO):
        out = out.at[m::MICRO].set(h[m])
    total = (lambda a: a.swapaxes(0, 1)) if stack else (lambda a: a.sum((0, 1)))
    return out, state, jax.tree.map(total, aux)


def piped(stages: int, aux: str, **options: Any) -> Any:
    def f(params: Any, x: Any, inputs: Any, state: Any, key: Any) -> Any:
        return sw.pipeline(
            layer, params, sw.annotate(x, P("data")), axis="stage", num_stages=stages,
            num_microbatches=MICRO, inputs=inputs, state=state, key=key, aux=aux, remat=True, **options,
        )  # fmt: skip

    return f


def with_gradients(f: Any) -> Any:
    """Results, and gradients of a sum of them."""

    def loss(params: Any, x: Any, bias: Any, rest: Any) -> Any:
        inputs, state, key = rest
        y, new, aux = out = f(params, x, {**inputs, "bias": bias}, state, key)
        total = jnp.sum(y**2) + jnp.sum(new["mean"] ** 3) + jnp.sum(jnp.sin(aux["loss"]))
        return total, out

    def run(params: Any, x: Any, inputs: Any, state: Any, key: Any) -> Any:
        g = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
        return g(params, x, inputs["bias"], (inputs, state, key))

    return run


CASES = [("gpipe", "stack", True), ("circular", "sum", True), ("circular", "stack", False)]


@pytest.mark.parametrize(("schedule", "aux", "partitioned"), CASES)
def test_everything_at_once(schedule: str, aux: str, partitioned: bool):
    args = values()
    want = jax.jit(with_gradients(lambda *a: plain(*a, stack=aux == "stack")))(*args)
    f = with_gradients(piped(2, aux, **SCHEDULES[schedule]))
    if not partitioned:
        same(jax.jit(f)(*args), want, 2e-5)
        return
    g = sw.spmd(f, mesh=sw.device_mesh({"data": 2, "stage": 2}))
    same(g(*args), want, 2e-5)
    plan = g.plan(*args)
    assert plan.fallbacks == []
    inside = {c.kind for c in plan.collectives if c.count > 1 and "stage" in c.axes}
    assert inside == {"collective-permute"}


@pytest.mark.parametrize("remat", [False, jax.checkpoint_policies.dots_saveable], ids=str)
def test_remat_changes_no_number(remat: Any):
    params, x = stacks.params(4), stacks.batch(8)

    def loss(params: Any, x: Any) -> Any:
        y = sw.pipeline(
            stacks.layer, params, x, axis="stage", num_stages=4, num_microbatches=2, remat=remat
        )
        return jnp.mean(y * y)

    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)
    same(got, stacks.expected(params, x))


def test_layers_written_out():
    params, x = stacks.params(6), stacks.batch(8)

    def run(unroll: bool) -> Any:
        return lambda p, x: sw.pipeline(
            stacks.layer, p, x, axis="stage", num_stages=2, num_microbatches=4, unroll=unroll
        )

    same(jax.jit(run(True))(params, x), stacks.plain(params, x))
    counts = [str(jax.make_jaxpr(run(u))(params, x)).count("tanh") for u in (False, True)]
    assert counts == [1, 3]


def test_a_tree_of_values_travels_together():
    layer = lambda w, x: {"a": x["a"] * w, "b": x["b"] + x["a"].sum(-1).astype(int)}
    x = {"a": jnp.ones((4, 3)), "b": jnp.arange(4)}
    w = jnp.array([2.0, 0.5, 3.0])
    got = sw.pipeline(layer, w, x, axis="stage", num_stages=3, num_microbatches=2)
    same(got, {"a": jnp.full((4, 3), 3.0), "b": jnp.arange(4) + 3 + 6 + 3})


def test_second_derivatives():
    params, x = stacks.params(2), stacks.batch(4)

    def square(f: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(f(x) ** 2))(x) ** 2))

    f = lambda x: sw.pipeline(
        stacks.layer, params, x, axis="stage", num_stages=2, num_microbatches=2
    )
    want = jax.jit(square(lambda x: stacks.plain(params, x)))(x)
    same(jax.jit(square(f))(x), want, 1e-4)


def run(**options: Any) -> Any:
    x = options.pop("x", jnp.ones((6, 4)))
    params = options.pop("params", jnp.ones((4, 4)))
    layer = options.pop("layer", lambda w, x, *rest: x * w)
    options = {"axis": "stage", "num_stages": 2, "num_microbatches": 3, **options}
    return sw.pipeline(layer, params, x, **options)


ERRORS = {
    "batch": ({"num_microbatches": 4}, """
pipeline: 4 microbatches do not divide a batch of 6
  at    AT
  hint  num_microbatches=2 or 3 does; or pad the batch"""),
    "params": ({"params": {"a": jnp.ones((4, 2)), "b": jnp.ones((3, 2))}}, """
pipeline: params['a'] has 4 in its first dim, params['b'] has 3
  at    AT
  hint  all leaves of params are stacked alike"""),
    "scalar": ({"params": 1.0}, """
pipeline: params is a scalar
  at    AT
  hint  its first dim counts layers, or rows of the batch"""),
    "nothing": ({"params": {}}, """
pipeline: params has no arrays
  at    AT"""),
    "inputs": ({"inputs": jnp.ones(5)}, """
pipeline: inputs have 5 rows, x has 6
  at    AT"""),
    "state": ({"state": jnp.ones(5)}, """
pipeline: state is of 5 layers, params of 4
  at    AT"""),
    "shape": ({"layer": lambda w, x: (x * w).sum(-1)}, """
pipeline: <lambda> does not keep the shape of x
  at    AT
  facts it takes float32[2,4] and returns float32[2]
  hint  stages must be alike: what comes out of one goes into the next"""),
    "schedule": ({"schedule": "1f1b"}, """
pipeline: unknown schedule '1f1b'
  at    AT
  facts schedules are gpipe, circular"""),
    "rounds": ({"rounds": 2}, """
pipeline: 2 rounds of a gpipe schedule
  at    AT
  hint  rounds belong to schedule="circular\""""),
    "number": ({"num_stages": 0}, """
pipeline: num_stages must be a number of at least 1, not 0
  at    AT"""),
    "axis": ({"axis": None}, """
pipeline: axis is a mesh axis or a tuple of them, not None
  at    AT"""),
    "aux": ({"aux": "mean"}, """
pipeline: aux is None, 'sum' or 'stack', not 'mean'
  at    AT"""),
    "remat": ({"remat": "full"}, """
pipeline: remat is False, True or a policy, not 'full'
  at    AT
  hint  see jax.checkpoint_policies"""),
    "dealt": ({"schedule": "circular", "rounds": 3, "dealt": True}, """
pipeline: 4 dealt layers are not 3 rounds of 2 stages
  at    AT
  hint  layers that do nothing fill up where they are in model order"""),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str):
    options, text = ERRORS[case]
    with pytest.raises(ShardingError) as e:
        run(**options)
    got = str(e.value)
    line = next(w for w in got.split() if w.startswith("test_options.py:"))
    assert got == text.strip().replace("AT", line)


def test_dealing_what_does_not_divide():
    with pytest.raises(ShardingError, match="deal: 5 layers are not 2 rounds of 2 stages"):
        deal(np.ones((5, 2)), 2, 2)


def test_a_mesh_without_the_axis():
    f = sw.spmd(lambda x: run(x=x), mesh=sw.abstract_mesh({"x": 8}))
    with pytest.raises(ShardingError, match=r"test_options\.py"):
        f.plan(jnp.ones((6, 4)))
