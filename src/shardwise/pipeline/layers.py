"""How a stack of layers is dealt to stages, and a batch to microbatches.

    gpipe      [L, ...] -> [S, 1, K, ...]   stage s has layers s K, ..., s K + K - 1
    circular   [L, ...] -> [S, R, K, ...]   in round r it has layers (r S + s) K, ...

Only the first dim is split over the mesh, so a device holds the layers of its stages.  A stack split in
blocks over its layers lies like that for GPipe; for a circular schedule it does not, and is moved in every
step, unless it is stored *dealt*: in the order in which the stages have the layers.

A batch is cut with a stride: microbatch m has rows m, m + M, m + 2M, ...  So a batch that is split in
blocks over a data axis makes microbatches that are split over it, with nothing moved; blocks of rows
would make each a microbatch of a few devices.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise.errors import ShardingError
from shardwise.pipeline.checks import first_dim


def per_stage(layers: int, stages: int, rounds: int) -> int:
    """K, the layers a stage has in one round; the last of all may be missing."""
    return -(-layers // (stages * rounds))


def to_stages(tree: Any, stages: int, rounds: int, dealt: bool = False) -> Any:
    """[L, ...] -> [S, R, K, ...]; layers that are missing are copies of the last, with no gradient."""

    def one(w: Any) -> Any:
        k = per_stage(w.shape[0], stages, rounds)
        missing = stages * rounds * k - w.shape[0]
        if missing:
            last = lax.stop_gradient(w[-1:])
            w = jnp.concatenate([w, jnp.broadcast_to(last, (missing, *w.shape[1:]))])
        if dealt:
            return w.reshape(stages, rounds, k, *w.shape[1:])
        return jnp.swapaxes(w.reshape(rounds, stages, k, *w.shape[1:]), 0, 1)

    return jax.tree.map(one, tree)


def from_stages(tree: Any, layers: int, dealt: bool = False) -> Any:
    """[S, R, K, ...] -> [L, ...]: back again."""

    def one(w: Any) -> Any:
        w = w if dealt else jnp.swapaxes(w, 0, 1)
        return w.reshape(math.prod(w.shape[:3]), *w.shape[3:])[:layers]

    return jax.tree.map(one, tree)


def deal(params: Any, num_stages: int, rounds: int) -> Any:
    """Stacked layers in the order in which the stages of a circular schedule have them.

    Stored so, for `pipeline(..., dealt=True)`, and split over their first dim, every device holds the
    layers of its own stages: no weight or gradient is sent to another one.

    Args:
      params: a tree of arrays [L, ...]; `num_stages * rounds` divides L.

    Returns:
      the same tree, layers in the order (stage, round, layer of the stage).

    Raises:
      ShardingError: a number of layers that does not divide.
    """
    layers = _dividing(params, num_stages, rounds, "deal")
    return from_stages(to_stages(params, num_stages, rounds), layers, dealt=True)


def undeal(params: Any, num_stages: int, rounds: int) -> Any:
    """Layers in model order again: the inverse of `deal`."""
    layers = _dividing(params, num_stages, rounds, "undeal")
    return from_stages(to_stages(params, num_stages, rounds, dealt=True), layers)


def _dividing(params: Any, stages: int, rounds: int, what: str) -> int:
    layers = first_dim(params, "params", "")
    if layers % (stages * rounds):
        raise ShardingError(
            f"{what}: {layers} layers are not {rounds} rounds of {stages} stages",
            hint="leave them in model order: pipeline fills up with layers that do nothing",
        )
    return layers


def to_microbatches(tree: Any, count: int) -> Any:
    """[B, ...] -> [M, B / M, ...]: microbatch m has rows m, m + M, ..."""

    def one(x: Any) -> Any:
        return jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1)

    return jax.tree.map(one, tree)


def from_microbatches(tree: Any) -> Any:
    """[M, B / M, ...] -> [B, ...]: back again."""

    def one(x: Any) -> Any:
        return jnp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    return jax.tree.map(one, tree)
