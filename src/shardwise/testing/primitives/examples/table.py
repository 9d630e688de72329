"""The table of examples, and the values they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Example:
    """One equation of a primitive.

    Attributes:
      primitive, family: its name and where the page has it.
      fn, args: the primitive is the last equation of that name in `fn(*args)`.
      tol: allowed difference of values.
      mesh: the mesh of the brute-force test; limit: of the splits tried there.
      runs: whether CPUs have it, so that the test can run it.
      platform: where it is a primitive, if elsewhere capture writes it out.
    """

    primitive: str
    family: str
    fn: Callable[..., Any]
    args: Sequence[Any]
    tol: float = 1e-4
    mesh: dict[str, int] = dataclasses.field(default_factory=lambda: {"x": 2, "y": 2})
    limit: int = 6
    runs: bool = True
    platform: str = ""


EXAMPLES: dict[str, Example] = {}


def example(
    primitive: str, family: str, fn: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """Put an example into the table."""
    if primitive in EXAMPLES:
        raise ValueError(f"two examples of {primitive}")
    EXAMPLES[primitive] = Example(primitive, family, fn, args, **options)


def floats(*shape: int, dtype: Any = jnp.float32) -> np.ndarray:
    """Floats between 0.1 and 0.9, inside the domain of every function."""
    x = np.random.default_rng(sum(shape) + 1).uniform(0.1, 0.9, shape)
    return np.asarray(jnp.asarray(x, dtype))


def ints(*shape: int, low: int = 0, high: int = 9, dtype: Any = np.int32) -> np.ndarray:
    return np.random.default_rng(sum(shape) + 2).integers(low, high, shape).astype(dtype)


def bools(*shape: int) -> np.ndarray:
    return ints(*shape, high=2).astype(bool)


def complexes(*shape: int) -> np.ndarray:
    return (floats(*shape) + 1j * floats(*shape, 1)[..., 0]).astype(np.complex64)


def keys(*shape: int) -> Any:
    words = np.random.default_rng(5).integers(0, 2**32, (*shape, 2), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words))


def matrices(*shape: int) -> np.ndarray:
    """Positive definite: every decomposition of them exists and is well conditioned."""
    x = floats(*shape)
    return (x @ np.swapaxes(x, -1, -2) + 2 * np.eye(shape[-1])).astype(np.float32)
