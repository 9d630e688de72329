"""Windowed einsum: right, as many bytes as the collective replaced, and never the whole value."""

import itertools
import math

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.capture import capture
from shardwise.factors import assignment_fits
from shardwise.mesh import MeshAxes, device_mesh
from shardwise.ops.registry import LocalContext, layouts_for, rules_of, run_local
from shardwise.ops.windowed import Window
from shardwise.sharding import Layout, padded_size
from shardwise.testing import check
from shardwise.testing.rules import assignments, block, run_blocks, valid_part

PERMUTES = "collective-permute"


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def planned(fn, args, mesh, **options):
    return sw.spmd(fn, mesh=sw.abstract_mesh(mesh), **options).plan(*args)


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(s).astype(np.float32) for s in shapes)


def local_shapes(jaxpr):
    """The shape of every value of a jaxpr, bodies included."""
    for eqn in jaxpr.eqns:
        for v in eqn.outvars:
            yield v.aval.shape
        for sub in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from local_shapes(sub)


# Per kind: the program, shapes and shardings for one axis x of any size, and what goes around.
GATHER_COLUMNS = ("mk,kn->mn", (48, 40), (40, 24), P("x"), P(None, "x"), P("x"))
GATHER_ROWS = ("mk,kn->mn", (24, 40), (40, 48), P("x"), P(None, "x"), P(None, "x"))
GATHER_CONTRACTED = ("mk,kn->mn", (48, 24), (24, 8), P("x"), P("x"), P("x"))
SCATTER = ("mk,kn->mn", (48, 96), (96, 5), P(None, "x"), P("x"), P("x"))
SCATTER_BATCH = ("bmk,bkn->bmn", (24, 3, 48), (24, 48, 2), P(None, None, "x"), P(None, "x"), P("x"))
BATCHED = ("bmk,kn->bmn", (24, 3, 8), (8, 24), P("x"), P(None, "x"), P("x"))
CASES = {
    "columns": (GATHER_COLUMNS, 1),
    "rows": (GATHER_ROWS, 0),
    "contracted": (GATHER_CONTRACTED, 1),
    "scatter": (SCATTER, None),
    "scatter over a batch": (SCATTER_BATCH, None),
    "batched": (BATCHED, 1),
}


def windows(plan):
    """What goes around in the dots of a plan."""
    _ = plan.jaxpr  # choices are made when the per-device program is traced
    return [c.window for c, _ in plan.partitioner.eqn_choices.values() if c.window is not None]


@pytest.mark.parametrize("mesh", [{"x": 4, "y": 2}, {"x": 3}, {"x": 8}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_collectives(name, mesh):
    (spec, a, b, *ins, out), operand = CASES[name]

    def fn(a, b):
        return jnp.einsum(spec, a, b)

    whole = mesh == {"x": 8}
    plan = check(fn, arrays(a, b), mesh, tuple(ins), out, grad=whole, wire=True, windowed_einsum=0)
    (window,) = windows(plan)
    assert window.operand == operand
    around = [c for c in plan.collectives if c.reason.startswith("windowed")]
    g = mesh["x"]
    assert [(c.kind, c.axes, c.group_size, c.count) for c in around] == [
        (PERMUTES, ("x",), g, g - 1)
    ]
    assert around[0].bytes == window.bytes / g
    plain = planned(fn, (f32(*a), f32(*b)), mesh, in_shardings=tuple(ins), out_shardings=out)
    assert plan.comm_bytes == pytest.approx(plain.comm_bytes)
    assert {c.kind for c in plain.collectives} >= (
        {"all-gather"} if operand is not None else {"reduce-scatter"}
    )


@pytest.mark.parametrize("mesh", [{"x": 4, "y": 2}, {"x": 3}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_uneven_dims(name, mesh):
    (spec, a, b, *ins, out), _ = CASES[name]
    letters = sorted(set(spec) - set(",->"))
    size = dict(zip("".join(spec.split("->")[0].split(",")), (*a, *b), strict=True))
    size = {c: size[c] + (1, -1, 5)[i % 3] for i, c in enumerate(letters)}
    left, right = (tuple(size[c] for c in s) for s in spec.split("->")[0].split(","))
    fn = lambda a, b: jnp.einsum(spec, a, b)
    plan = check(
        fn, arrays(left, right), mesh, tuple(ins), out, grad=mesh == {"x": 3}, windowed_einsum=0
    )
    assert windows(plan)


@pytest.mark.parametrize("name", ["columns", "scatter"])
def test_with_64_bits_enabled(name):
    (spec, a, b, *ins, out), _ = CASES[name]
    args = tuple(x.astype(np.float64) for x in arrays(a, b))
    with jax.enable_x64(True):
        plan = check(
            lambda a, b: jnp.einsum(spec, a, b), args, {"x": 3}, tuple(ins), out, grad=False,
            tol=1e-12, windowed_einsum=0,
        )  # fmt: skip
        assert windows(plan)


@pytest.mark.parametrize("name", CASES)
def test_the_whole_value_never_exists(name):
    """No value of the gathered operand's, or of the unsummed result's, local shape; less memory."""
    (spec, a, b, *ins, out), operand = CASES[name]
    options = {"in_shardings": tuple(ins), "out_shardings": out}
    fn = lambda a, b: jnp.einsum(spec, a, b)
    plain, plan = (
        planned(fn, (f32(*a), f32(*b)), {"x": 8}, windowed_einsum=w, **options) for w in (None, 0)
    )
    (window,) = windows(plan)
    whole = window.whole.local_shape(plan.axes)
    assert whole in set(local_shapes(plain.jaxpr))
    assert whole not in set(local_shapes(plan.jaxpr))
    largest = max(math.prod(s) for s in local_shapes(plan.jaxpr))
    assert operand is not None or largest < math.prod(whole)


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_takes_less_memory(name):
    """By the plan's count and by the compiler's."""
    if name == "gather":
        args, ins, out = (f32(512, 512), f32(512, 64)), (P("x"), P("x")), P("x")
    else:
        args, ins, out = (f32(256, 512), f32(512, 256)), (P(None, "x"), P("x")), P("x")
    mesh = device_mesh({"x": 8})
    options = {"mesh": mesh, "in_shardings": ins, "out_shardings": out}
    plain, f = (sw.spmd(jnp.matmul, windowed_einsum=w, **options) for w in (None, 0))
    (window,) = windows(f.plan(*args))
    assert (window.operand is None) == (name == "scatter")
    assert f.plan(*args).peak_memory < plain.plan(*args).peak_memory
    temporary = [g.lower(*args).compile().memory_analysis().temp_size_in_bytes for g in (f, plain)]
    assert temporary[0] < 0.8 * temporary[1]


def test_asked_for_above_a_size():
    (spec, a, b, *ins, out), _ = CASES["columns"]
    args = f32(*a), f32(*b)
    whole = 4 * math.prod(b)
    fn = lambda a, b: jnp.einsum(spec, a, b)
    for option, limit in (("windowed_einsum", whole), ("memory_limit", 8 * whole)):
        for least, expected in ((limit, []), (limit - 8, [option])):
            plan = planned(
                fn, args, {"x": 4}, in_shardings=tuple(ins), out_shardings=out, **{option: least}
            )
            assert [w.option for w in windows(plan)] == expected
            assert ("windowed: " in plan.explain()) == bool(expected)
    plan = planned(
        fn, args, {"x": 4}, in_shardings=tuple(ins), out_shardings=out, memory_limit=1000
    )
    assert (
        "windowed: blocks of b, [-, x], go around x; gathered it would take 3.84 kB "
        "(memory_limit allows 125 B)"
    ) in plan.explain()
    plan = planned(fn, args, {"x": 4}, in_shardings=tuple(ins), out_shardings=out)
    assert not windows(plan)


def test_the_largest_value_goes_around():
    """Both operands are gathered; the larger one is not."""
    plan = planned(
        jnp.matmul, (f32(64, 32), f32(32, 128)), {"x": 4, "y": 2},
        in_shardings=(P("x", "y"), P("y", "x")), out_shardings=P("x", "y"), windowed_einsum=0,
    )  # fmt: skip
    (window,) = windows(plan)
    plain = planned(
        jnp.matmul, (f32(64, 32), f32(32, 128)), {"x": 4, "y": 2},
        in_shardings=(P("x", "y"), P("y", "x")), out_shardings=P("x", "y"),
    )  # fmt: skip
    gathered = [c for c in plain.collectives if c.kind == "all-gather"]
    assert len(gathered) == 2
    assert window.bytes == max(c.bytes * c.group_size / (c.group_size - 1) for c in gathered)


def test_a_loop_multiplies_the_permutes():
    def fn(ws, h):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0]

    args = arrays((3, 16, 16), (32, 16))
    ins = P(None, "x", None), P("x", None)
    plan = check(fn, args, {"x": 4}, ins, P("x"), wire=True, windowed_einsum=0)
    assert [(c.kind, c.count, c.bytes) for c in plan.collectives] == [(PERMUTES, 9, 4 * 16 * 4)]


def test_in_both_passes_of_a_weight_split_over_the_batch_axis():
    """Forward and backward: blocks of the weight go around; its gradient's sums go around."""

    def loss(w, a):
        return (jnp.einsum("bd,df->bf", a, w) ** 2).sum()

    plan = planned(
        jax.grad(loss), (f32(16, 32), f32(64, 16)), {"x": 4}, in_shardings=(P("x"), P("x")),
        out_shardings=P("x"), windowed_einsum=0,
    )  # fmt: skip
    shard = 16 * 32 * 4 / 4
    assert [(c.kind, c.count, c.bytes) for c in plan.collectives] == [(PERMUTES, 3, shard)] * 2


def test_copies_of_a_result_are_not_added_up_in_different_orders():
    """Every device would meet the blocks of the contracted dim in its own order."""
    shapes = (64, 8), (8, 2)
    ins, out = (P(None, None), P("x", None)), P(None, None)
    plan = check(jnp.matmul, arrays(*shapes), {"x": 4}, ins, out, windowed_einsum=0)
    assert [c.kind for c in plan.collectives] == ["all-gather"]
    assert plan.collectives[0].op == "dot_general"
    assert not windows(plan)


def test_short_floats_are_added_up_in_single_precision():
    (spec, a, b, *ins, out), _ = CASES["contracted"]
    bf16 = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (a, b)]
    fn = lambda a, b: jnp.einsum(spec, a, b)
    plan = planned(
        fn, bf16, {"x": 8}, in_shardings=tuple(ins), out_shardings=out, windowed_einsum=0
    )
    (loop,) = [e for e in plan.jaxpr.eqns if e.primitive.name == "scan"]
    assert {v.aval.dtype.name for v in loop.outvars} == {"bfloat16", "float32"}
    assert plan.jaxpr.outvars[0].aval.dtype == jnp.bfloat16


def test_under_jit_and_grad():
    (spec, a, b, *ins, _out), _ = CASES["columns"]
    fn = lambda a, b: jnp.sin(jnp.einsum(spec, a, b)).sum()
    mesh = device_mesh({"x": 8})
    f = sw.spmd(fn, mesh=mesh, in_shardings=tuple(ins), windowed_einsum=0)
    x, y = arrays(a, b)
    g = jax.jit(jax.grad(f, (0, 1)))
    text = g.lower(x, y).as_text()
    assert "collective_permute" in text
    for got, want in zip(g(x, y), jax.grad(fn, (0, 1))(x, y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", ["windowed_einsum", "memory_limit"])
@pytest.mark.parametrize("value", [True, -1, "1 GB", float("nan")])
def test_limits_are_numbers_of_bytes(option, value):
    with pytest.raises(sw.ShardingError, match=option):
        sw.spmd(jnp.matmul, mesh=sw.abstract_mesh({"x": 2}), **{option: value})


# -- every window there can be ---------------------------------------------------------------------


def all_windows(rule, assignment, shapes, mesh):
    """Every (window, ins, outs): atoms an operand has free cut it; pending atoms cut the result."""
    padded = [tuple(padded_size(n, [mesh.device_count]) for n in s) for s in shapes]
    pairs = list(zip(shapes, padded, strict=True))
    ins = layouts_for(rule, assignment, pairs[:2], "operands", mesh)
    (out,) = layouts_for(rule, assignment, pairs[2:], "results", mesh)

    def cut(layout, atoms):
        """`layout` with atoms, in either order, given to its dims in every way."""
        for order in itertools.permutations(atoms):
            for dims in itertools.product(range(len(layout.shape)), repeat=len(order)):
                s = layout.sharding
                for d, atom in zip(dims, order, strict=True):
                    s = s.with_dim(d, (*s.axes[d], atom))
                left = tuple(a for a in s.partial if a not in order)
                yield layout.with_sharding(s.with_partial(left))

    def some(atoms):
        return itertools.chain.from_iterable(
            itertools.combinations(atoms, n) for n in range(1, len(atoms) + 1)
        )

    for i, l in enumerate(ins):
        for atoms in some([a for a in mesh.atoms if a not in l.sharding.used]):
            for b in cut(l, atoms):
                yield Window(i, l, b, 0, 0, ""), (*ins[:i], b, *ins[i + 1 :]), (out,)
    for atoms in some(out.sharding.partial):
        for b in cut(out, atoms):
            yield Window(None, out, b, 0, 0, ""), ins, (b,)


def fits(layout, mesh):
    return layout.fits(layout.sharding, mesh)


def test_blocks_along_any_dims_with_garbage_in_the_padding():
    """Blocks of every value along every dim; what is padding is NaN and must not come through."""
    spec = "bkm,bnk->bmn"
    mesh = MeshAxes.of(device_mesh({"x": 2, "y": 2}))
    size = {"b": 3, "m": 5, "k": 6, "n": 3}
    left, right = (tuple(size[c] for c in s) for s in spec.split("->")[0].split(","))
    args = arrays(left, right)
    fn = lambda a, b: jnp.einsum(spec, a, b)
    body, _ = capture(fn, [f32(*left), f32(*right)])
    eqn = next(e for e in body.eqns if e.name == "dot_general")
    (rule,) = rules_of(eqn)
    args = args if eqn.invars[0].shape == left else args[::-1]
    want = np.asarray(eqn.primitive.bind(*args, **eqn.params))
    shapes = [v.shape for v in (*eqn.invars, *eqn.outvars)]
    tried = [
        LocalContext(mesh, rule, assignment, ins, outs, window)
        for assignment in assignments(rule, mesh)
        if assignment_fits(rule, assignment, mesh)
        for window, ins, outs in all_windows(rule, assignment, shapes, mesh)
    ]
    assert len(tried) > 100
    tried = tried[:: 1 + len(tried) // 24]
    blocks = [
        [block(a, l, d, mesh, np.nan) for d in range(mesh.device_count)]
        for ctx in tried
        for a, l in zip(args, ctx.ins, strict=True)
    ]

    def every(*xs):
        pairs = zip(tried, zip(xs[::2], xs[1::2], strict=True), strict=True)
        return [y for ctx, pair in pairs for y in run_local(ctx, eqn, pair)]

    for ctx, got in zip(tried, run_blocks(every, blocks, mesh), strict=True):
        compare(got, want, ctx.outs[0], mesh)


def compare(got: list[np.ndarray], want: np.ndarray, layout: Layout, mesh: MeshAxes) -> None:
    tiling = layout.with_sharding(layout.sharding.tiling)
    terms = np.stack(got).reshape(2, 2, *got[0].shape)
    for d in range(mesh.device_count):
        at = tuple(
            slice(None) if a in layout.sharding.partial else slice(c, c + 1)
            for a, c in zip(mesh.atoms, divmod(d, 2), strict=True)
        )
        value = terms[at].sum((0, 1))
        np.testing.assert_allclose(
            valid_part(value, tiling, d, mesh),
            valid_part(block(want, tiling, d, mesh, 0), tiling, d, mesh),
            rtol=1e-5, atol=1e-5, err_msg=f"{layout.sharding.text(mesh)} on device {d}",
        )  # fmt: skip
