"""Random keys and counters: values do not depend on the sharding, and keys pass through."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import context

from shardwise import _jax
from shardwise.capture import capture
from shardwise.factors import Assignment
from shardwise.mesh import MeshAxes, device_mesh
from shardwise.ops import random
from shardwise.ops.registry import rules_of, run_local
from shardwise.program import Eqn, Var
from shardwise.sharding import Layout
from shardwise.testing import rules
from shardwise.testing.rules import check_rule

KEYS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4, "philox2x32": 1}


def equation(fn: Callable[..., Any], *avals: Any) -> Eqn:
    return capture(fn, avals)[0].eqns[-1]


def keys_of(impl: str, *shape: int) -> Any:
    return jax.random.wrap_key_data(
        np.random.default_rng(0).integers(0, 2**32, (*shape, KEYS[impl]), np.uint32), impl=impl
    )


def is_key(v: Any) -> bool:
    return jnp.issubdtype(v.dtype, jax.dtypes.prng_key)


def raw(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def wrong(
    fn: Callable[..., Any], *args: Any, mesh: dict[str, int], every: int = 1
) -> tuple[list[str], int]:
    """(what is wrong, splits tried: one in `every`) of the last equation of `fn`.

    `check_rule` for operands and results that may be keys: they reach the devices as their words.
    """
    axes = MeshAxes.of(device_mesh(mesh))
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    eqn = equation(fn, *avals)
    (rule,) = rules_of(eqn)
    want = eqn.primitive.bind(*args, **eqn.params)
    bad, tried = [], 0
    for a in [*rules.assignments(rule, axes)][::every]:
        tried += 1
        if not _same(eqn, rule, a, args, raw(want), axes):
            bad.append(f"{eqn.name} {rule} {a}")
    return bad, tried


def _same(
    eqn: Eqn, rule: Any, assignment: Assignment, args: Any, want: np.ndarray, mesh: MeshAxes
) -> bool:
    ctx = context(eqn, rule, assignment, mesh)
    devices = range(mesh.device_count)

    def words(v: Var, layout: Layout) -> Layout:
        """The layout of a value's words: keys have one more dim."""
        if not is_key(v):
            return layout
        n = KEYS[_jax.key_impl_name(v.dtype)]
        sharding = layout.sharding.__class__((*layout.sharding.axes, ()))
        return Layout((*layout.shape, n), (*layout.padded, n), sharding)

    blocks = [
        [rules.block(raw(x), words(v, lay), d, mesh, 7) for d in devices]
        for x, v, lay in zip(args, eqn.invars, ctx.ins, strict=True)
    ]

    def run(*xs: Any) -> Any:
        ins = [
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(a)) if is_key(a) else x
            for x, a in zip(xs, args, strict=True)
        ]
        (out,) = run_local(ctx, eqn, ins)
        return [jax.random.key_data(out) if is_key(out) else out]

    (got,) = rules.run_blocks(run, blocks, mesh)
    out = words(eqn.outvars[0], ctx.outs[0])
    return all(
        np.array_equal(
            rules.valid_part(got[d], out, d, mesh),
            rules.valid_part(rules.block(want, out, d, mesh, 0), out, d, mesh),
        )
        for d in devices
    )


@pytest.mark.parametrize("shape", [(10,), (3, 5), (2, 4, 3), (1, 7)], ids=str)
def test_counters(shape: tuple[int, ...]) -> None:
    for mesh in ({"x": 2, "y": 2}, {"x": 3}):
        f = lambda: jax.random.bits(jax.random.key(0), shape)
        found = check_rule(f, [], mesh=mesh, primitive="iota_2x32_shape")
        assert found["wrong"] == [] and len(found["splits"]) > len(shape)


@pytest.mark.parametrize("shape", [(2**20, 2**13), (3, 2**31 - 5), (7, 5, 2**30 + 3)], ids=str)
def test_counters_past_32_bits(shape: tuple[int, ...]) -> None:
    """A block of a shape of more than 2**32 elements, on the last of 2**18 devices' worth of it."""
    at = [n - 3 if n > 8 else 0 for n in shape]
    size = [min(3, n) if n > 8 else n for n in shape]
    high, low = jax.jit(lambda: _counters(shape, at, size))()
    got = (np.asarray(high).astype(object) << 32) + np.asarray(low)
    grid = np.meshgrid(*[np.arange(a, a + n) for a, n in zip(at, size, strict=True)], indexing="ij")
    want = sum(g.astype(object) * math.prod(shape[d + 1 :]) for d, g in enumerate(grid))
    assert (got == want).all()


def _counters(shape: tuple[int, ...], at: list[int], size: list[int]) -> Any:
    """The local code on the block that starts at `at`: its context, placed by hand."""

    class Placed:
        outs = (SimpleNamespace(shape=shape),)

        def local_out(self) -> tuple[int, ...]:
            return tuple(size)

        def global_iota(self, _: Any, d: int) -> Any:
            return jnp.arange(size[d], dtype=jnp.int32) + at[d]

    eqn = equation(lambda: jax.random.bits(jax.random.key(0), shape))
    eqn = Eqn(random._P["iota_2x32_shape"], [], eqn.outvars * 2, {"shape": shape}, [], None, 0)
    (words,) = [run_local(Placed(), eqn, ())]  # type: ignore[arg-type]
    return words


@pytest.mark.parametrize("n", [0, 1, 3, 0xFFFF, 0x10000, 0xFFFFFFFF, 2**33 + 7, 2**63 + 2**31 + 1])
def test_products_of_64_bits(n: int) -> None:
    x = np.array([0, 1, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF, 12345678], np.uint32)
    high, low = random.times(jnp.asarray(x), n)
    got = (np.asarray(high).astype(object) << 32) + np.asarray(low)
    assert got.tolist() == [int(v) * n % 2**64 for v in x]


def test_nothing_of_the_global_size_is_made() -> None:
    eqn = next(
        e for e in capture(lambda: jax.random.bits(jax.random.key(0), (64, 1024)), [])[0].eqns
        if e.name == "iota_2x32_shape"
    )  # fmt: skip
    mesh = MeshAxes(("x",), (8,))
    (rule,) = rules_of(eqn)
    ctx = context(eqn, rule, {1: mesh.atoms}, mesh)
    names = [(a, mesh.size_of[a]) for a in mesh.atoms]
    jaxpr = jax.make_jaxpr(lambda: run_local(ctx, eqn, ()), axis_env=names)()
    sizes = [math.prod(v.aval.shape) for e in jaxpr.eqns for v in e.outvars]
    assert max(sizes) == 64 * 1024 // 8


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"x": 3}], ids=str)
def test_key_dims_pass_through(mesh: dict[str, int]) -> None:
    keys = keys_of("threefry2x32", 5, 2)
    assert wrong(jax.random.key_data, keys, mesh=mesh)[0] == []
    assert wrong(jax.random.wrap_key_data, raw(keys), mesh=mesh)[0] == []
    assert wrong(jax.random.clone, keys, mesh=mesh)[0] == []
    seed = jax.vmap(jax.random.key)
    assert wrong(seed, np.arange(5, dtype=np.int32), mesh=mesh)[0] == []
    fold = jax.vmap(jax.vmap(jax.random.fold_in))
    assert wrong(fold, keys, np.arange(10, dtype=np.uint32).reshape(5, 2), mesh=mesh)[0] == []


def test_messages_are_broadcast_to_keys() -> None:
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    keys = jax.eval_shape(lambda: keys_of("threefry2x32", 5))
    eqn = equation(fold, keys, jax.ShapeDtypeStruct((3,), np.uint32))
    assert str(rules_of(eqn)[0]) == "a 1, 1 b -> a b"


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"x": 3}], ids=str)
def test_new_keys_are_those_of_one_device(mesh: dict[str, int]) -> None:
    split = jax.vmap(lambda k: jax.random.split(k, (4, 3)))
    bad, tried = wrong(split, keys_of("threefry2x32", 2), mesh=mesh, every=2)
    assert bad == [] and tried > 1
    assert wrong(lambda k: jax.random.split(k, 10), keys_of("rbg"), mesh=mesh)[0] == []


def test_generators_that_draw_for_all_keys_at_once_stay_whole() -> None:
    """rbg under vmap draws every key's bits from the first: a block of keys would draw others."""

    def text(fn: Callable[..., Any], impl: str) -> str:
        keys = jax.eval_shape(lambda: keys_of(impl, 5))
        return str(rules_of(equation(jax.vmap(fn), keys))[0])

    bits = lambda k: jax.random.bits(k, (3,))
    split = lambda k: jax.random.split(k, 3)
    fold = lambda k: jax.random.fold_in(k, 3)
    assert text(bits, "rbg") == "a -> a b  whole=a,b"
    assert text(split, "rbg") == "a -> a b"
    assert text(fold, "rbg") == "a, () -> a"
    assert text(split, "unsafe_rbg") == "a -> a b  whole=a"
    assert text(fold, "unsafe_rbg") == "a, () -> a  whole=a"
    assert text(split, "threefry2x32") == "a -> a b"


def test_rbg_keys_split_by_block() -> None:
    split = jax.vmap(lambda k: jax.random.split(k, 3))
    assert wrong(split, keys_of("rbg", 5), mesh={"x": 3})[0] == []
    bits = jax.vmap(lambda k: jax.random.bits(k, (3,)))
    assert wrong(bits, keys_of("rbg", 5), mesh={"x": 3}) == ([], 1)
