"""`spmd` as a user meets it: called like `jax.jit`, with whatever arrays lie wherever."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.testing import check

MESH = sw.device_mesh({"x": 2, "y": 4})
PERMUTED = Mesh(np.array(jax.devices())[[3, 1, 0, 2, 7, 6, 5, 4]].reshape(2, 4), ("x", "y"))
RNG = np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


A, W = f32(8, 16), f32(16, 32)


def layer(a: Any, w: Any) -> Any:
    return jnp.tanh(a @ w)


def near(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)


def on(mesh: Mesh, x: Any, *spec: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


# --- like jit -----------------------------------------------------------------------------------


def test_transformations():
    """What jit, grad and vmap make of a partitioned function is what they make of the function."""
    f = sw.spmd(layer, mesh=MESH, in_shardings=(P("x"), P(None, "y")))
    loss, one = lambda a, w: f(a, w).sum(), lambda a, w: layer(a, w).sum()
    near(jax.jit(f)(A, W), layer(A, W))
    near(jax.grad(loss, 1)(A, W), jax.grad(one, 1)(A, W))
    near(jax.jit(jax.grad(loss, 1))(A, W), jax.grad(one, 1)(A, W))
    value, grads = jax.value_and_grad(loss, (0, 1))(A, W)
    near(value, one(A, W))
    near(grads[0], jax.grad(one)(A, W))
    stack = f32(3, 8, 16)
    near(jax.vmap(f, (0, None))(stack, W), jax.vmap(layer, (0, None))(stack, W))


def test_a_transformed_function_is_traced_once():
    traces = []

    def f(x: Any) -> Any:
        traces.append(x)
        return (x * x).sum()

    g = jax.grad(sw.spmd(f, mesh=MESH))
    near(g(A), 2 * A)
    count = len(traces)
    near(g(A + 1), 2 * (A + 1))
    assert len(traces) == count


def test_lowered_and_compiled():
    f = sw.spmd(layer, mesh=MESH, in_shardings=(P("x"), P(None, "y")), out_shardings=P("x", "y"))
    lowered = f.lower(A, W)
    assert "dot_general" in lowered.as_text()
    compiled = lowered.compile()
    near(compiled(A, W), layer(A, W))
    assert compiled.output_shardings == NamedSharding(MESH, P("x", "y"))
    assert (
        f.lower(jax.ShapeDtypeStruct((8, 16), "float32"), W).compile().cost_analysis() is not None
    )


def test_lowered_with_keywords_and_static_arguments():
    f = sw.spmd(lambda a, n, *, b: a * n + b, mesh=MESH, static_argnums=1, in_shardings=P("x"))
    near(f.lower(A, 3, b=A).compile()(A, b=A), 4 * A)


def test_pytrees_and_keywords():
    def f(params: Any, x: Any, *, scale: Any) -> Any:
        return {"y": x @ params["w"] + params["b"], "scale": scale, "none": None}

    args = {"w": W, "b": f32(32)}, A
    g = sw.spmd(f, mesh=MESH, in_shardings=({"w": P(None, "y"), "b": None}, P("x")))
    out = g(*args, scale=2.0)
    near(out["y"], f(*args, scale=2.0)["y"])
    assert out["none"] is None
    assert out["scale"] == 2.0
    plan = g.plan(*args, scale=2.0)
    assert plan.names == ["params['b']", "params['w']", "x", "scale"]
    assert plan.in_shardings == (
        ({"w": P(None, "y"), "b": P("y")}, P("x", None)), {"scale": P()}
    )  # fmt: skip
    assert plan.out_shardings["y"] == P("x", "y")


def test_static_arguments():
    """By position, from the end, by keyword, or left to their default; 2 and 2.0 are two."""
    traces = []

    def f(x: Any, n: Any, flip: bool = False) -> Any:
        traces.append((n, flip))
        return -x * n if flip else x * n

    g = sw.spmd(f, mesh=MESH, static_argnums=(1, 2))
    for args, kwargs in [((A, 2), {}), ((A, 2, True), {}), ((A,), {"n": 2, "flip": True})]:
        near(g(*args, **kwargs), f(*args, **kwargs))
    traces.clear()
    near(g(A, 2), 2 * A)
    assert traces == []
    assert g(jnp.arange(8), 2).dtype == jnp.int32
    assert g(jnp.arange(8), 2.0).dtype == jnp.float32
    near(sw.spmd(lambda n, x: x * n, mesh=MESH, static_argnums=-2)(3, A), 3 * A)


def test_donated_buffers_are_reused():
    f = sw.spmd(lambda state, x: state + x, mesh=MESH, donate_argnums=0, out_shardings=P("x", "y"))
    state = on(MESH, A, "x", "y")
    near(f(state, A), 2 * A)
    assert state.is_deleted()
    text = f.lower(A, A).compile().as_text()
    assert "input_output_alias" in text


def test_donated_buffers_that_must_move():
    """They are donated to the copy in the right place; an array on one device stays the user's."""
    f = sw.spmd(lambda x: x + 1, mesh=MESH, donate_argnums=-1, in_shardings=P("x", "y"))
    near(f(on(MESH, A, "y")), A + 1)
    near(f(jnp.asarray(A)), A + 1)


def test_donated_padded_array():
    f = sw.spmd(lambda x: x + 1, mesh=MESH, donate_argnums=0)
    x = sw.PaddedArray.from_logical(f32(10, 3), NamedSharding(MESH, P("y")))
    want = np.asarray(x) + 1
    near(f(x), want)
    assert x.array.is_deleted()


def test_scalars_and_weak_types():
    half = jnp.ones(8, jnp.bfloat16)
    f = sw.spmd(lambda x, s: x * s, mesh=MESH)
    assert f(half, 2.0).dtype == jnp.bfloat16
    assert f(half, np.float32(2)).dtype == jnp.float32
    assert f(2, 3) == 6
    for x in (2, 2.5, True, 1j):
        ours, theirs = (jax.typeof(f(x)) for f in (sw.spmd(jnp.real, mesh=MESH), jax.jit(jnp.real)))
        assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint32", "bool", "bfloat16", "complex64"])
def test_dtypes(dtype: str):
    x = jnp.asarray(np.arange(40).reshape(10, 4) % 7).astype(dtype)

    def f(x: Any) -> Any:
        return x.sum(0), x[::-1], jnp.concatenate([x, x]), jnp.where(x == x.T.T, x, x), x.any(1)

    check(f, (x,), MESH, in_shardings=P("y"), grad=False)


def test_random_keys_are_arguments():
    key = jax.random.key(3)
    bits = lambda k: jax.random.bits(k, (8, 4))
    check(bits, (key,), MESH, out_shardings=P("x", "y"), grad=False)
    check(lambda k: jax.random.split(k, 4), (key,), MESH, out_shardings=P("x"), grad=False)
    keys = jax.random.split(key, 5)  # 5 over 2: key arrays are padded too
    check(jax.vmap(bits), (keys,), MESH, in_shardings=P("x"), grad=False)


def test_methods():
    class Model:
        @functools.partial(sw.spmd, mesh=MESH, static_argnums=0)
        def double(self, x: Any) -> Any:
            return 2 * x

    near(Model().double(A), 2 * A)


def test_no_arguments_and_constant_results():
    f = sw.spmd(lambda: (jnp.arange(8.0), 3), mesh=MESH, out_shardings=(P("x"), None))
    out, three = f()
    near(out, np.arange(8))
    assert three == 3
    assert out.sharding.spec == P("x")


def test_it_looks_like_the_function():
    f = sw.spmd(layer, mesh=MESH)
    assert (f.__name__, f.__doc__, f.__wrapped__) == (layer.__name__, layer.__doc__, layer)


# --- arrays placed anywhere ---------------------------------------------------------------------

PLACES = {
    "numpy": lambda x: x,
    "uncommitted": jnp.asarray,
    "one device": lambda x: jax.device_put(x, jax.devices()[5]),
    "replicated": lambda x: on(MESH, x),
    "otherwise sharded": lambda x: on(MESH, x, None, ("y", "x")),
    "other axes": lambda x: on(sw.device_mesh({"a": 8}), x, "a"),
    "fewer devices": lambda x: on(sw.device_mesh({"a": 2}), x, "a"),
    "permuted devices": lambda x: on(PERMUTED, x, "x", "y"),
    "explicit axes": lambda x: on(jax.make_mesh((2, 4), ("x", "y")), x, "y"),
    "padded": lambda x: sw.PaddedArray.from_logical(x, NamedSharding(MESH, P("y"))),
}


@pytest.mark.parametrize("place", PLACES)
def test_arrays_placed_anywhere(place: str):
    x, w = f32(8, 16), PLACES[place](W)
    for in_shardings in (None, (P("x"), P(None, "y"))):
        f = sw.spmd(layer, mesh=MESH, in_shardings=in_shardings)
        near(f(PLACES[place](x), w), layer(x, W))


def test_placed_arrays_stay_where_they_lie():
    """Without in_shardings, what is committed to the mesh's devices is an annotation."""
    plan = sw.spmd(layer, mesh=MESH).plan(on(MESH, A, "x"), on(MESH, W, None, "y"))
    assert plan.in_shardings == (P("x", None), P(None, "y"))
    assert plan.out_shardings == P("x", "y")
    assert "the array's own sharding" in plan.explain()
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, P("x"))) for x in (A, W)
    ]
    assert sw.spmd(layer, mesh=MESH).plan(*shapes).in_shardings[1] == P("x", None)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_inside_set_mesh(kind: AxisType):
    """The mesh of `jax.set_mesh` neither changes the plan nor stands in the way."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    f = sw.spmd(lambda a, w: jnp.zeros((8, 32)) + layer(a, w), mesh=mesh, in_shardings=P("x"))
    want, bytes_ = layer(A, W), f.plan(A, W).comm_bytes
    with jax.set_mesh(mesh):
        near(f(A, W), want)
        near(jax.jit(f)(A, W), want)
        assert f.plan(A, W).comm_bytes == bytes_


def test_closed_over_arrays():
    placed = on(MESH, W, "x", "y")
    explicit = on(jax.make_mesh((2, 4), ("x", "y")), W, "x")
    for w in (W, jnp.asarray(W), placed, explicit):
        near(sw.spmd(lambda a, w=w: a @ w, mesh=MESH)(A), A @ W)


def test_closed_over_traced_values():
    """Under jit and grad a function may close over what is being traced."""

    def inside(y: Any) -> Any:
        return sw.spmd(lambda a: (a @ y).sum(), mesh=MESH)(A)

    near(jax.jit(inside)(W), (A @ W).sum())
    near(jax.grad(inside)(W), jax.grad(lambda y: (A @ y).sum())(W))


# --- uneven dims --------------------------------------------------------------------------------


def test_uneven_in_and_out():
    f = sw.spmd(lambda x: jnp.sin(x) * 2, mesh=MESH, in_shardings=P(("x", "y")))
    x = f32(10, 3)
    y = f(x)
    assert isinstance(y, sw.PaddedArray)
    assert (y.shape, y.array.shape, y.shard_sizes(0)) == ((10, 3), (16, 3), (2,) * 5 + (0,) * 3)
    near(y, np.sin(x) * 2)


def test_padded_results_are_fed_back_without_a_copy():
    f = sw.spmd(lambda x: x + 1, mesh=MESH, in_shardings=P("y"), out_shardings=P("y"))
    y = f(f32(5, 4))
    with jax.transfer_guard("disallow"):
        z = f(y)
    near(z, np.asarray(y) + 1)
    assert f.plan(y).comm_bytes == 0


@pytest.mark.parametrize("n", [10, 5, 4, 1, 0])
def test_sizes(n: int):
    """10 over 8, 5 over 8, one, none: values, gradients, and no error."""

    def f(x: Any, w: Any) -> Any:
        h = jax.nn.softmax(x @ w, -1)
        return h, h.sum(0), (x * x).mean() if n else x.sum()

    check(f, (f32(n, 6), f32(6, n)), MESH, in_shardings=(P(("x", "y")), P("y", "x")))


@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_what_padding_holds_does_not_matter(fill: float):
    x = f32(10, 5)
    padded = sw.PaddedArray.from_logical(x, NamedSharding(MESH, P(("x", "y"))), fill=fill)
    w = f32(5, 10)

    def f(x: Any) -> Any:
        return {
            "sum": x.sum(0), "max": x.max(0), "min": x.min(0), "prod": x.prod(0), "mean": x.mean(),
            "dot": w @ x, "softmax": jax.nn.softmax(x, 0), "argmax": x.argmax(0), "var": x.var(),
            "cumsum": jnp.cumsum(x, 0), "rev": x[::-1].sum(0), "slice": x[1:9:2],
            "roll": jnp.roll(x, 3, 0), "concatenate": jnp.concatenate([x, x]).sum(0),
            "pad": jnp.pad(x, ((1, 2), (0, 0))), "reshape": x.reshape(5, 10), "take": x[::3, 2],
            "finite": jnp.isfinite(x).all(),
        }  # fmt: skip

    got, want = sw.spmd(f, mesh=MESH)(padded), f(x)
    for name in want:
        np.testing.assert_allclose(np.asarray(got[name]), want[name], 1e-5, 1e-5, err_msg=name)


def test_gradients_through_padded_arrays():
    x = sw.PaddedArray.from_logical(f32(10, 3), NamedSharding(MESH, P("y")))
    f = sw.spmd(lambda x: (x * x).sum(), mesh=MESH)
    g = jax.grad(f)(x)
    assert isinstance(g, sw.PaddedArray)
    near(g, 2 * np.asarray(x))


# --- meshes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axes",
    [{"x": 1}, {"x": 3}, {"x": 6}, {"x": 1, "y": 4}, {"a": 2, "b": 1, "c": 2, "d": 2}],
    ids=str,
)
def test_meshes(axes: dict[str, int]):
    names = tuple(axes)
    specs = (P(names), P(None, names[-1]))
    check(layer, (f32(7, 12), f32(12, 5)), axes, in_shardings=specs, out_shardings=P(names[0]))


def test_permuted_mesh():
    """Blocks go by the mesh's order of devices, not by their ids."""
    f = sw.spmd(lambda x: jnp.cumsum(x[::-1], 0), mesh=PERMUTED, in_shardings=P("x", "y"))
    y = f(A)
    near(y, np.cumsum(A[::-1], 0))
    assert y.sharding.mesh.devices.tolist() == PERMUTED.devices.tolist()
    check(layer, (A, W), PERMUTED, in_shardings=(P("x", "y"), P("y", "x")))


def test_one_device():
    plan = check(layer, (f32(3, 5), f32(5, 2)), {"x": 1}, in_shardings=P("x"))
    assert plan.collectives == []


@pytest.mark.parametrize("axes", [{"x": 16, "y": 128}, {"x": 12, "y": 6}, {"x": 65536}], ids=str)
def test_plans_need_no_device(axes: dict[str, int]):
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 1000), (1000, 9000))]
    names = tuple(axes)
    f = sw.spmd(
        lambda a, w: layer(a, w).sum(0), mesh=sw.abstract_mesh(axes),
        in_shardings=(P(names[0]), P(None, names[1:] or None)), out_shardings=P(names[1:] or None),
    )  # fmt: skip
    plan = f.plan(*shapes)
    (reduce,) = plan.collectives
    assert (reduce.kind, reduce.group_size) == ("all-reduce", axes["x"])
    local = -(-9000 // axes.get("y", 1)) * 4
    assert plan.comm_bytes == pytest.approx(2 * local * (axes["x"] - 1) / axes["x"])
    assert plan.peak_memory > 0
    assert plan.flops > 0


# --- caches -------------------------------------------------------------------------------------


def counted() -> tuple[Any, list[int]]:
    traces: list[int] = []

    def step(params: Any, batch: Any) -> Any:
        traces.append(1)
        return jax.tree.map(lambda p: p - 0.1 * batch.mean(), params), batch.sum()

    return step, traces


def test_calls_are_cached():
    step, traces = counted()
    f = sw.spmd(step, mesh=MESH, in_shardings=(P("x"), P("y")))
    for _ in range(3):
        f({"w": W}, A)
    assert len(traces) == 1
    f({"w": W}, f32(4, 16))
    f({"w": W.astype(jnp.bfloat16)}, A)
    f({"v": W}, A)
    assert len(traces) == 4


def test_configuration_is_part_of_the_key():
    f = sw.spmd(lambda x: x * 2, mesh=MESH)
    x = np.ones(4)
    assert f(x).dtype == jnp.float32
    with jax.enable_x64(True):
        assert f(x).dtype == jnp.float64
    assert f(x).dtype == jnp.float32


@pytest.mark.parametrize("rows", [16, 10])
def test_results_fed_back_do_not_recompile(rows: int):
    """Called with NumPy arrays first, then with its results: they lie as the plan wants them."""
    step, traces = counted()
    f = sw.spmd(lambda p, b: step(jax.tree.map(lambda w: sw.annotate(w, P("y")), p), b), mesh=MESH)
    params = {"w": f32(rows, 8)}
    for _ in range(3):
        params, _ = f(params, A)
    assert len(traces) == 1


def test_results_of_another_layout_are_planned_anew():
    step, traces = counted()
    f = sw.spmd(step, mesh=MESH)
    f({"w": on(MESH, W, "x")}, A)
    f({"w": on(MESH, W, "y")}, A)
    assert len(traces) == 2


# --- annotations --------------------------------------------------------------------------------


def test_annotated_code_runs_on_one_device():
    def f(a: Any, w: Any) -> Any:
        a = sw.split(sw.annotate(a, P("x", None)), 1, 2)
        return sw.mesh_split(sw.replicate(w), (2, 4), [0, -1]), sw.shard(
            a, np.arange(8).reshape(8, 1)
        )

    got = jax.jit(f)(A, W)
    np.testing.assert_array_equal(got[0], W)
    np.testing.assert_array_equal(got[1], A)


def test_bare_specs_of_jax_in_a_mesh_context():
    f = sw.spmd(lambda x: jax.lax.with_sharding_constraint(x * 2, P("x")), mesh=MESH)
    with jax.set_mesh(MESH):
        assert f(A).sharding.spec == P("x", None)
