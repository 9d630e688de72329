"""Equal equations computed once.

A program often computes a value twice (the mean, and the mean inside the variance). The compiler merges
such equations later; merging them first keeps the plan's collectives those of the compiled program.
What lies in a checkpoint's body is a program of its own: what it recomputes stays recomputed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.program import Body, Eqn, Lit, Var

# Effects, and annotations: each says something at its place.
_APART = frozenset(
    ["annotation", "sharding_constraint", "debug_callback", "io_callback", "debug_print",
     "pure_callback", "optimization_barrier"]
)  # fmt: skip


def share(body: Body) -> None:
    """Replace equations that repeat an earlier one by its results, in every body, in place."""
    seen: dict[Any, Eqn] = {}
    same: dict[Var, Var] = {}
    kept = []
    for eqn in body.eqns:
        eqn.invars = [same.get(v, v) for v in eqn.invars]
        for sub in eqn.bodies:
            share(sub)
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
    if eqn.bodies or eqn.name in _APART:
        return None
    key = (
        eqn.primitive,
        tuple(_operand(v) for v in eqn.invars),
        tuple(sorted((k, _hashable(v)) for k, v in eqn.params.items())),
        tuple((v.shape, str(v.dtype)) for v in eqn.outvars),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


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
