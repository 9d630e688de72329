"""Stages that are not alike (GSPMD 3.3 only names them): padded to one buffer, switched by stage.

`pipeline` needs stages that are one function with different weights.  Here every stage is a function of its
own, from one shape to another: a convolutional front end, then Transformer layers, then a projection.
One program runs on all devices, so

- what goes from stage to stage is flattened, row by row, and padded to the widest such value;
- a stage's weights are flattened and padded to those of the largest stage (`pack`);
- each device picks its own function by its index along the axis (`lax.switch`, under manual control of that
  axis; all other axes stay the partitioner's).

What that costs: a tick takes as long as the slowest stage; the shift sends the widest value, whichever
stages are next to each other; every device has room for the largest stage's weights; weights lie whole
along axes other than the stages', as a flat vector has no dims to split by name.  Stages that are nearly
alike are better made alike, and run by `pipeline`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise import _jax
from shardwise.annotate import annotate
from shardwise.errors import ShardingError
from shardwise.manual import blocks_along, manual
from shardwise.pipeline.checks import check_options, first_dim
from shardwise.pipeline.layers import from_microbatches, to_microbatches
from shardwise.pipeline.schedule import Schedule

OPEN = P.UNCONSTRAINED
Shape = jax.ShapeDtypeStruct


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """The weights of unlike stages as arrays to be split over stages.

    Attributes:
      arrays: dtype -> [S, n]: a stage's weights of that dtype, one after the other, zeros after them.
      trees: of each stage, the tree of its weights as shapes.
    """

    arrays: dict[str, Any]
    trees: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    def of_stage(self, s: int, rows: dict[str, Any]) -> Any:
        """A stage's weights out of its rows of the arrays."""
        at = dict.fromkeys(rows, 0)
        leaves, tree = self.trees[s]
        out = []
        for shape, dtype in leaves:
            start, n = at[dtype], math.prod(shape)
            out.append(rows[dtype][start : start + n].reshape(shape))
            at[dtype] = start + n
        return jax.tree.unflatten(tree, out)

    def unpack(self) -> list[Any]:
        """Each stage's weights, as `pack` was given them."""
        rows = [{d: a[s] for d, a in self.arrays.items()} for s in range(len(self.trees))]
        return [self.of_stage(s, r) for s, r in enumerate(rows)]


def pack(params: Sequence[Any]) -> Packed:
    """Weights of unlike stages, one tree a stage, padded and stacked: what is stored and trained."""
    trees, vectors = [], []
    for p in params:
        leaves, tree = jax.tree.flatten(p)
        kinds = [jnp.dtype(jax.dtypes.result_type(a)).name for a in leaves]
        trees.append((tuple(zip([np.shape(a) for a in leaves], kinds, strict=True)), tree))
        vectors.append(
            {
                d: jnp.concatenate(
                    [jnp.ravel(a) for a, k in zip(leaves, kinds, strict=True) if k == d]
                )
                for d in dict.fromkeys(kinds)
            }
        )
    arrays = {}
    for d in sorted({d for v in vectors for d in v}):
        rows = [v.get(d, jnp.zeros(0, d)) for v in vectors]
        n = max(r.size for r in rows)
        arrays[d] = jnp.stack([jnp.pad(r, (0, n - r.size)) for r in rows])
    return Packed(arrays, tuple(trees))


def pipeline_stages(
    stages: Sequence[Callable[[Any, Any], Any]],
    params: Packed | Sequence[Any],
    x: Any,
    *,
    axis: str,
    num_microbatches: int,
    remat: bool = False,
) -> Any:
    """Run functions that are not alike as a pipeline: `stages[-1](p[-1], ... stages[0](p[0], x))`.

    Letters of shapes: S stages, B batch, M microbatches.

    Args:
      stages: S functions `f(params, x) -> x`, each [rows, ...] -> [rows, ...] of whatever shape.  What
        they hand over are floating-point arrays; rows are treated apart.
      params: `pack` of each stage's weights, or the list of them: packed here, in every step.
      x: an array [B, ...] of any dtype.
      axis: the mesh axis stages are split over; its size divides S.
      num_microbatches: M, divides B.
      remat: the backward pass recomputes a stage from its input.

    Returns:
      the last stage's result [B, ...].

    Raises:
      ShardingError: a batch that M does not divide, weights of another number of stages, a value between
        stages that is no floating-point array or does not have a row for each of x's.

    Example:
      >>> import jax.numpy as jnp
      >>> widen = lambda p, x: jnp.tile(x, (1, 3)) * p
      >>> total = lambda p, x: x.sum(-1) + p
      >>> pipeline_stages([widen, total], [2.0, 1.0], jnp.ones((4, 2)), axis="stage",
      ...                 num_microbatches=2).tolist()
      [13.0, 13.0, 13.0, 13.0]
    """
    where = _jax.current_source()
    check_options(axis, len(stages), num_microbatches, "gpipe", None, None, remat, where)
    batch = first_dim(x, "x", where)
    if batch % num_microbatches:
        raise ShardingError(
            f"pipeline_stages: {num_microbatches} microbatches do not divide a batch of {batch}",
            where=where,
        )
    packed = params if isinstance(params, Packed) else pack(params)
    if len(packed.trees) != len(stages):
        raise ShardingError(
            f"pipeline_stages: {len(stages)} stages and weights of {len(packed.trees)}", where=where
        )
    plan = Schedule(len(stages), num_microbatches)
    return _Stages(tuple(stages), plan, axis, remat).run(packed, x, where)


@dataclasses.dataclass(frozen=True)
class _Stages:
    functions: tuple[Callable[[Any, Any], Any], ...]
    schedule: Schedule
    axis: str
    remat: bool

    def values(self, packed: Packed, x: Any, where: str) -> list[Shape]:
        """What goes into each stage, and out of the last: one microbatch, as shapes."""
        values = [Shape(x.shape[1:], x.dtype)]
        for s, f in enumerate(self.functions):
            leaves, tree = packed.trees[s]
            p = jax.tree.unflatten(tree, [Shape(shape, d) for shape, d in leaves])
            out = jax.eval_shape(f, p, values[-1])
            rows = values[0].shape[0]
            good = isinstance(out, Shape) and jnp.issubdtype(out.dtype, jnp.floating)
            if not good or not out.shape or out.shape[0] != rows:
                raise ShardingError(
                    f"pipeline_stages: stage {s} returns {jax.tree.map(str, out)}", where=where,
                    facts=f"it gets a microbatch of {rows} rows",
                    hint="a stage returns one floating-point array with a row for each it gets",
                )  # fmt: skip
            values.append(out)
        return values

    def split(self, a: Any, *whole: None) -> Any:
        return annotate(a, P(self.axis, *whole, *[OPEN] * (a.ndim - 1 - len(whole))))

    def run(self, packed: Packed, x: Any, where: str) -> Any:
        s, m = self.schedule.stages, self.schedule.microbatches
        x = to_microbatches(x, m)
        values = self.values(packed, x, where)
        between, last = values[1:-1], values[-1]
        width = max((math.prod(v.shape[1:]) for v in between), default=0)
        dtype = jnp.result_type(*[v.dtype for v in between]) if between else last.dtype
        rows = last.shape[0]
        weights = {d: self.split(a, None) for d, a in packed.arrays.items()}
        come = self.split(jnp.broadcast_to(x[None], (s, *x.shape)), None)
        buffer = self.split(jnp.ones((s, rows, width), dtype))
        gone = self.split(jnp.zeros((s, m, *last.shape), last.dtype), None)

        branches = [self.branch(packed, values, k, width, dtype) for k in range(s)]
        each = s // blocks_along(self.axis)

        def of_device(weights: Any, x: Any, buffer: Any) -> Any:
            first = lax.axis_index(self.axis) * each
            outs = [
                lax.switch(first + j, branches, *jax.tree.map(lambda a: a[j], (weights, x, buffer)))  # noqa: B023
                for j in range(each)
            ]
            return jax.tree.map(lambda *a: jnp.stack(a), *outs)

        if self.remat:
            of_device = jax.checkpoint(of_device, prevent_cse=False)
        spec = P(self.axis)
        switched = manual(
            of_device,
            in_specs=(spec, spec, spec),
            out_specs=(spec, spec),
            axes=self.axis,
            check=False,
        )

        def tick(carry: Any, t: Any) -> Any:
            buffer, gone = carry
            new = lax.dynamic_index_in_dim(come, jnp.minimum(t, m - 1), 1, False)
            config = [(1, -1, 0), (0, 0, 0), (0, 0, 0)]
            # a bubble's row is ones, not zeros: a norm of it is finite
            buffer = self.split(lax.pad(buffer, jnp.ones((), dtype), config))
            buffer, y = switched(weights, new, buffer)
            at = jnp.maximum(t - (s - 1), 0)
            gone = lax.dynamic_update_index_in_dim(gone, y, at, 1)
            return (self.split(buffer), self.split(gone, None)), None

        ticks = jnp.arange(self.schedule.ticks, dtype=jnp.int32)
        (_, gone), _ = lax.scan(tick, (buffer, gone), ticks)
        # only the last stage has written anything but zeros
        return from_microbatches(jnp.sum(gone, 0, dtype=gone.dtype))

    def branch(
        self, packed: Packed, values: list[Shape], s: int, width: int, dtype: Any
    ) -> Callable[..., Any]:
        """Stage s as a function of flat rows: (weights, x, buffer) -> (buffer, result)."""
        last, rows = values[-1], values[-1].shape[0]

        def run(weights: Any, x: Any, buffer: Any) -> Any:
            if s:
                v = values[s]
                n = math.prod(v.shape[1:])
                x = buffer[:, :n].reshape(v.shape).astype(v.dtype)
            y = self.functions[s](packed.of_stage(s, weights), x)
            if s == self.schedule.stages - 1:
                return jnp.ones((rows, width), dtype), y
            flat = y.reshape(rows, -1).astype(dtype)
            buffer = jnp.pad(flat, ((0, 0), (0, width - flat.shape[1])))
            return buffer, jnp.zeros(last.shape, last.dtype)

        return run
