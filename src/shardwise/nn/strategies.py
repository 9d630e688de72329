"""Strategies: for each tensor of a model, which of its dims are split over which of the model's axes.

A model is annotated once, by names of tensors; its `STRATEGIES` say what becomes of each name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from shardwise.errors import ShardingError

Strategies = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Strategy -> tensor -> for each dim the number of the axis it is split over, or -1."""
Axes = Sequence[str | tuple[str, ...]]
"""The mesh's names for a model's axes; an empty one is an axis that the mesh has not."""


def spec_of(
    strategies: Strategies, strategy: str, tensor: str, axes: Axes, tensors: Collection[str] = ()
) -> P | None:
    """The annotation of a tensor under a strategy, or None where it has none.

    Args:
      axes: those that the strategy does not use may be left out.
      tensors: all that the model names, to tell a name that has no annotation from one there is not.

    Raises:
      ShardingError: no such strategy or tensor, or an axis without a name.
    """
    if strategy not in strategies:
        raise ShardingError(
            f"unknown strategy {strategy!r}",
            facts=f"strategies are {', '.join(sorted(strategies))}",
            hint="see STRATEGIES for what each one splits",
        )
    if tensors and tensor not in tensors:
        raise ShardingError(
            f"unknown tensor {tensor!r}",
            facts=f"tensors are {', '.join(tensors)}",
            hint="see STRATEGIES for what each one splits",
        )
    dims = strategies[strategy].get(tensor)
    if dims is None:
        return None
    if max(dims, default=-1) >= len(axes):
        raise ShardingError(
            f"strategy {strategy!r} splits over {max(dims) + 1} mesh axes",
            facts=f"given the names {', '.join(map(repr, axes))}",
            hint="give axes=, with '' for an axis that the mesh has not",
        )
    return P(*(None if d < 0 else axes[d] or None for d in dims))


def descend(loss: Callable[[Any], jax.Array], params: Any, rate: float) -> tuple[Any, jax.Array]:
    """One step of plain gradient descent: (new parameters, loss before the step)."""
    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - rate * g, params, grads), value
