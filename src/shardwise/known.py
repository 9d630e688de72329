"""Indices that are written into the program: gathers and scatters that are slices and updates.

`x.at[1:-1].set(u)`, `x[np.arange(n)[::-1]]` or `x.at[::2].add(u)` reach us as gathers and scatters
of computed indices.  Where an index comes of literals, constants and counting alone it is worked
out here, and the equation is spelled as the move that it is, so that rows go straight to where they
belong and neighbouring moves can be merged.

    one window                  slice; dynamic_update_slice at a known place
    rows first, first + k, ...  strided slice, reversed for k < 0; interior pad and select
    few runs of rows            slices, joined
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from shardwise.ops.indexing import Indexing
from shardwise.ops.reduce import identity
from shardwise.program import Body, Eqn, Lit, Var

MAX_INDEX = 1 << 18  # entries of an index that is worked out
MAX_RUNS = 16
MAX_DEPTH = 200

Function = Callable[..., Any]

_REDUCING: dict[str, tuple[str, Function]] = {
    "scatter-add": ("sum", lax.add),
    "scatter-sub": ("sum", lax.sub),
    "scatter-mul": ("prod", lax.mul),
    "scatter-min": ("min", lax.min),
    "scatter-max": ("max", lax.max),
}


# ---- values --------------------------------------------------------------------------------------


class Known:
    """The whole numbers of a body that follow from the program's text, worked out when asked for."""

    def __init__(self, body: Body):
        self.made = {v: e for e in body.eqns for v in e.outvars}
        self.consts = dict(body.consts)
        self.found: dict[Var, np.ndarray | None] = {}

    def get(self, v: Var, depth: int = 0) -> np.ndarray | None:
        """The value of `v`, None where it is not known."""
        if isinstance(v, Lit):
            return np.asarray(v.value) if _whole_number(v) else None
        if v not in self.found:
            self.found[v] = self.work_out(v, depth) if depth < MAX_DEPTH else None
        return self.found[v]

    def work_out(self, v: Var, depth: int) -> np.ndarray | None:
        if not _whole_number(v) or v.size > MAX_INDEX:
            return None
        if v in self.consts:
            return np.asarray(self.consts[v])
        eqn = self.made.get(v)
        f = _NUMPY.get(eqn.name) if eqn is not None else None
        if eqn is None or f is None:
            return None
        xs = []
        for operand in eqn.invars:
            x = self.get(operand, depth + 1)
            if x is None:
                return None
            xs.append(x.astype(operand.dtype))
        with np.errstate(all="ignore"):
            return np.asarray(f(eqn, *xs)).astype(v.dtype).reshape(v.shape)


def _whole_number(v: Var) -> bool:
    return v.dtype == np.bool_ or (
        isinstance(v.dtype, np.dtype) and np.issubdtype(v.dtype, np.integer)
    )


def _iota(eqn: Eqn) -> np.ndarray:
    shape, d = eqn.params["shape"], eqn.params["dimension"]
    count = np.arange(shape[d]).reshape([-1 if i == d else 1 for i in range(len(shape))])
    return np.broadcast_to(count, shape)


def _broadcast(eqn: Eqn, x: np.ndarray) -> np.ndarray:
    shape = eqn.params["shape"]
    dims = eqn.params["broadcast_dimensions"]
    inner = [1] * len(shape)
    for d, n in zip(dims, x.shape, strict=True):
        inner[d] = n
    return np.broadcast_to(x.reshape(inner), shape)


def _slice(eqn: Eqn, x: np.ndarray) -> np.ndarray:
    p = eqn.params
    strides = p["strides"] or [1] * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], strides))]


def _select(_: Eqn, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    which = np.broadcast_to(which, cases[0].shape)
    return np.choose(which.astype(np.int32), cases)


def _elementwise(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *xs: f(*xs)


_NUMPY: dict[str, Callable[..., Any]] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "select_n": _select,
    "reshape": lambda e, x: x.reshape(e.params["new_sizes"]),
    "squeeze": lambda e, x: np.squeeze(x, tuple(e.params["dimensions"])),
    "transpose": lambda e, x: np.transpose(x, e.params["permutation"]),
    "rev": lambda e, x: np.flip(x, tuple(e.params["dimensions"])),
    "concatenate": lambda e, *xs: np.concatenate(xs, e.params["dimension"]),
    "convert_element_type": _elementwise(lambda x: x),
    "copy": _elementwise(lambda x: x),
    "clamp": _elementwise(lambda lo, x, hi: np.minimum(np.maximum(x, lo), hi)),
    "add": _elementwise(np.add),
    "sub": _elementwise(np.subtract),
    "mul": _elementwise(np.multiply),
    "max": _elementwise(np.maximum),
    "min": _elementwise(np.minimum),
    "neg": _elementwise(np.negative),
    "lt": _elementwise(np.less),
    "le": _elementwise(np.less_equal),
    "gt": _elementwise(np.greater),
    "ge": _elementwise(np.greater_equal),
    "eq": _elementwise(np.equal),
    "ne": _elementwise(np.not_equal),
    "and": _elementwise(np.bitwise_and),
    "or": _elementwise(np.bitwise_or),
    "not": _elementwise(np.invert),
}


# ---- what a gather or scatter of known indices is --------------------------------------------------


def as_moves(eqn: Eqn, known: Known) -> Function | None:
    """A function of the equation's operands that does the same by slices, pads and updates.

    None where the indices are not known, or reach out of range, or follow no simple pattern.
    """
    scatter = eqn.name in _REDUCING or eqn.name == "scatter"
    if not scatter and eqn.name != "gather":
        return None
    if eqn.name == "scatter" and eqn.params["update_jaxpr"] is not None:
        return None
    if any(0 in v.shape for v in (*eqn.invars, *eqn.outvars)) or not _plain(eqn.outvars[0]):
        return None
    index = known.get(eqn.invars[1])
    ix = Indexing.of(eqn)
    if index is None or ix.shared:
        return None
    starts = _starts(ix, index.astype(np.int64), eqn.params["mode"])
    if starts is None:
        return None
    slices = eqn.invars[2] if scatter else eqn.outvars[0]
    count = len(starts)
    if count == 1:
        first = tuple(starts[0].tolist())
        return _update(eqn, ix, first) if scatter else _window(ix, first, slices.shape)
    if (starts == starts[0]).all():
        return None if scatter else _repeated(ix, tuple(starts[0].tolist()), slices.shape)
    if len(ix.indexed) != 1 or ix.window[ix.indexed[0]] is not None:
        return None
    (d,) = ix.indexed
    if scatter:
        return _rows_written(eqn, ix, d, starts[:, d])
    return _rows_read(ix, d, starts[:, d], slices.shape)


def _plain(v: Var) -> bool:
    return isinstance(v.dtype, np.dtype)  # random keys are none


def _starts(ix: Indexing, index: np.ndarray, mode: Any) -> np.ndarray | None:
    """[slices, operand dims]: where each starts; None where one is out of range (but for clip)."""
    flat = index.reshape(-1, index.shape[-1])
    starts = np.zeros((len(flat), len(ix.shape)), np.int64)
    for d, column in enumerate(ix.column):
        if column is not None:
            starts[:, d] = flat[:, column]
    last = np.array(ix.shape) - np.array(ix.sizes)
    if mode == lax.GatherScatterMode.CLIP:
        return np.clip(starts, 0, last)
    return starts if ((starts >= 0) & (starts <= last)).all() else None


def _window(ix: Indexing, start: tuple[int, ...], shape: tuple[int, ...]) -> Function:
    """One window: its dims keep their order, and only dims of size 1 come or go."""
    stop = [s + n for s, n in zip(start, ix.sizes, strict=True)]
    return lambda x, _: lax.reshape(lax.slice(x, start, stop), shape)


def _repeated(ix: Indexing, start: tuple[int, ...], shape: tuple[int, ...]) -> Function:
    """The same window for every index."""
    windows = [w for w in ix.window if w is not None]
    one = tuple(shape[w] for w in windows)
    cut = _window(ix, start, one)
    return lambda x, i: lax.broadcast_in_dim(cut(x, i), shape, windows)


def _update(eqn: Eqn, ix: Indexing, start: tuple[int, ...]) -> Function | None:
    """One window written: an update in place; or, of half the operand or more, a pad and the op."""
    if eqn.name == "scatter":
        at = tuple(np.int32(s) for s in start)
        return lambda x, _, u: lax.dynamic_update_slice_p.bind(x, lax.reshape(u, ix.sizes), *at)
    config = [(s, n - s - k, 0) for s, n, k in zip(start, ix.shape, ix.sizes, strict=True)]
    return _combined(eqn, config, lambda u: lax.reshape(u, ix.sizes))


def _combined(eqn: Eqn, config: Any, place: Function) -> Function | None:
    """`x` and the padded updates, put together by the op that a reducing scatter is."""
    op, combine = _REDUCING[eqn.name]
    x, u = eqn.invars[0], eqn.invars[2]
    spread = functools.reduce(operator.mul, (1 + k for _, _, k in config), 1)
    if x.dtype == np.bool_ or 2 * u.size * spread < x.size:
        return None
    nothing = identity(op, x.dtype)
    return lambda x, _, u: combine(x, lax.pad(place(u), nothing, config))


def _progression(rows: np.ndarray) -> tuple[int, int] | None:
    """(first, step) of evenly spaced rows."""
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    return (int(rows[0]), step) if (np.diff(rows) == step).all() else None


def _taken(x: Any, d: int, first: int, step: int, count: int) -> Any:
    """Rows first, first + step, ... of a dim."""
    if step == 0:
        row = lax.slice_in_dim(x, first, first + 1, axis=d)
        shape = [count if e == d else n for e, n in enumerate(x.shape)]
        return lax.broadcast_in_dim(row, shape, range(x.ndim))
    low = min(first, first + step * (count - 1))
    high = max(first, first + step * (count - 1)) + 1
    out = lax.slice_in_dim(x, low, high, abs(step), d)
    return lax.rev(out, (d,)) if step < 0 else out


def _runs(rows: np.ndarray) -> list[tuple[int, int, int]] | None:
    """Rows as few (first, step, count) with steps of one; None where they are many."""
    out: list[tuple[int, int, int]] = []
    for row in rows.tolist():
        if out:
            first, step, count = out[-1]
            if (count == 1 and row - first in (1, -1)) or (
                count > 1 and row == first + step * count
            ):
                out[-1] = (first, row - first if count == 1 else step, count + 1)
                continue
        if len(out) == MAX_RUNS:
            return None
        out.append((row, 1, 1))
    return out


def _rows_read(ix: Indexing, d: int, rows: np.ndarray, shape: tuple[int, ...]) -> Function | None:
    even = _progression(rows)
    if even is not None:
        runs = [(*even, len(rows))]
    elif 2 * len(rows) < ix.shape[d] or (runs := _runs(rows)) is None:
        return None  # a few rows here and there: a pending sum of them costs less
    order = [e for e in range(len(ix.shape)) if e != d]
    at = next(iter(ix.batch), 0)

    def read(x: Any, _: Any) -> Any:
        parts = [_taken(x, d, *run) for run in runs]
        out = lax.concatenate(parts, d) if len(parts) > 1 else parts[0]
        if len(ix.batch) == 1 and at == d:
            return out
        # the window dims keep their order; the rows go to the dims of the indices
        out = lax.transpose(out, [d, *order])
        split = [shape[w] for w in ix.batch] + [shape[w] for w in ix.window if w is not None]
        out = lax.reshape(out, split)
        places = [*ix.batch, *(w for w in ix.window if w is not None)]
        return lax.transpose(out, np.argsort(places))

    return read


def _rows_written(eqn: Eqn, ix: Indexing, d: int, rows: np.ndarray) -> Function | None:
    even = _progression(rows)
    if even is None or even[1] == 0 or len(ix.batch) != 1:
        return None
    first, step = even
    backwards, n = step < 0, ix.shape[d]
    low, high = min(first, int(rows[-1])), max(first, int(rows[-1]))
    config = [(0, 0, 0)] * len(ix.shape)
    config[d] = (low, n - 1 - high, abs(step) - 1)
    places = [ix.batch[0] if w is None else w for w in ix.window]

    def placed(u: Any) -> Any:
        u = lax.transpose(u, places)
        return lax.rev(u, (d,)) if backwards else u

    if eqn.name != "scatter":
        return _combined(eqn, config, placed)
    if abs(step) == 1:
        at = [np.int32(low if e == d else 0) for e in range(len(ix.shape))]
        return lambda x, _, u: lax.dynamic_update_slice_p.bind(x, placed(u), *at)
    if 2 * len(rows) * abs(step) < n:
        return None

    def write(x: Any, _: Any, u: Any) -> Any:
        row = lax.broadcasted_iota(np.int32, x.shape, d)
        hit = (row >= low) & (row <= high) & ((row - low) % abs(step) == 0)
        return lax.select(hit, lax.pad(placed(u), np.zeros((), u.dtype), config), x)

    return write
