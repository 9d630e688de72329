"""Sorts that carry their elements' positions, as argsort does: the positions order equal keys.

    sort (x, iota) by x, stable     ->  sort (x, iota) by both

which says the same, and lets a split dim be sorted without other positions being sent along.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from shardwise.ops.sort import ranked_p
from shardwise.pairing import _Counters
from shardwise.program import Body, Eqn, Var


def rank_sorts(body: Body) -> None:
    """Rewrite the sorts of a body (not of bodies in it) in place."""
    if any(e.name == "sort" for e in body.eqns):
        counters = _Counters(body)
        body.eqns = [_ranked(e, counters) if e.name == "sort" else e for e in body.eqns]


def _ranked(eqn: Eqn, counters: _Counters) -> Eqn:
    keys, d = eqn.params["num_keys"], eqn.params["dimension"]
    counts = (i for i, v in enumerate(eqn.invars) if _distinct(v, d) and counters.dim(v) == d)
    found = next(counts, None)
    if found is None or eqn.primitive is ranked_p:
        return eqn
    at = min(found, keys)
    order = [i for i in range(len(eqn.invars)) if i != found]
    order.insert(at, found)
    return dataclasses.replace(
        eqn,
        primitive=ranked_p,
        invars=[eqn.invars[i] for i in order],
        outvars=[eqn.outvars[i] for i in order],
        params={**eqn.params, "num_keys": at + 1},
    )


def _distinct(v: Var, d: int) -> bool:
    """Whether all positions, and one greater than all, are values of the operand's type."""
    dtype = np.dtype(v.dtype)
    return dtype.kind in "iu" and v.shape[d] - 1 < np.iinfo(dtype).max
