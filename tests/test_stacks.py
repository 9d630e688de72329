"""Scans over stacks that are split over the scanned dim: a slice at a time, no stack gathered."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.testing import check

RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return RNG.uniform(-1, 1, shape).astype(np.float32)


def layers(h: Any, ws: Any) -> Any:
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0]


def layers_grad(h: Any, ws: Any) -> Any:
    return jax.grad(lambda ws: layers(h, ws).sum())(ws)


def sent(plan: Any) -> list[tuple[str, int, float]]:
    """Kind, trips and bytes of each collective, those of one kind, trips and bytes together."""
    found = Counter((c.kind, c.count, c.bytes) for c in plan.collectives)
    return sorted((k, n * trips, b) for (k, trips, b), n in found.items())


def largest(plan: Any) -> int:
    """Entries of the largest value of the per-device program, bodies included."""

    def sizes(jaxpr: Any) -> Any:
        for eqn in jaxpr.eqns:
            for v in eqn.outvars:
                yield int(np.prod(v.aval.shape))
            for p in eqn.params.values():
                for sub in p if isinstance(p, (list, tuple)) else (p,):
                    if hasattr(inner := getattr(sub, "jaxpr", sub), "eqns"):
                        yield from sizes(inner)

    return max(sizes(getattr(plan.jaxpr, "jaxpr", plan.jaxpr)))


# --- operands -------------------------------------------------------------------------------------


def test_the_axis_moves_to_the_slice_before_the_loop():
    """One all-to-all of 1/8 of the stack; layers are computed split, and their results gathered."""
    args = f32(16, 64), f32(8, 64, 64) / 4
    plan = check(layers, args, {"x": 8}, (P(), P("x")), P(), wire=True)
    stack, h = 8 * 64 * 64 * 4, 16 * 64 * 4
    assert sent(plan) == [("all-gather", 8, h * 7 / 8), ("all-to-all", 1, stack / 8 * 7 / 8)]
    assert plan.comm_bytes < stack * 7 / 8  # what gathering the stack sends
    assert largest(plan) <= 8 * 64 * 64 / 8


def test_slices_needed_whole_are_gathered_one_at_a_time():
    """Batch and layers split over one axis: a layer is gathered when its turn comes."""
    args = f32(512, 32), f32(8, 32, 32) / 4
    plan = check(layers, args, {"x": 4}, (P("x"), P("x")), P("x"), wire=True)
    w = 32 * 32 * 4
    assert sent(plan) == [("all-gather", 8, w * 3 / 4), ("all-to-all", 1, 8 * w / 4 * 3 / 4)]
    assert largest(plan) < 8 * 32 * 32


def test_gradients_of_layers_end_with_their_owners():
    args = f32(16, 64), f32(8, 64, 64) / 4
    plan = check(layers_grad, args, {"x": 8}, (P(), P("x")), P("x"), grad=False, wire=True)
    assert plan.out_shardings == P("x", None, None)
    assert Counter(c.kind for c in plan.collectives)["all-reduce"] == 0
    assert plan.comm_bytes <= 114688  # of which a gathered stack alone would be as much
    # the residuals h: [8, 16, 64] are the largest
    assert largest(plan) <= 8 * 16 * 64


def test_pending_gradients_are_scattered_and_moved_to_their_owners():
    """Each device has its rows' part of every layer's gradient: a reduce-scatter each, then one move."""

    def f(xs: Any, h: Any) -> Any:
        return lax.scan(lambda c, x: (c, jnp.sin(x * h).T @ h), 0.0, xs)[1]

    args = f32(8, 256, 16), f32(256, 16)
    plan = check(f, args, {"x": 4}, (P(None, "x"), P("x")), P("x"), wire=True)
    n = 16 * 16 * 4
    assert sent(plan) == [
        ("all-to-all", 1, 8 * n / 4 * 3 / 4),
        ("reduce-scatter", 8, n * 3 / 4),
    ]


def test_slices_that_every_device_has_are_written_by_their_owners():
    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=6)[1]

    plan = check(f, (f32(8, 6),), {"x": 4}, P(), P("x"), kinds=[], bytes=0, wire=True)
    assert largest(plan) <= 2 * 8 * 6
    check(lambda x: f(x)[::-1], (f32(8, 6),), {"x": 2, "y": 4}, P("x"), P("y"))


@pytest.mark.parametrize(
    ("mesh", "size", "grad"),
    [
        ({"x": 8}, (8, 4, 24), False),
        ({"x": 3}, (5, 6, 13), True),
        ({"x": 2, "y": 4}, (5, 6, 20), False),
        ({"x": 6}, (1, 3, 16), False),
    ],
    ids=str,
)
def test_every_way_in_and_out(mesh: dict[str, int], size: tuple[int, int, int], grad: bool):
    """Uneven numbers of layers, slices with no dim that can be split, fewer layers than devices."""
    n, rows, h = size

    def f(x: Any, ws: Any, bs: Any) -> Any:
        def step(c: Any, wb: Any) -> Any:
            (x, i), (w, b) = c, wb
            out = jnp.tanh(x @ w + b)
            return (out, i + 1), (out * 2, w.T, out.sum(), b, i, w > 0, jnp.zeros((3, 2)))

        return lax.scan(step, (x, 1), (ws, bs), reverse=True, unroll=2)

    args = f32(rows, h), f32(n, h, h) / 4, f32(n, h)
    lead = tuple(mesh)
    out = (P(), P()), (P(lead),) * 7
    check(f, args, mesh, (P(lead[-1]), P(lead), P(lead[0])), out, grad=grad)


def test_parts_of_an_axis_on_several_dims():
    """Eight devices, and slices of 4 by 2."""
    args = f32(8, 40, 20, 4, 2), f32(4, 2)
    f = lambda xs, h: lax.scan(lambda h, x: (jnp.tanh(h + x.sum((0, 1))), h * x), h, xs)
    check(f, args, {"x": 8}, (P("x"), P()), (P(), P("x")))
    small = f32(8, 2, 3, 32), f32(32)
    check(
        lambda xs, h: lax.scan(lambda h, x: (jnp.tanh(h + x[0, 0]), h * x), h, xs),
        small, {"x": 8}, (P("x"), P()), (P(), P("x")), grad=False,
    )  # fmt: skip


def test_small_slices_are_gathered_at_once():
    def f(xs: Any) -> Any:
        return lax.scan(lambda c, x: (jnp.sin(c) + x, c), jnp.zeros(4), xs)

    plan = check(f, (f32(64, 4),), {"x": 8}, P("x"), (P(), P("x")), wire=True)
    assert sent(plan) == [("all-gather", 1, 64 * 4 * 4 * 7 / 8)]


def test_stacks_of_keys_and_integers():
    def f(keys: Any, xs: Any) -> Any:
        def step(c: Any, kx: Any) -> Any:
            k, x = kx
            bits = jax.random.bits(k, (8,), "uint32")
            return c ^ bits, (k, x + bits.astype(jnp.int32) % 3)

        c, (keys, out) = lax.scan(step, jnp.zeros(8, jnp.uint32), (keys, xs))
        return c, jax.random.key_data(keys), out

    args = jax.random.split(jax.random.key(0), 6), np.arange(6 * 512).reshape(6, 64, 8)
    args = args[0], args[1].astype(np.int32)[:, 0]
    check(f, args, {"x": 4}, (P("x"), P("x")), (P(), P("x"), P("x")))


def test_layers_of_layers():
    """The stack of an outer scan is split over its own loop dim, or over the inner one's."""

    def f(h: Any, ws: Any) -> Any:
        return lax.scan(lambda h, w: (layers(h, w), h.mean()), h, ws)

    args = f32(8, 16), f32(4, 3, 16, 16) / 3
    for specs in (P("x"), P(None, "x"), P("y", None, "x")):
        check(f, args, {"x": 2, "y": 2}, (P("y"), specs), (P("y"), P("x")), grad=specs == P("x"))


def test_checkpointed_layers():
    block = jax.checkpoint(lambda h, w: jnp.tanh(h @ w) + h)

    def f(h: Any, ws: Any) -> Any:
        return lax.scan(lambda h, w: (block(h, w), None), h, ws)[0]

    def g(h: Any, ws: Any) -> Any:
        return jax.grad(lambda ws: f(h, ws).sum())(ws)

    args = f32(256, 32), f32(6, 32, 32) / 4
    plan = check(g, args, {"x": 4}, (P("x"), P("x")), P("x"), grad=False, wire=True)
    assert largest(plan) < 6 * 256 * 32
    stack = 6 * 32 * 32 * 4
    gathers = [c for c in plan.collectives if c.kind == "all-gather"]
    assert all(c.bytes < stack / 2 for c in gathers)


# --- iterations in any order ----------------------------------------------------------------------


def rows(x: Any, w: Any) -> Any:
    return lax.map(lambda r: jnp.tanh(r @ w).sum(0), x)


@pytest.mark.parametrize("n", [16, 15, 5])
def test_a_map_over_a_split_dim_runs_where_its_rows_are(n: int):
    args = f32(n, 4, 32), f32(32, 32)
    plan = check(rows, args, {"x": 8}, (P("x"), P()), kinds=[], grad=n == 16, wire=True)
    assert plan.out_shardings == P("x", None)
    check(rows, args, {"x": 2, "y": 4}, (P("x"), P(None, "y")), kinds=[], grad=False)


def test_the_gradient_of_a_map_is_summed_once():
    f = lambda x, w: jax.grad(lambda w: rows(x, w).sum())(w)
    args = f32(16, 4, 32), f32(32, 32)
    plan = check(f, args, {"x": 8}, (P("x"), P()), grad=False, wire=True)
    assert sent(plan) == [("all-reduce", 1, 2 * 32 * 32 * 4 * 7 / 8)]


def test_sums_with_padding_or_split_terms():
    """Padding must not be added up; what the body has split over the axis cannot be shared out too."""

    def f(x: Any, w: Any) -> Any:
        step = lambda c, r: (c + jnp.cos(r) @ w, jnp.sin(r))
        return lax.scan(step, jnp.zeros((4, 32)), x, reverse=True)

    for n, spec in ((16, P(None, "y")), (15, P(None, "y")), (16, P("x", "y"))):
        check(f, (f32(n, 4, 32), f32(32, 32)), {"x": 2, "y": 4}, (P("x"), spec), grad=n == 16)


def test_sums_of_much_stay_in_order():
    """Microbatches take memory: they are run one by one where they take more than a loop may hold."""

    def f(x: Any, w: Any) -> Any:
        step = lambda g, r: (g + jax.grad(lambda w: jnp.tanh(r @ w).sum())(w), None)
        return lax.scan(step, jnp.zeros_like(w), x)[0]

    args = f32(8, 64, 32), f32(32, 32)
    free = check(f, args, {"x": 8}, (P("x"), P()), grad=False, wire=True)
    assert sent(free) == [("all-reduce", 1, 2 * 32 * 32 * 4 * 7 / 8)]
    tight = check(f, args, {"x": 8}, (P("x"), P()), grad=False, memory_limit=1 << 16)
    assert any(c.kind == "all-to-all" for c in tight.collectives)


def test_while_loops_in_a_map_end():
    """A row of padding could run for ever."""

    def f(x: Any) -> Any:
        grow = lambda r: lax.while_loop(lambda r: r.sum() < 10, lambda r: r * 1.5 + 1, r)
        return lax.map(grow, x)

    check(f, (f32(16, 4),), {"x": 8}, P("x"), kinds=[], grad=False)
    check(f, (f32(13, 4),), {"x": 8}, P("x"), grad=False)


def test_branches_that_communicate_in_a_map():
    """Devices that ran different branches would wait for each other: the rows go in order."""

    def f(x: Any) -> Any:
        even = lambda r: jnp.roll(r, 1) * r.sum()
        return lax.map(lambda r: lax.cond(r[0] > 0, even, lambda r: r * 2, r), x)

    args = (f32(8, 64),)
    check(f, args, {"x": 2, "y": 4}, P("x", "y"), P("x", "y"))
    local = lambda x: lax.map(lambda r: lax.cond(r[0] > 0, jnp.sin, jnp.cos, r), x)
    check(local, args, {"x": 8}, P("x"), kinds=[])


# --- what a backward pass reads -------------------------------------------------------------------


def test_a_value_moved_for_a_dot_is_kept_as_the_dot_took_it():
    """The rows go to the matrices and back: two all-to-alls forward, two backward, and none to bring the
    saved rows there once more."""

    def mixed(h: Any, ws: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            rows = sw.annotate(h, P("x")) + 1.0
            out = jnp.einsum("abm,bmn->abn", rows, sw.annotate(w, P("x")))
            return sw.annotate(out, P("x")), None

        return (lax.scan(layer, h, ws)[0] ** 2).sum()

    args = f32(8, 8, 16), f32(3, 8, 16, 16) / 4
    step = jax.value_and_grad(mixed, argnums=(0, 1))
    plan = check(step, args, {"x": 8}, grad=False, wire=True)
    assert [n for kind, n, _ in sent(plan) if kind == "all-to-all"] == [4 * 3]
    assert {kind for kind, _, _ in sent(plan)} == {"all-to-all", "all-reduce"}  # and the loss
