"""FLOPs by the program's own named scopes, and the MoE layer's growth with devices (GShard 3.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardwise as sw
from benchmarks import moe_scale
from shardwise.cost.flops import flops, flops_by_scope
from shardwise.mesh import abstract_mesh


def test_flops_by_scope_add_up_and_count_trips_and_backward_passes():
    def f(w, x):
        def body(x, _):
            return jnp.tanh(jnp.einsum("ij,jk->ik", x, w)), None

        return jnp.sum(lax.scan(body, x, None, length=3)[0])

    w, x = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    plan = sw.spmd(jax.grad(f), mesh=abstract_mesh({"d": 4})).plan(w, x)
    found = flops_by_scope(plan.jaxpr)
    assert sum(found.values()) == flops(plan.jaxpr)
    # three trips: forward, and two products backward, of which the first trip's last is not needed
    assert found["ij,jk->ik"] >= 3 * 2 * (2 * 16 * 8 * 8)


@pytest.fixture(scope="module")
def rows():
    return [moe_scale.layer(n) for n in (64, 256)]


def test_experts_cost_a_device_the_same_and_the_gate_grows_with_devices(rows):
    growth = moe_scale.growth(rows)
    assert growth["experts"] == growth["dispatch, combine"] == "D^0.00"
    assert growth["gate GFLOP"] == "D^1.00"
    # 4096 tokens, two choices: 2 x 2 S M H multiply-adds, and twice that backward
    assert rows[0]["experts"] == pytest.approx(3 * 2 * 2 * 2 * 4096 * 1024 * 8192 / 1e9)
    assert rows[0]["other GFLOP"] < 0.01 * rows[0]["experts"]


def test_a_device_sends_two_all_to_alls_a_pass_of_the_same_bytes(rows):
    assert [r["all-to-alls"] for r in rows] == [4, 4]
    # slots of 2 S tokens, M bfloat16 numbers each, all but one device's part of them
    assert rows[1]["their MB"] == pytest.approx(4 * 2 * 4096 * 1024 * 2 * 255 / 256 / 1e6)
    assert moe_scale.growth(rows)["all-to-all ms"].startswith("D^0.5")


def test_the_largest_other_message_is_the_gates_gradient(rows):
    assert rows[1]["other MB"] == pytest.approx(2 * 1024 * 256 * 4 * 255 / 256 / 1e6, rel=0.01)
