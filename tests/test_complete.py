"""Completion: the papers' figures and examples, and what "refinement only" promises."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw

MESH = sw.abstract_mesh({"x": 2, "y": 4})


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def planned(fn, *args, mesh=MESH, **kwargs):
    return sw.spmd(fn, mesh=mesh, **kwargs).plan(*args)


def spec_of(plan, value):
    """The completed PartitionSpec of a value, found by its dtype-free repr or name."""
    from shardwise.explain.text import find

    return plan.spec(plan.completion.sharding(find(plan, value)))


def results_of(plan, primitive):
    """Completed specs of the results of every equation of a primitive, bodies included."""
    out = []

    def walk(body):
        for eqn in body.eqns:
            for sub in eqn.bodies:
                walk(sub)
            if eqn.name == primitive:
                out.append(plan.spec(plan.completion.sharding(eqn.outvars[0])))

    walk(plan.body)
    return out


def test_figure_3_a_dot_merges_the_splits_of_its_operands():
    """AyB, BCx -> AyCx."""
    plan = planned(
        lambda a, b: a @ b, f32(8, 16), f32(16, 32), in_shardings=(P("y", None), P(None, "x"))
    )
    assert plan.out_shardings == P("y", "x")


def test_figure_4_dot_add_and_broadcast_agree():
    """Elementwise first: the bias, broadcast and added, takes the dot's split and not another."""

    def f(a, b, bias):
        return jax.nn.relu(a @ b + jnp.broadcast_to(bias, (8, 32)))

    plan = planned(f, f32(8, 16), f32(16, 32), f32(32), in_shardings=(P("x"), P(None, "y"), None))
    assert results_of(plan, "dot_general") == [P("x", "y")]
    assert results_of(plan, "add") == [P("x", "y")]
    assert results_of(plan, "broadcast_in_dim")[-1] == P("x", "y")
    assert plan.in_shardings[2] == P("y")
    assert plan.collectives == []


def test_einsum_data_and_model_parallel():
    """BD,DF -> BF: batch over x from the activations, F over y from the weights."""
    plan = planned(
        lambda a, w: jnp.einsum("bd,df->bf", a, w), f32(8, 16), f32(16, 32),
        in_shardings=(P("x", None), P(None, "y")),
    )  # fmt: skip
    assert plan.out_shardings == P("x", "y")
    assert plan.collectives == []


def test_einsum_weight_update_sharding():
    """The weight split over the batch axis: all-gather forward, reduce-scatter backward."""

    def loss(w, a):
        return (jnp.einsum("bd,df->bf", a, w) ** 2).sum()

    plan = planned(
        jax.grad(loss), f32(16, 32), f32(64, 16), in_shardings=(P("x", None), P("x", None)),
        out_shardings=P("x", None),
    )  # fmt: skip
    kinds = [c.kind for c in plan.collectives]
    assert kinds == ["all-gather", "reduce-scatter"]
    half = 16 * 32 * 4 / 2
    assert [c.bytes for c in plan.collectives] == [half, half]


def test_einsum_experts_reach_unannotated_activations():
    """EBD,EDF -> EBF: only the weights are annotated."""
    plan = planned(
        lambda a, w: jnp.einsum("ebd,edf->ebf", a, w), f32(8, 16, 32), f32(8, 32, 64),
        in_shardings=(None, P("x", None, "y")),
    )  # fmt: skip
    assert plan.in_shardings[0] == P("x", None, None)
    assert plan.out_shardings == P("x", None, "y")


def test_gradients_carry_their_annotation():
    def loss(w, a):
        return jnp.sin(a @ sw.annotate(w, P("x", "y"))).sum()

    plan = planned(jax.grad(loss), f32(16, 32), f32(64, 16))
    assert plan.in_shardings[0] == P("x", "y")
    assert plan.out_shardings == P("x", "y")


def test_partial_specification_leaves_open_dims_to_completion():
    def f(a, w):
        return sw.annotate(a @ w, P("x", P.UNCONSTRAINED))

    plan = planned(f, f32(8, 16), f32(16, 32), in_shardings=(None, P(None, "y")))
    assert plan.out_shardings == P("x", "y")
    closed = planned(
        lambda a, w: sw.annotate(a @ w, P("x", None)), f32(8, 16), f32(16, 32),
        in_shardings=(None, P(None, "y")),
    )  # fmt: skip
    assert results_of(closed, "annotation") == [P("x", None)]


def test_annotations_are_fixed():
    """Neither neighbour changes what the user wrote; the reshard between them is the plan's."""
    plan = planned(
        lambda a: sw.annotate(sw.annotate(a, P("x", None)) * 2, P(None, "y")), f32(8, 16)
    )
    assert results_of(plan, "annotation") == [P("x", None), P(None, "y")]


@pytest.mark.parametrize("kind", ["scan", "while", "cond", "checkpoint", "jit", "custom_vjp"])
def test_through_control_flow(kind):
    """An annotation on the input reaches the result through every kind of body."""

    def body(h):
        return jnp.tanh(h) * 2

    def f(h):
        if kind == "scan":
            return lax.scan(lambda c, _: (body(c), None), h, None, length=3)[0]
        if kind == "while":
            return lax.while_loop(lambda c: c[1] < 3, lambda c: (body(c[0]), c[1] + 1), (h, 0))[0]
        if kind == "cond":
            return lax.cond(h.sum() > 0, body, lambda h: -h, h)
        if kind == "checkpoint":
            return jax.checkpoint(body)(h)
        if kind == "jit":
            return jax.jit(body)(h)
        g = jax.custom_vjp(body)
        g.defvjp(lambda h: (body(h), h), lambda h, ct: (ct * h,))
        return g(h)

    plan = planned(f, f32(8, 16), in_shardings=(P("x", "y"),))
    assert plan.out_shardings == P("x", "y")
    backward = planned(f, f32(8, 16), out_shardings=P("x", "y"))
    assert backward.in_shardings == (P("x", "y"),)


def test_scanned_stack_keeps_its_layers_whole_and_shares_the_rest():
    def f(ws, h):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0]

    plan = planned(f, f32(4, 16, 16), f32(8, 16), in_shardings=(P(None, "x", "y"), None))
    assert plan.in_shardings[0] == P(None, "x", "y")


def test_an_atom_can_split_a_dim_smaller_than_its_axis():
    """Two heads over an axis of four: two-way heads, two-way head dim, as GSPMD's users want it."""

    def f(h):
        return jnp.tanh(h.reshape(8, 2, 32))

    plan = planned(f, f32(8, 64), in_shardings=(P(None, "y"),))
    s = plan.completion.sharding(plan.body.outvars[0])
    assert s.axes == ((), ("y.0",), ("y.1",))
    assert plan.collectives == []


def test_why_walks_back_to_the_annotation():
    def f(a, b):
        return jax.nn.relu(a @ b)

    plan = planned(f, f32(8, 16), f32(16, 32), in_shardings=(P("x"), P(None, "y")))
    text = plan.why("result0")
    assert text.splitlines()[0] == "result0: float32[8@x, 32@y]"
    assert "through dot_general" in text
    assert "in_shardings at test_complete.py:" in text


def test_same_plan_under_any_hash_seed():
    """Deterministic: nothing depends on the order of a set."""
    program = (
        "import jax, jax.numpy as jnp, shardwise as sw\n"
        "from jax.sharding import PartitionSpec as P\n"
        "f = jax.grad(lambda w, a: jax.nn.softmax(jax.nn.gelu(a @ w) @ w.T).sum())\n"
        "m = sw.abstract_mesh({'x': 2, 'y': 4})\n"
        "s = lambda *d: jax.ShapeDtypeStruct(d, jnp.float32)\n"
        "print(sw.spmd(f, mesh=m, in_shardings=(P('x', 'y'), None)).plan(s(16, 32), s(8, 16)).explain())"
    )
    out = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(out) == 1


def test_cost_of_completion_does_not_depend_on_devices():
    """The same visits on 8 and on 65,536 devices: cost grows with the edges only."""

    def f(w, a):
        return jax.nn.gelu(a @ w) @ w.T

    visits = [
        planned(
            f, f32(65536, 512), f32(1024, 65536), in_shardings=(P("x", "y"), P("y", None)),
            mesh=sw.abstract_mesh({"x": n, "y": n}),
        ).completion.visits
        for n in (4, 256)
    ]  # fmt: skip
    assert visits[0] == visits[1]
