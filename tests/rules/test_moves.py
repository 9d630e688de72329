"""slice, pad, concatenate, rev, dynamic_slice, dynamic_update_slice: every split, and its price."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardwise.capture import capture
from shardwise.cost import comm as cost
from shardwise.mesh import MeshAxes, device_mesh
from shardwise.ops.dynamic_slice import clamped
from shardwise.ops.registry import LocalContext, comm_bytes, layouts_for, rules_of, run_local
from shardwise.program import Eqn
from shardwise.testing import rules
from shardwise.testing.rules import check_rule

MESHES = [{"x": 2, "y": 2}, {"x": 4}, {"x": 3}, {"x": 8}]
START = np.int32(0)


def values(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=shape) * 9
    return x > 0 if dtype is bool else x.astype(dtype)


def sliced(*dims: tuple[int, int, int]) -> Callable[..., Any]:
    """A slice by (start, limit, stride) of each dim."""
    return lambda x: lax.slice(x, *zip(*dims, strict=True))


def padded(*config: tuple[int, int, int], value: float = 0.0) -> Callable[..., Any]:
    return lambda x: lax.pad(x, jnp.asarray(value, x.dtype), config)


def joined(dim: int = 0) -> Callable[..., Any]:
    return lambda *xs: lax.concatenate(xs, dim)


def reversed_(*dims: int) -> Callable[..., Any]:
    return lambda x: lax.rev(x, dims)


def cut(*sizes: int) -> Callable[..., Any]:
    return lambda x, *starts: lax.dynamic_slice_p.bind(x, *starts, slice_sizes=sizes)


def updated(x: Any, update: Any, *starts: Any) -> Any:
    return lax.dynamic_update_slice_p.bind(x, update, *starts)


def known(f: Callable[..., Any], *starts: int) -> Callable[..., Any]:
    """`f` with its starts written into the program."""
    return lambda *xs: f(*xs, *map(np.int32, starts))


CASES: dict[str, tuple[str, Callable[..., Any], list[Any]]] = {
    "slice": ("slice", sliced((3, 11, 1)), [values(16)]),
    "slice-uneven": ("slice", sliced((2, 13, 1)), [values(13)]),
    "slice-one-row": ("slice", sliced((5, 6, 1)), [values(16)]),
    "slice-strided": ("slice", sliced((1, 13, 3)), [values(13)]),
    "slice-halved": ("slice", sliced((0, 16, 2)), [values(16)]),
    "slice-2d": ("slice", sliced((2, 9, 1), (1, 6, 2)), [values(9, 7)]),
    "slice-3d": ("slice", sliced((1, 4, 1), (0, 3, 1), (1, 3, 1)), [values(4, 4, 4)]),
    "pad-low": ("pad", padded((1, 0, 0)), [values(16)]),
    "pad-high": ("pad", padded((0, 5, 0), value=2), [values(13)]),
    "pad-all": ("pad", padded((-2, 3, 1), value=2), [values(11)]),
    "pad-far": ("pad", padded((30, 3, 0), value=2), [values(2)]),
    "pad-interior": ("pad", padded((3, -5, 2), value=2), [values(8)]),
    "pad-one-row": ("pad", padded((5, 10, 0)), [values(1)]),
    "pad-2d": ("pad", padded((1, 2, 0), (-1, 0, 1), value=3), [values(6, 5)]),
    "concatenate": ("concatenate", joined(), [values(16), values(16, seed=1)]),
    "concatenate-uneven": ("concatenate", joined(), [values(5), values(1), values(9)]),
    "concatenate-each": ("concatenate", joined(), [values(5), values(31, seed=1)]),
    "concatenate-empty": ("concatenate", joined(), [values(5), values(0), values(4)]),
    "concatenate-dim-1": ("concatenate", joined(1), [values(3, 4), values(3, 7)]),
    "rev": ("rev", reversed_(0), [values(16)]),
    "rev-uneven": ("rev", reversed_(0), [values(13)]),
    "rev-2d": ("rev", reversed_(0, 1), [values(5, 6)]),
    "cut": ("dynamic_slice", cut(4), [values(16), np.int32(7)]),
    "cut-uneven": ("dynamic_slice", cut(9), [values(13), np.int32(3)]),
    "cut-most": ("dynamic_slice", cut(15), [values(16), np.int32(1)]),
    "cut-row": ("dynamic_slice", cut(1), [values(16), np.int32(30)]),
    "cut-2d": ("dynamic_slice", cut(4, 3), [values(9, 6), np.int32(2), np.int32(-1)]),
    "cut-known": ("dynamic_slice", known(cut(8), 5), [values(16)]),
    "update": ("dynamic_update_slice", updated, [values(16), values(4), np.int32(7)]),
    "update-uneven": ("dynamic_update_slice", updated, [values(13), values(9), np.int32(3)]),
    "update-row": ("dynamic_update_slice", updated, [values(16), values(1), np.int32(31)]),
    "update-2d": (
        "dynamic_update_slice", updated, [values(9, 6), values(4, 3), np.int32(2), np.int32(-2)],
    ),
    "update-known": ("dynamic_update_slice", known(updated, 5), [values(16), values(6)]),
    "slice-nothing": ("slice", sliced((3, 3, 1)), [values(16)]),
    "pad-nothing": ("pad", padded((2, 3, 0), value=2), [values(0)]),
    "cut-nothing": ("dynamic_slice", cut(0), [values(9), np.int32(3)]),
    "update-nothing": ("dynamic_update_slice", updated, [values(9), values(0), np.int32(3)]),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_split(case: str, mesh: dict[str, int]) -> None:
    primitive, f, args = CASES[case]
    found = check_rule(f, args, mesh, primitive, limit=9 if args[0].ndim < 2 else 6)
    assert found["wrong"] == []


@pytest.mark.parametrize("dtype", [bool, np.int8, jnp.bfloat16, np.complex64], ids=str)
@pytest.mark.parametrize(
    "case", ["slice", "pad-all", "concatenate-uneven", "rev-uneven", "cut", "update-uneven"]
)
def test_dtypes(case: str, dtype: Any) -> None:
    primitive, f, args = CASES[case]
    args = [a if np.ndim(a) == 0 else values(*a.shape, dtype=dtype) for a in args]
    found = check_rule(f, args, {"x": 4}, primitive, limit=5)
    assert found["wrong"] == []


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.int32])
@pytest.mark.parametrize("start", [0, 100, -100])
def test_starts_of_any_type_are_clamped_against_the_whole_dim(dtype: Any, start: int) -> None:
    # Not further than the type reaches: there the one-device program writes out of bounds (XLA).
    at = np.asarray(start).astype(dtype)
    for primitive, f, args in (
        ("dynamic_slice", cut(90), [values(200), at]),
        ("dynamic_update_slice", updated, [values(200), values(90), at]),
    ):
        assert check_rule(f, args, {"x": 3}, primitive)["wrong"] == []


def test_a_start_whose_type_does_not_reach_the_end() -> None:
    assert [int(clamped(np.int8(i), 150)) for i in (-3, 99, 127)] == [0, 99, 127]
    assert [int(clamped(np.uint8(i), 150)) for i in (0, 99, 255)] == [0, 99, 150]


def test_64_bit_starts() -> None:
    with jax.enable_x64(True):
        for start in (np.int64(5), np.int64(2**40), np.int64(-(2**40))):
            case = [values(13), start]
            assert check_rule(cut(4), case, {"x": 4}, "dynamic_slice")["wrong"] == []
            case = [values(13), values(6), start]
            assert check_rule(updated, case, {"x": 4}, "dynamic_update_slice")["wrong"] == []


# ---- every start, and the price of every split -----------------------------------------------


def contexts(f: Callable[..., Any], args: list[Any], mesh: dict[str, int], primitive: str) -> Any:
    """The equation, and a context for every split of every rule."""
    axes = MeshAxes.of(device_mesh(mesh))
    body, _ = capture(f, [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in args], merged=False)
    eqn, _ = rules.find_eqn(body, primitive)
    found = []
    for r in rules_of(eqn):
        for a in rules.assignments(r, axes):
            ins, outs = rules._pads(r, eqn, a, axes)
            found.append(
                LocalContext(
                    axes, r, a,
                    layouts_for(r, a, ins, "operands", axes),
                    layouts_for(r, a, outs, "results", axes),
                )
            )  # fmt: skip
    return eqn, found


def emitted_bytes(ctx: LocalContext, eqn: Eqn, mesh: dict[str, int]) -> float:
    """What one device sends in the local code, counted in its jaxpr."""
    blocks = [
        jax.ShapeDtypeStruct((ctx.mesh.device_count, *lay.local_shape(ctx.mesh)), v.dtype)
        for lay, v in zip(ctx.ins, eqn.invars, strict=True)
    ]
    spec = jax.sharding.PartitionSpec(ctx.mesh.atoms)
    run = jax.shard_map(
        lambda *xs: [y[None] for y in run_local(ctx, eqn, [x[0] for x in xs])],
        mesh=ctx.mesh.atom_mesh(device_mesh(mesh)), in_specs=spec, out_specs=spec, check_vma=False,
    )  # fmt: skip
    return sum(c.bytes * c.count for c in cost.find(jax.make_jaxpr(run)(*blocks), ctx.mesh))


@pytest.mark.parametrize("case", CASES)
def test_the_price_is_what_is_sent(case: str) -> None:
    primitive, f, args = CASES[case]
    mesh = {"x": 8}
    eqn, found = contexts(f, args, mesh, primitive)
    for ctx in found[:: max(1, len(found) // 12)]:
        assert comm_bytes(ctx, eqn) == emitted_bytes(ctx, eqn, mesh), (ctx.rule, ctx.assignment)


@pytest.mark.parametrize("mesh", [{"x": 8}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("sizes", [(16, 5), (13, 11), (13, 7), (40, 37)])
def test_every_start(sizes: tuple[int, int], mesh: dict[str, int]) -> None:
    """One program for all starts: where rows come from is known at run time only."""
    size, part = sizes
    x, update = values(size), values(part, seed=1)
    starts = np.arange(-1, size - part + 2, dtype=np.int32)
    for primitive, f, args in (
        ("dynamic_slice", cut(part), [x]),
        ("dynamic_update_slice", updated, [x, update]),
    ):
        eqn, found = contexts(f, [*args, START], mesh, primitive)
        split = [c for c in found if c.rule.variant == "tied" and c.axes(0)]
        ctx = max(split, key=lambda c: c.mesh.size(c.axes(0)))
        blocks = [
            [rules.block(a, lay, d, ctx.mesh, np.nan) for d in range(ctx.mesh.device_count)]
            for a, lay in zip(args, ctx.ins, strict=False)
        ]

        def run(*xs: Any, ctx: LocalContext = ctx, eqn: Eqn = eqn) -> list[Any]:
            def one(start: Any) -> Any:
                return run_local(ctx, eqn, [*xs, start])[0]

            return [lax.map(one, jnp.asarray(starts))]

        (got,) = (np.stack(o, 1) for o in rules.run_blocks(run, blocks, ctx.mesh))
        for s, blocks_of_s in zip(starts, got, strict=True):
            want = np.asarray(f(*map(jnp.asarray, args), jnp.int32(s)))
            whole = np.concatenate([
                rules.valid_part(b, ctx.outs[0], d, ctx.mesh)
                for d, b in enumerate(blocks_of_s)
            ])  # fmt: skip
            np.testing.assert_array_equal(whole, want)


def tied_bytes(f: Callable[..., Any], args: list[Any], primitive: str) -> float:
    """What one device sends with dim 0 split over 8 on both sides."""
    eqn, found = contexts(f, args, {"x": 8}, primitive)
    axes = found[0].mesh.atoms
    (ctx,) = [
        c
        for c in found
        if c.outs[0].sharding.axes[0] == c.ins[0].sharding.axes[0] == axes
        and not c.outs[0].sharding.partial
    ]
    return comm_bytes(ctx, eqn)


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


ROW = 128 * 4
PRICES: dict[str, tuple[Callable[..., Any], list[Any], str, int]] = {
    "two halves, in shared rounds": (joined(), [shape(2048, 128)] * 2, "concatenate", 512),
    "a few rows at the end": (joined(), [shape(4088, 128), shape(8, 128)], "concatenate", 13),
    "a shift by one row": (sliced((1, 4096, 1), (0, 128, 1)), [shape(4096, 128)], "slice", 1),
    "a row before": (padded((1, -1, 0), (0, 0, 0)), [shape(4096, 128)], "pad", 1),
    "reversed": (reversed_(0), [shape(4096, 128)], "rev", 512),
    "every second row": (sliced((0, 4096, 2), (0, 128, 1)), [shape(4096, 128)], "slice", 0),
    "half of the rows from a run-time start": (
        cut(2048, 128), [shape(4096, 128), START, START], "dynamic_slice", 7 * 256,
    ),
    "nearly all of them": (
        cut(4090, 128), [shape(4096, 128), START, START], "dynamic_slice", 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PRICES)
def test_prices(case: str) -> None:
    f, args, primitive, rows = PRICES[case]
    assert tied_bytes(f, args, primitive) == rows * ROW


def test_what_shrinks_moves_first() -> None:
    """Two of 64 rows over x: one row of 32 columns; then a column of what is left, over y."""
    f = sliced((1, 3, 1), (1, 64, 1))
    eqn, found = contexts(f, [shape(64, 64)], {"x": 2, "y": 2}, "slice")
    (ctx,) = [
        c
        for c in found
        if c.outs[0].sharding.axes == c.ins[0].sharding.axes == (("x",), ("y",))
        and not c.outs[0].sharding.partial
    ]
    assert comm_bytes(ctx, eqn) == 32 * 4 + 1 * 4


def test_a_small_update_of_a_split_dim_is_free() -> None:
    args = [shape(4096, 128), shape(4, 128), START, START]
    eqn, found = contexts(updated, args, {"x": 8}, "dynamic_update_slice")
    first = next(c for c in found if c.rule == rules_of(eqn)[0] and len(c.axes(0)) == 3)
    assert first.rule.variant == "apart"
    assert comm_bytes(first, eqn) == 0


def test_linear_in_what_it_moves() -> None:
    """A pending sum is carried through; a pad only where its value adds nothing."""
    for f, args, primitive, groups in (
        (sliced((1, 4, 1)), [values(8)], "slice", ((0,),)),
        (lambda x: lax.pad(x, 0.0, ((1, 0, 0),)), [values(8)], "pad", ((0,),)),
        (lambda x: lax.pad(x, 1.0, ((1, 0, 0),)), [values(8)], "pad", ((0, 1),)),
        (joined(), [values(8), values(8), values(2)], "concatenate", ((0, 1, 2),)),
        (reversed_(0), [values(8)], "rev", ((0,),)),
        (cut(3), [values(8), START], "dynamic_slice", ((0,),)),
        (updated, [values(8), values(3), START], "dynamic_update_slice", ((0, 1),)),
    ):
        eqn, _ = contexts(f, args, {"x": 2}, primitive)
        assert {r.linear for r in rules_of(eqn)} == {groups}
