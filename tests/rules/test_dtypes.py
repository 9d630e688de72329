"""Complex, double, half and eight-bit types through a handful of rules: values, gradients, padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise.testing import check

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "dot": lambda a: a @ a.T,
    "sum": lambda a: a.sum(0),
    "mean": lambda a: a - a.mean(1, keepdims=True),
    "roll": lambda a: jnp.roll(a, 3, 0),
    "pad": lambda a: jnp.pad(a, ((1, 2), (0, 0))),
    "cumsum": lambda a: jnp.cumsum(a, 0),
    "gather": lambda a: a[jnp.array([3, 0, 9, 3])],
    "scatter": lambda a: a.at[jnp.array([3, 0, 9, 3])].add(a[:4]),
    "reshape": lambda a: a.reshape(-1, 2),
    "flip": lambda a: jnp.flip(a, 0),
}
ORDERED: dict[str, Callable[[Any], Any]] = {
    "max": lambda a: a.max(0),
    "argmin": lambda a: a.argmin(0),
    "cummax": lambda a: lax.cummax(a, 0),
    "softmax": lambda a: jax.nn.softmax(a.astype(jnp.float32), 0).astype(a.dtype),
}


def values(dtype: Any) -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 4))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * rng.normal(size=(10, 4))
    return jnp.asarray(x, dtype)


def everywhere(f: Callable[[Any], Any], dtype: Any, tol: float, grad: bool = True) -> None:
    for mesh, spec in (({"x": 4}, P("x")), ({"x": 3, "y": 2}, P("x", "y"))):
        check(f, (values(dtype),), mesh, (spec,), tol=tol, grad=grad)


@pytest.mark.parametrize("name", PROGRAMS)
def test_complex(name: str) -> None:
    everywhere(PROGRAMS[name], np.complex64, 1e-5)


@pytest.mark.parametrize("name", ["dot", "sum", "cumsum", "scatter", "roll", "argmin"])
def test_double(name: str) -> None:
    with jax.enable_x64(True):
        everywhere({**PROGRAMS, **ORDERED}[name], np.float64, 1e-12)
        if name in PROGRAMS:
            everywhere(PROGRAMS[name], np.complex128, 1e-12, grad=False)


@pytest.mark.parametrize("name", [*PROGRAMS, *ORDERED])
def test_half(name: str) -> None:
    everywhere({**PROGRAMS, **ORDERED}[name], jnp.bfloat16, 0.1)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=str)
@pytest.mark.parametrize("name", ["roll", "pad", "gather", "reshape", "flip", "max"])
def test_eight_bits(name: str, dtype: Any) -> None:
    everywhere({**PROGRAMS, **ORDERED}[name], dtype, 0.5, grad=False)


def test_a_dot_of_eight_bits() -> None:
    def dot(a: Any) -> Any:
        return lax.dot(a, a.T, preferred_element_type=jnp.float32)

    for spec in (P("x"), P(None, "x")):
        check(dot, (values(jnp.float8_e4m3fn),), {"x": 2}, (spec,), tol=0.1, grad=False)
