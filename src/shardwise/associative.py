"""`lax.associative_scan` found again: JAX writes it out as a tree of strided slices and interleavings.

Split along the scanned dim, every level of that tree moves rows of its own.  The scan is recognised by
supposing and checking: two strided slices suggest one and what is between them and the next two the
function; what JAX writes for a scan with that function must then be, equation by equation, what the
program has.  Only elementwise functions of arrays of one shape are taken for granted at other sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from shardwise.ops.associative import Combine, associative_scan_p
from shardwise.ops.registry import level_of
from shardwise.program import Body, Eqn, Lit, Var

MAX_ARRAYS = 4

Trace = Callable[[Callable[..., Any], Sequence[Any]], Body]


def find_scans(body: Body, trace: Trace, fresh: Callable[[Var], Var]) -> None:
    """Rewrite the scans of a body (not of bodies in it) in place.

    Args:
      trace: captures a function of abstract arguments, scans left as they are written.
      fresh: makes a variable like another.
    """
    at = 0
    while at < len(body.eqns):
        found = _find(body, at, trace) if _halves(body.eqns[at], 0) else None
        if found is not None:
            region, scan, outs = found
            scan.outvars = [outs.get(j) or fresh(scan.invars[j]) for j in range(len(scan.outvars))]
            body.eqns[at : at + region] = [scan]
        at += 1


def _halves(eqn: Eqn, start: int) -> tuple[int, int] | None:
    """(dim, its size) where an equation takes every second row of one dim, from `start` on."""
    if eqn.name != "slice":
        return None
    x, strides, starts = eqn.invars[0], eqn.params["strides"], eqn.params["start_indices"]
    dims = [d for d, s in enumerate(strides or ()) if s != 1]
    if (
        len(dims) != 1
        or strides[dims[0]] != 2
        or any(s for d, s in enumerate(starts) if d != dims[0])
    ):
        return None
    (d,) = dims
    kept = [y for e, y in enumerate(eqn.outvars[0].shape) if e != d]
    whole = kept == [s for e, s in enumerate(x.shape) if e != d]
    rows = eqn.outvars[0].shape[d] == x.shape[d] // 2
    return (d, x.shape[d]) if whole and rows and starts[d] == start else None


def _pairs(eqns: Sequence[Eqn], at: int) -> list[Var]:
    """The arrays whose even rows, and then odd rows, are taken by the equations from `at` on."""
    where = _halves(eqns[at], 0)
    run = itertools.takewhile(lambda e: _halves(e, 0) == where, eqns[at : at + MAX_ARRAYS])
    xs = [e.invars[0] for e in run]
    odd = eqns[at + len(xs) : at + 2 * len(xs)]
    same = len(odd) == len(xs) and all(
        _halves(e, 1) == where and e.invars[0] is x for e, x in zip(odd, xs, strict=True)
    )
    return xs if same and len({x.shape for x in xs}) == 1 else []


def _find(body: Body, at: int, trace: Trace) -> tuple[int, Eqn, dict[int, Var]] | None:
    """(number of equations, the scan they are, its results that are read) for a scan that begins here."""
    eqns = body.eqns
    arrays, where = _pairs(eqns, at), _halves(eqns[at], 0)
    if not arrays or where is None or where[1] < 4:
        return None
    axis, k = where[0], len(arrays)
    first = at + 2 * k
    again = (axis, where[1] // 2)
    end = next((i for i in range(first, len(eqns)) if _halves(eqns[i], 0) == again), None)
    combined = _pairs(eqns, end) if end is not None else []
    if end is None or len(combined) != k:
        return None
    if _read_outside(body, at, eqns[at:end], set(combined)):  # residuals of a gradient, mostly
        return None
    combine = _combine(eqns[at:end], k, combined)
    if combine is None:
        return None
    extra = combine.extra
    like = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (*arrays, *extra)]
    for live in _subsets(k):

        def scan(*xs: Any, live: tuple[int, ...] = live) -> Any:
            ys = lax.associative_scan(lambda a, b: combine(a, b, xs[k:]), list(xs[:k]), axis=axis)
            return [ys[j] for j in live]

        expected = trace(scan, like)
        region = eqns[at : at + len(expected.eqns)]
        names = _same(expected, region, [*arrays, *extra], dict(body.consts))
        if names is None:
            continue
        outs = {j: names[v] for j, v in zip(live, expected.outvars, strict=True)}
        if not _read_outside(body, at, region, set(outs.values())):
            params = {"axis": axis, "combine": combine}
            one = Eqn(
                associative_scan_p, [*arrays, *extra], list(arrays), params, [], region[0].info,
                region[0].id, region[0].callers,
            )  # fmt: skip
            return len(region), one, outs
    return None


def _subsets(k: int) -> Iterator[tuple[int, ...]]:
    """The results that may be read, all first."""
    for n in range(k, 0, -1):
        yield from itertools.combinations(range(k), n)


def _combine(eqns: Sequence[Eqn], k: int, results: Sequence[Var]) -> Combine | None:
    """The function between the first slices and the next, if it is elementwise in arrays of one shape."""
    slices, inner = eqns[: 2 * k], tuple(eqns[2 * k :])
    rows = slices[0].outvars[0].shape
    known = {e.outvars[0] for e in slices}
    extra: dict[Var, None] = {}
    for eqn in inner:
        for v in eqn.invars:
            if not isinstance(v, Lit) and v not in known:
                if v.rank:
                    return None
                extra[v] = None
        known.update(eqn.outvars)
        shapes = {v.shape for v in (*eqn.invars, *eqn.outvars)}
        scalar = eqn.name == "broadcast_in_dim" and not eqn.invars[0].rank
        if eqn.bodies or not (scalar or level_of(eqn.primitive) == "elementwise"):
            return None
        if not shapes <= {rows, ()}:
            return None
    if not set(results) <= known - set(extra):
        return None
    firsts = [e.outvars[0] for e in slices]
    return Combine(inner, tuple(firsts[:k]), tuple(firsts[k:]), tuple(extra), tuple(results))


def _same(
    expected: Body, region: Sequence[Eqn], arguments: Sequence[Var], consts: dict[Var, Any]
) -> dict[Var, Var] | None:
    """What the variables of one program are called in the other, if they are the same program."""
    if len(region) != len(expected.eqns):
        return None
    names: dict[Var, Var] = dict(zip(expected.invars, arguments, strict=True))
    mine = dict(expected.consts)

    def value(v: Var, constants: dict[Var, Any]) -> Any:
        return v.value if isinstance(v, Lit) else constants.get(v)

    def alike(a: Var, b: Var) -> bool:
        if a in names:
            return names[a] is b
        x, y = value(a, mine), value(b, consts)
        if x is None or y is None or a.shape or b.shape or a.dtype != b.dtype:
            return False
        return bool(np.asarray(x == y)) or bool(np.asarray(x != x) & np.asarray(y != y))

    for a, b in zip(expected.eqns, region, strict=True):
        if a.primitive is not b.primitive or len(a.invars) != len(b.invars) or a.bodies or b.bodies:
            return None
        if not all(map(alike, a.invars, b.invars)) or not _equal(a.params, b.params):
            return None
        names.update(zip(a.outvars, b.outvars, strict=True))
    return names


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    # A stride of one may be said or left out.
    def plain(params: dict[str, Any]) -> dict[str, Any]:
        strides = params.get("strides")
        gone = "strides" in params and (strides is None or all(s == 1 for s in strides))
        return {**params, "strides": None} if gone else params

    try:
        return bool(plain(a) == plain(b))
    except ValueError:  # arrays among the parameters
        return False


def _read_outside(body: Body, at: int, region: Sequence[Eqn], outs: set[Var]) -> bool:
    """Whether something between is read by the rest of the program."""
    inside = {v for e in region for v in e.outvars} - outs
    rest = itertools.islice(body.eqns, at + len(region), None)
    return not inside.isdisjoint(body.outvars) or any(not inside.isdisjoint(e.invars) for e in rest)
