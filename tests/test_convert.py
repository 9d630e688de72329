"""Conversions of shardings, checked against JAX's own placements and XLA's own text."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import _jax
from shardwise.convert import (
    from_named,
    from_spec,
    from_xla_text,
    open_dims,
    to_named,
    to_spec,
    to_xla_text,
)
from shardwise.device_tensor import Placement, from_device_tensor, to_device_tensor
from shardwise.errors import ShardingError
from shardwise.mesh import MeshAxes, abstract_mesh, device_mesh
from shardwise.sharding import Sharding, offset

XY = MeshAxes(("x", "y"), (2, 4))


def message(call) -> str:
    with pytest.raises(ShardingError) as e:
        call()
    return str(e.value)


def specs(names: tuple[str, ...], rank: int = 2) -> list[P]:
    """Every spec over `names`: each choice of axes, each order, dealt to the dims in each way."""
    out = []
    for r in range(len(names) + 1):
        for order in itertools.permutations(names, r):
            for cuts in itertools.combinations_with_replacement(range(r + 1), rank - 1):
                edges = [0, *cuts, r]
                out.append(P(*(order[a:b] or None for a, b in itertools.pairwise(edges))))
    return out


def starts(named: NamedSharding, shape: tuple[int, ...], program: Mesh) -> list[tuple[int, ...]]:
    """Where each device's block starts, by JAX; devices in the program's order."""
    index_of = named.devices_indices_map(shape)
    return [tuple(s.start or 0 for s in index_of[d]) for d in program.devices.flat]


MESHES = [{"x": 2, "y": 4}, {"y": 4, "x": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 8}, {"x": 1, "y": 8}]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_spec_text_and_offsets_are_jaxs(sizes):
    """For every spec: JAX's text is ours, it parses to the spec's sharding, blocks start alike."""
    mesh = device_mesh(sizes)
    axes, shape = MeshAxes.of(mesh), (16, 24)
    for spec in specs(tuple(sizes)):
        named, sharding = NamedSharding(mesh, spec), from_spec(spec, 2, mesh)
        text = _jax.xla_text(named, 2)
        assert to_xla_text(sharding, mesh) == text, spec
        assert from_xla_text(text, mesh, 2) == Placement(sharding), spec
        assert from_spec(to_spec(sharding, mesh), 2, mesh) == sharding
        assert to_named(sharding, mesh).is_equivalent_to(named, 2), spec
        for device, start in enumerate(starts(named, shape, mesh)):
            assert start == tuple(offset(sharding, shape, device, d, axes) for d in (0, 1)), spec


@pytest.mark.parametrize("sizes", [{"a": 6, "b": 2}, {"a": 3, "b": 12, "c": 2}], ids=str)
def test_text_on_meshes_that_are_no_powers_of_two(sizes):
    mesh = abstract_mesh(sizes)
    for spec in specs(tuple(sizes), rank=3):
        text = _jax.xla_text(NamedSharding(mesh, spec), 3)
        assert to_xla_text(from_spec(spec, 3, mesh), mesh) == text, spec
        assert from_xla_text(text, mesh, 3).sharding == from_spec(spec, 3, mesh), spec


def test_pending_sums_are_unreduced_axes():
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    for spec in [P("x", None, unreduced={"y"}), P(None, None, unreduced={"x", "y"}),
                 P(None, None, unreduced={"y"})]:  # fmt: skip
        sharding = from_spec(spec, 2, mesh)
        assert sharding.partial and sharding.op == "sum"
        assert to_spec(sharding, mesh) == spec
        named = to_named(sharding, mesh)
        assert named.spec == spec
        assert to_xla_text(sharding, mesh) == _jax.xla_text(named, 2)
        assert from_xla_text(to_xla_text(sharding, mesh), mesh, 2) == Placement(sharding)


def test_parts_of_an_axis():
    half = from_spec(P("x[0:2]", ("y", "x[2:8]")), 2, MeshAxes(("x", "y"), (8, 3)))
    assert half == Sharding((("x.0",), ("y", "x.1", "x.2")))
    assert half.text(MeshAxes(("x", "y"), (8, 3))) == "[x[0:2], (y, x[2:8])]"
    assert to_spec(half, MeshAxes(("x", "y"), (8, 3)), atoms=True) == P("x.0", ("y", "x.1", "x.2"))
    mesh = device_mesh({"x": 8})
    named = to_named(from_spec(P("x[2:4]"), 1, mesh), mesh)
    assert named.spec == P("x.1")
    assert starts(named, (8,), mesh) == [(0,), (0,), (4,), (4,)] * 2


def test_open_dims():
    assert open_dims(P("x", P.UNCONSTRAINED, None)) == {1}
    assert from_spec(P("x", P.UNCONSTRAINED), 3, XY) == Sharding((("x",), (), ()))


# Texts as XLA writes them, on 8 devices, with the device that holds each block.
TEXTS = [
    ("{replicated}", Sharding(((), ()))),
    ("{devices=[2,4]<=[8]}", Sharding((("x",), ("y.0", "y.1")))),
    ("{devices=[4,2]<=[2,4]T(1,0)}", Sharding((("y.0", "y.1"), ("x",)))),
    ("{devices=[2,2,2]<=[8] last_tile_dim_replicate}", Sharding((("x",), ("y.0",)))),
    ("{devices=[2,2,2]<=[8] last_tile_dims={replicated}}", Sharding((("x",), ("y.0",)))),
    ("{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}", Sharding((("x",), ()))),
    ("{devices=[2,1,4]3,1,0,2,4,6,5,7 last_tile_dim_replicate}", Sharding((("x",), ()))),
    ("{devices=[2,4]0,1,2,3,4,5,6,7 metadata={op_name=\"f/g\" id={1}}}",
     Sharding((("x",), ("y.0", "y.1")))),
]  # fmt: skip


@pytest.mark.parametrize("text, sharding", TEXTS, ids=[t for t, _ in TEXTS])
def test_text_parses(text, sharding):
    assert from_xla_text(text, XY, 2) == Placement(sharding)


def test_text_beyond_a_sharding():
    one = from_xla_text("{maximal device=3}", XY, 1)
    assert one == Placement(Sharding(((),)), device=3)
    manual = from_xla_text("{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dims={manual}}", XY)
    assert manual == Placement(Sharding(((), ("y.1",))), manual=("x", "y.0"))
    mixed = from_xla_text("{devices=[2,2,2]<=[8] last_tile_dims={manual, replicated}}", XY)
    assert mixed == Placement(Sharding((("x",),)), manual=("y.0",))
    order = from_xla_text("{devices=[2,2,2]6,7,4,5,2,3,0,1 last_tile_dim_replicate}", XY)
    assert order == Placement(Sharding((("x",), ("y.0",))), (6, 7, 4, 5, 2, 3, 0, 1))
    everything = from_xla_text("{manual}", XY, 2)
    assert everything == Placement(Sharding(((), ())), manual=XY.atoms)
    for placed in (one, manual, mixed, order, everything):
        rank = placed.sharding.rank
        assert from_xla_text(to_xla_text(placed, XY), XY, rank) == placed


def test_device_tensors_of_the_papers():
    square = MeshAxes(("x", "y"), (2, 2))
    cases = [
        ([[0, 1], [2, 3]], Sharding((("x",), ("y",)))),
        ([[0, 2], [1, 3]], Sharding((("y",), ("x",)))),
        ([[[0, 2]], [[1, 3]]], Sharding((("y",), ()))),
        ([[[0, 1, 2, 3]]], Sharding(((), ()))),
    ]
    for tensor, sharding in cases:
        assert from_device_tensor(np.array(tensor), 2, square) == Placement(sharding)
        assert to_device_tensor(sharding, square).tolist() == tensor
    turned = from_device_tensor(np.array([[3, 1], [2, 0]]), 2, square)
    assert turned == Placement(Sharding((("x",), ("y",))), (3, 1, 2, 0))
    assert to_device_tensor(turned, square).tolist() == [[3, 1], [2, 0]]


def test_an_order_the_atoms_cannot_spell():
    """Blocks of 0..5 by threes are no coordinate of a mesh axis of 6 = 2 x 3."""
    mesh = MeshAxes(("x",), (6,))
    placed = from_device_tensor(np.arange(6).reshape(3, 2), 2, mesh)
    assert placed == Placement(Sharding((("x.1",), ("x.0",))), (0, 2, 4, 1, 3, 5))


@given(
    st.permutations(range(8)),
    st.sampled_from([(8,), (2, 4), (4, 1, 2), (2, 2, 2), (1, 8)]),
    st.sampled_from([{"x": 2, "y": 4}, {"x": 8}, {"a": 2, "b": 2, "c": 2}]),
    st.booleans(),
)
def test_any_device_order_is_placed_as_asked(ids, shape, sizes, copies):
    """JAX, given our sharding on our order of devices, puts each block where the tensor says."""
    mesh = device_mesh(sizes)
    tensor = np.array(ids).reshape(shape)
    rank = tensor.ndim - copies
    placed = from_device_tensor(tensor, rank, MeshAxes.of(mesh))
    named = to_named(placed, mesh)
    sizes_of_dims = tuple(2 * n for n in shape[:rank])
    at = starts(named, sizes_of_dims, mesh)
    for block in np.ndindex(*shape):
        assert at[tensor[block]] == tuple(2 * b for b in block[:rank])
    back = to_device_tensor(placed, MeshAxes.of(mesh))
    again = from_device_tensor(back, rank, MeshAxes.of(mesh))
    assert again == placed
    text = to_xla_text(placed, mesh)
    assert to_named(from_xla_text(text, mesh, rank), mesh).is_equivalent_to(named, rank)


@given(st.permutations(range(8)), st.sampled_from(specs(("a", "b"))))
def test_named_sharding_over_another_mesh(ids, spec):
    program = device_mesh({"x": 2, "y": 4})
    other = Mesh(np.array(jax.devices())[list(ids)].reshape(4, 2), ("a", "b"))
    named = NamedSharding(other, spec)
    placed = from_named(named, 2, program)
    assert starts(to_named(placed, program), (8, 8), program) == starts(named, (8, 8), program)


@st.composite
def shardings(draw):
    """A mesh of 1 to 3 axes, and any sharding on it: any atoms on any dims in any order."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=3))
    mesh = MeshAxes(tuple("xyz"[: len(sizes)]), tuple(sizes))
    atoms = draw(st.permutations(mesh.atoms))
    rank = draw(st.integers(0, 3))
    where = [draw(st.integers(-1, rank)) for _ in atoms]
    dims = [tuple(a for a, w in zip(atoms, where, strict=True) if w == d) for d in range(rank)]
    partial = mesh.sort(a for a, w in zip(atoms, where, strict=True) if w == rank)
    return mesh, Sharding(tuple(dims), partial)


@given(shardings())
def test_every_sharding_round_trips(case):
    mesh, sharding = case
    rank = sharding.rank
    assert from_spec(to_spec(sharding, mesh, atoms=True), rank, mesh) == sharding
    merged = P(*map(mesh.merge, sharding.axes), unreduced=frozenset(mesh.merge(sharding.partial)))
    assert from_spec(merged, rank, mesh) == sharding
    assert from_xla_text(to_xla_text(sharding, mesh), mesh, rank).sharding == sharding
    tensor = to_device_tensor(sharding.tiling, mesh)
    assert math.prod(tensor.shape) == mesh.device_count
    assert from_device_tensor(tensor, rank, mesh) == Placement(sharding.tiling)


def test_errors():
    part = from_spec(P("y[0:2]"), 1, XY)
    assert message(lambda: to_spec(part, XY)) == (
        "dim 0 uses part of a mesh axis, which a PartitionSpec cannot say\n"
        "  facts dim 0 is over y[0:2]; the mesh has x=2 y=4\n"
        "  hint  use to_spec(..., atoms=True) or to_named, over a mesh with an axis for each atom"
    )
    assert message(lambda: from_spec(P("z"), 1, XY, "model.py:3")) == (
        "unknown mesh axis 'z'\n"
        "  at    model.py:3\n"
        "  facts the mesh has x=2 y=4\n"
        "  hint  use one of the mesh's axis names, or build the mesh with that axis"
    )
    assert message(lambda: from_spec(P("y", "y[2:4]"), 2, XY)) == (
        "mesh axis y[2:4] is used twice in P('y', 'y[2:4]')\n"
        "  hint  an axis splits one dim: take it out of the others"
    )
    assert message(lambda: from_spec(P(None, "x"), 1, XY)) == (
        "P(None, 'x') has 2 entries for a value of 1 dims\n"
        "  hint  give one entry per dim; trailing dims that are not split may be left out"
    )
    pending = Sharding(((),), ("x",), "max")
    assert message(lambda: to_spec(pending, XY)) == (
        "a pending max has no PartitionSpec\n"
        "  facts the sharding is [-] partial max over x; a spec can say pending sums only\n"
        "  hint  finish it first: convert sharding.tiling"
    )
    assert message(lambda: to_xla_text(pending, XY)) == (
        "a pending max has no XLA text\n"
        "  facts the sharding is [-] partial max over x; XLA can say pending sums only\n"
        "  hint  finish it first: convert sharding.tiling"
    )
    assert message(lambda: to_device_tensor(pending, XY)) == (
        "a device tensor cannot say pending reductions, manual axes, or one device alone\n"
        "  facts the sharding is [-] partial max over x"
    )


def test_errors_of_meshes_and_devices():
    program = device_mesh({"x": 2, "y": 4})
    four = Mesh(np.array(jax.devices()[:4]), ("x",))
    assert message(lambda: from_named(NamedSharding(four, P("x")), 1, program)) == (
        "the sharding is on a mesh of 4 devices, and the program runs on 8\n"
        "  facts its mesh has x=4, the program's x=2 y=4\n"
        "  hint  use one mesh for both"
    )
    low, high = four, Mesh(np.array(jax.devices()[4:]), ("x",))
    assert message(lambda: from_named(NamedSharding(high, P("x")), 1, low, "m.py:1")) == (
        "the sharding is on devices that the program does not run on\n"
        "  at    m.py:1\n"
        "  facts device ids [4, 5, 6, 7]\n"
        "  hint  use one mesh for both"
    )
    assert message(lambda: from_device_tensor(np.array([0, 1, 1, 9]), 1, XY)) == (
        "a device tensor must name each device of the mesh exactly once\n"
        "  facts the tensor has 4 entries, the mesh 8 devices; no such device: 9; "
        "more than once: 1; missing: 2, 3, 4, 5, 6, 7\n"
        "  hint  devices that hold copies of one block go into one more dim, the last"
    )
    assert message(lambda: from_device_tensor(np.arange(8), 2, XY)) == (
        "a device tensor of 1 dims for a value of 2 dims\n"
        "  facts its shape is (8,)\n"
        "  hint  give it one dim per dim of the value, and one more where devices hold copies"
    )
    pending = Sharding(((),), ("x",))
    assert message(lambda: to_named(pending, program)) == (
        "a pending sum has no NamedSharding on this mesh: P(None, unreduced={'x'})\n"
        "  facts JAX allows unreduced axes on a mesh whose axes are Explicit only\n"
        "  hint  finish the sum first: convert sharding.tiling"
    )
    assert message(lambda: to_named(Placement(Sharding(((),)), device=1), program)) == (
        "manual axes and one-device placements have no NamedSharding"
    )
    turned = Placement(Sharding((("x",),)), (1, 0, 2, 3, 4, 5, 6, 7))
    assert message(lambda: to_named(turned, abstract_mesh({"x": 2, "y": 4}))) == (
        "a device order needs a mesh of devices, and this one is abstract"
    )


BAD_TEXTS = {
    "{{replicated}, {replicated}}": (
        "not an XLA sharding: '{{replicated}, {replicated}}'\n"
        "  facts forms: {replicated}, {manual}, {unreduced}, {maximal device=0}, "
        "{devices=[2,4]<=[8]}, {devices=[2,2]0,2,1,3}, with last_tile_dim_replicate or "
        "last_tile_dims={...}\n"
        "  hint  a tuple's shardings are converted one by one"
    ),
    "{devices=[2,4]<=[4]}": "the device numbers in '{devices=[2,4]<=[4]}' do not fill its tiles",
    "{devices=[2,4]<=[8]T(1,0)}": (
        "the device numbers in '{devices=[2,4]<=[8]T(1,0)}' do not fill its tiles"
    ),
    "{devices=[8]<=[8]}": "'{devices=[8]<=[8]}' is for a value of 1 dims, not 2",
    "{devices=[1,1,8]<=[8] last_tile_dims={maximal}}": (
        "unknown subgroup 'maximal' in '{devices=[1,1,8]<=[8] last_tile_dims={maximal}}'"
    ),
    "{maximal device=8}": (
        "'{maximal device=8}' names a device the mesh does not have\n  facts x=2 y=4"
    ),
}


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_errors_of_texts(text):
    assert message(lambda: from_xla_text(text, XY, 2)) == BAD_TEXTS[text]


def test_text_without_a_rank():
    assert message(lambda: from_xla_text("{replicated}", XY)) == (
        "'{replicated}' does not show how many dims the value has: give the rank"
    )
