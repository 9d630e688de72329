"""Manual subgraphs: nested shard_map, `manual`, `auto_to_manual` and `manual_to_auto` (GSPMD 3.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.testing import check

XY = sw.device_mesh({"x": 2, "y": 4})
X8, X6, X3 = (sw.device_mesh({"x": n}) for n in (8, 6, 3))
ABC = sw.device_mesh({"a": 2, "b": 2, "c": 2})
PQ = sw.device_mesh({"p": 4, "q": 2})
ONE = sw.device_mesh({"o": 1, "x": 8})


def array(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return rng.normal(size=shape).astype(np.float32)


def mapped(f: Any, mesh: Any, ins: Any, outs: Any, **options: Any) -> Callable[..., Any]:
    return jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=outs, **options)


def users(plan: sw.Plan) -> list[tuple[str, tuple[str, ...]]]:
    return [(c.kind, c.axes) for c in plan.collectives if c.reason == "the user's own"]


# -- collectives ---------------------------------------------------------------------------------------


def every_collective(a: Any, b: Any) -> Any:
    """On a [8, 16] split over x by columns and b [16, 8] by rows."""
    total = lax.psum(a @ b, "x")
    turned = lax.ppermute(a, "x", [(0, 1), (1, 0)])
    rows = lax.all_gather(a, "x").sum(0) + lax.axis_index("x")
    scattered = lax.psum_scatter(b, "x", tiled=True)
    exchanged = lax.all_to_all(a, "x", 0, 1, tiled=True)
    return total, turned, rows, scattered, exchanged


EVERY = mapped(
    every_collective,
    XY,
    (P(None, "x"), P("x")),
    (P(), P("x"), P("x"), P("x"), P(None, "x")),
)
KINDS = ["all-reduce", "collective-permute", "all-gather", "reduce-scatter", "all-to-all"]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("names", [{"x", "y"}, {"x"}], ids=["all", "some"])
@pytest.mark.parametrize(
    "ins", [None, (P("y"), P(None, "y")), (P(("x", "y")), P(None, ("y", "x")))]
)
def test_every_collective(ins: Any, names: set[str], checked: bool):
    f = mapped(
        every_collective, XY, (P(None, "x"), P("x")),
        (P(), P("x"), P("x"), P("x"), P(None, "x")), axis_names=names, check_vma=checked,
    )  # fmt: skip
    program, args = lambda a, b: f(jnp.sin(a), b), (array(8, 16), array(16, 8))
    plan = check(program, args, XY, ins, grad=checked and ins is None)
    assert users(plan) == [(k, ("x",)) for k in KINDS]


def test_bytes_of_every_collective():
    plan = check(EVERY, (array(8, 16), array(16, 8)), XY, wire=True)
    # all-reduce 2 * 256 / 2, permute 256, all-gather 512 / 2, reduce-scatter 256 / 2, all-to-all 256 / 2
    assert plan.comm_bytes == 1024


def test_what_is_left_automatic_stays_split_through_them():
    """The rows over y, which the user says nothing of, are a quarter of every block sent."""

    def f(a: Any) -> Any:
        return lax.psum(a, "x"), lax.ppermute(a, "x", [(0, 1), (1, 0)]), lax.all_gather(a, "x")

    g = mapped(f, XY, P(None, "x"), (P(), P(None, "x"), P()), axis_names={"x"}, check_vma=False)
    plan = check(g, (array(8, 16),), XY, P("y"), wire=True, grad=False)
    block = 2 * 8 * 4
    assert [c.bytes for c in plan.collectives if c.reason == "the user's own"] == [block] * 3
    assert plan.out_shardings == (P("y", None), P("y", "x"), P(None, "y", None))


def test_dims_gathered_or_scattered_give_way_to_the_others():
    def f(a: Any) -> Any:
        b = sw.annotate(jnp.sin(a), P("y"))
        scattered = lax.psum_scatter(b, "x", tiled=True)
        apart = lax.psum_scatter(b.reshape(2, 4, 4), "x")
        return lax.all_gather(b, "x", tiled=True), scattered, apart, lax.all_gather(b, "x", axis=1)

    g = mapped(f, XY, P("x"), (P(), P("x"), P("x"), P()), axis_names={"x"}, check_vma=False)
    plan = check(g, (array(16, 4),), XY, grad=False)
    assert plan.fallbacks == []  # y moves to another dim while the first is gathered or scattered


@pytest.mark.parametrize("mesh", [X8, X6, X3], ids=["8", "6", "3"])
def test_one_axis_of_several_atoms(mesh: Mesh):
    n = mesh.devices.size

    def f(a: Any) -> Any:
        ring = [(i, (i + 1) % n) for i in range(n)]
        at = lax.axis_index("x")
        return (
            lax.ppermute(a, "x", ring) * at, lax.all_gather(a, "x", tiled=True),
            lax.psum_scatter(a, "x", scatter_dimension=1, tiled=True),
            lax.all_to_all(a, "x", 1, 0, tiled=True), lax.pmax(lax.stop_gradient(a), "x"),
        )  # fmt: skip

    specs = (P("x"), P(), P(None, "x"), P(None, "x"), P())
    g = mapped(f, mesh, P("x"), specs, check_vma=False)
    check(lambda a: g(a * 2), (array(2 * n, 2 * n),), mesh, P("x"), wire=True)


@pytest.mark.parametrize("mesh", [PQ, X8, ABC, XY, ONE])
def test_a_mesh_of_other_axes_on_the_same_devices(mesh: Mesh):
    """Devices are numbered by the mesh the user names, whatever the program's is."""

    def f(a: Any) -> Any:
        at = lax.axis_index(("q", "p"))
        shifted = lax.ppermute(a, ("p", "q"), [(j, (j + 3) % 8) for j in range(8)])
        return (
            shifted + at, lax.all_gather(a, ("q", "p"), tiled=True),
            lax.psum_scatter(a, ("q", "p"), scatter_dimension=1, tiled=True),
        )  # fmt: skip

    g = mapped(f, PQ, P(("p", "q")), (P(("p", "q")), P(), P(None, ("q", "p"))), check_vma=False)
    check(lambda a: g(a + 1), (array(16, 8),), mesh, wire=True, grad=mesh is ABC)


def test_a_mesh_with_its_devices_turned():
    turned = Mesh(np.asarray(XY.devices).T, ("y", "x"))

    def f(a: Any) -> Any:
        return lax.ppermute(a, ("y", "x"), [(j, (j + 1) % 8) for j in range(8)])

    g = mapped(f, turned, P(("x", "y")), P(("x", "y")), check_vma=False)
    check(lambda a: g(a + 1), (array(16, 4),), XY, P("y"))


def test_groups_of_an_axis():
    def f(a: Any) -> Any:
        pairs = [[0, 3], [1, 2], [4, 7], [5, 6]]
        halves = [[0, 2, 4, 6], [1, 3, 5, 7]]
        gathered = lax.all_gather(a, "x", axis_index_groups=pairs)
        return lax.psum(a, "x", axis_index_groups=halves), gathered

    g = mapped(f, X8, P("x"), (P("x"), P("x")), check_vma=False)
    check(g, (array(16, 8),), X8, grad=False)


def test_an_axis_of_one_device():
    def f(a: Any) -> Any:
        return (
            lax.psum(a, "o") + lax.axis_index("o"), lax.all_gather(a, "o"),
            lax.psum_scatter(a[None], "o"), lax.all_to_all(a, "o", 0, 1, tiled=True),
            lax.ppermute(a, "o", [(0, 0)]),
        )  # fmt: skip

    specs = (P("x"), P(None, "x"), P("x"), P("x"), P("x"))
    check(mapped(f, ONE, P("x"), specs, check_vma=False), (array(16, 8),), ONE, bytes=0)


@pytest.mark.parametrize("ins", [None, P("x"), P(None, "y")])
def test_collectives_over_a_vmapped_axis(ins: Any):
    """Over vmap's own axis they are reductions of a dim; over a mesh axis too, both."""

    def f(a: Any) -> Any:
        inner = lambda r: lax.psum(r, ("i", "x"))
        return jax.vmap(inner, axis_name="i")(a)

    g = mapped(f, XY, P("x"), P(), axis_names={"x"}, check_vma=False)
    row = lambda r: (lax.psum(r, "i"), lax.pmax(lax.stop_gradient(r), "i"))
    check(lambda a: (g(a), jax.vmap(row, axis_name="i")(a)), (array(6, 8),), XY, ins)


# -- layouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ins", [P("y"), P(("y", "x")), P(None, "y")])
@pytest.mark.parametrize("names", [{"x"}, {"x", "y"}], ids=["some", "all"])
def test_dims_that_do_not_divide_outside(ins: Any, names: set[str]):
    """6 rows over 4 devices are padded to 8; the user's blocks of 3 are not."""
    f = mapped(lambda a: (lax.psum(a, "x"), a + 1), XY, P("x"), (P(), P("x")), axis_names=names)
    check(lambda a: f(jnp.sin(a)), (array(6, 5),), XY, ins, grad="y" not in str(names))


def test_dims_that_do_not_divide_inside():
    """A block's 3 rows over the 4 devices of y: padded inside, whole at the border."""
    f = lambda a: sw.annotate(a, P("y")).sum(0, keepdims=True) + a
    g = mapped(f, XY, P("x"), P("x"), axis_names={"x"})
    check(lambda a: g(jnp.sin(a)), (array(6, 5),), XY, P(None, "y"))


def test_completion_goes_through():
    """Splits over other axes go in at the operands and out at the results, and backward too."""
    f = mapped(
        lambda a, b: a @ b, XY, (P(None, "x"), P("x")), P(), axis_names={"x"}, check_vma=False
    )
    plan = sw.spmd(f, mesh=XY, in_shardings=(P("y", P.UNCONSTRAINED), None)).plan(
        array(8, 16), array(16, 8)
    )
    assert plan.in_shardings == (P("y", "x"), P("x", None))
    assert plan.out_shardings == P("y", None)
    assert "in_specs[0] dim 0 through shard_map" in plan.why("a").replace("args[0]", "a")


def test_values_that_are_made_or_constant():
    k = array(8, 8)

    def f(a: Any, b: Any, c: Any, d: Any) -> Any:
        return a + k[:4] + b.sum() + c, jnp.zeros((2, 3)), d, lax.psum(jnp.ones(3), "x")

    specs = (P("x"), P("x"), P(), P())
    g = mapped(f, XY, specs, (P("x"), P("x"), P(), P()), axis_names={"x"}, check_vma=False)
    check(lambda a: g(a, jnp.ones((4, 8)), 2.0, jnp.arange(3.0)), (array(8, 8),), XY, P("y"))


def test_scalars_keys_and_empty_arrays():
    def f(a: Any, s: Any, e: Any, key: Any) -> Any:
        noise = jax.random.normal(jax.random.fold_in(key, lax.axis_index("x")), a.shape)
        return lax.psum((a * s).sum(), "x"), lax.psum(e, "x"), a + noise

    specs = (P("x"), P(), P("x"), P())
    g = mapped(f, X8, specs, (P(), P(), P("x")))
    prog = lambda a: g(a, a.sum(), jnp.zeros((8, 0)), jax.random.key(0))
    check(prog, (array(8, 8),), X8, P(None, "x"))


# -- structure -------------------------------------------------------------------------------------------


def test_loops_inside_and_outside():
    def inside(a: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            return lax.ppermute(c, "x", [(0, 1), (1, 0)]) + lax.psum(x, "x"), c.sum()

        c, ys = lax.scan(step, a, jnp.stack([a, a * 2, a * 3]))
        return c, lax.psum(ys, "x")

    f = mapped(inside, XY, P("x"), (P("x"), P()), axis_names={"x"})

    def program(a: Any, w: Any) -> Any:
        dot = mapped(lambda a, w: lax.psum(a @ w, "x"), XY, (P(None, "x"), P("x")), P(),
                     axis_names={"x"})  # fmt: skip
        c, _ = lax.scan(lambda c, w: (jnp.tanh(dot(c, w)), None), a, w)
        return f(c)

    plan = check(program, (array(8, 8), array(3, 8, 8)), XY, (P("y"), None), wire=True)
    assert next(c.count for c in plan.collectives if c.reason == "the user's own") == 3


def test_branches_and_loops_that_differ_between_devices():
    def f(a: Any) -> Any:
        at = lax.axis_index("x")
        b = lax.cond(at == 0, lambda a: a * 2, lambda a: a.sum(0, keepdims=True) + a, a)
        grow = lambda c: (c[0] * 1.5, c[1] + 1)
        return lax.while_loop(lambda c: c[1] < at + 2, grow, (b, 0))[0]

    g = mapped(f, XY, P("x"), P("x"), axis_names={"x"}, check_vma=False)
    for ins in (P("x"), P("y")):
        check(g, (array(8, 8),), XY, ins, grad=False)


def test_checkpoint_and_custom_derivatives():
    @jax.custom_vjp
    def total(a: Any) -> Any:
        return lax.psum(a, "x")

    total.defvjp(lambda a: (total(a), None), lambda _, g: (g * 3,))
    f = mapped(total, XY, P("x"), P(), axis_names={"x"}, check_vma=False)
    g = mapped(lambda a: a * lax.psum(a, "x"), XY, P("x"), P("x"), axis_names={"x"})
    check(lambda a: f(jax.checkpoint(g)(a)), (array(8, 8),), XY, P("y"))


def test_one_inside_another():
    def outer(a: Any) -> Any:
        inner = lambda b: lax.psum(b, "y") + lax.axis_index("x")
        c = jax.shard_map(inner, in_specs=P(None, "y"), out_specs=P(), axis_names={"y"},
                          check_vma=False)(a)  # fmt: skip
        return lax.psum(c, "x")

    f = mapped(outer, XY, P("x"), P(), axis_names={"x"}, check_vma=False)
    plan = check(f, (array(4, 8),), XY, P("y", "x"))
    assert users(plan) == [("all-reduce", ("y",)), ("all-reduce", ("x",))]


def test_annotations_inside():
    def f(a: Any) -> Any:
        return lax.with_sharding_constraint(sw.annotate(a * 2, P(None, "y")) + 1, P("y"))

    check(mapped(f, XY, P("x"), P("x"), axis_names={"x"}), (array(8, 8),), XY, P("x"))


def test_transformed():
    f = mapped(lambda a: lax.psum(a @ a.T, "x"), XY, P(None, "x"), P(), axis_names={"x"})
    loss = lambda a: f(jnp.sin(a)).sum()
    run, a = sw.spmd(loss, mesh=XY, in_shardings=P("y", "x")), array(8, 8)
    np.testing.assert_allclose(jax.jit(run)(a), loss(a), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(run)(a), jax.grad(loss)(a), rtol=1e-4)
    batch = jnp.stack([a, 2 * a])
    np.testing.assert_allclose(jax.vmap(run)(batch), jax.vmap(loss)(batch), rtol=1e-5)


def test_the_mesh_may_come_from_the_context():
    def f(a: Any) -> Any:
        total = lambda a: lax.psum(a, "x")
        return jax.shard_map(total, in_specs=P("x"), out_specs=P(), axis_names={"x"})(a)

    a = array(4, 8)
    with jax.set_mesh(XY):
        np.testing.assert_allclose(sw.spmd(f, mesh=XY)(a), a[:2] + a[2:], rtol=1e-5)


def test_planned_for_a_mesh_without_devices():
    mesh = AbstractMesh((512, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    f = mapped(lambda a: lax.psum(a @ a.T, "x"), mesh, P(None, "x"), P(), axis_names={"x"})
    plan = sw.spmd(f, mesh=mesh).plan(jax.ShapeDtypeStruct((1024, 4096), "float32"))
    (c,) = plan.collectives
    assert (c.kind, c.group_size, c.reason) == ("all-reduce", 512, "the user's own")
    assert c.bytes == 2 * 1024 * 1024 * 4 * 511 / 512
