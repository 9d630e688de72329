"""The training step of the demo, three ways to run it, and the comparison of what they gave.

The step is written for one device.  What differs between the ways is only the annotation hook:
`sw.annotate` under `sw.spmd`, nothing on one device, `with_sharding_constraint` under `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding

import shardwise as sw
from shardwise.demo.options import DemoOptions
from shardwise.nn import transformer

State = tuple[Any, Any]  # parameters, optimizer state


def make_step(options: DemoOptions, annotate: transformer.Annotate) -> Callable[..., Any]:
    """train_step(params, opt_state, tokens) -> (params, opt_state, loss), with Adam."""
    optimizer = optax.adam(options.rate)

    def train_step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        def objective(params: Any) -> jax.Array:
            return transformer.loss(
                options.model, params, tokens, annotate, options.strategy, options.axes
            )

        loss, grads = jax.value_and_grad(objective)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def initial_state(options: DemoOptions) -> State:
    """Fresh parameters and optimizer state, on one device; the same for the same seed."""
    init = jax.jit(functools.partial(transformer.init, options.model))
    params = init(jax.random.key(options.seed))
    return params, jax.jit(optax.adam(options.rate).init)(params)


def abstract_arguments(options: DemoOptions) -> tuple[Any, Any, jax.ShapeDtypeStruct]:
    """Shapes of the step's arguments: a plan needs no more."""
    params, opt_state = jax.eval_shape(lambda: initial_state(options))
    return params, opt_state, jax.ShapeDtypeStruct((options.batch, options.seq), jnp.int32)


def partitioned(options: DemoOptions, mesh: Mesh) -> Any:
    """The step under shardwise."""
    return sw.spmd(make_step(options, sw.annotate), mesh=mesh, donate_argnums=(0, 1))


def one_device(options: DemoOptions) -> Any:
    """The step as it was written."""
    return jax.jit(make_step(options, transformer.identity), donate_argnums=(0, 1))


def by_jax(options: DemoOptions, mesh: Mesh) -> Any:
    """The step with the same annotations, partitioned by jax.jit."""

    def annotate(x: jax.Array, spec: Any) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.jit(make_step(options, annotate), donate_argnums=(0, 1))


@dataclasses.dataclass
class Training:
    """What a run of some steps gave.

    Attributes:
      losses: loss of each step, in nats a byte.
      params: the parameters at the end, as numpy arrays.
      seconds: wall time of the steps, the first (which compiles) left out.
    """

    losses: list[float]
    params: Any
    seconds: float

    def tokens_per_second(self, options: DemoOptions) -> float:
        steps = len(self.losses) - 1
        return steps * options.batch * options.seq / self.seconds if steps else 0.0


def train(
    step: Any,
    options: DemoOptions,
    batches: Iterator[np.ndarray],
    on_step: Callable[[int, float, float], None] = lambda step, loss, rate: None,
) -> Training:
    """Run `options.steps` steps; `on_step(number, loss, tokens per second)` after each."""
    params, opt_state = initial_state(options)
    losses: list[float] = []
    started = time.perf_counter()
    for number in range(options.steps):
        params, opt_state, loss = step(params, opt_state, next(batches))
        losses.append(float(loss))
        if number == 0:
            started = time.perf_counter()
        elapsed = time.perf_counter() - started
        rate = number * options.batch * options.seq / elapsed if number else 0.0
        on_step(number + 1, losses[-1], rate)
    seconds = time.perf_counter() - started
    return Training(losses, whole_arrays(params), seconds)


def whole_arrays(tree: Any) -> Any:
    """A tree as numpy arrays at their logical sizes (a `PaddedArray` is one array)."""
    return jax.tree.map(np.asarray, tree, is_leaf=lambda x: isinstance(x, sw.PaddedArray))


def relative_difference(a: Any, b: Any) -> float:
    """Largest |a - b| over all arrays of two trees, relative to each array's largest |b|."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        scale = max(float(np.max(np.abs(y), initial=0.0)), 1e-30)
        worst = max(worst, float(np.max(np.abs(x - y), initial=0.0)) / scale)
    return worst
