"""Sliding windows along split dims: what is read, what is sent, and the block to slide over."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from shardwise.cost import comm as cost
from shardwise.mesh import MeshAxes, abstract_mesh, device_mesh
from shardwise.ops.sliding import Sliding, Split, WindowDim, slide, sliding, sliding_bytes
from shardwise.sharding import padded_size
from shardwise.testing.rules import run_blocks

FILL = -7.0


def windows(size: int, w: WindowDim) -> int:
    """How many windows a dim has."""
    return max(0, (w.low + (size - 1) * w.base + 1 + w.high - w.span) // w.stride + 1)


def split(size: int, atoms: tuple[str, ...], mesh: MeshAxes) -> Split:
    shards = mesh.size(atoms)
    block = padded_size(size, [shards]) // shards if atoms else size
    return Split(size, block, atoms, shards)


def read(x: np.ndarray, w: WindowDim, n: int) -> np.ndarray:
    """[window, tap] -> the value read, of `n` windows."""
    dim = np.full((x.size - 1) * w.base + 1, FILL, x.dtype)
    dim[:: w.base] = x
    pads = (max(w.low, 0), max(w.high, 0))
    dim = np.pad(dim, pads, constant_values=FILL)[max(-w.low, 0) :]
    at = np.arange(n)[:, None] * w.stride + np.arange(w.size) * w.dilation
    assert at.max(initial=0) < dim.size - max(-w.high, 0), "a window reads past the end"
    return dim[at]


def data(size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


def place(s: Split, at: dict[str, int], mesh: MeshAxes) -> int:
    out = 0
    for a in s.atoms:
        out = out * mesh.size_of[a] + at[a]
    return out


def wrong(
    cases: list[tuple[int, WindowDim, tuple[str, str, str]]], mesh: dict[str, int]
) -> list[str]:
    """What a device does not read right: (size, window, axes that split the dim, windows, taps)."""
    axes = MeshAxes.of(device_mesh(mesh))
    devices = [
        dict(zip(axes.atoms, i, strict=True))
        for i in np.ndindex(*(axes.size_of[a] for a in axes.atoms))
    ]
    dims, blocks = [], []
    for size, w, atoms in cases:
        sizes = (size, windows(size, w), w.size)
        dims.append([
            split(s, tuple(b for a in names for b in axes.expand(a)), axes)
            for s, names in zip(sizes, atoms, strict=True)
        ])  # fmt: skip
        source = dims[-1][0]
        padded = np.full((source.shards, source.block), np.nan, np.float32)
        padded.reshape(-1)[:size] = data(size)
        blocks.append([padded[place(source, at, axes)] for at in devices])
    plans = [sliding(d[0], w, d[1], d[2]) for d, (_, w, _) in zip(dims, cases, strict=True)]

    def run(*xs: jax.Array) -> list[jax.Array]:
        return [slide(x, {0: plan}, FILL) for x, plan in zip(xs, plans, strict=True)]

    out = []
    got = run_blocks(run, blocks, axes)
    for case, (_, result, taps), plan, ys in zip(cases, dims, plans, got, strict=True):
        want = read(data(case[0]), case[1], result.size)
        assert plan.window.low >= 0, case
        assert -plan.window.high <= (plan.block - 1) * plan.window.base + 1, case
        for at, block in zip(devices, ys, strict=True):
            o, k = place(result, at, axes) * result.block, place(taps, at, axes) * taps.block
            part = want[o : o + result.block, k : k + taps.block]
            mine = read(block, plan.window, result.block)[: part.shape[0]]
            if not np.array_equal(mine[:, : part.shape[1]], part):
                out.append(f"{case}, {at}: {mine.tolist()}, should be {part.tolist()}")
            if np.isnan(mine).any():
                out.append(f"{case}, {at}: junk under taps that are padding")
    return out


WINDOWS = {
    "same": WindowDim(3, 1, 1, 1),
    "valid": WindowDim(4),
    "wide": WindowDim(9, 1, 4, 4),
    "even": WindowDim(2, 2),
    "strided": WindowDim(3, 2, 1, 1),
    "skips": WindowDim(2, 5, 1, 3),
    "padded": WindowDim(3, 2, 7, 5),
    "cut": WindowDim(2, 1, -3, -2),
    "dilated": WindowDim(3, 1, 3, 3, 1, 3),
    "dilated-strided": WindowDim(3, 2, 2, 5, 1, 3),
    "one": WindowDim(1, 3, 0, 0),
    "base": WindowDim(3, 1, 1, 2, 2),
    "base-strided": WindowDim(3, 2, 2, 1, 3),
    "base-strided-alike": WindowDim(4, 3, 1, 3, 3),
    "base-all": WindowDim(3, 3, 4, -1, 2, 2),
    "base-few": WindowDim(2, 1, 0, 1, 5),
}
ALIKE = [("x", "x", ""), ("x", "", "x"), ("", "x", ""), ("", "", "x")]


@pytest.mark.parametrize("mesh", [{"x": 3}, {"x": 8}], ids=str)
@pytest.mark.parametrize("case", WINDOWS)
def test_every_split_over_one_axis(case: str, mesh: dict[str, int]) -> None:
    w = WINDOWS[case]
    assert wrong([(size, w, atoms) for size in (13, 24) for atoms in ALIKE], mesh) == []


APART = [
    ("x", "x", "y"), ("x", "y", "x"), ("", "x", "y"), ("", "y", "x"), ("xy", "xy", ""),
    ("yx", "yx", ""), ("yx", "", "yx"), ("", "xy", ""),
]  # fmt: skip


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_and_taps_over_different_axes(case: str) -> None:
    assert wrong([(11, WINDOWS[case], atoms) for atoms in APART], {"x": 2, "y": 4}) == []


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_blocks_that_hold_nothing(size: int) -> None:
    cases = [
        (size, w, atoms)
        for w in (
            WindowDim(3, 1, 1, 1),
            WindowDim(3, 2, 4, 4, 3),
            WindowDim(1),
            WindowDim(1, 2),
            WindowDim(1, 3, 2, 0, 3),
        )
        for atoms in ALIKE
    ]
    assert wrong(cases, {"x": 8}) == []


def test_random_windows() -> None:
    rng = np.random.default_rng(1)
    cases = []
    while len(cases) < 40:
        size, taps, stride, base, dilation = (int(rng.integers(1, n)) for n in (30, 9, 6, 5, 5))
        w = WindowDim(taps, stride, *map(int, rng.integers(-6, 12, 2)), base, dilation)
        if windows(size, w) > 0:
            cases.append((size, w, ALIKE[len(cases) % 4]))
    assert wrong(cases[:20], {"x": 4}) == []
    assert wrong(cases[20:], {"x": 6}) == []


def on(mesh: dict[str, int], size: int, w: WindowDim, atoms: tuple[str, str, str]) -> Sliding:
    axes = MeshAxes.of(abstract_mesh(mesh))
    sizes = (size, windows(size, w), w.size)
    return sliding(*(
        x if isinstance(x, WindowDim) else split(x[0], axes.expand(x[1]) if x[1] else (), axes)
        for x in ((sizes[0], atoms[0]), w, (sizes[1], atoms[1]), (sizes[2], atoms[2]))
    ))  # fmt: skip


def test_halos_of_figure_9() -> None:
    """Window 3, stride 2, padding 1 and 1, over 4: right halos of 1, 2, 3, 4 rows."""
    s = on({"x": 4}, 12, WindowDim(3, 2, 1, 1), ("x", "x", ""))
    lo, hi = s.reads
    assert (hi - (np.arange(4) + 1) * 3).tolist() == [1, 2, 3, 4]
    assert (np.arange(4) * 3 - lo).tolist() == [1, 0, -1, -2]
    assert s.rows == 3  # the last device has no window


@pytest.mark.parametrize(
    ("w", "rows"),
    [
        (WindowDim(3, 1, 1, 1), 2),  # a row from each side
        (WindowDim(9, 1, 4, 4, 1), 8),
        (WindowDim(3, 1, 4, 4, 1, 4), 8),
        (WindowDim(2, 2), 0),  # windows do not cross blocks
        (WindowDim(3, 2, 0, 1), 1),
        (WindowDim(1, 2), 0),
        (WindowDim(3, 1, 1, 2, 2), 1),  # dilated by 2: only holes to the left
        (WindowDim(2, 1, 1, 1, 2), 0),
        (WindowDim(33, 1, 16, 16), 32),  # wider than a block of 16
    ],
)
def test_rows_sent(w: WindowDim, rows: int) -> None:
    size = 64 if w.size < 33 else 128
    s = on({"x": 8 if w.size == 33 else 4}, size, w, ("x", "x", ""))
    assert s.rows == rows


def test_what_is_emitted_is_what_is_priced() -> None:
    mesh = {"x": 4, "y": 3}
    axes = MeshAxes.of(abstract_mesh(mesh))
    for first, second in itertools.product(WINDOWS.values(), list(WINDOWS.values())[::3]):
        dims = {
            0: on(mesh, 22, first, ("x", "x", "")),
            2: on(mesh, 13, second, ("y", "", "y")),
        }
        shape = (dims[0].source.block, 3, dims[2].source.block)
        jaxpr = jax.make_jaxpr(
            lambda x, dims=dims: slide(x, dims),
            axis_env=[(a, axes.size_of[a]) for a in axes.atoms],
        )(jax.ShapeDtypeStruct(shape, np.float32))
        sent = sum(f.bytes * f.count for f in cost.find(jaxpr, axes))
        assert sent == sliding_bytes(shape, dims, 4)


def test_windows_that_hold_a_row() -> None:
    """The windows that may hold each row of a dim: what a scatter back onto it reads."""
    w = WindowDim(3, 2, 1, 1)
    n, back = windows(13, w), w.holders()
    at = read(np.arange(n, dtype=np.float32), back_padded(back, 13, n), 13)
    for i, held in enumerate(at.tolist()):
        want = [o for o in range(n) if 0 <= i + w.low - o * w.stride < w.span]
        assert sorted(o for o in held if o != FILL) == want
    assert wrong([(n, back_padded(back, 13, n), ("x", "x", ""))], {"x": 4}) == []


def back_padded(w: WindowDim, rows: int, n: int) -> WindowDim:
    high = rows - 1 + w.span - w.low - ((n - 1) * w.base + 1)
    return WindowDim(w.size, 1, w.low, high, w.base)


def test_a_dim_that_nothing_splits() -> None:
    w = WindowDim(3, 2, 1, 1)
    s = sliding(Split.whole(9), w, Split.whole(5))
    assert (s.window, s.block, s.rows) == (w, 9, 0)


def test_a_split_that_nothing_follows() -> None:
    with pytest.raises(ValueError, match="must be split as"):
        on({"x": 2}, 8, WindowDim(3), ("x", "", ""))
