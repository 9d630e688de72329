"""Indices that pair each row with a position: `x[arange(n), ids]` read as a batch of lookups.

Written with `arange`, the index vector holds a column that is the row's own number.  A gather that
sees only positions must treat such rows as addressed: split rows would leave a pending sum.  Here
the column is recognised and dropped, and its dims become batching dims, as `take_along_axis` has
them from the start: split rows then cost nothing.  The same holds for scatter, and for gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from shardwise.program import Body, Eqn, Lit, Var

_SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")


def pair_rows(body: Body, fresh: Callable[[tuple[int, ...], Any], Var]) -> None:
    """Rewrite the gathers and scatters of a body (not of bodies in it) in place.

    `fresh` makes a new variable of a shape and dtype.  What the dropped columns leave unread stays;
    pruning takes it away.
    """
    counters = _Counters(body)
    out: list[Eqn] = []
    for eqn in body.eqns:
        while eqn.name == "gather" or eqn.name in _SCATTERS:
            found = _pair(eqn, counters)
            if found is None:
                break
            eqn = _drop_column(eqn, *found, counters, fresh, out)
        out.append(eqn)
    body.eqns = out


class _Counters:
    """Which values of a body count along one of their dims: 0, 1, 2, ... whatever the others are."""

    def __init__(self, body: Body):
        self.made_by = {v: e for e in body.eqns for v in e.outvars}
        self.consts = dict(body.consts)

    def dim(self, v: Var) -> int | None:
        """The dim along which `v` counts from 0, or None where that is not known."""
        if isinstance(v, Lit):
            return None
        if v in self.consts:
            counts = v.rank == 1 and np.array_equal(self.consts[v], np.arange(v.shape[0]))
            return 0 if counts else None
        eqn = self.made_by.get(v)
        step = _STEPS.get(eqn.name) if eqn else None
        return step(self, eqn) if step and eqn else None

    def columns(self, indices: Var) -> list[Var] | None:
        """The parts an index vector was put together from, when each is one column."""
        eqn = self.made_by.get(indices)
        if indices.shape[-1] == 1:
            return [indices]
        last = indices.rank - 1
        if eqn is None or eqn.name != "concatenate" or eqn.params["dimension"] != last:
            return None
        return list(eqn.invars) if all(v.shape[-1] == 1 for v in eqn.invars) else None


def _through_broadcast(c: _Counters, eqn: Eqn) -> int | None:
    (x, *_), (y,) = eqn.invars, eqn.outvars
    d = c.dim(x)
    if d is None:
        return None
    to = int(eqn.params["broadcast_dimensions"][d])
    return to if y.shape[to] == x.shape[d] else None


def _through_reshape(c: _Counters, eqn: Eqn) -> int | None:
    """Only dims of size 1 come and go."""
    (x, *_), (y,) = eqn.invars, eqn.outvars
    d = c.dim(x)
    if d is None or [s for s in x.shape if s != 1] != [s for s in y.shape if s != 1]:
        return None
    if x.shape[d] == 1:
        return None
    before = sum(s != 1 for s in x.shape[:d])
    return [i for i, s in enumerate(y.shape) if s != 1][before]


def _through_select(c: _Counters, eqn: Eqn) -> int | None:
    """`where(i < 0, i + n, i)`, the wrap of negative positions: what counts is never negative."""
    test = c.made_by.get(eqn.invars[0])
    if test is None or test.name != "lt":
        return None
    bound = test.invars[1]
    never = isinstance(bound, Lit) and np.all(np.asarray(bound.value) <= 0)
    return c.dim(eqn.invars[1]) if never and c.dim(test.invars[0]) is not None else None


_STEPS: dict[str, Callable[[_Counters, Eqn], int | None]] = {
    "iota": lambda c, eqn: int(eqn.params["dimension"]),
    "convert_element_type": lambda c, eqn: c.dim(eqn.invars[0]) if _holds(eqn) else None,
    "broadcast_in_dim": _through_broadcast,
    "reshape": _through_reshape,
    "squeeze": _through_reshape,
    "expand_dims": _through_reshape,
    "select_n": _through_select,
}


def _holds(eqn: Eqn) -> bool:
    """Whether a conversion leaves every position as it is."""
    to = np.dtype(eqn.outvars[0].dtype)
    if to.kind not in "iu":
        return False
    return max(eqn.outvars[0].shape, default=0) - 1 <= np.iinfo(to).max


def _pair(eqn: Eqn, counters: _Counters) -> tuple[int, int, int] | None:
    """(column, operand dim, indices dim) of a column that is its row's own number."""
    n = eqn.params["dimension_numbers"]
    operand, indices = eqn.invars[:2]
    gather = eqn.name == "gather"
    starts = n.start_index_map if gather else n.scatter_dims_to_operand_dims
    dropped = n.collapsed_slice_dims if gather else n.inserted_window_dims
    taken = n.start_indices_batching_dims if gather else n.scatter_indices_batching_dims
    for column, v in enumerate(counters.columns(indices) or ()):
        d = counters.dim(v)
        at = int(starts[column])
        if d is None or d == indices.rank - 1 or d in taken or at not in dropped:
            continue
        if operand.shape[at] == indices.shape[d]:
            return column, at, d
    return None


def _drop_column(
    eqn: Eqn,
    column: int,
    at: int,
    dim: int,
    counters: _Counters,
    fresh: Callable[[tuple[int, ...], Any], Var],
    out: list[Eqn],
) -> Eqn:
    """The same equation with operand dim `at` and indices dim `dim` as a pair of batching dims."""
    indices = eqn.invars[1]
    columns = counters.columns(indices)
    assert columns is not None
    rest = columns[:column] + columns[column + 1 :]
    if len(rest) == 1:
        new = rest[0]
    else:
        new = fresh((*indices.shape[:-1], len(rest)), indices.dtype)
        made = (
            Eqn(lax.concatenate_p, rest, [new], {"dimension": indices.rank - 1}, [], eqn.info, eqn.id)
            if rest
            else Eqn(lax.broadcast_in_dim_p, *_nothing(new), [], eqn.info, eqn.id)
        )
        counters.made_by[new] = made
        out.append(made)
    params = {**eqn.params, "dimension_numbers": _paired(eqn, column, at, dim)}
    invars = [eqn.invars[0], new, *eqn.invars[2:]]
    if eqn.name == "gather":
        return Eqn(eqn.primitive, invars, eqn.outvars, params, [], eqn.info, eqn.id)
    return Eqn(eqn.primitive, invars, eqn.outvars, params, [], eqn.info, eqn.id)
