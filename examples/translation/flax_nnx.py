"""The mixture-of-experts layer inside a Flax NNX module, partitioned over 8 devices.

    pip install flax
    python examples/translation/flax_nnx.py

A module's parameters are one pytree (`nnx.split`), and a function of it is what `sw.spmd` partitions: the
module says where an annotation belongs, as the layer does, and nothing about devices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import shardwise as sw
from shardwise.demo import devices
from shardwise.nn import moe
from shardwise.nn.gating import GatingConfig


class Block(nnx.Module):
    """A normalised residual MoE layer."""

    def __init__(self, config: moe.MoeConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.norm = nnx.RMSNorm(config.model, rngs=rngs)
        for name, value in moe.init(config, rngs.params()).items():
            setattr(self, name, nnx.Param(value))

    def __call__(
        self, x: jax.Array, key: jax.Array, shard: moe.Shard = moe.identity
    ) -> tuple[jax.Array, moe.GatingStats]:
        params = {name: getattr(self, name)[...] for name in moe.param_shapes(self.config)}
        y, stats = moe.layer(self.config, params, self.norm(x), key=key, shard=shard)
        return x + y, stats


def main() -> float:
    """Loss and gradients on one device and on eight; returns their largest difference."""
    devices.start(8)
    config = moe.MoeConfig(model=64, hidden=128, gating=GatingConfig(experts=8))
    graph, state = nnx.split(Block(config, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (8, 32, config.model))

    def loss(state: Any, x: jax.Array, shard: moe.Shard = moe.identity) -> Any:
        y, stats = nnx.merge(graph, state)(x, jax.random.key(2), shard)
        return jnp.mean(y**2) + 0.01 * stats.aux_loss, stats

    def annotated(state: Any, x: jax.Array) -> Any:
        return loss(state, x, moe.sharder(sw.annotate, "gshard"))

    one = jax.jit(jax.value_and_grad(loss, has_aux=True))
    many = sw.spmd(jax.value_and_grad(annotated, has_aux=True), mesh=sw.device_mesh({"x": 8}))
    (value, stats), grads = many(state, x)
    print(f"loss {value:.4f}, overflow {stats.overflow:.1%}, second expert {stats.second:.1%}")
    print("w_in lies", many.plan(state, x).in_shardings[0]["w_in"].get_value())
    for c in many.plan(state, x).collectives:
        print(f"  {c.kind} of {c.bytes:,.0f} bytes: {c.reason}")
    pairs = zip(
        jax.tree.leaves(one(state, x)), jax.tree.leaves(((value, stats), grads)), strict=True
    )
    error = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
    print(f"largest difference from one device: {error:.1e}")
    return error


if __name__ == "__main__":
    main()
