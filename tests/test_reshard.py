"""Reshards on 8 CPU devices against a numpy reference (`reshards`); and what is asked wrongly."""

from __future__ import annotations

import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from reshards import X4Y2, Pair, all_pairs, check, even, jax_mesh, place, program, spread

from shardwise.errors import ShardingError
from shardwise.mesh import MeshAxes
from shardwise.reshard import Step, emit_reshard, plan_reshard, reshard_bytes
from shardwise.sharding import Layout, Sharding

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


def test_with_64_bits_enabled():
    """Python's integers are int64 then, and places in blocks int32: they must not meet."""
    pairs = all_pairs(X4Y2, (5, 4), (8, 4))
    with jax.enable_x64(True):
        check(random.Random(3).sample(pairs, 24), X4Y2, np.float64)


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
