"""Adafactor as GShard trains with it (appendix A.2), for weights that are stacks of matrices.

Second moments are factored into one number a row and one a column; there is no first moment;
beta2 = min(0.99, 1 - t^-0.8); an update is scaled down where its root mean square exceeds 1; the
learning rate is rate / sqrt(max(t, warmup)), and relative to the size of the weights (Shazeer and
Stern 2018).

A stack of layers, and the experts of a layer, are many matrices in one array.  Optax's Adafactor factors
an array over its two largest dims: of experts [E, M, H] those may be E and H, and the moments of all
experts would be mixed, and clipped as one.  Here each layer's and each expert's matrix is treated by
itself, by mapping Optax's transformations over the leading dims.  So the moments of a split expert
stay with it: nothing of the optimizer is sent between devices but sums of squares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwise.nn.encoder_decoder import TranslationConfig

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """Adafactor's settings; the defaults are the paper's.

    Attributes:
      rate, warmup: of the learning rate, rate / sqrt(max(t, warmup)).
      beta2, decay: the second moments' decay at step t is min(beta2, 1 - t^-decay).
      clip: an update's largest root mean square, before the learning rate.
      relative: the learning rate is a share of the root mean square of the weights (at least 1e-3).
      factor_from: second moments are factored where both dims of a matrix are at least this.
    """

    rate: float = 1.0
    warmup: int = 10_000
    beta2: float = 0.99
    decay: float = 0.8
    clip: float = 1.0
    relative: bool = True
    factor_from: int = 128

    def __post_init__(self) -> None:
        if not self.rate > 0 or self.warmup < 1:
            raise ValueError(f"rate and warmup are above 0, not {self.rate} and {self.warmup}")
        if not 0 < self.beta2 < 1 or not self.decay > 0 or not self.clip > 0:
            raise ValueError(
                f"beta2 is between 0 and 1, decay and clip above 0, "
                f"not {self.beta2}, {self.decay} and {self.clip}"
            )

    def learning_rate(self, step: Any) -> Any:
        """Of step 0, 1, ...; also traced."""
        return self.rate * jnp.maximum(jnp.asarray(step, jnp.float32) + 1, self.warmup) ** -0.5


def adafactor(options: OptimizerOptions, config: TranslationConfig) -> Any:
    """The optimizer of a model's parameters, as an `optax.GradientTransformation`."""

    def beta2(step: Any, decay: Any) -> Array:
        return jnp.minimum(options.beta2, 1.0 - (jnp.asarray(step, jnp.float32) + 1) ** -decay)

    parts = [
        optax.scale_by_factored_rms(
            decay_rate=options.decay,
            decay_rate_fn=beta2,
            min_dim_size_to_factor=options.factor_from,
        ),
        optax.clip_by_block_rms(options.clip),
    ]
    if options.relative:
        parts.append(optax.scale_by_param_block_rms())
    parts.append(optax.scale_by_learning_rate(options.learning_rate))
    return per_matrix(optax.chain(*parts), lambda path: leading_dims(config, path))


def leading_dims(config: TranslationConfig, path: Any) -> int:
    """How many leading dims of a parameter say which matrix: of the stack, of the experts."""
    names = [getattr(k, "key", None) for k in path]
    stacked = config.scan and names[0] in ("encoder", "decoder")
    return int(stacked) + int("moe" in names and names[-1] != "gate")


def per_matrix(inner: Any, leading: Callable[[Any], int]) -> Any:
    """`inner` for each array, and for each index of its leading dims, by itself.

    Args:
      inner: an `optax.GradientTransformation` that needs parameters.
      leading: from a parameter's path in the tree to its number of leading dims.

    Returns:
      A transformation whose state is, in the place of each parameter, `inner`'s state for it; a number
      that counts steps is not repeated for every matrix.
    """

    def axes(p: Array, n: int) -> Any:
        """Of the state: what differs by matrix has a leading dim, a counter has none."""
        one = jax.ShapeDtypeStruct(p.shape[n:], p.dtype)
        return jax.tree.map(lambda x: 0 if x.ndim else None, jax.eval_shape(inner.init, one))

    def init(params: Any) -> Any:
        def one(path: Any, p: Array) -> Any:
            n = leading(path)
            f = inner.init
            for _ in range(n):
                f = jax.vmap(f, out_axes=axes(p, n))
            return f(p)

        return jax.tree_util.tree_map_with_path(one, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def one(path: Any, p: Array, u: Array, s: Any) -> Any:
            n = leading(path)
            f, at = inner.update, axes(p, n)
            for _ in range(n):
                f = jax.vmap(f, in_axes=(0, at, 0), out_axes=(0, at))
            return _Pair(*f(u, s, p))

        pairs = jax.tree_util.tree_map_with_path(one, params, updates, state)

        def part(name: str) -> Any:
            return jax.tree.map(
                lambda x: getattr(x, name), pairs, is_leaf=lambda x: isinstance(x, _Pair)
            )

        return part("update"), part("state")

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class _Pair:
    update: Any
    state: Any
