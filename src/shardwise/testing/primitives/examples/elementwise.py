"""Elementwise primitives, and those of types."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import primitives as jp

from shardwise.ops.elementwise import find
from shardwise.testing.primitives.examples.table import (
    bools,
    complexes,
    example,
    floats,
    ints,
)

# One split of one dim says it all.
_SPLIT: dict[str, Any] = {"mesh": {"x": 3}, "limit": 1}

_ONE = """
    abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv
    erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt
    square tan tanh
"""
_TWO = """
    add atan2 complex div eq ge gt igamma igammac le lt max min mul ne nextafter pow rem sub zeta
    polygamma
"""
_BITS = "and or xor shift_left shift_right_arithmetic shift_right_logical"
_TOTAL = "eq_to le_to lt_to"


def _simple(name: str, *args: Any, family: str = "Elementwise", **params: Any) -> None:
    """A primitive bound as it stands."""
    (p,) = find(name)
    example(name, family, lambda *xs: p.bind(*xs, **params), *args, **_SPLIT)


def _function(name: str, *args: Any, family: str = "Elementwise") -> None:
    f = getattr(
        lax, {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}.get(name, name)
    )
    example(name, family, f, *args, **_SPLIT)


for _name in _ONE.split():
    _function(_name, floats(5))
for _name in _TWO.split():
    _function(_name, floats(5) + 1, floats(5))
for _name in _BITS.split():
    _function(_name, ints(5), ints(5, high=4))
for _name in _TOTAL.split():
    _simple(_name, floats(5), floats(5))
_function("acosh", floats(5) + 1)
_function("clz", ints(5))
_function("population_count", ints(5))
_function("real", complexes(5))
_function("imag", complexes(5))
example("conj", "Elementwise", jnp.conj, complexes(5), **_SPLIT)
example("not", "Elementwise", lax.bitwise_not, bools(5), **_SPLIT)
example("integer_pow", "Elementwise", lambda x: lax.integer_pow(x, 3), floats(5), **_SPLIT)
example("reduce_precision", "Elementwise", lambda x: lax.reduce_precision(x, 5, 7), floats(5),
        **_SPLIT)  # fmt: skip
example("regularized_incomplete_beta", "Elementwise", lax.betainc, floats(5), floats(5), floats(5),
        **_SPLIT)  # fmt: skip
example("igamma_grad_a", "Elementwise", lax.igamma_grad_a, floats(5) + 1, floats(5), **_SPLIT)
example("clamp", "Elementwise", lax.clamp, np.float32(0.3), floats(5), floats(5) + 0.2,
        **_SPLIT)  # fmt: skip
example("select_n", "Elementwise", lax.select_n, bools(5), floats(5), floats(5) + 1, **_SPLIT)
example("add_any", "Elementwise", jp.add_jaxvals_p.bind, floats(5), floats(5), **_SPLIT)

# -- types -------------------------------------------------------------------------------------------

example("convert_element_type", "Types", lambda x: lax.convert_element_type(x, jnp.bfloat16),
        floats(5), **_SPLIT)  # fmt: skip
example("bitcast_convert_type", "Types",
        lambda x: lax.bitcast_convert_type(x, jnp.uint8), floats(5, 3))  # fmt: skip
example("optimization_barrier", "Types", lambda x, y: lax.optimization_barrier((x, y)), floats(5),
        floats(2, 3), **_SPLIT)  # fmt: skip
example("xla_metadata_value", "Types", lambda x: set_xla_metadata(x, note="one"), floats(5),
        **_SPLIT)  # fmt: skip
example("dce_sink", "Types", lambda x: lax.dce_sink(x) or x, floats(5), **_SPLIT)
