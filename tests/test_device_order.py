"""Results on another order of the mesh's devices: GShard's `shard` with a device assignment."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.hlo import wire_report
from shardwise.testing import check

MESH = sw.device_mesh({"x": 2, "y": 4})
ORDER = np.array([3, 1, 0, 2, 7, 6, 5, 4]).reshape(4, 2)
PERMUTED = Mesh(np.array(jax.devices())[ORDER.ravel()].reshape(2, 4), ("x", "y"))


def f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


A = f32(8, 16)


def test_shard_places_a_result_on_the_devices_named():
    f = sw.spmd(lambda x: sw.shard(x * 2, ORDER), mesh=MESH)
    y = f(A)
    np.testing.assert_array_equal(y, 2 * A)
    held = {(s.index[0].start, s.index[1].start): s.device.id for s in y.addressable_shards}
    assert [held[2 * i, 8 * j] for i in range(4) for j in range(2)] == ORDER.ravel().tolist()
    for s in y.addressable_shards:
        np.testing.assert_array_equal(s.data, 2 * A[s.index])
    np.testing.assert_array_equal(f(y), 4 * A)  # and back


def test_it_is_one_permute_of_a_block_in_the_plan_and_in_the_program():
    f = sw.spmd(lambda x: sw.shard(x * 2, ORDER), mesh=MESH)
    plan = f.plan(A)
    (sent,) = plan.collectives
    assert (sent.kind, sent.bytes, sent.op) == ("collective-permute", 2 * 8 * 4, "result")
    assert sent.reason == "result0: each block to the device that the order asked for names"
    assert wire_report(f.lower(A).compile().as_text()).bytes == plan.comm_bytes
    text = plan.explain()
    ids = "3, 1, 0, 2, 7, 6, 5, 4"
    assert f"asked for on devices {ids}: inside, blocks stay in the mesh's order" in text
    assert f"sent there at the end: devices {ids} hold the blocks in order" in text


def test_out_shardings_on_permuted_devices_uneven_too():
    asked = NamedSharding(PERMUTED, P("x", "y"))
    f = sw.spmd(jnp.sin, mesh=MESH, out_shardings=asked)
    y = f(A)
    np.testing.assert_allclose(y, np.sin(A), rtol=1e-6)
    assert y.sharding.mesh.devices.tolist() == PERMUTED.devices.tolist()
    odd = f32(7, 6)
    z = f(odd)
    assert isinstance(z, sw.PaddedArray)
    np.testing.assert_allclose(np.asarray(z), np.sin(odd), rtol=1e-6)


def test_keys_and_several_results():
    keys = jax.random.split(jax.random.key(0), 8)
    wanted = NamedSharding(PERMUTED, P("y"))
    f = sw.spmd(lambda k, x: (k, x + 1), mesh=MESH, out_shardings=(wanted, P("x", "y")))
    got, y = f(keys, A)
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(keys))
    assert got.sharding.devices_indices_map((8,)) == wanted.devices_indices_map((8,))
    np.testing.assert_array_equal(y, A + 1)


def test_inside_a_program_and_its_gradient_and_under_jit():
    check(lambda x: (jnp.sin(sw.shard(x, ORDER)) + x).sum(0), (f32(10, 3),), MESH)
    f = sw.spmd(lambda x: sw.shard(x * 2, ORDER), mesh=MESH)
    np.testing.assert_array_equal(jax.jit(f)(A), 2 * A)
