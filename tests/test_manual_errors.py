"""Manual subgraphs misused: every error by its whole message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardwise as sw

XY = sw.device_mesh({"x": 2, "y": 4})


def lost(x: Any) -> Any:
    return sw.auto_to_manual(x, P("x"))


def mixed(x: Any) -> Any:
    return sw.auto_to_manual(x, P("x")) + x[:4]


def not_in(x: Any) -> Any:
    return sw.manual_to_auto(x, P("x"))


def twice(x: Any) -> Any:
    return sw.auto_to_manual(sw.auto_to_manual(x, P("x"), axes="x"), P("x"), axes="x")


def wrong_shape(x: Any) -> Any:
    return sw.manual_to_auto(sw.auto_to_manual(x, P("x")), P("x"), shape=(16, 16))


def annotated(x: Any) -> Any:
    return sw.manual(lambda a: sw.annotate(a, P("x")), in_specs=P("x"), out_specs=P("x"), axes="x")(
        x
    )


def in_loop(x: Any) -> Any:
    return lax.scan(lambda c, r: (c + r, None), sw.auto_to_manual(x[0], P()), x)[0]


def nested(x: Any) -> Any:
    inner = sw.manual(lambda a: a, in_specs=P(), out_specs=P(), axes="x")
    return sw.manual(inner, in_specs=P("x"), out_specs=P("x"), axes="x")(x)


def on_mesh(mesh: Mesh, ins: Any, outs: Any) -> Callable[..., Any]:
    return jax.shard_map(identity, mesh=mesh, in_specs=ins, out_specs=outs)


def through(f: Any, ins: Any, outs: Any, **options: Any) -> Callable[..., Any]:
    return lambda x: sw.manual(f, in_specs=ins, out_specs=outs, **options)(x)


def identity(a: Any) -> Any:
    return a


def index(a: Any) -> Any:
    return a * lax.axis_index("x")


def pair(a: Any) -> Any:
    return a, a


ERRORS: dict[str, tuple[Callable[..., Any], str]] = {
    "collective outside": (
        lambda x: lax.psum(x, "x"),
        """psum over axis 'x', which is not under manual control here
  facts x [8, 16]
  hint  collectives belong inside sw.manual or jax.shard_map, or between auto_to_manual and \
manual_to_auto over 'x'""",
    ),
    "index of an automatic value": (
        lambda x: x * lax.axis_index("x"),
        """mul mixes values under manual control over x with x, which is not
  facts x [8, 16]: automatic, v3 []: manual over x
  hint  bring it in with auto_to_manual (P() where every device needs all of it), or give the others \
back with manual_to_auto first""",
    ),
    "index as result": (
        lambda x: lax.axis_index("x"),
        """v2 is still under manual control over x where its function ends
  facts it has v2:int32[]
  hint  give it back with manual_to_auto""",
    ),
    "mixed": (
        mixed,
        """add mixes values under manual control over (x, y) with v3, which is not
  facts v2 [4, 16]: manual over (x, y), v3 [4, 16]: automatic
  hint  bring it in with auto_to_manual (P() where every device needs all of it), or give the others \
back with manual_to_auto first""",
    ),
    "mixed in a loop": (
        in_loop,
        """scan mixes values under manual control over (x, y) with x, which is not
  facts v4 [16]: manual over (x, y), x [8, 16]: automatic
  hint  bring it in with auto_to_manual (P() where every device needs all of it), or give the others \
back with manual_to_auto first""",
    ),
    "lost": (
        lost,
        """v2 is still under manual control over (x, y) where its function ends
  facts it has v2:float32[4,16]
  hint  give it back with manual_to_auto""",
    ),
    "not in": (
        not_in,
        """manual_to_auto over x, y: the value is not under manual control there
  facts x [8, 16]
  hint  name the axes auto_to_manual was given""",
    ),
    "twice": (
        twice,
        """auto_to_manual over x: the value is under manual control there
  facts v2 [4, 16]
  hint  an axis is manual or automatic: leave it out of axes here""",
    ),
    "wrong shape": (
        wrong_shape,
        """manual_to_auto: blocks of [4, 16] make [8, 16], not [16, 16]
  facts P('x',) on the mesh x=2 y=4
  hint  the block must have the shape of one device's part, as auto_to_manual gives it""",
    ),
    "claimed whole": (
        lambda x: sw.manual_to_auto(sw.auto_to_manual(x, P("x")) * 2, P()),
        """manual_to_auto: the value may differ between devices along x
  facts v4 [4, 16]; P() says that they hold the same value
  hint  name 'x' in the spec, or reduce the value over it (lax.psum(x, 'x')); check=False if you know \
that it does not differ""",
    ),
    "index claimed whole": (
        lambda x: sw.manual_to_auto(sw.auto_to_manual(x, P("x")) * lax.axis_index("y"), P("x")),
        """manual_to_auto: the value may differ between devices along y
  facts v5 [4, 16]; P('x',) says that they hold the same value
  hint  name 'y' in the spec, or reduce the value over it (lax.psum(x, 'y')); check=False if you know \
that it does not differ""",
    ),
    "collective of an automatic axis": (
        through(lambda a: lax.psum(a, "y"), P("x"), P("x"), axes="x"),
        """manual(<lambda>): a collective over axis 'y', which is not under manual control
  facts axes=('x',)
  hint  add 'y' to axes: what is not in it is the partitioner's""",
    ),
    "argument over an automatic axis": (
        through(identity, P("y"), P(), axes="x"),
        """manual(identity): argument [0]: P('y',) names axis 'y', which is not under manual control
  facts axes=('x',)
  hint  add 'y' to axes, or leave it out of the spec: it stays the partitioner's""",
    ),
    "result over an automatic axis": (
        through(pair, P("x"), (P("x"), P("x", "y")), axes="x"),
        """manual(pair): result [1]: P('x', 'y') names axis 'y', which is not under manual control
  facts axes=('x',)
  hint  add 'y' to axes, or leave it out of the spec: it stays the partitioner's""",
    ),
    "unknown axis of a function": (
        through(identity, P("z"), P()),
        """manual(identity): unknown mesh axis 'z'
  facts the mesh has x=2 y=4
  hint  use one of the mesh's axis names, or build the mesh with that axis""",
    ),
    "result of fewer dims": (
        through(jnp.sum, P("x"), P("x")),
        "manual(sum): result: P('x',) has more entries than the value's 0 dims",
    ),
    "blocks of other axes": (
        lambda x: sw.auto_to_manual(x, P("x"), axes="x") + sw.auto_to_manual(x, P("x")),
        """add mixes values under manual control over y with v2, which is not
  facts v2 [4, 16]: manual over x, v3 [4, 16]: manual over (x, y)
  hint  bring it in with auto_to_manual (P() where every device needs all of it), or give the others \
back with manual_to_auto first""",
    ),
    "entered inside": (
        through(lambda a: sw.auto_to_manual(a, P("x")), P("x"), P("x"), axes="x"),
        """auto_to_manual: axis 'x' is under manual control already
  facts the enclosing manual function has x
  hint  leave it out of axes: inside, its collectives work as they are""",
    ),
    "left inside": (
        through(lambda a: sw.manual_to_auto(a, P("x"), axes="x"), P("x"), P("x"), axes="x"),
        """manual_to_auto over x: the value is not under manual control there
  facts v3 [4, 16]
  hint  name the axes auto_to_manual was given""",
    ),
    "unknown axis": (
        lambda x: sw.auto_to_manual(x, P("z")),
        """auto_to_manual: unknown mesh axis 'z'
  facts the mesh has x=2 y=4
  hint  use one of the mesh's axis names, or build the mesh with that axis""",
    ),
    "axis not in axes": (
        lambda x: sw.auto_to_manual(x, P("x"), axes="y"),
        """auto_to_manual: P('x',) names axis 'x', which is not under manual control
  facts axes=('y',)
  hint  add 'x' to axes, or leave it out of the spec: it stays the partitioner's""",
    ),
    "axis twice": (
        lambda x: sw.auto_to_manual(x, P("x", "x")),
        """auto_to_manual: axis 'x' is used twice in P('x', 'x')
  hint  an axis splits one dim""",
    ),
    "too many entries": (
        lambda x: sw.auto_to_manual(x, P(None, None, "x")),
        "auto_to_manual: P(None, None, 'x') has more entries than the value's 2 dims",
    ),
    "does not divide": (
        lambda x: sw.auto_to_manual(x[:5], P("x")),
        """auto_to_manual: dim 0 of [5, 16] does not divide
  facts P('x',) makes 2 blocks of 5 rows
  hint  pad the dim: what the padding means is the manual code's to say""",
    ),
    "argument does not divide": (
        lambda x: through(identity, P("x"), P("x"))(x[:5]),
        """manual(identity): argument [0]: dim 0 of [5, 16] does not divide
  facts P('x',) makes 2 blocks of 5 rows
  hint  pad the dim: what the padding means is the manual code's to say""",
    ),
    "not a spec": (
        lambda x: sw.auto_to_manual(x, "x"),  # type: ignore[arg-type]
        """auto_to_manual needs a PartitionSpec, not 'x'
  hint  write P('x', None), with P = jax.sharding.PartitionSpec""",
    ),
    "not a spec of a function": (
        through(identity, "x", P()),
        """manual: in_specs needs PartitionSpecs, not 'x'
  hint  write P('x', None), with P = jax.sharding.PartitionSpec""",
    ),
    "varies": (
        through(index, P(), P()),
        """manual(index): result may differ between devices along x
  facts P() says that they hold the same value
  hint  name 'x' in the spec, or reduce the value over it (lax.psum(x, 'x')); check=False if you know \
that it does not differ""",
    ),
    "no prefix": (
        through(pair, P("x"), (P("x"), P("x"), P())),
        """manual(pair): the tree of out_specs is not a prefix of the values'
  facts out_specs PyTreeDef((*, *, *)), values PyTreeDef((*, *))""",
    ),
    "nested": (
        nested,
        """manual(<lambda>): axis 'x' is under manual control already
  facts the enclosing manual function has x
  hint  leave it out of axes: inside, its collectives work as they are""",
    ),
    "annotated": (
        annotated,
        """an annotation splits over an axis that is under manual control there
  facts x on v4 [4, 16]
  hint  inside a manual region annotate with the other axes only""",
    ),
    "other order": (
        lambda x: on_mesh(Mesh(np.asarray(XY.devices)[::-1], ("x", "y")), P("x"), P("x"))(x),
        """a shard_map whose mesh has the program's devices in an order its axes cannot spell
  facts it has x=2 y=4, the program x=2 y=4; its order is 4, 5, 6, 7, 0, 1, 2, 3
  hint  use the program's own mesh""",
    ),
    "fewer devices": (
        lambda x: on_mesh(sw.device_mesh({"x": 4}), P("x"), P("x"))(x),
        """a shard_map over other devices than the program's
  facts it has x=4, the program x=2 y=4; devices 0, 1, 2, 3 instead of 0, 1, 2, 3, 4, 5, 6, 7
  hint  use the program's own mesh""",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors(what: str):
    fn, message = ERRORS[what]
    with pytest.raises(sw.ShardingError) as error:
        sw.spmd(fn, mesh=XY).plan(np.ones((8, 16), np.float32))
    assert error.value.where.startswith("test_manual_errors.py:")
    lines = [l for l in str(error.value).splitlines() if not l.startswith("  at    ")]
    assert "\n".join(lines) == message


def leaving(*, inside: Any = identity, check: bool = True) -> Callable[..., Any]:
    """Blocks over x, what becomes of them, and that claimed to be the same along x."""
    return lambda x: sw.manual_to_auto(inside(sw.auto_to_manual(x, P("x"))), P(), check=check)


def summed_in_a_loop(block: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, b: lax.psum(b, "x"), block)


@pytest.mark.parametrize(
    "fn",
    [
        leaving(inside=lambda b: lax.psum(b, ("x", "y"))),
        leaving(inside=lambda b: lax.all_gather(b, "x")),
        leaving(inside=summed_in_a_loop),
        leaving(check=False),
    ],
    ids=["sum", "gather", "in a loop", "unchecked"],
)
def test_the_same_on_all_devices(fn: Any):
    """No error, nor in the gradient's program, where the same crossing is transposed."""
    plan = sw.spmd(fn, mesh=XY).plan(np.ones((8, 16), np.float32))
    assert not plan.fallbacks
    sw.spmd(jax.grad(lambda x: fn(x).sum()), mesh=XY).plan(np.ones((8, 16), np.float32))


def test_outside_on_several_devices():
    x = jax.device_put(np.ones((8, 16), np.float32), jax.sharding.NamedSharding(XY, P("x")))
    with pytest.raises(sw.ShardingError) as error:
        through(identity, P("x"), P("x"))(x)
    lines = str(error.value).splitlines()
    assert lines[0] == (
        "manual(identity): outside sw.spmd it runs on one device, and an argument lies on 8"
    )
    assert lines[2:] == ["  hint  call it in what sw.spmd partitions, or under jax.set_mesh(mesh)"]
    with jax.set_mesh(XY):
        np.testing.assert_array_equal(through(identity, P("x"), P("x"))(x), x)
