"""Equal equations computed once.

A program often computes a value twice (the mean, and the mean inside the variance). The compiler merges
such equations later; merging them first keeps the plan's collectives those of the compiled program.
What lies in a checkpoint's body is a program of its own: what it recomputes stays recomputed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.program import ANNOTATIONS, Body, Eqn, Lit, Var

# Effects, and annotations: each says something at its place.
_APART = frozenset(
    [*ANNOTATIONS, "debug_callback", "io_callback", "debug_print",
     "pure_callback", "optimization_barrier", "inspect_sharding", "dce_sink", "rng_uniform"]
)  # fmt: skip


def share(body: Body) -> None:
    """Replace equations that repeat an earlier one by its results, in every body, in place."""
    for b in body.all():
        _share(b)


def _share(body: Body) -> None:
    seen: dict[Any, Eqn] = {}
    same: dict[Var, Var] = {}
    kept = []
    for eqn in body.eqns:
        eqn.invars = [same.get(v, v) for v in eqn.invars]
        key = _key(eqn)
        earlier = seen.setdefault(key, eqn) if key is not None else eqn
        if earlier is eqn:
            kept.append(eqn)
        else:
            same.update(zip(eqn.outvars, earlier.outvars, strict=True))
    body.eqns = kept
    body.outvars = [same.get(v, v) for v in body.outvars]


def _key(eqn: Eqn) -> Any:
    """What makes two equations equal; None for one that stands for itself."""
    if eqn.bodies or eqn.name in _APART or eqn.params.get("has_side_effect"):
        return None
    key = (*work(eqn), tuple(_operand(v) for v in eqn.invars))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def work(eqn: Eqn) -> tuple[Any, ...]:
    """What an equation does to its operands: equal for equations that do the same."""
    return (
        eqn.primitive,
        tuple(sorted((k, _hashable(v)) for k, v in eqn.params.items())),
        tuple((v.shape, str(v.dtype)) for v in eqn.outvars),
        tuple(_operand(v) if isinstance(v, Lit) else None for v in eqn.invars),
    )


def _operand(v: Var) -> Any:
    if not isinstance(v, Lit):
        return v
    value = np.asarray(v.value)
    return ("literal", str(v.dtype), value.shape, value.tobytes()) if value.dtype != object else v


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value if not isinstance(value, (list, dict, set)) else id(value)
