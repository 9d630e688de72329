"""Reshards on 8 CPU devices against a numpy reference; and what is compiled against the plan.

The reference knows nothing of steps: it places a global array's blocks on devices, and reads back
from every device the block the target says it has.  Padding is filled with NaN (or with large
numbers), so that any of it reaching a value shows.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardwise.errors import ShardingError
from shardwise.mesh import MeshAxes
from shardwise.reshard import Step, emit_reshard, plan_reshard, reshard_bytes
from shardwise.sharding import Layout, Sharding, device_coordinates

REDUCE = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
Pair = tuple[Layout, Sharding]


# ---- the reference -------------------------------------------------------------------------------


def rows_of(layout: Layout, dim: int, at: dict[str, int], mesh: MeshAxes) -> tuple[int, int]:
    """First global row and number of rows of the block of a device at coordinates `at`."""
    index = 0
    for a in layout.sharding.axes[dim]:
        index = index * mesh.size_of[a] + at[a]
    length = layout.local_shape(mesh)[dim]
    return index * length, length


def term_key(s: Sharding, at: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((a, at[a]) for a in s.partial)


def place(terms: dict, layout: Layout, mesh: MeshAxes, junk: object) -> np.ndarray:
    """[devices, *block]: every device's block of its term, `junk` where the block is padding."""
    dtype = next(iter(terms.values())).dtype
    out = np.full((mesh.device_count, *layout.local_shape(mesh)), junk, dtype)
    for device in range(mesh.device_count):
        at = device_coordinates(device, mesh)
        theirs, mine = [], []
        for d, size in enumerate(layout.shape):
            lo, n = rows_of(layout, d, at, mesh)
            have = max(0, min(n, size - lo))
            theirs.append(slice(lo, lo + have))
            mine.append(slice(0, have))
        out[(device, *mine)] = terms[term_key(layout.sharding, at)][tuple(theirs)]
    return out


def finished(terms: dict, src: Sharding, dst: Sharding) -> dict:
    """The terms that are left when the reductions that `dst` does not keep are done."""
    out: dict = {}
    for key, term in terms.items():
        left = tuple((a, i) for a, i in key if a in dst.partial)
        out[left] = REDUCE[src.op](out[left], term) if left in out else term
    return out


def random_terms(layout: Layout, mesh: MeshAxes, dtype: object, rng: np.random.Generator) -> dict:
    """A random global array per term; small integers, so that sums and products are exact."""
    keys = itertools.product(*(range(mesh.size_of[a]) for a in layout.sharding.partial))
    draw = {True: (0, 2), False: (-2, 3)}[jnp.issubdtype(dtype, jnp.bool_)]
    return {
        tuple(zip(layout.sharding.partial, key, strict=True)): rng.integers(
            *draw, layout.shape
        ).astype(dtype)
        for key in keys
    }


def jax_mesh(mesh: MeshAxes) -> Mesh:
    sizes = [mesh.size_of[a] for a in mesh.atoms]
    return Mesh(np.array(jax.devices()[: mesh.device_count]).reshape(sizes), mesh.atoms)


def program(pairs: Sequence[Pair], mesh: MeshAxes):
    """One jitted program that does all reshards; operands and results are [devices, *block]."""

    def body(*xs: jax.Array) -> tuple[jax.Array, ...]:
        out = []
        for x, (src, dst) in zip(xs, pairs, strict=True):
            y = emit_reshard(x[0], src, dst, mesh)
            assert y.shape == src.with_sharding(dst).local_shape(mesh), (src, dst)
            assert y.dtype == x.dtype
            out.append(y[None])
        return tuple(out)

    spec = PartitionSpec(mesh.atoms)
    return jax.jit(
        jax.shard_map(body, mesh=jax_mesh(mesh), in_specs=spec, out_specs=spec, check_vma=False)
    )


def check(pairs: Sequence[Pair], mesh: MeshAxes, dtype: object = np.float32, seed: int = 0) -> None:
    """Run the reshards in one program and compare every device's block with the reference."""
    rng = np.random.default_rng(seed)
    junk = jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 1
    everything = [random_terms(src, mesh, dtype, rng) for src, _ in pairs]
    blocks = [place(t, src, mesh, junk) for t, (src, _) in zip(everything, pairs, strict=True)]
    results = program(pairs, mesh)(*map(jnp.asarray, blocks))
    for terms, (src, dst), got in zip(everything, pairs, results, strict=True):
        layout = src.with_sharding(dst)
        left = finished(terms, src.sharding, dst)
        real = place({k: np.ones(src.shape, bool) for k in left}, layout, mesh, False)
        want = place(left, layout, mesh, junk)
        text = f"{src.sharding.text(mesh)} -> {dst.text(mesh)}, {src.shape} padded {src.padded}"
        np.testing.assert_array_equal(np.asarray(got)[real], want[real], err_msg=text)


# ---- which shardings -----------------------------------------------------------------------------


def shardings(mesh: MeshAxes, padded: Sequence[int], partial: bool = True) -> list[Sharding]:
    """Every sharding of a value whose padded sizes divide, pending sums included."""
    rank, out = len(padded), []
    for n in range(len(mesh.atoms) + 1):
        for order in itertools.permutations(mesh.atoms, n):
            for cuts in itertools.combinations_with_replacement(range(n + 1), rank - 1):
                ends = (0, *cuts, n)
                axes = tuple(order[ends[d] : ends[d + 1]] for d in range(rank))
                if any(p % mesh.size(a) for p, a in zip(padded, axes, strict=True)):
                    continue
                rest = [a for a in mesh.atoms if a not in order]
                for k in range(len(rest) + 1 if partial else 1):
                    for pending in itertools.combinations(rest, k):
                        out.append(Sharding(axes, pending))
    return list(dict.fromkeys(out))


def all_pairs(mesh: MeshAxes, shape: Sequence[int], padded: Sequence[int]) -> list[Pair]:
    every = shardings(mesh, padded)
    return [
        (Layout(tuple(shape), tuple(padded), a), b)
        for a, b in itertools.product(every, every)
        if set(b.partial) <= set(a.partial) and a != b
    ]


def spread(mesh: MeshAxes, *dims: str, partial: str = "", op: str = "sum") -> Sharding:
    """`spread(mesh, "xy", "")`: dim 0 over x and y, dim 1 whole."""

    def atoms(names: str) -> tuple[str, ...]:
        return tuple(a for n in names for a in mesh.expand(n))

    return Sharding(tuple(map(atoms, dims))).with_partial(mesh.sort(atoms(partial)), op)


def even(shape: Sequence[int], sharding: Sharding) -> Layout:
    return Layout(tuple(shape), tuple(shape), sharding)


X4Y2 = MeshAxes(("x", "y"), (4, 2))


# ---- right ---------------------------------------------------------------------------------------

SHAPES = [
    # mesh, shape, padded
    ({"x": 2, "y": 2}, (8, 4), (8, 4)),
    ({"x": 2, "y": 2}, (5, 7), (8, 8)),
    ({"x": 2, "y": 2}, (1, 3, 2), (4, 4, 2)),
    ({"x": 4, "y": 2}, (8, 8), (8, 8)),
    ({"x": 4, "y": 2}, (13, 4), (16, 4)),
    ({"x": 4, "y": 2}, (3, 10, 2), (4, 16, 2)),
    ({"x": 2, "y": 3}, (6, 12), (6, 12)),
    ({"x": 2, "y": 3}, (5, 7), (6, 12)),
    ({"x": 2, "y": 3}, (6, 0), (6, 0)),
    ({"a": 2, "b": 2, "c": 2}, (8, 8), (8, 8)),
    ({"a": 2, "b": 2, "c": 2}, (10, 2, 7), (16, 2, 8)),
]


def sample(mesh: MeshAxes, shape: Sequence[int], padded: Sequence[int]) -> list[Pair]:
    """Thirty random pairs, as different as can be: each list of kinds once before any is twice."""
    pairs = all_pairs(mesh, shape, padded)
    random.Random(0).shuffle(pairs)
    seen: dict[tuple[str, ...], int] = {}

    def turn(pair: Pair) -> int:
        kinds = tuple(s.kind for s in plan_reshard(*pair, 4, mesh))
        seen[kinds] = seen.get(kinds, 0) + 1
        return seen[kinds]

    return sorted(pairs[:400], key=turn)[:30]


@pytest.mark.parametrize("axes, shape, padded", SHAPES)
def test_any_sharding_to_any_other(axes, shape, padded):
    mesh = MeshAxes(tuple(axes), tuple(axes.values()))
    check(sample(mesh, shape, padded), mesh)


def test_every_kind_of_step_is_run():
    """The samples above leave no step untried, alone and in company."""
    kinds = set()
    for axes, shape, padded in SHAPES:
        mesh = MeshAxes(tuple(axes), tuple(axes.values()))
        for src, dst in sample(mesh, shape, padded):
            kinds |= {s.kind for s in plan_reshard(src, dst, 4, mesh)}
    assert kinds == {
        "slice", "all-gather", "all-to-all", "reduce-scatter", "all-reduce",
        "collective-permute", "exchange",
    }  # fmt: skip


OPS = {
    np.float32: ("max", "min", "prod"),
    np.int32: ("max", "min", "prod", "and", "or", "xor"),
    np.int8: ("and", "xor"),
    np.bool_: ("max", "min", "and", "or", "xor"),
}


@pytest.mark.parametrize("dtype", OPS)
def test_other_pending_reductions(dtype):
    pending = [
        p
        for shape, padded in (((7, 8), (8, 8)), ((3,), (4,)))
        for p in all_pairs(X4Y2, shape, padded)
        if p[0].sharding.partial
    ]
    pairs = []
    for op in OPS[dtype]:
        for src, dst in random.Random(op).sample(pending, 6):
            start = src.sharding.with_partial(src.sharding.partial, op)
            pairs.append((src.with_sharding(start), dst.with_partial(dst.partial, op)))
        pairs.append((even((), Sharding((), X4Y2.atoms, op)), Sharding(())))
    check(pairs, X4Y2, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.complex64, np.int8, np.uint8, np.float16])
def test_other_dtypes(dtype):
    pairs = all_pairs(X4Y2, (5, 4), (8, 4))
    check(random.Random(2).sample(pairs, 12), X4Y2, dtype)


def test_complex_prod_and_bool_moves():
    src = even((8,), spread(X4Y2, "", partial="xy", op="prod"))
    check([(src, spread(X4Y2, "")), (src, spread(X4Y2, "x"))], X4Y2, np.complex64)
    src = even((8, 8), spread(X4Y2, "x", "y"))
    check([(src, spread(X4Y2, "y", "x")), (src, spread(X4Y2, "", ""))], X4Y2, np.bool_)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, jnp.float8_e4m3fn,
                                   jnp.float8_e4m3fnuz, jnp.float8_e5m2])  # fmt: skip
@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins_whoever_holds_it(op, dtype):
    """As on one device; `lax.pmax` alone drops a NaN, depending on who holds it."""
    mesh = X4Y2
    src = Layout((8,), (8,), spread(mesh, "", partial="xy", op=op))
    terms = np.arange(-32, 32, dtype=np.float32).reshape(8, 8) / 4
    for device in range(8):
        terms[device, device if device < 6 else 0] = np.nan
    terms[:, 7] = [-0.0, 0.0, -0.5, -8, -0.25, -0.0, -4, -1]
    blocks = jnp.asarray(terms).astype(dtype)
    for dst in (spread(mesh, ""), spread(mesh, "x")):
        [got] = program([(src, dst)], mesh)(blocks)
        reduce = jnp.max if op == "max" else jnp.min
        want = reduce(blocks.astype(np.float32), axis=0)
        whole = np.asarray(got.astype(np.float32))
        if dst.axes[0]:
            whole = whole.reshape(4, 2, 2)[:, 0].reshape(-1)
        np.testing.assert_array_equal(whole if dst.axes[0] else whole[3], want)


def test_infinities_survive_max():
    src = Layout((2,), (2,), spread(X4Y2, "", partial="xy", op="max"))
    blocks = jnp.full((8, 2), -jnp.inf).at[5, 0].set(jnp.inf)
    [got] = program([(src, spread(X4Y2, ""))], X4Y2)(blocks)
    np.testing.assert_array_equal(got, np.tile([np.inf, -np.inf], (8, 1)))


def test_random_keys():
    mesh = X4Y2
    keys = jax.random.split(jax.random.key(0), 8)

    def body(k):
        src = even((8,), spread(mesh, "xy"))
        whole = emit_reshard(k, src, spread(mesh, ""), mesh)
        return emit_reshard(whole, src.with_sharding(spread(mesh, "")), spread(mesh, "yx"), mesh)

    spec = PartitionSpec(mesh.expand("x") + mesh.expand("y"))
    back = PartitionSpec(mesh.expand("y") + mesh.expand("x"))
    f = jax.shard_map(body, mesh=jax_mesh(mesh), in_specs=spec, out_specs=back, check_vma=False)
    got = jax.jit(f)(keys)
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(keys))


def test_a_plan_made_elsewhere():
    """A plan for slow links may differ from the cheapest in bytes; it can be handed in."""
    mesh, shape = X4Y2, (8, 8)
    src, dst = even(shape, spread(mesh, "x", "y")), spread(mesh, "y", "x")
    steps = plan_reshard(src, dst, 4, mesh, weights={"y": 9.0})
    x = np.arange(64, dtype=np.float32).reshape(shape)
    blocks = place({(): x}, src, mesh, 0)
    spec = PartitionSpec(mesh.atoms)
    f = jax.shard_map(
        lambda b: emit_reshard(b[0], src, dst, mesh, steps)[None],
        mesh=jax_mesh(mesh), in_specs=spec, out_specs=spec, check_vma=False,
    )  # fmt: skip
    want = place({(): x}, src.with_sharding(dst), mesh, 0)
    np.testing.assert_array_equal(jax.jit(f)(jnp.asarray(blocks)), want)


# ---- what is compiled ----------------------------------------------------------------------------

_BITS = {"f32": 4, "s32": 4, "pred": 1, "bf16": 2, "s8": 1, "c64": 8}
_OP = re.compile(r"= (.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)\(")


def compiled(pair: Pair, mesh: MeshAxes, dtype: object = np.float32) -> list[tuple[str, float]]:
    """(kind, bytes one device sends on a ring) of every collective in the compiled program."""
    src, _ = pair
    arg = jax.ShapeDtypeStruct((mesh.device_count, *src.local_shape(mesh)), dtype)
    out = []
    for line in program([pair], mesh).lower(arg).compile().as_text().splitlines():
        if found := _OP.search(line):
            n = sum(
                _BITS[t] * math.prod(int(d) for d in dims.split(",") if d)
                for t, dims in re.findall(r"(\w+)\[([\d,]*)\]", found[1])
            )
            out.append((found[2], _ring(found[2], n, _group(line))))
    return out


def _group(line: str) -> int:
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        return math.prod(int(sizes[a]) for a in re.findall(r"'([^']+)'", found[2]))
    found = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    return int(found[2]) if found else 1


def _ring(kind: str, result: int, g: int) -> float:
    if kind == "collective-permute":
        return float(result)
    if kind == "all-reduce":
        return 2 * result * (g - 1) / g
    return float(result * (g - 1)) if kind == "reduce-scatter" else result * (g - 1) / g


COUNTED = [
    ((64, 64), ("x", "y"), ("y", "x")),
    ((64, 64), ("xy", ""), ("yx", "")),
    ((64, 64), ("x", ""), ("y", "")),
    ((64, 64), ("x", ""), ("", "xy")),
    ((64, 64), ("x", "y"), ("", "")),
    ((64, 64), ("xy", ""), ("", "x")),
    ((16, 16, 16), ("y", "", "x"), ("", "xy", "")),
    ((64, 64), ("", ""), ("y", "x")),
]


@pytest.mark.parametrize("shape, a, b", COUNTED)
def test_the_compiled_program_sends_what_the_plan_says(shape, a, b):
    pair = even(shape, spread(X4Y2, *a)), spread(X4Y2, *b)
    steps = plan_reshard(*pair, 4, X4Y2)
    assert compiled(pair, X4Y2) == [c for s in steps for c in s.collectives]
    for s in steps:
        assert s.bytes == sum(n for _, n in s.collectives)


@pytest.mark.parametrize("op", ["sum", "max", "prod"])
@pytest.mark.parametrize("partial, a, b", [
    ("xy", ("", ""), ("", "")),
    ("xy", ("", ""), ("x", "y")),
    ("x", ("", "y"), ("", "")),
    ("x", ("", ""), ("", "xy")),
])  # fmt: skip
def test_the_compiled_program_reduces_as_the_plan_says(op, partial, a, b):
    pair = even((64, 64), spread(X4Y2, *a, partial=partial, op=op)), spread(X4Y2, *b)
    steps = plan_reshard(*pair, 4, X4Y2)
    assert compiled(pair, X4Y2) == [c for s in steps for c in s.collectives]
    for s in steps:
        assert s.bytes == sum(n for _, n in s.collectives)


def test_a_small_product_is_gathered_and_a_large_one_scattered():
    kinds = []
    for size, axes in ((1, "y"), (4096, "xy")):
        pair = even((size,), spread(X4Y2, "", partial=axes, op="prod")), spread(X4Y2, "")
        [step] = [s for s in plan_reshard(*pair, 4, X4Y2) if s.kind != "slice"]
        assert step.kind == "all-reduce"
        kinds.append([kind for kind, _ in step.collectives])
        assert compiled(pair, X4Y2) == list(step.collectives)
    assert kinds == [["all-gather"], ["all-to-all", "all-gather"]]


# ---- asked wrongly -------------------------------------------------------------------------------


@pytest.mark.parametrize("src, dst, message", [
    (even((8, 8), spread(X4Y2, "x", "")), spread(X4Y2, "x"),
     "a value of 2 dims cannot take a sharding of 1 dims\n"
     "  facts from [x, -] of shape (8, 8), padded (8, 8) to [x]"),
    (even((8,), spread(X4Y2, "x")), spread(X4Y2, "", partial="y"),
     "a reshard can finish pending reductions but not start or change one\n"
     "  facts from [x] of shape (8,), padded (8,) to [-] partial sum over y"),
    (even((8,), spread(X4Y2, "", partial="y", op="max")), spread(X4Y2, "", partial="y"),
     "a reshard can finish pending reductions but not start or change one\n"
     "  facts from [-] partial max over y of shape (8,), padded (8,) to [-] partial sum over y"),
    (even((8,), spread(X4Y2, "")), spread(X4Y2, "xyx"),
     "a sharding uses a part of the mesh twice\n  facts [(x, y, x)]"),
    (even((6,), spread(X4Y2, "")), spread(X4Y2, "x"),
     "a dim's padded size does not divide into its blocks\n"
     "  facts [x] with shape (6,), padded (6,)\n"
     "  hint  choose the padded size with `padded_size` over all splits used for the dim"),
])  # fmt: skip
def test_errors(src, dst, message):
    with pytest.raises(ShardingError) as error:
        plan_reshard(src, dst, 4, X4Y2)
    assert str(error.value) == message


def test_nothing_to_do():
    s = spread(X4Y2, "x", "y")
    assert plan_reshard(even((8, 8), s), s, 4, X4Y2) == ()
    assert reshard_bytes(even((8, 8), s), s, 4, X4Y2) == 0


def test_a_step_prints():
    src, dst = even((1024, 1024), spread(X4Y2, "x", "y")), spread(X4Y2, "y", "x")
    [step] = plan_reshard(src, dst, 4, X4Y2)
    assert isinstance(step, Step)
    assert step.text(X4Y2) == ("exchange over (x, y) in 2 rounds: [x, y] -> [y, x], 524288 bytes")
    assert str(step) == (
        "exchange over (x.0, x.1, y): (('x.0', 'x.1'), ('y',)) -> (('y',), ('x.0', 'x.1')), 524288"
    )
