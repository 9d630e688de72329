"""Elementwise primitives: every dim of every operand is the result's dim of the same position.

A dim of size 1 is broadcast by the primitive itself, and scalars are.  What varies is in which operands
an op is linear: there a pending sum may be carried through instead of being finished first.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as jp

from shardwise import _jax_primitives
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn

Shape = tuple[int, ...]


def find(*names: str) -> list[Any]:
    """Primitives by name, those this version of JAX has."""
    found = [getattr(space, f"{n}_p", None) for n in names for space in (jp, lax)]
    found += [_INNER[n] for n in names if n in _INNER]
    return list(dict.fromkeys(p for p in found if p is not None))


_INNER = {**_jax_primitives.inner_primitives(), **_jax_primitives.generator_primitives()}


def pointwise(eqn: Eqn, linear: tuple[tuple[int, ...], ...] = ()) -> FactorRule:
    """`i j, i j -> i j`; a dim of size 1 that is broadcast, like a scalar, has no factor."""
    shapes = tuple(v.shape for v in eqn.invars)
    return _pointwise(shapes, eqn.outvars[0].shape, len(eqn.outvars), linear)


@functools.lru_cache(maxsize=1 << 12)
def _pointwise(
    shapes: tuple[Shape, ...], out: Shape, results: int, linear: tuple[tuple[int, ...], ...]
) -> FactorRule:
    b = RuleBuilder()
    dims = b.factors(out)

    def operand(shape: Shape) -> list[int | None]:
        if not shape:
            return []
        return [f if s == n else None for f, s, n in zip(dims, shape, out, strict=True)]

    return b.build([operand(s) for s in shapes], [dims] * results, linear=linear)


_NONLINEAR = find(
    "abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clz", "cos", "cosh", "digamma", "eq", "eq_to", "erf", "erf_inv",
    "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "integer_pow",
    "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "min",
    "ne", "nextafter", "not", "one_minus_square", "or", "polygamma", "polynomial",
    "population_count", "pow", "reduce_precision",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "xor", "zeta",
    "threefry2x32", "threefry4x32",
)  # fmt: skip

_LINEAR = {
    ((0,),): find("neg", "conj", "real", "imag", "xla_metadata_value"),
    ((0,), (1,)): find("mul"),
    ((0, 1),): find("add", "sub", "add_jaxvals", "complex"),
}


for _p in dict.fromkeys(_NONLINEAR):
    rule(_p, level="elementwise")(pointwise)


def _linear(groups: tuple[tuple[int, ...], ...]) -> Any:
    return lambda eqn: pointwise(eqn, groups)


for _groups, _ps in _LINEAR.items():
    for _p in _ps:
        rule(_p, level="elementwise")(_linear(_groups))


@rule(lax.div_p, level="elementwise")
def _div(eqn: Eqn) -> FactorRule:
    """Linear in the numerator, but only where division is exact arithmetic (not for integers)."""
    return pointwise(eqn, ((0,),) if jnp.issubdtype(eqn.outvars[0].dtype, jnp.inexact) else ())


@rule(lax.convert_element_type_p, level="elementwise")
def _convert(eqn: Eqn) -> FactorRule:
    """Linear when no rounding happens before the sum is finished: to a type at least as wide."""
    src, dst = eqn.invars[0].dtype, eqn.outvars[0].dtype
    widens = (
        jnp.issubdtype(src, jnp.inexact)
        and jnp.issubdtype(dst, jnp.inexact)
        and jnp.promote_types(src, dst) == dst
    )
    return pointwise(eqn, ((0,),) if widens else ())


@local(lax.convert_element_type_p)
def _convert_local(ctx: LocalContext, eqn: Eqn, x: Any) -> Any:
    return lax.convert_element_type_p.bind(x, **{**eqn.params, "sharding": None})


@rule(lax.select_n_p, level="elementwise")
def _select_n(eqn: Eqn) -> FactorRule:
    """Linear in all cases together: the predicate picks the same case on every term."""
    return pointwise(eqn, (tuple(range(1, len(eqn.invars))),))


@rule(lax.clamp_p, level="elementwise")
def _clamp(eqn: Eqn) -> FactorRule:
    return pointwise(eqn)


@rule(lax.bitcast_convert_type_p, level="elementwise")
def _bitcast(eqn: Eqn) -> FactorRule:
    """Same width: elementwise.  Otherwise the last dim of one side holds the parts, whole."""
    (x,), (y,) = eqn.invars, eqn.outvars
    b = RuleBuilder()
    shared = b.factors(x.shape[: min(x.rank, y.rank)])
    parts = [b.factor(v.shape[-1]) for v in (x, y) if v.rank > len(shared)]
    return b.build(
        [shared + parts if x.rank > len(shared) else shared],
        [shared + parts if y.rank > len(shared) else shared],
        whole=parts,
    )


@rule(*find("dce_sink"), level="elementwise")
def _sink(eqn: Eqn) -> FactorRule:
    """`i j -> `: keeps its operand from being dropped, wherever it lies."""
    b = RuleBuilder()
    return b.build([b.factors(v.shape) for v in eqn.invars], [])


@rule(*find("optimization_barrier"), level="elementwise")
def _barrier(eqn: Eqn) -> FactorRule:
    """Each result is its own operand, whatever the shapes."""
    b = RuleBuilder()
    dims = [b.factors(v.shape) for v in eqn.invars]
    return b.build(dims, dims)
