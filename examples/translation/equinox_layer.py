"""The mixture-of-experts layer inside an Equinox module, partitioned over 8 devices.

    pip install equinox
    python examples/translation/equinox_layer.py

An Equinox module is a pytree: it goes into what `sw.spmd` partitions like any argument, and its gradient
comes out as a module.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import shardwise as sw
from shardwise.demo import devices
from shardwise.nn import moe
from shardwise.nn.gating import GatingConfig


class Block(eqx.Module):
    """A normalised residual MoE layer."""

    norm: eqx.nn.RMSNorm
    params: dict[str, jax.Array]
    config: moe.MoeConfig = eqx.field(static=True)

    def __init__(self, config: moe.MoeConfig, key: jax.Array):
        self.norm = eqx.nn.RMSNorm(config.model)
        self.params = moe.init(config, key)
        self.config = config

    def __call__(
        self, x: jax.Array, key: jax.Array, shard: moe.Shard = moe.identity
    ) -> tuple[jax.Array, moe.GatingStats]:
        normed = jax.vmap(jax.vmap(self.norm))(x)
        y, stats = moe.layer(self.config, self.params, normed, key=key, shard=shard)
        return x + y, stats


def main() -> float:
    """Loss and gradients on one device and on eight; returns their largest difference."""
    devices.start(8)
    config = moe.MoeConfig(model=64, hidden=128, gating=GatingConfig(experts=8))
    block = Block(config, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, 32, config.model))

    def loss(block: Block, x: jax.Array, shard: moe.Shard = moe.identity) -> Any:
        y, stats = block(x, jax.random.key(2), shard)
        return jnp.mean(y**2) + 0.01 * stats.aux_loss, stats

    def annotated(block: Block, x: jax.Array) -> Any:
        return loss(block, x, moe.sharder(sw.annotate, "gshard"))

    one = jax.jit(jax.value_and_grad(loss, has_aux=True))
    many = sw.spmd(jax.value_and_grad(annotated, has_aux=True), mesh=sw.device_mesh({"x": 8}))
    (value, stats), grads = many(block, x)
    print(f"loss {value:.4f}, overflow {stats.overflow:.1%}, second expert {stats.second:.1%}")
    print("w_in lies", many.plan(block, x).in_shardings[0].params["w_in"])
    for c in many.plan(block, x).collectives:
        print(f"  {c.kind} of {c.bytes:,.0f} bytes: {c.reason}")
    pairs = zip(
        jax.tree.leaves(one(block, x)), jax.tree.leaves(((value, stats), grads)), strict=True
    )
    error = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
    print(f"largest difference from one device: {error:.1e}")
    return error


if __name__ == "__main__":
    main()
