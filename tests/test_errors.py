"""Every error of `spmd` and its meshes by its whole message: what, where, the facts, the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw

MESH = sw.device_mesh({"x": 2, "y": 4})
ABSTRACT = sw.abstract_mesh({"x": 16, "y": 4})
SMALL = sw.device_mesh({"a": 4})
A, W = np.ones((8, 4), np.float32), np.ones((4, 6), np.float32)


def dot(a: Any, w: Any) -> Any:
    return a @ w


def spmd(fn: Any = dot, **options: Any) -> Any:
    return sw.spmd(fn, mesh=MESH, **options)


def message(f: Callable[[], Any]) -> str:
    """The error's whole message, with this file's line numbers as `HERE`."""
    with pytest.raises(sw.ShardingError) as e:
        f()
    return re.sub(r"test_errors\.py:\d+", "HERE", str(e.value))


def same(got: str, want: str) -> None:
    assert got == want.strip("\n")


# --- what spmd is given -------------------------------------------------------------------------

MAKING = {
    "not a function": (lambda: spmd(3), """
spmd needs a function, not 3
  at    HERE
"""),
    "not a mesh": (lambda: sw.spmd(dot, mesh=jax.devices()), """
spmd needs a Mesh or an AbstractMesh, not list
  at    HERE
  hint  jax.make_mesh((2, 4), ('x', 'y')), or sw.abstract_mesh({'x': 2, 'y': 4})
"""),
    "static out of range": (lambda: spmd(static_argnums=2), """
static_argnums names argument 2, and `dot` has 2
  at    HERE
  facts its parameters are a, w
"""),
    "donate out of range": (lambda: spmd(donate_argnums=(0, -3)), """
donate_argnums names argument -3, and `dot` has 2
  at    HERE
  facts its parameters are a, w
"""),
    "not a position": (lambda: spmd(static_argnums="a"), """
static_argnums needs positions of arguments, not 'a'
  at    HERE
"""),
    "not bytes": (lambda: spmd(memory_limit="2GB"), """
memory_limit needs a number of bytes or None, not '2GB'
  at    HERE
  hint  memory_limit=268435456 for 256 MiB
"""),
    "too few devices": (lambda: sw.device_mesh({"x": 3, "y": 4}), """
a mesh of 12 devices was asked for, and there are 8
  facts axes {'x': 3, 'y': 4}; backend cpu
  hint  for a CPU set XLA_FLAGS=--xla_force_host_platform_device_count=12 \
before importing jax, or plan on an abstract mesh
"""),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKING)
def test_making(name: str):
    f, want = MAKING[name]
    same(message(f), want)


# --- arguments ----------------------------------------------------------------------------------

CALLS = {
    "no array": (lambda: spmd()(A, "text"), """
argument w is not an array
  at    HERE
  facts it is 'text' of type str
  hint  pass arrays, or name its position in static_argnums
"""),
    "no array deep down": (lambda: spmd(lambda p: p["w"][0])({"w": [A, {1, 2}]}), """
argument p['w'][1] is not an array
  at    HERE
  facts it is {1, 2} of type set
  hint  pass arrays, or name its position in static_argnums
"""),
    "no array, planned": (lambda: spmd(lambda *args, k: k).plan(A, k=object), """
argument k is not an array
  at    HERE
  facts it is <class 'object'> of type type
  hint  pass arrays, or name its position in static_argnums
"""),
    "not hashable": (lambda: spmd(static_argnums=1)(A, [1]), """
static argument w is not hashable
  at    HERE
  facts it is a list
  hint  a static argument is part of the cache's key: pass a tuple or a frozen dataclass
"""),
    "abstract mesh called": (lambda: sw.spmd(dot, mesh=ABSTRACT)(A, W), """
an abstract mesh has no devices to run on
  at    HERE
  facts the mesh has x=16 y=4; it was given at HERE
  hint  use .plan(...) to plan, or pass a Mesh to run
"""),
    "abstract mesh lowered": (lambda: sw.spmd(dot, mesh=ABSTRACT).lower(A, W), """
an abstract mesh has no devices to run on
  at    HERE
  facts the mesh has x=16 y=4; it was given at HERE
  hint  use .plan(...) to plan, or pass a Mesh to run
"""),
    "abstract mesh traced": (lambda: jax.jit(sw.spmd(dot, mesh=ABSTRACT))(A, W), """
an abstract mesh has no devices to run on
  at    HERE
  facts the mesh has x=16 y=4; it was given at HERE
  hint  use .plan(...) to plan, or pass a Mesh to run
"""),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str):
    f, want = CALLS[name]
    same(message(f), want)


def test_traced_argument_with_explicit_axes():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(A, NamedSharding(mesh, P("y")))
    same(message(lambda: jax.jit(spmd(jnp.sin))(x)), """
traced argument x has its sharding in its type
  at    HERE
  facts it is f32[8@y,4], on a mesh with axes of type Explicit
  hint  call it outside jit, or make the mesh with axis_types=(AxisType.Auto, ...)
""")  # fmt: skip


# --- shardings of arguments and results ---------------------------------------------------------


def plan(fn: Any = dot, **options: Any) -> Any:
    return spmd(fn, **options).plan(A, W)


def both(a: Any, w: Any) -> Any:
    return {"y": a @ w, "n": a.sum()}


ONE_AXIS = NamedSharding(SMALL, P("a"))
SHARDINGS = {
    "unknown axis": (lambda: plan(in_shardings=(P("x"), P("model"))), """
unknown mesh axis 'model'
  at    HERE
  facts argument w: float32[4,6]; the mesh has x=2 y=4
  hint  use one of the mesh's axis names, or build the mesh with that axis
"""),
    "unknown axis of a result": (lambda: plan(both, out_shardings={"y": P("z"), "n": None}), """
unknown mesh axis 'z'
  at    HERE
  facts result result['y']: float32[8,6]; the mesh has x=2 y=4
  hint  use one of the mesh's axis names, or build the mesh with that axis
"""),
    "axis twice": (lambda: plan(in_shardings=(P("x", ("y", "x")), None)), """
mesh axis x is used twice in P('x', ('y', 'x'))
  at    HERE
  facts argument a: float32[8,4]
  hint  an axis splits one dim: take it out of the others
"""),
    "too long": (lambda: plan(in_shardings=(None, P("x", None, None))), """
P('x', None, None) has 3 entries for a value of 2 dims
  at    HERE
  facts argument w: float32[4,6]
  hint  give one entry per dim; trailing dims that are not split may be left out
"""),
    "too long for a result": (lambda: plan(both, out_shardings=P("x")), """
P('x',) has 1 entries for a value of 0 dims
  at    HERE
  facts result result['n']: float32[]
  hint  give one entry per dim; trailing dims that are not split may be left out
"""),
    "too many": (lambda: plan(in_shardings=(P(), P(), P())), """
in_shardings has 3 specs for 2 arguments
  at    HERE
  hint  one spec per argument (None leaves it to completion), or one for all
"""),
    "too few results": (lambda: plan(lambda a, w: (a, w), out_shardings=[P()]), """
out_shardings has 1 specs for 2 results
  at    HERE
  hint  one spec per result (None leaves it to completion), or one for all
"""),
    "other tree": (lambda: plan(both, out_shardings={"y": P("x")}), """
out_shardings is not a prefix of the tree of results
  at    HERE
  facts specs PyTreeDef({'y': *}), results PyTreeDef({'n': *, 'y': *})
"""),
    "other tree of arguments": (lambda: plan(in_shardings=(P("x"), {"w": P()})), """
in_shardings is not a prefix of the tree of arguments
  at    HERE
  facts specs PyTreeDef((*, {'w': *})), arguments PyTreeDef((*, *))
"""),
    "not a spec": (lambda: plan(in_shardings=("x", None)), """
in_shardings needs PartitionSpecs, not 'x'
  at    HERE
  facts for argument a: float32[8,4]
  hint  write P('x', None), with P = jax.sharding.PartitionSpec
"""),
    "pending sum": (lambda: plan(out_shardings=P("x", unreduced={"y"})), """
out_shardings cannot ask for a pending sum: P('x', unreduced={'y'})
  at    HERE
  facts result result: float32[8,6]
"""),
    "other devices": (lambda: plan(in_shardings=ONE_AXIS), """
the sharding is on a mesh of 4 devices, and the program runs on 8
  at    HERE
  facts argument a: float32[8,4]; its mesh has a=4, the program's x=2 y=4
  hint  use one mesh for both
"""),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARDINGS)
def test_shardings(name: str):
    f, want = SHARDINGS[name]
    same(message(f), want)


# --- annotations inside the function ------------------------------------------------------------


def annotated(spec: P) -> Any:
    return spmd(lambda a: sw.annotate(a, spec)).plan(A)


ANNOTATIONS = {
    "unknown axis": (lambda: annotated(P("model")), """
unknown mesh axis 'model'
  at    HERE
  facts the mesh has x=2 y=4
  hint  use one of the mesh's axis names, or build the mesh with that axis
"""),
    "axis twice": (lambda: annotated(P("x", "x")), """
mesh axis 'x' is used twice in P('x', 'x')
  at    HERE
  facts on dims [0, 1] of float32[8,4]
  hint  an axis splits one dim: take it out of the others
"""),
    "too long": (lambda: annotated(P("x", None, "y")), """
P('x', None, 'y') has 3 entries for float32[8,4]
  at    HERE
  hint  give one entry per dim; trailing dims that are not split may be left out
"""),
    "no array": (lambda: spmd(lambda a: sw.annotate("b", P())).plan(A), """
annotate needs an array, not str
  at    HERE
  facts got 'b'
"""),
}  # fmt: skip


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_annotations(name: str):
    f, want = ANNOTATIONS[name]
    same(message(f), want)


def test_where_is_the_users_line():
    """Of the call, of `spmd`, of the annotation: never a line of this package or of JAX."""
    here = test_where_is_the_users_line.__code__.co_firstlineno
    f = spmd(lambda a: sw.annotate(a, P("q")), in_shardings=P("x"))
    g = sw.spmd(dot, mesh=MESH, in_shardings=(P("q"), None))
    for call, line in [
        (lambda: f(A), here + 3),
        (lambda: g(A, W), here + 4),
        (lambda: f("text"), here + 8),
    ]:
        with pytest.raises(sw.ShardingError) as e:
            call()
        assert e.value.where == f"test_errors.py:{line}"


# --- what is no error ---------------------------------------------------------------------------


def test_dims_of_size_zero_can_be_split():
    """There is nothing to split, and nothing to refuse: such a value lies whole everywhere."""
    f = spmd(lambda x: x * 2, in_shardings=P("x", "y"), out_shardings=P("y"))
    assert f(np.zeros((0, 4), np.float32)).shape == (0, 4)
    assert f.plan(np.zeros((0, 4), np.float32)).in_shardings == (P(None, None),)


def test_two_annotations_in_a_row_are_a_reshard():
    """Each holds where it stands; what lies between them is the plan's."""
    plan = spmd(lambda x: sw.annotate(sw.annotate(x, P("x")), P(None, "y"))).plan(A)
    assert plan.in_shardings == (P("x", None),)
    assert plan.out_shardings == P(None, "y")
    assert [c.kind for c in plan.collectives] != []


def test_arrays_on_other_devices_are_moved():
    two = Mesh(np.array(jax.devices())[[7, 6]], ("a",))
    x = jax.device_put(A, NamedSharding(two, P("a")))
    np.testing.assert_array_equal(np.asarray(spmd(jnp.negative)(x)), -A)
