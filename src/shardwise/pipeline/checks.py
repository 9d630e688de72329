"""What can be wrong with a pipeline, said before anything is traced: what, where, and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shardwise.errors import ShardingError
from shardwise.pipeline.schedule import Schedule

SCHEDULES = ("gpipe", "circular")


def first_dim(tree: Any, what: str, where: str) -> int:
    """The size of the first dim of all leaves of a tree."""
    sizes: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = what + jax.tree_util.keystr(path)
        if not np.ndim(leaf):
            raise ShardingError(f"pipeline: {name} is a scalar", where=where,
                                hint="its first dim counts layers, or rows of the batch")  # fmt: skip
        sizes.setdefault(np.shape(leaf)[0], name)
    if not sizes:
        raise ShardingError(f"pipeline: {what} has no arrays", where=where)
    if len(sizes) > 1:
        (a, x), (b, y), *_ = sizes.items()
        raise ShardingError(f"pipeline: {x} has {a} in its first dim, {y} has {b}", where=where,
                            hint=f"all leaves of {what} are stacked alike")  # fmt: skip
    return next(iter(sizes))


def check_options(
    axis: Any, stages: int, microbatches: int, schedule: str, rounds: int | None, aux: Any, remat: Any,
    where: str,
) -> None:  # fmt: skip
    names = (axis,) if isinstance(axis, str) else axis
    if not (isinstance(names, tuple) and names and all(isinstance(n, str) for n in names)):
        raise ShardingError(
            f"pipeline: axis is a mesh axis or a tuple of them, not {axis!r}", where=where
        )
    for what, n in (("num_stages", stages), ("num_microbatches", microbatches), ("rounds", rounds)):
        if n is not None and (not isinstance(n, (int, np.integer)) or n < 1):
            raise ShardingError(
                f"pipeline: {what} must be a number of at least 1, not {n!r}", where=where
            )
    if schedule not in SCHEDULES:
        raise ShardingError(f"pipeline: unknown schedule {schedule!r}", where=where,
                            facts=f"schedules are {', '.join(SCHEDULES)}")  # fmt: skip
    if schedule == "gpipe" and rounds not in (None, 1):
        raise ShardingError(f"pipeline: {rounds} rounds of a gpipe schedule", where=where,
                            hint='rounds belong to schedule="circular"')  # fmt: skip
    if aux not in (None, "sum", "stack"):
        raise ShardingError(f"pipeline: aux is None, 'sum' or 'stack', not {aux!r}", where=where)
    if not isinstance(remat, bool) and not callable(remat):
        raise ShardingError(f"pipeline: remat is False, True or a policy, not {remat!r}", where=where,
                            hint="see jax.checkpoint_policies")  # fmt: skip


def check_sizes(
    plan: Schedule, layers: int, x: Any, inputs: Any, state: Any, dealt: bool, where: str
) -> None:
    batch, m = first_dim(x, "x", where), plan.microbatches
    if batch % m:
        near = [d for d in range(1, batch + 1) if batch % d == 0]
        best = sorted(near, key=lambda d: abs(d - m))[:2]
        raise ShardingError(
            f"pipeline: {m} microbatches do not divide a batch of {batch}", where=where,
            hint=f"num_microbatches={' or '.join(map(str, sorted(best)))} does; or pad the batch",
        )  # fmt: skip
    if jax.tree.leaves(inputs) and (n := first_dim(inputs, "inputs", where)) != batch:
        raise ShardingError(f"pipeline: inputs have {n} rows, x has {batch}", where=where)
    if jax.tree.leaves(state) and (n := first_dim(state, "state", where)) != layers:
        raise ShardingError(f"pipeline: state is of {n} layers, params of {layers}", where=where)
    if dealt and layers % (plan.stages * plan.rounds):
        raise ShardingError(
            f"pipeline: {layers} dealt layers are not {plan.rounds} rounds of {plan.stages} stages",
            where=where, hint="layers that do nothing fill up where they are in model order",
        )  # fmt: skip


def check_layer(
    layer: Any, call: Callable[..., Any], microbatches: int, values: tuple[Any, ...], where: str
) -> None:
    """Whether the layer keeps the shapes and dtypes of x and of its state.

    Args:
      call: (params, x, inputs, state, key) -> (x, state, aux), for one layer and microbatch.
      values: those of the pipeline.
    """
    params, x, inputs, state, key = values

    def of(tree: Any, shape: Callable[[Any], tuple[int, ...]]) -> Any:
        def one(a: Any) -> Any:
            return jax.ShapeDtypeStruct(shape(np.shape(a)), jax.dtypes.result_type(a))

        return jax.tree.map(one, tree)

    def rows(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[0] // microbatches, *shape[1:]

    p, before = of((params, state), lambda shape: shape[1:])
    h, mine = of(x, rows), of(inputs, rows)
    out, after, _ = jax.eval_shape(call, p, h, mine, before, key)
    name = getattr(layer, "__name__", "layer")
    for what, a, b in (("x", h, out), ("state", before, after)):
        if jax.tree.structure(a) != jax.tree.structure(b) or _text(a) != _text(b):
            raise ShardingError(
                f"pipeline: {name} does not keep the shape of {what}",
                where=where,
                facts=f"it takes {_text(a)} and returns {_text(b)}",
                hint="stages must be alike: what comes out of one goes into the next",
            )


def _text(tree: Any) -> str:
    leaves = [f"{a.dtype}[{','.join(map(str, a.shape))}]" for a in jax.tree.leaves(tree)]
    return ", ".join(leaves) or "nothing"
