"""`pipeline`: a stack of layers run as a pipeline of stages, by sharding alone (GSPMD 3.3).

The layers are put on a stage dim, `vmap` runs all stages at once, and a buffer [S, microbatch, ...] that
is shifted by one stage in every tick of a loop carries microbatches from stage to stage.  Nothing here
knows of devices.  Split the stage dim over a mesh axis (the one annotation made), and the shift is one
collective-permute a tick; every other dim is left open, for whatever the layer's own annotations ask.

    tick t:  h = [x of a new microbatch, buffer[0], ..., buffer[S-2]]
             buffer = vmap(stage)(weights, h)

New microbatches and finished ones share one array [S, M, microbatch, ...], split over its first dim: the
first stage reads its block, the last writes into its own.  What comes after the loop is one sum over the
stages of all but zeros; in the backward pass the same happens the other way around.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise import _jax
from shardwise.annotate import annotate as sw_annotate
from shardwise.pipeline.checks import check_layer, check_options, check_sizes, first_dim
from shardwise.pipeline.layers import (
    from_microbatches,
    from_stages,
    per_stage,
    to_microbatches,
    to_stages,
)
from shardwise.pipeline.schedule import Schedule

OPEN = P.UNCONSTRAINED
Axis = str | tuple[str, ...]


def pipeline(
    layer: Callable[..., Any],
    params: Any,
    x: Any,
    *,
    axis: Axis,
    num_stages: int,
    num_microbatches: int,
    schedule: str = "gpipe",
    rounds: int | None = None,
    inputs: Any = None,
    state: Any = None,
    key: Any = None,
    aux: str | None = None,
    remat: bool | Callable[..., Any] = False,
    dealt: bool = False,
    unroll: bool = False,
    annotate: Callable[[Any, P], Any] = sw_annotate,
) -> Any:
    """Run a stack of layers as a pipeline: the same numbers as one layer after the other.

    Letters of shapes: L layers, S stages, B batch, M microbatches, R rounds.

    Args:
      layer: `layer(layer_params, x[, inputs][, state][, key]) -> x[, state][, aux]`, for one layer and one
        microbatch: of its arguments and results those are there that are asked for below.  It keeps the
        shape and dtype of x, and treats its rows apart.
      params: a tree of arrays [L, ...], stacked over layers.  Where R S does not divide L, layers that do
        nothing fill up.
      x: an array [B, ...], or a tree of them.
      axis: the mesh axis (or axes) that stages are split over.
      num_stages: S, best the size of the axis.
      num_microbatches: M, divides B.  Microbatch m has rows m, m + M, ... of the batch.
      schedule: "gpipe" gives every stage L / S layers in a row; "circular" deals layers round robin in R
        rounds: a device has R stages, and there are R times fewer bubbles.
      rounds: R of a circular schedule; None: as many as there are layers for (ceil(L / S)).
      inputs: a tree of arrays [B, ...] that a layer gets the rows of its microbatch of: masks, or the
        encoder's output.
      state: a tree of arrays [L, ...]: a layer gets its own and returns it updated, microbatch after
        microbatch in order.
      key: a random key: a layer gets `fold_in(fold_in(key, layer), microbatch)`.
      aux: None; or what becomes of a layer's auxiliary output, a tree (losses, statistics): "sum" adds up
        all layers and microbatches, "stack" makes [L, M, ...].  Bubbles are left out.
      remat: True: the backward pass recomputes a stage from its input, as GPipe does; or a policy of
        `jax.checkpoint_policies`; False: everything is kept.  To recompute layer by layer give
        `jax.checkpoint(layer)`.
      dealt: params and state are in the order of `deal`.
      unroll: the layers of a stage are written out, else they are a loop.  The program is larger; weights
        that are split along other axes too are gathered once, layer by layer, as far as
        `sw.spmd(loop_memory=...)` allows it, where a loop's stack is held whole or not at all.
      annotate: what puts a spec on a value; for `jax.jit` its `with_sharding_constraint`.

    Returns:
      x [B, ...] after L layers; with `state` or `aux` a tuple of it and the new state [L, ...] and the
      auxiliary output, as far as asked for.

    Raises:
      ShardingError: a batch that M does not divide, stacks of different sizes, a layer that changes the
        shape or dtype of x, options that do not exist.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> w = jnp.stack([jnp.eye(4) * k for k in (1.0, 2.0, 3.0)])
      >>> layer = lambda w, x: x @ w
      >>> y = pipeline(layer, w, jnp.ones((4, 4)), axis="stage", num_stages=3, num_microbatches=2)
      >>> y.shape, float(y[0, 0])
      ((4, 4), 6.0)
    """
    where = _jax.current_source()
    check_options(axis, num_stages, num_microbatches, schedule, rounds, aux, remat, where)
    layers = first_dim(params, "params", where)
    if rounds is None:
        rounds = 1 if schedule == "gpipe" else -(-layers // num_stages)
    plan = Schedule(num_stages, num_microbatches, rounds)
    check_sizes(plan, layers, x, inputs, state, dealt, where)
    run = _Pipeline(
        layer, layers, plan, axis, aux, remat, dealt, unroll, annotate, state is not None,
        _jax.calling(),
    )  # fmt: skip
    check_layer(layer, run.call, num_microbatches, (params, x, inputs, state, key), where)
    with jax.named_scope("pipeline"):
        return run(params, x, inputs, state, key)


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """What is known of a pipeline before any value: see `pipeline` for the words.

    In the loop, weights and state are [S, R, K, ...], without R where there is one round; where the layers
    of a stage are written out, weights are a list of K such trees, without K.
    """

    layer: Callable[..., Any]
    layers: int
    schedule: Schedule
    axis: Axis
    aux: str | None
    remat: bool | Callable[..., Any]
    dealt: bool
    unroll: bool
    annotate: Callable[[Any, P], Any]
    has_state: bool
    traceback: Any

    @property
    def per_stage(self) -> int:
        return per_stage(self.layers, self.schedule.stages, self.schedule.rounds)

    @property
    def missing(self) -> bool:
        """Whether the last stages have layers that do nothing."""
        return self.per_stage * self.schedule.stages * self.schedule.rounds != self.layers

    # -- one layer, one stage ----------------------------------------------------------------------------

    def call(self, p: Any, x: Any, inputs: Any, state: Any, key: Any) -> tuple[Any, Any, Any]:
        """The user's layer: (x, state, aux), None for what is not asked for."""
        extra = [a for a in (inputs, state, key) if a is not None]
        out = self.layer(p, x, *extra)
        if not self.has_state and self.aux is None:
            return out, None, None
        parts = list(out)
        return parts[0], parts[1] if self.has_state else None, parts[-1] if self.aux else None

    def stage(self, p: Any, state: Any, x: Any, s: Any, tick: Any, inputs: Any, key: Any) -> Any:
        """One stage in one tick: the layers of its round, one after the other.

        Args:
          x: [microbatch, ...]; inputs: [M, microbatch, ...]; s: which stage.

        Returns:
          x, state, aux [K, ...] with zeros in a bubble.
        """
        with _jax.called_from(self.traceback):
            round, microbatch, exists = self.schedule.at(tick - s)
            mine = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, microbatch, 0, False), inputs)
            weights, before = self.of_round(p, round), self.of_round(state, round)
            first = (round * self.schedule.stages + s) * self.per_stage

        def one(x: Any, item: Any) -> Any:
            w, st, k = item
            number = first + k
            layer_key = None
            if key is not None:
                layer_key = jax.random.fold_in(jax.random.fold_in(key, number), microbatch)
            with _jax.called_from(None):  # the layer's own lines
                y, new, aux = self.call(w, x, mine, st, layer_key)
            real = exists
            if self.missing:
                y = _where(number < self.layers, y, x)
                real = exists & (number < self.layers)
            return y, (_where(real, new, st), _where(real, aux, jax.tree.map(jnp.zeros_like, aux)))

        if isinstance(weights, list):
            ys = []
            for k, w in enumerate(weights):
                x, y = one(x, (w, jax.tree.map(lambda a: a[k], before), k))  # noqa: B023
                ys.append(y)
            after, aux = jax.tree.map(lambda *a: jnp.stack(a), *ys)
        else:
            count = jnp.arange(self.per_stage, dtype=jnp.int32)
            with _jax.called_from(self.traceback):
                x, (after, aux) = lax.scan(one, x, (weights, before, count))
        return x, self.with_round(state, after, round), aux

    def of_round(self, tree: Any, round: Any) -> Any:
        if self.schedule.rounds == 1:
            return tree
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, round, 0, False), tree)

    def with_round(self, tree: Any, new: Any, round: Any) -> Any:
        if self.schedule.rounds == 1:
            return new
        return jax.tree.map(lambda a, n: lax.dynamic_update_index_in_dim(a, n, round, 0), tree, new)

    # -- what goes in and comes out ----------------------------------------------------------------------

    def split(self, tree: Any, *whole: None) -> Any:
        """The one annotation: the first dim is split over the axis (and `whole` ones are not)."""

        def one(a: Any) -> Any:
            return self.annotate(a, P(self.axis, *whole, *[OPEN] * (a.ndim - 1 - len(whole))))

        return jax.tree.map(one, tree)

    def dealt_out(self, tree: Any) -> Any:
        """A stack of layers as [S, R, K, ...], split over stages; and before that, as it is stored."""
        plan = self.schedule
        tree = self.split(to_stages(self.split(tree), plan.stages, plan.rounds, self.dealt))
        return jax.tree.map(lambda a: a[:, 0], tree) if plan.rounds == 1 else tree

    def written_out(self, tree: Any) -> Any:
        """Stacked weights as a list of layers, where those of a stage are no loop."""
        if not self.unroll and self.per_stage > 1:
            return tree
        at = (slice(None),) * (1 if self.schedule.rounds == 1 else 2)
        return [jax.tree.map(lambda a: a[(*at, k)], tree) for k in range(self.per_stage)]  # noqa: B023

    def collected(self, tree: Any) -> Any:
        """The layers' state [L, ...]."""
        if self.schedule.rounds == 1:
            tree = jax.tree.map(lambda a: a[:, None], tree)
        return from_stages(tree, self.layers, self.dealt)

    def by_layer(self, ys: Any) -> Any:
        """What stages handed out in every tick [T, S, K, ...] as [L, M, ...]."""
        plan = self.schedule
        items = [[plan.item(r, m) for m in range(plan.microbatches)] for r in range(plan.rounds)]
        ticks = np.asarray(items, np.int32) + np.arange(plan.stages, dtype=np.int32)[:, None, None]

        def one(a: Any) -> Any:
            rows = jax.vmap(lambda a, t: a[t])(jnp.moveaxis(a, 1, 0), ticks)  # [S, R, M, K, ...]
            return from_stages(jnp.swapaxes(rows, 2, 3), self.layers, self.dealt)

        return jax.tree.map(one, ys)

    # -- all stages, all ticks ---------------------------------------------------------------------------

    def stages(self, p: Any, state: Any, x: Any, tick: Any, inputs: Any, key: Any) -> Any:
        """All stages in one tick."""
        number = jnp.arange(self.schedule.stages, dtype=jnp.int32)
        f = jax.vmap(self.stage, (0, 0, 0, 0, None, None, None), spmd_axis_name=self.axis)
        return f(p, state, x, number, tick, inputs, key)

    def __call__(self, params: Any, x: Any, inputs: Any, state: Any, key: Any) -> Any:
        plan, s = self.schedule, self.schedule.stages
        weights, state = self.written_out(self.dealt_out(params)), self.dealt_out(state)
        x, inputs = to_microbatches((x, inputs), plan.microbatches)
        traffic = self.split(jax.tree.map(lambda a: _copies(a, s), x), None)
        # bubbles compute on rows like any other: nothing they do can be infinite that is finite elsewhere
        start = self.split(jax.tree.map(lambda a: _copies(lax.stop_gradient(a[0]), s), x))
        stages = self.stages
        if self.remat:
            policy = None if self.remat is True else self.remat
            stages = jax.checkpoint(stages, prevent_cse=False, policy=policy)

        def tick(carry: Any, t: Any) -> Any:
            traffic, buffer, state, total = carry
            with _jax.called_from(self.traceback):
                h = self.entering(traffic, buffer, t)
            buffer, state, aux = stages(weights, state, h, t, inputs, key)
            with _jax.called_from(self.traceback):
                buffer, state = self.split((buffer, state))
                traffic = self.leaving(traffic, buffer, t)
                if self.aux == "sum":
                    total = jax.tree.map(lambda a, y: a + jnp.sum(y, 1), total, aux)
            return (traffic, buffer, state, total), aux if self.aux == "stack" else None

        total = None
        if self.aux == "sum":
            made = jax.eval_shape(stages, weights, state, start, jnp.int32(0), inputs, key)[2]
            total = jax.tree.map(lambda a: jnp.zeros((s, *a.shape[2:]), a.dtype), made)
        count = jnp.arange(plan.ticks, dtype=jnp.int32)
        (traffic, _, state, total), ys = lax.scan(tick, (traffic, start, state, total), count)
        results = [from_microbatches(jax.tree.map(_of_last, self.split(traffic, None)))]
        if self.has_state:
            results.append(self.collected(state))
        if self.aux == "sum":
            results.append(jax.tree.map(lambda a: jnp.sum(a, 0), total))
        elif self.aux == "stack":
            results.append(self.by_layer(ys))
        return results[0] if len(results) == 1 else tuple(results)

    def entering(self, traffic: Any, buffer: Any, t: Any) -> Any:
        """What every stage works on in tick t: the first on a new microbatch, the others on what the one
        before them made; in a circular schedule the first also on what the last made."""
        round, coming, _ = self.schedule.at(t)
        first = (jnp.arange(self.schedule.stages) == 0) & (round == 0)

        def one(a: Any, b: Any) -> Any:
            new = lax.dynamic_index_in_dim(a, coming, 1, False)
            return _where(first.reshape(-1, *[1] * (new.ndim - 1)), new, self.shift(b))

        return self.split(jax.tree.map(one, traffic, buffer))

    def leaving(self, traffic: Any, buffer: Any, t: Any) -> Any:
        """The microbatch that is at the last stage in tick t, in its place: there it stays after its last
        round.  The first stage has read its block's row long before."""
        _, going, _ = self.schedule.at(t - (self.schedule.stages - 1))

        def one(a: Any, b: Any) -> Any:
            return lax.dynamic_update_index_in_dim(a, b, going, 1)

        return jax.tree.map(one, traffic, buffer)

    def shift(self, buffer: Any) -> Any:
        """Every stage's output to the next stage; in a circular schedule the last one's to the first."""
        if self.schedule.rounds > 1:
            return jnp.roll(buffer, 1, axis=0)
        config = [(1, -1, 0)] + [(0, 0, 0)] * (buffer.ndim - 1)
        return lax.pad(buffer, jnp.zeros((), buffer.dtype), config)


def _copies(a: Any, count: int) -> Any:
    return jnp.broadcast_to(a[None], (count, *a.shape))


def _where(mask: Any, a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(mask, x, y), a, b)


def _of_last(a: Any) -> Any:
    """The last stage's block of [S, M, ...]: a sum over stages, all others' being zeros."""
    last = lax.broadcasted_iota(jnp.int32, (a.shape[0],) + (1,) * (a.ndim - 1), 0) == a.shape[0] - 1
    return jnp.sum(jnp.where(last, a, jnp.zeros((), a.dtype)), 0, dtype=a.dtype)
