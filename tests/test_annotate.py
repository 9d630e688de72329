"""Annotations: identities that differentiate and vmap, and what they mean on a mesh."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from shardwise.annotate import (
    DeviceDim,
    Parts,
    annotate,
    annotate_p,
    mesh_split,
    replicate,
    shard,
    split,
)
from shardwise.convert import OPEN
from shardwise.device_tensor import Devices
from shardwise.errors import ShardingError
from shardwise.mesh import MeshAxes, abstract_mesh, device_mesh
from shardwise.resolve import Resolved, from_constraint_params, resolve
from shardwise.sharding import Sharding

X = np.ones((8, 4), np.float32)
XY = MeshAxes(("x", "y"), (2, 4))
Y = ("y.0", "y.1")
KINDS = {
    "annotate": lambda x: annotate(x, P("x", OPEN)),
    "mesh_split": lambda x: mesh_split(x, (2, 4), [0, -1], [1]),
    "split": lambda x: split(x, 0, 4),
    "replicate": lambda x: replicate(x),  # traced directly, JAX would hide the calling line
    "shard": lambda x: shard(x, np.arange(8)[::-1].reshape(4, 2)),
}


def annotations(f, *args) -> list[dict]:
    """The parameters of every annotation in the traced function, in program order."""
    eqns = jax.make_jaxpr(f)(*args).eqns
    return [e.params for e in eqns if e.primitive is annotate_p]


def resolved(f, mesh=XY, x=X) -> Resolved:
    (params,) = annotations(f, x)
    return resolve(params, np.ndim(x), mesh)


def message(f, *args) -> str:
    """The error's whole message, with this file's line numbers as `HERE`."""
    with pytest.raises(ShardingError) as e:
        f(*args)
    return re.sub(r"test_annotate\.py:\d+", "HERE", str(e.value))


# --- identities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_identity_outside_spmd(kind):
    f = KINDS[kind]
    assert f(X) is X
    x = jnp.asarray(X)
    assert f(x) is x
    assert "return %arg0" in jax.jit(f).lower(x).as_text()
    (params,) = annotations(f, x)
    assert params["kind"] == kind


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_carry_the_annotation(kind):
    f = KINDS[kind]
    x = jnp.arange(32.0).reshape(8, 4)
    loss = lambda x: jnp.sum(f(x) ** 2)
    forward, backward = annotations(jax.grad(loss), x)
    assert forward == backward == annotations(f, x)[0]
    np.testing.assert_array_equal(jax.grad(loss)(x), 2 * x)
    primal, tangent = annotations(lambda x, t: jax.jvp(f, (x,), (t,)), x, x)
    assert primal == tangent == forward
    np.testing.assert_array_equal(
        jax.hessian(lambda v: f(v[:, None])[:, 0] @ v)(x[0]), 2 * np.eye(4)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_vmap_leaves_the_new_dim_open(kind, at):
    f = KINDS[kind]
    (plain,) = annotations(f, X)
    batched = jnp.expand_dims(jnp.asarray(X), at).repeat(3, at)
    (params,) = annotations(jax.vmap(f, in_axes=at, out_axes=at), batched)
    expected = list(plain["spec"])
    expected.insert(at, OPEN)
    assert params == {**plain, "spec": tuple(expected)}
    one, many = resolve(plain, 2, XY), resolve(params, 3, XY)
    axes = list(one.axes)
    axes.insert(at, ())
    assert many.axes == tuple(axes) and many.device_order == one.device_order
    assert many.open == {d + (d >= at) for d in one.open} | {at}
    np.testing.assert_array_equal(jax.vmap(f, in_axes=at, out_axes=at)(batched), batched)


def test_vmap_over_a_named_axis():
    f = jax.vmap(KINDS["annotate"], spmd_axis_name="y")
    assert resolved(f, x=X[None]).axes == (Y, ("x",), ())
    g = jax.vmap(KINDS["mesh_split"], spmd_axis_name="y")
    assert resolved(g, x=X[None]).axes == (Y, ("x",), ())
    h = jax.vmap(lambda x: split(x, 0, 2), spmd_axis_name="x")
    assert resolved(h, x=X[None]).axes == (("x",), ("y.0",), ())
    twice = jax.vmap(KINDS["mesh_split"], spmd_axis_name="x")
    assert message(resolved, twice, XY, X[None]) == (
        "vmap's spmd_axis_name does not fit the annotation's devices\n"
        "  at    HERE\n"
        "  facts spmd_axis_name asks for [x, -, -], the devices for [-, x, -]\n"
        "  hint  annotate with axis names, or leave out spmd_axis_name"
    )


def test_parameters_are_hashable_and_short():
    for f in KINDS.values():
        (params,) = annotations(f, X)
        hash(tuple(sorted(params.items(), key=str)))
    (params,) = annotations(lambda x: mesh_split(x, np.arange(65536).reshape(256, 256), [0, 1]), X)
    assert params["devices"] == Devices((256, 256), None)
    assert params["spec"] == (DeviceDim(0), DeviceDim(1))
    assert annotations(lambda x: split(x, -1, 2), X)[0]["spec"] == (None, Parts(2))


def test_the_source_is_the_users_line():
    line = inspect.currentframe().f_lineno + 1
    f = lambda tree: annotate(tree, P("x"))
    a, b = annotations(jax.jit(f).__wrapped__, {"a": X, "b": [X]})
    assert a["source"] == b["source"] == f"test_annotate.py:{line}"
    line = inspect.currentframe().f_lineno + 1
    (params,) = annotations(lambda x: jax.vmap(replicate)(x), X)
    assert params["source"] == f"test_annotate.py:{line}"


def test_trees():
    tree = {"a": X, "b": None, "c": [X, X[0]], "d": X}
    specs = {"a": P("x"), "b": None, "c": P("y"), "d": None}
    params = annotations(lambda t: annotate(t, specs), tree)
    assert [p["spec"] for p in params] == [(("x",), None), (("y",), None), (("y",),)]
    assert [p["spec"] for p in annotations(lambda t: annotate(t, P()), tree)] == [
        (None, None), (None, None), (None,), (None, None),
    ]  # fmt: skip


def test_keys_integers_and_scalars():
    key = jax.random.key(0)
    assert (jax.random.key_data(jax.jit(lambda k: annotate(k, P()))(key)) == 0).all()
    value, grad = jax.value_and_grad(lambda x, i: x * replicate(i), allow_int=True)(2.0, 3)
    assert (value, grad) == (6, 3)
    assert annotate(3.0, P()) == 3.0


# --- meaning on a mesh --------------------------------------------------------------------------

MEANINGS = [
    (lambda x: annotate(x, P("x")), (("x",), ()), (), None),
    (lambda x: annotate(x, P(("y", "x"), None)), ((*Y, "x"), ()), (), None),
    (lambda x: annotate(x, P(OPEN, "y")), ((), Y), {0}, None),
    (lambda x: annotate(x, P("y[2:4]", "y[0:2]")), (("y.1",), ("y.0",)), (), None),
    (lambda x: mesh_split(x, (2, 4), [1, 0]), (Y, ("x",)), (), None),
    (lambda x: mesh_split(x, np.arange(8).reshape(2, 4), [-1, 1]), ((), Y), (), None),
    (lambda x: mesh_split(x, (2, 4), [0, -1], [0, 1]), (("x",), ()), {0, 1}, None),
    (lambda x: mesh_split(x, (2, 4), [-1, -1]), ((), ()), (), None),
    (lambda x: mesh_split(x, (2, 4), [0, 1], [-1]), (("x",), Y), {1}, None),
    # The device mesh need not have the program's shape: 4x2 takes parts of the axes.
    (lambda x: mesh_split(x, (4, 2), [0, 1]), (("x", "y.0"), ("y.1",)), (), None),
    (lambda x: mesh_split(x, (2, 2, 2), [2, 0]), (("y.1",), ("x",)), (), None),
    (lambda x: mesh_split(x, np.arange(8).reshape(4, 2).T, [0, -1]), (("y.1",), ()), (), None),
    # Devices in an order the atoms do not spell; copies already in place stay.
    (lambda x: mesh_split(x, np.array([[4, 5, 6, 7], [0, 1, 2, 3]]), [0, -1]),
     (("x",), ()), (), (4, 5, 6, 7, 0, 1, 2, 3)),
    (lambda x: mesh_split(x, np.array([[0, 4, 2, 3], [1, 5, 6, 7]]), [0, -1]),
     (("x",), ()), (), (0, 4, 2, 3, 1, 5, 6, 7)),
    (lambda x: split(x, 0, 8), (("x", *Y), ()), (), None),
    (lambda x: split(x, 1, 4), ((), Y), (), None),
    (lambda x: split(x, 0, 2), (("x",), ()), (), None),
    (lambda x: split(x, 0, 1), ((), ()), (), None),
    (replicate, ((), ()), (), None),
    (lambda x: shard(x, [[0, 4], [1, 5], [2, 6], [3, 7]]), (Y, ("x",)), (), None),
    (lambda x: shard(x, np.arange(8).reshape(1, 2, 4)), ((), ("x",)), (), None),
    (lambda x: shard(x, (4, 2)), (("x", "y.0"), ("y.1",)), (), None),
    (lambda x: shard(x, np.arange(8)[::-1].reshape(2, 4)), (("x",), Y), (),
     (7, 6, 5, 4, 3, 2, 1, 0)),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(MEANINGS)))
def test_meaning(case):
    f, axes, is_open, order = MEANINGS[case]
    assert resolved(f) == Resolved(Sharding(axes), frozenset(is_open), order)


@pytest.mark.parametrize("sizes, parts, atoms", [
    ({"x": 4, "y": 8}, 8, ("y.0", "y.1", "y.2")),       # the first axis of that size
    ({"x": 4, "y": 4}, 4, ("x.0", "x.1")),
    ({"x": 2, "y": 2, "z": 4}, 4, ("z.0", "z.1")),
    ({"x": 2, "y": 2, "z": 3}, 6, ("y", "z")),           # a run of whole axes
    ({"x": 2, "y": 3, "z": 2, "w": 5}, 12, ("x", "y", "z")),
    ({"x": 4, "y": 2}, 8, ("x.0", "x.1", "y")),
    ({"x": 8, "y": 3}, 4, ("x.0", "x.1")),               # a run of atoms
    ({"x": 4, "y": 9}, 6, ("x.1", "y.0")),
    ({"x": 2, "y": 5, "z": 3}, 6, ("x", "z")),           # any atoms
])  # fmt: skip
def test_split_chooses_axes(sizes, parts, atoms):
    mesh = abstract_mesh(sizes)
    assert resolved(lambda x: split(x, 0, parts), mesh).axes == (atoms, ())


@pytest.mark.parametrize("devices", [8, 65536])
def test_every_number_of_parts_that_divides_the_devices_can_be_made(devices):
    mesh = MeshAxes(("x", "y"), (2, devices // 2))
    for n in (2**i for i in range(devices.bit_length())):
        assert mesh.size(resolved(lambda x, n=n: split(x, 0, n), mesh).axes[0]) == n


def test_named_shardings_and_constraints_agree():
    """A NamedSharding means the same in annotate and in with_sharding_constraint, on any mesh."""
    program = device_mesh({"x": 2, "y": 4})
    devices = np.array(jax.devices())
    meshes = [
        program,
        abstract_mesh({"x": 2, "y": 4}),
        Mesh(devices.reshape(4, 2), ("a", "b")),
        Mesh(devices[::-1].reshape(2, 4), ("x", "y")),
        abstract_mesh({"a": 4, "b": 2}),
    ]
    seen = []
    for mesh in meshes:
        named = NamedSharding(mesh, P(mesh.axis_names[0], OPEN))
        seen.append(resolved(lambda x, n=named: annotate(x, n), program))
        jaxpr = jax.make_jaxpr(lambda x, n=named: lax.with_sharding_constraint(x, n))(X)
        (eqn,) = jaxpr.eqns
        assert eqn.primitive.name == "sharding_constraint"
        assert from_constraint_params(eqn.params, 2, program) == seen[-1]
    whole, half = Sharding((("x",), ())), Sharding((("x", "y.0"), ()))
    assert seen == [
        Resolved(whole, frozenset({1})),
        Resolved(whole, frozenset({1})),
        Resolved(half, frozenset({1})),
        Resolved(whole, frozenset({1}), (4, 5, 6, 7, 0, 1, 2, 3)),
        Resolved(half, frozenset({1})),
    ]


def test_dims_a_constraint_leaves_open():
    """JAX names them in the spec and in the equation; either is enough."""
    mesh = abstract_mesh({"x": 2, "y": 4})
    for spec, unconstrained in [(P("x", OPEN), frozenset()), (P("x"), frozenset({1}))]:
        params = {"sharding": NamedSharding(mesh, spec), "unconstrained_dims": unconstrained}
        assert from_constraint_params(params, 2, XY) == Resolved(
            Sharding((("x",), ())), frozenset({1})
        )


def test_constraint_under_vmap_is_open():
    named = NamedSharding(device_mesh({"x": 2, "y": 4}), P("x"))
    f = jax.vmap(lambda x: lax.with_sharding_constraint(x, named), in_axes=1, out_axes=1)
    (eqn,) = jax.make_jaxpr(f)(X).eqns
    assert from_constraint_params(eqn.params, 2, XY) == Resolved(
        Sharding((("x",), ())), frozenset({1})
    )


# --- errors -------------------------------------------------------------------------------------

FIT = "  hint  give one entry per dim; trailing dims that are not split may be left out"
CALL_ERRORS = [
    (lambda: annotate(X, P("x", ("y", "x"))),
     "mesh axis 'x' is used twice in P('x', ('y', 'x'))\n  at    HERE\n"
     "  facts on dims [0, 1] of float32[8,4]\n"
     "  hint  an axis splits one dim: take it out of the others"),
    (lambda: annotate(X, P("x", None, None)),
     f"P('x', None, None) has 3 entries for float32[8,4]\n  at    HERE\n{FIT}"),
    (lambda: annotate({"w": [X]}, {"w": P("x", None, None)}),
     f"P('x', None, None) has 3 entries for ['w'][0]: float32[8,4]\n  at    HERE\n{FIT}"),
    (lambda: annotate("text", P()),
     "annotate needs an array, not str\n  at    HERE\n  facts got 'text'"),
    (lambda: annotate(X, ("x", None)),
     "annotate needs a PartitionSpec, not 'x'\n  at    HERE\n"
     "  hint  write P('x', None), with P = jax.sharding.PartitionSpec"),
    (lambda: annotate({"a": X}, {"b": P()}),
     "the tree of specs is not a prefix of the tree of arrays\n  at    HERE\n"
     "  facts specs PyTreeDef({'b': *}), arrays PyTreeDef({'a': *})"),
    (lambda: annotate(X, P("x", unreduced={"y"})),
     "an annotation cannot ask for a pending sum: P('x', unreduced={'y'})\n  at    HERE\n"
     "  facts it annotates float32[8,4]\n"
     "  hint  leave out unreduced and reduced: shardwise keeps sums pending where that pays"),
    (lambda: mesh_split(X, (2, 4), [0]),
     "mesh_split: dims_mapping [0] does not fit\n  at    HERE\n"
     "  facts float32[8,4] on a device mesh of 2 dims\n"
     "  hint  give one entry per dim: the dim of the device mesh that splits it, or -1"),
    (lambda: mesh_split(X, (2, 4), [0, 2]),
     "mesh_split: dims_mapping [0, 2] does not fit\n  at    HERE\n"
     "  facts float32[8,4] on a device mesh of 2 dims\n"
     "  hint  entries are -1 (not split) to 1"),
    (lambda: mesh_split(X, (2, 4), [1, 1]),
     "mesh_split: dims_mapping [1, 1] does not fit\n  at    HERE\n"
     "  facts float32[8,4] on a device mesh of 2 dims\n"
     "  hint  a dim of the device mesh splits one dim of the array"),
    (lambda: mesh_split(X, (2, 4), [0, "y"]),
     "mesh_split: dims_mapping needs integers, not 'y'\n  at    HERE"),
    (lambda: mesh_split(X, (2, 4), [0, -1], [2]),
     "mesh_split: unspecified_dims: float32[8,4] has no dim 2\n  at    HERE"),
    (lambda: mesh_split(X, (2, 0), [0, -1]),
     "mesh_split: device_mesh cannot have the shape (2, 0)\n  at    HERE"),
    (lambda: mesh_split(X, np.zeros((2, 0), int), [0, -1]),
     "mesh_split: device_mesh names no devices: its shape is (2, 0)\n  at    HERE"),
    (lambda: mesh_split([X], (8,), [0]),
     "mesh_split needs an array, not list\n  at    HERE\n"
     "  facts got [array([[1., 1., 1., 1.],\n    "),
    (lambda: shard(X, [[0.5, 1]]),
     "shard: device_assignment needs integer device ids, not float64\n  at    HERE"),
    (lambda: shard(X, [[0, 1], [1, 2]]),
     "shard: device_assignment has device 1 more than once\n  at    HERE"),
    (lambda: shard(X, [[-1, 0]]),
     "shard: device_assignment has a negative device id, -1\n  at    HERE"),
    (lambda: shard(X, [0, 1]),
     "shard: a device_assignment of 1 dims for float32[8,4]\n  at    HERE\n"
     "  facts its shape is (2,)\n"
     "  hint  give it one dim per dim of the array, and one more where devices hold copies"),
    (lambda: split(X, 2, 2), "split: float32[8,4] has no dim 2\n  at    HERE"),
    (lambda: split(X, 0, 0), "split: num_partitions is 0, less than 1\n  at    HERE"),
    (lambda: split(X, 0, 2.5), "split: num_partitions needs integers, not 2.5\n  at    HERE"),
    (lambda: replicate(None), "replicate needs an array, not NoneType\n  at    HERE\n"
     "  facts got None"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CALL_ERRORS)))
def test_errors_where_called(case):
    f, expected = CALL_ERRORS[case]
    assert message(f) == expected


MESH_ERRORS = [
    (lambda x: annotate(x, P("z")),
     "unknown mesh axis 'z'\n  at    HERE\n  facts the mesh has x=2 y=4\n"
     "  hint  use one of the mesh's axis names, or build the mesh with that axis"),
    (lambda x: annotate(x, P("y", "y[0:2]")),
     "mesh axis y[0:2] is used twice in P('y', 'y[0:2]')\n  at    HERE\n"
     "  hint  an axis splits one dim: take it out of the others"),
    (lambda x: split(x, 0, 3),
     "split: the mesh cannot make 3 parts\n  at    HERE\n"
     "  facts the mesh has x=2 y=4, 8 devices to split over; parts can be 1, 2, 4, 8\n"
     "  hint  choose one of these numbers, or a mesh with an axis of that size"),
    (lambda x: mesh_split(x, (4, 4), [0, 1]),
     "a device tensor must name each device of the mesh exactly once\n  at    HERE\n"
     "  facts the tensor has 16 entries, the mesh 8 devices; "
     "no such device: 8, 9, 10, 11, 12, 13, 14, 15\n"
     "  hint  devices that hold copies of one block go into one more dim, the last"),
    (lambda x: shard(x, (2, 2)),
     "a device tensor must name each device of the mesh exactly once\n  at    HERE\n"
     "  facts the tensor has 4 entries, the mesh 8 devices; missing: 4, 5, 6, 7\n"
     "  hint  devices that hold copies of one block go into one more dim, the last"),
    (lambda x: annotate(x, NamedSharding(abstract_mesh({"a": 4}), P("a"))),
     "the sharding is on a mesh of 4 devices, and the program runs on 8\n  at    HERE\n"
     "  facts its mesh has a=4, the program's x=2 y=4\n  hint  use one mesh for both"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(MESH_ERRORS)))
def test_errors_on_a_mesh(case):
    f, expected = MESH_ERRORS[case]
    assert message(resolved, f) == expected


def test_error_of_a_constraint_to_one_device():
    params = {"sharding": SingleDeviceSharding(jax.devices()[1])}
    assert message(from_constraint_params, params, 2, XY, "model.py:9") == (
        "with_sharding_constraint asks for one device only\n  at    model.py:9\n"
        f"  facts {params['sharding']} on a mesh x=2 y=4\n"
        "  hint  use a NamedSharding: with P() every device holds the whole array"
    )
    one = MeshAxes(("x",), (1,))
    assert from_constraint_params(params, 2, one) == Resolved(Sharding(((), ())))
