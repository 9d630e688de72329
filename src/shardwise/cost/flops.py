"""Floating-point operations of a per-device jaxpr.

Contractions count 2 per multiply-add, everything else one per element of its result (as the compilers'
own cost analyses do for elementwise work); loops are multiplied, the dearest branch of a cond counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from shardwise import _jax

# Data movement and bookkeeping: no arithmetic.
_FREE = frozenset([
    "all_gather", "all_to_all", "axis_index", "bitcast_convert_type", "broadcast_in_dim", "concatenate",
    "convert_element_type", "copy", "dynamic_slice", "dynamic_update_slice", "gather", "iota",
    "iota_2x32_shape", "optimization_barrier", "pad", "ppermute", "reshape", "rev", "scatter",
    "select_n", "slice", "squeeze", "transpose",
])  # fmt: skip


def flops(jaxpr: Any) -> float:
    """Operations one device does per run of the jaxpr (while loops count one iteration)."""
    return sum(flops_by_scope(jaxpr).values())


def flops_by_scope(jaxpr: Any) -> dict[str, float]:
    """The same, by the innermost of the program's own named scopes an equation comes from.

    `jnp.einsum` opens one of its own name ("gsm,me->gse"), and its backward pass is in it too; what is in
    no scope is under "".
    """
    found: dict[str, float] = {}

    def walk(jaxpr: Any, times: float, outer: str) -> None:
        for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
            scope = _jax.scope_of(eqn) or outer
            bodies = list(subjaxprs(eqn))
            if eqn.primitive.name == "cond":
                bodies = [max(eqn.params["branches"], key=flops)]
            if not bodies:
                found[scope] = found.get(scope, 0.0) + times * _eqn(eqn)
            for body in bodies:
                trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
                walk(body, times * trips, scope)

    walk(jaxpr, 1.0, "")
    return found


def _eqn(eqn: Any) -> float:
    """Of an equation without bodies."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2.0 * _size(eqn.outvars[0]) * math.prod(lhs[i] for i in contract)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _size(eqn.outvars[0]) * math.prod(kernel) / max(out_features, 1)
    if name in _FREE:
        return 0.0
    if name.startswith(("reduce_", "arg", "cum", "psum", "pmax", "pmin")):
        return float(sum(_size(v) for v in eqn.invars))
    return float(sum(_size(v) for v in eqn.outvars))


def _size(v: Any) -> int:
    return math.prod(v.aval.shape)


def subjaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs an equation runs: bodies of loops, branches, calls; not a reduction's scalar monoid."""
    if eqn.primitive.name in (
        "reduce",
        "scatter",
        "scatter-add",
        "scatter_add",
    ) or eqn.primitive.name.startswith("scatter"):
        return
    for value in eqn.params.values():
        for v in value if isinstance(value, (tuple, list)) else (value,):
            inner = _jax.open_jaxpr(v)[0]
            if hasattr(inner, "eqns"):
                yield inner
