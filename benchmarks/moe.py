"""`moe`: a mixture-of-experts training step, shardwise beside jax.jit with the same annotations.

A stack of residual MoE layers on 8 CPU devices, groups and experts split over them.  "pinned" is
GShard's three annotations and the weights'; "gshard" the three alone; "weights" pins no tensor but the
experts' weights, and the batch is split by `in_shardings`, as it is in all three.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from benchmarks import programs, table
from benchmarks.transformer import SIDES, beside
from shardwise.mesh import device_mesh
from shardwise.nn import moe, transformer
from shardwise.nn.gating import GatingConfig

AXIS = "x"
PINS = {"pinned": "all", "gshard": "gshard", "weights": "weights"}
"""What is annotated -> the strategy of `nn.moe`."""


@dataclasses.dataclass(frozen=True)
class Model:
    """`layers` MoE layers over [groups, tokens, model] activations."""

    layers: int = 4
    model: int = 256
    hidden: int = 1024
    experts: int = 8
    groups: int = 16
    tokens: int = 128
    remat: bool = True

    @property
    def moe(self) -> moe.MoeConfig:
        return moe.MoeConfig(self.model, self.hidden, GatingConfig(self.experts))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pins", choices=PINS, help="one set of annotations (default: all)")
    parser.add_argument("--experts", type=int, default=Model.experts, help="experts (default 8)")
    parser.add_argument("--saved", action="store_true", help="without jax.checkpoint")
    parser.add_argument("--pairs", type=int, default=20, help="paired timing rounds (default 20)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    model = Model(experts=args.experts, remat=not args.saved)
    rows = [
        row for pins in ([args.pins] if args.pins else PINS)
        for row in compare(model, pins, args.pairs)
    ]  # fmt: skip
    table.show(
        f"MoE training step, {model.experts} experts, scan{', remat' if model.remat else ''}, 8 devices",
        rows,
        args.json,
        "ratio: shardwise / jax.jit; times are medians, their ratio the median of paired ratios",
    )
    return rows


def init(model: Model, key: jax.Array) -> Any:
    """Stacked parameters of the layers, and the scales of their norms [L, M]."""
    layers = [moe.init(model.moe, k) for k in jax.random.split(key, model.layers)]
    norm = jnp.ones((model.layers, model.model))
    return jax.tree.map(lambda *w: jnp.stack(w), *layers), norm


def step(
    model: Model, shard: moe.Shard, params: Any, x: jax.Array, key: jax.Array
) -> tuple[Any, jax.Array]:
    """Gradient descent on a loss of activations x [G, S, M]: (new parameters, loss)."""

    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
        (weights, norm), key = p
        normed = transformer.rms_norm(h, norm)
        y, stats = moe.layer(model.moe, weights, normed, key=key, shard=shard)
        return h + y, stats.aux_loss

    def objective(params: Any) -> jax.Array:
        body = jax.checkpoint(layer, prevent_cse=False) if model.remat else layer
        h, aux = lax.scan(body, x, (params, jax.random.split(key, model.layers)))
        return jnp.mean((h - jnp.roll(x, 1, axis=1)) ** 2) + 0.01 * jnp.sum(aux)

    value, grads = jax.value_and_grad(objective)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def partitioned(side: str, model: Model, pins: str, mesh: Mesh) -> Any:
    """The step, ready to lower or to call."""
    annotate = sw.annotate if side == "shardwise" else programs.jit_annotate(mesh)
    f = functools.partial(step, model, moe.sharder(annotate, PINS[pins]))
    if side == "shardwise":
        return sw.spmd(f, mesh=mesh, in_shardings=(None, P(AXIS), None))
    return jax.jit(f, in_shardings=(None, NamedSharding(mesh, P(AXIS)), None))


def arguments(model: Model) -> tuple[Any, jax.Array, jax.Array]:
    params = jax.jit(functools.partial(init, model))(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (model.groups, model.tokens, model.model))
    return params, x, jax.random.key(2)


def compare(model: Model, pins: str, pairs: int) -> list[dict[str, Any]]:
    """The rows of one set of annotations: what is measured, both sides, and their ratio."""
    mesh = device_mesh({AXIS: 8})
    values = arguments(model)
    steps = {side: partitioned(side, model, pins, mesh) for side in SIDES}
    return beside({"pins": pins}, steps, values, pairs)
