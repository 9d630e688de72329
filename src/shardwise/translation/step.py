"""The training step of the translation model, written for one device.

State is a tree of arrays, and all there is: parameters, the optimizer's moments, the number of steps
done, and a table of what happened to each language's tokens since it was last reported.  Random
numbers of a step are a function of the seed and its number.  So a state saved and loaded goes on
as if nothing had happened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwise.nn import encoder_decoder as model
from shardwise.translation.optimizer import OptimizerOptions, adafactor

Array = jax.Array
State = dict[str, Any]
Batch = dict[str, Array]

LANGUAGE_COLUMNS = ("nats", "tokens", "overflow", "routed")
"""Of the table [languages, 4]: nats and tokens of the targets; tokens that no expert took, and all that
were routed, counted once for each MoE layer (0 in a dense model)."""


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What the numbers of a training run depend on, beside its data and its mesh.

    Attributes:
      strategy: a key of `nn.encoder_decoder.STRATEGIES`.
      languages: how many there are.
      languages_every: the table of languages starts anew after so many steps.
      seed: of parameters, dropout and random routing.
    """

    model: model.TranslationConfig
    optimizer: OptimizerOptions = OptimizerOptions()  # noqa: RUF009 - frozen
    strategy: str = "gshard"
    languages: int = 1
    languages_every: int = 100
    seed: int = 0


def initial_state(options: StepOptions) -> State:
    """Fresh parameters and moments."""
    params = model.init(options.model, jax.random.key(options.seed))
    return {
        "params": params,
        "optimizer": adafactor(options.optimizer, options.model).init(params),
        "step": jnp.zeros((), jnp.int32),
        "languages": jnp.zeros((options.languages, len(LANGUAGE_COLUMNS)), jnp.float32),
    }


def make_step(
    options: StepOptions,
    annotate: Callable[..., Array] = model.identity,
    axes: tuple[str, ...] = ("x", "y"),
) -> Callable[[State, Batch], tuple[State, dict[str, Array]]]:
    """`train_step(state, batch) -> (state, metrics)`.

    Metrics are those of `encoder_decoder.loss` that are not of single sequences, "total" (what is
    minimised), "rate" (the learning rate) and "languages", the table after this step.
    """
    optimizer = adafactor(options.optimizer, options.model)

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        number, params = state["step"], state["params"]
        key = jax.random.fold_in(jax.random.key(options.seed), number)

        def objective(params: Any) -> tuple[Array, dict[str, Array]]:
            return model.loss(
                options.model, params, batch, key=key, annotate=annotate, axes=axes,
                strategy=options.strategy,
            )  # fmt: skip

        (total, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params)
        updates, moments = optimizer.update(grads, state["optimizer"], params)
        table = jnp.where(number % options.languages_every == 0, 0.0, state["languages"])
        table = table.at[batch["language"]].add(_rows(metrics))
        new = {
            "params": optax.apply_updates(params, updates),
            "optimizer": moments,
            "step": number + 1,
            "languages": table,
        }
        shown = {k: v for k, v in metrics.items() if not k.startswith("sequence_")}
        rate = options.optimizer.learning_rate(number)
        return new, {**shown, "total": total, "rate": rate, "languages": table}

    return train_step


def _rows(metrics: dict[str, Array]) -> Array:
    """[B, 4]: each sequence's part of LANGUAGE_COLUMNS."""
    columns = [metrics.get(f"sequence_{name}") for name in LANGUAGE_COLUMNS]
    zero = jnp.zeros_like(metrics["sequence_tokens"])
    return jnp.stack([zero if c is None else c for c in columns], axis=-1)
