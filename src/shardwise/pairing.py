"""Indices that pair each row with a position: `x[arange(n), ids]` read as a batch of lookups.

Written with `arange`, the index vector holds a column that is the row's own number.  A gather that
sees only positions must treat such rows as addressed: split rows would leave a pending sum.  Here
the column is recognised and dropped, and its dims become batching dims, as `take_along_axis` has
them from the start: split rows then cost nothing.  The same holds for scatter, and for gradients.
"""

from __future__ import annotations

import dataclasses
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
            column, at, dim = found
            indices = _without(column, eqn, counters, fresh, out)
            numbers = _paired(eqn.params["dimension_numbers"], at, dim, eqn.name == "gather")
            # Sorted by row number first, the rest need not be sorted on its own.
            params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
            invars = [eqn.invars[0], indices, *eqn.invars[2:]]
            eqn = dataclasses.replace(eqn, invars=invars, params=params)
        out.append(eqn)
    body.eqns = out


def _without(
    column: int,
    eqn: Eqn,
    counters: _Counters,
    fresh: Callable[[tuple[int, ...], Any], Var],
    out: list[Eqn],
) -> Var:
    """The index vector of an equation without one of its columns."""
    old = eqn.invars[1]
    rest = [v for i, v in enumerate(counters.columns(old)) if i != column]
    if len(rest) == 1:
        return rest[0]
    new = fresh((*old.shape[:-1], len(rest)), old.dtype)
    params = {"dimension": old.rank - 1}
    made = Eqn(lax.concatenate_p, rest, [new], params, [], eqn.info, eqn.id)
    counters.made_by[new] = made
    out.append(made)
    return new


class _Counters:
    """Which values of a body count along one of their dims: 0, 1, 2, ... over the whole of it."""

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

    def columns(self, indices: Var) -> list[Var]:
        """The parts an index vector was put together from; none unless each is one column."""
        eqn = self.made_by.get(indices)
        if eqn is None or eqn.name != "concatenate" or eqn.params["dimension"] != indices.rank - 1:
            return []
        return list(eqn.invars) if all(v.shape[-1] == 1 for v in eqn.invars) else []


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
    return c.dim(eqn.invars[1]) if _never(c, eqn.invars[0]) else None


def _never(c: _Counters, test: Var) -> bool:
    """Whether a predicate is known to be false: no, or a counter below 0."""
    if test in c.consts:
        return not np.any(np.asarray(c.consts[test]))
    eqn = c.made_by.get(test)
    if eqn is None or eqn.name != "lt":
        return False
    counter, bound = eqn.invars
    low = isinstance(bound, Lit) and np.all(np.asarray(bound.value) <= 0)
    return bool(low) and c.dim(counter) is not None


_STEPS: dict[str, Callable[[_Counters, Eqn], int | None]] = {
    "iota": lambda c, eqn: int(eqn.params["dimension"]) if _holds(eqn) else None,
    "convert_element_type": lambda c, eqn: c.dim(eqn.invars[0]) if _holds(eqn) else None,
    "broadcast_in_dim": _through_broadcast,
    "reshape": _through_reshape,
    "squeeze": _through_reshape,
    "expand_dims": _through_reshape,
    "select_n": _through_select,
}


def _holds(eqn: Eqn) -> bool:
    """Whether every position fits the result's type."""
    to = np.dtype(eqn.outvars[0].dtype)
    if to.kind not in "iu":
        return False
    return max(eqn.outvars[0].shape, default=0) - 1 <= np.iinfo(to).max


def _pair(eqn: Eqn, counters: _Counters) -> tuple[int, int, int] | None:
    """(column, operand dim, indices dim) of a column that is its row's own number, if one is."""
    n = eqn.params["dimension_numbers"]
    operand, indices = eqn.invars[:2]
    gather = eqn.name == "gather"
    starts = n.start_index_map if gather else n.scatter_dims_to_operand_dims
    dropped = n.collapsed_slice_dims if gather else n.inserted_window_dims
    taken = n.start_indices_batching_dims if gather else n.scatter_indices_batching_dims
    columns = counters.columns(indices)
    for column, v in enumerate(columns if len(columns) > 1 else ()):
        at, dim = int(starts[column]), counters.dim(v)
        if dim in (None, indices.rank - 1) or dim in taken or at not in dropped:
            continue
        if operand.shape[at] == indices.shape[dim]:
            return column, at, dim
    return None


def _drop(dims: Any, gone: int) -> tuple[int, ...]:
    return tuple(int(d) for d in dims if d != gone)


def _paired(n: Any, at: int, dim: int, gather: bool) -> Any:
    """Dimension numbers with operand dim `at` and indices dim `dim` as one more batching pair."""
    old = n.start_indices_batching_dims if gather else n.scatter_indices_batching_dims
    pairs = sorted([*zip(n.operand_batching_dims, old, strict=True), (at, dim)])
    operand_dims, index_dims = (tuple(map(int, p)) for p in zip(*pairs, strict=True))
    if gather:
        return n._replace(
            collapsed_slice_dims=_drop(n.collapsed_slice_dims, at),
            start_index_map=_drop(n.start_index_map, at),
            operand_batching_dims=operand_dims,
            start_indices_batching_dims=index_dims,
        )
    return n._replace(
        inserted_window_dims=_drop(n.inserted_window_dims, at),
        scatter_dims_to_operand_dims=_drop(n.scatter_dims_to_operand_dims, at),
        operand_batching_dims=operand_dims,
        scatter_indices_batching_dims=index_dims,
    )
