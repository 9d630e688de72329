"""Moving rows of one split dim: plans by simulation, code on devices, and what it sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardwise import halo
from shardwise.mesh import MeshAxes
from shardwise.messages import Messages, Rows, edge_colouring, overlaps, repeats
from shardwise.ops.concatenate import concatenate_plans
from shardwise.regroup import plan_regrouping, regroup
from shardwise.rounds import MAX_ROUNDS, Plan, by_gather, by_scatter, colour_messages, plan_rounds

# ---- plans -----------------------------------------------------------------------------------


def simulate(plan: Plan, blocks: np.ndarray, fill: float) -> np.ndarray:
    """What the steps of a plan leave on every device; junk is NaN.  `blocks` is [devices, rows]."""
    margin = plan.block + plan.length
    out = np.full((plan.shards, plan.length + 2 * margin), np.nan)
    for s in plan.steps:
        take, put = (np.broadcast_to(t, plan.shards) for t in (s.take, s.put))
        assert (take >= 0).all() and (take + s.rows <= plan.block).all()
        source = {d: p for p, d in s.pairs} if s.pairs else {p: p for p in range(plan.shards)}
        for p in range(plan.shards):
            window = np.zeros(s.rows)
            if p in source:
                window = blocks[source[p], take[source[p]] : take[source[p]] + s.rows]
            lo, hi = (s.lo[p], s.hi[p]) if s.mask else (0, s.rows)
            out[p, margin + put[p] + lo : margin + put[p] + hi] = window[lo:hi]
    out = out[:, margin : margin + plan.length]
    i = np.arange(plan.length)
    if plan.fills[0]:
        out[i < plan.cover[0][:, None]] = fill
    if plan.fills[1]:
        out[i >= plan.cover[1][:, None]] = fill
    return out


def cut_blocks(size: int, shards: int, block: int) -> np.ndarray:
    """Rows 0, 1, 2 ... of a dim in blocks; padding is infinite."""
    x = np.full(shards * block, np.inf)
    x[:size] = np.arange(size)
    return x.reshape(shards, block)


def in_rounds(m: Messages, wanted: Rows, block: int, length: int) -> Plan:
    return plan_rounds(m, wanted, block, length, colour_messages(m.pick(m.src != m.dst)))


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, int, int, tuple[int, int], int]:
    shards = draw(st.sampled_from([2, 3, 4, 8, 12]))
    size = draw(st.integers(1, 60))
    block = -(-size // shards) + draw(st.sampled_from([0, 0, 1, 3]))
    stride = draw(st.sampled_from([block, block, block + 1, max(block - 1, 1), 1]))
    length = draw(st.sampled_from([stride, stride, stride + 2, 3 * stride]))
    return shards, block, size, (stride, draw(st.integers(-9, 9))), length


@settings(max_examples=300)
@given(windows())
def test_plans_bring_every_wanted_row(case: tuple[int, int, int, tuple[int, int], int]) -> None:
    shards, block, size, (a, b), length = case
    held, wanted = Rows.blocks(shards, block, size), Rows.windows(shards, a, b, length)
    plan = in_rounds(overlaps(held, wanted), wanted, block, length)
    got = simulate(plan, cut_blocks(size, shards, block), -1)
    row = np.arange(shards)[:, None] * a + b + np.arange(length)
    np.testing.assert_array_equal(got, np.where((row >= 0) & (row < size), row, -1))
    assert plan.rows == sum(s.rows for s in plan.steps if s.pairs)


@settings(max_examples=200)
@given(st.integers(2, 9), st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_joined_plans(shards: int, sizes: list[int]) -> None:
    blocks = [-(-n // shards) for n in sizes]
    out = -(-sum(sizes) // shards)
    plan = concatenate_plans(shards, tuple(blocks), tuple(sizes), out)[0]
    if plan.block != sum(blocks) or plan.method != "rounds":
        return
    firsts = np.cumsum([0, *sizes])
    parts = [cut_blocks(n, shards, b) + f for n, b, f in zip(sizes, blocks, firsts, strict=False)]
    got = simulate(plan, np.concatenate(parts, 1), -1).reshape(-1)[: sum(sizes)]
    np.testing.assert_array_equal(got, np.arange(sum(sizes)))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 9)), min_size=1))
def test_colouring_uses_as_few_rounds_as_the_busiest_device(edges: list[Any]) -> None:
    src, dst, length = (np.array(c) for c in zip(*edges, strict=True))
    colour = edge_colouring(src, dst, length)
    assert not repeats(colour, src).any() and not repeats(colour, dst).any()
    assert colour.max() + 1 == max(np.bincount(src).max(), np.bincount(dst).max())


def test_two_halves_share_rounds() -> None:
    (plan,) = concatenate_plans(8, (256, 256), (2048, 2048), 512)
    assert [s.rows for s in plan.steps if s.pairs] == [256, 256]


def test_a_halo_larger_than_a_block_takes_several_hops() -> None:
    plan = halo.window_plan(8, 4, 32, (4, -10), 14)
    assert [(s.rows, len(s.pairs)) for s in plan.steps] == [(2, 5), (4, 6), (4, 7), (4, 0)]
    assert plan.side_by_side and plan.rows == halo.window_rows(
        8, block=4, size=32, start=(4, -10), length=14
    )


@pytest.mark.parametrize(
    "window, method, rows",
    [
        ((2048, 512, 2048 * 512, (512, 3), 512), "rounds", 3),
        ((2048, 512, 2048 * 512 - 9, (511, 3), 511), "rounds", 1022),
        ((2048, 512, 2048 * 512, (1, 700), 1), "scatter", 2047),
        ((64, 1, 64, (64, 0), 64), "gather", 63),
    ],
)
def test_plans_for_many_devices_have_few_steps(window: Any, method: str, rows: int) -> None:
    plan = halo.window_plan(*window)
    assert (plan.method, plan.rows) == (method, rows)
    assert len(plan.steps) <= MAX_ROUNDS


def test_a_small_operand_of_many_devices_is_gathered_by_itself() -> None:
    plans = concatenate_plans(64, (512, 1), (512 * 64 - 64, 64), 512)
    assert [p.method for p in plans] == ["rounds", "gather"]


# ---- code ------------------------------------------------------------------------------------


def run(f: Callable[[Any], Any], x: np.ndarray, sizes: dict[str, int], atoms: Any) -> np.ndarray:
    """`f` on blocks of dim 0 of x over `atoms`; the results of all devices, in that order."""
    n = int(np.prod(list(sizes.values())))
    mesh = Mesh(np.array(jax.devices()[:n]).reshape(*sizes.values()), tuple(sizes))
    spec = PartitionSpec(tuple(atoms))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(mapped)(jnp.asarray(x)))


@pytest.mark.parametrize("atoms", [("z", "x", "y"), ("y", "x")])
@pytest.mark.parametrize(
    "start, length",
    [((4, -1), 4), ((4, 2), 6), ((4, -10), 14), ((3, 1), 3), ((5, -2), 5), ((1, 20), 1)],
)
@pytest.mark.parametrize("fill", [7.0, None])
def test_window(atoms: Any, start: tuple[int, int], length: int, fill: float | None) -> None:
    sizes = {"x": 2, "y": 2, "z": 2}
    shards = 2 ** len(atoms)
    size = shards * 4 - 3
    x = np.full((shards * 4, 2), np.nan, np.float32)
    x[:size] = np.random.default_rng(0).normal(size=(size, 2))
    got = run(
        lambda b: halo.window(
            b, 0, atoms, MeshAxes.of(Mesh(np.array(jax.devices()).reshape(2, 2, 2), tuple(sizes))),
            block=4, size=size, start=start, length=length, fill=fill,
        ), x, sizes, atoms,
    ).reshape(shards, length, 2)  # fmt: skip
    row = np.arange(shards)[:, None] * start[0] + start[1] + np.arange(length)
    inside = (row >= 0) & (row < size)
    want = np.where(inside[..., None], x[np.clip(row, 0, size - 1)], 7.0)
    if fill is None:
        got, want = got[inside], want[inside]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("make", [by_gather, by_scatter])
def test_one_collective_instead_of_many(make: Callable[..., Plan]) -> None:
    block, size = 6, 41
    start, length = (9, 16) if make is by_gather else (6, 6)
    held, wanted = Rows.blocks(8, block, size), Rows.windows(8, start, -3, length)
    plan = make(in_rounds(overlaps(held, wanted), wanted, block, length), held, wanted)
    x = np.full(8 * block, np.nan, np.float32)
    x[:size] = np.arange(size)
    got = run(lambda b: halo.exchange(b, 0, ("x",), plan, -1.0), x, {"x": 8}, "x")
    row = wanted.lo[:, None] + np.arange(length)
    want = np.where((row >= 0) & (row < size), row, -1).reshape(-1)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("shards", [3, 8])
@pytest.mark.parametrize("block, reach", [(1, 5), (4, 3), (4, 4), (4, 9), (5, 14)])
def test_shift_by_every_amount(shards: int, block: int, reach: int, down: bool) -> None:
    n = shards * block
    x = np.arange(n, dtype=np.float32)
    mesh = MeshAxes(("x",), (shards,))
    atoms = mesh.atoms
    sizes = {a: mesh.size_of[a] for a in atoms}
    amounts = jnp.arange(reach + 1)
    got = run(
        lambda b: lax.map(lambda by: halo.shift(b, 0, atoms, mesh, by, reach, down), amounts).T,
        x, sizes, atoms,
    )  # fmt: skip
    for by in range(reach + 1):
        row = np.arange(n) + (-by if down else by)
        inside = (row >= 0) & (row < n)
        np.testing.assert_array_equal(got[inside, by], x[row[inside]])


# ---- regroup ---------------------------------------------------------------------------------


def minor_split(major: int, minor: int, shards: int) -> np.ndarray:
    """Positions of (major, minor) with the minor dim split, per device."""
    grid = np.arange(major * minor).reshape(major, shards, -1)
    return grid.transpose(1, 0, 2).reshape(shards, -1)


def test_regrouping_of_a_reshape_sends_less_than_equal_messages() -> None:
    """(48) over 4 to (6, 8) with 4 on the 8: one all-to-all would send 12 rows."""
    assert plan_regrouping(minor_split(6, 8, 4), 12).rows == 10


@pytest.mark.parametrize("seed", range(4))
def test_regroup_follows_any_map(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shards, block, length = [(8, 3, 3), (3, 5, 4), (8, 2, 5), (4, 12, 12)][seed]
    index = rng.integers(-1, shards * block - 1, size=(shards, length))
    plan = plan_regrouping(index, block)
    x = rng.normal(size=(shards * block, 2)).astype(np.float32)
    got = run(lambda b: regroup(b, 0, ("x",), plan), x, {"x": shards}, "x")
    got = got.reshape(shards, length, 2)
    np.testing.assert_array_equal(got[index >= 0], x[index[index >= 0]])


def test_regroup_uses_one_all_to_all_where_every_pair_talks() -> None:
    shards, block = 24, 24
    plan = plan_regrouping(minor_split(block, shards, shards), block)
    assert plan.everywhere is not None and plan.rows == shards - 1
    pool = np.arange(shards * block).reshape(shards, block)
    sent = np.take_along_axis(pool, plan.everywhere, 1).reshape(shards, shards, -1)
    received = sent.transpose(1, 0, 2).reshape(shards, -1)
    got = np.take_along_axis(np.concatenate([pool, received], 1), plan.place, 1)
    np.testing.assert_array_equal(got, minor_split(block, shards, shards))


def test_messages_of_a_device_to_itself_are_not_sent() -> None:
    held = Rows.blocks(4, 5, 20)
    m = overlaps(held, Rows.windows(4, 5, 0, 5))
    assert isinstance(m, Messages) and (m.src == m.dst).all()
    assert in_rounds(m, held, 5, 5).rows == 0
