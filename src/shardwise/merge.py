"""Chains of slices, pads and concatenations merged into one move (GSPMD 4.6).

A shift can be spelled as a concatenation of slices, a pad and a slice, a roll, or updates of slices.
Each spelling, taken op by op, moves rows to an intermediate split and then again.  Here every such chain
along one dim becomes one `assemble` of pieces of the arrays it starts from.

    concatenate(slice(x, 1:), slice(x, :1))      -> assemble (x, 1, n-1), (x, 0, 1)
    concatenate(neg(slice(x, h:)), slice(x, :h)) -> assemble (neg x, h, h), (x, 0, h)
    pad(g, (0, 1)) + pad(h, (n-1, 0))            -> assemble (g, 0, n-1), (h, 0, 1)
    dynamic_slice(concatenate(x, x), i)          -> rotate x, i

The second is the rotation of rotary embeddings: an elementwise op of a slice is a slice of the op; the
third is the gradient of such a chain, a roll's say; the last is a `jnp.roll` by a traced amount.  Gathers
and scatters of known indices are spelled as moves first (`known`), moves that change nothing are dropped,
and results without elements are made of nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
from jax import lax

from shardwise.known import Known, as_moves
from shardwise.ops.assemble import assemble_p
from shardwise.ops.rotate import rotate_p
from shardwise.program import ANNOTATIONS, Body, Eqn, Lit, Var

MAX_PIECES = 64

# Equations that mean more than their result: annotations, and what has effects.
_KEPT = frozenset([*ANNOTATIONS, "optimization_barrier"])
_UNARY = frozenset(["neg", "convert_element_type", "abs", "exp", "tanh", "logistic", "cos", "sin"])


@dataclasses.dataclass(frozen=True)
class Cut:
    """A value as pieces along a dim: (source, first row, rows); a scalar source fills."""

    dim: int
    pieces: tuple[tuple[Var, int, int], ...]

    def rows(self, start: int, size: int) -> tuple[tuple[Var, int, int], ...]:
        """The pieces of rows [start, start + size)."""
        out, at = [], 0
        for source, first, n in self.pieces:
            lo, hi = max(start, at), min(start + size, at + n)
            if lo < hi:
                out.append((source, first + lo - at if source.rank else 0, hi - lo))
            at += n
        return tuple(out)


class _Merge:
    def __init__(self, body: Body, fresh: Any, written_out: Any):
        self.body, self.fresh, self.written_out = body, fresh, written_out
        self.known = Known(body)
        self.cuts: dict[Var, Cut] = {}
        self.scalars: dict[Var, Lit] = {}  # arrays of one element that hold a literal
        self.made: dict[Var, Eqn] = {}
        self.same: dict[Var, Var] = {}  # values that are another value
        self.uses: dict[Var, int] = {}
        for eqn in body.eqns:
            for v in eqn.invars:
                self.uses[v] = self.uses.get(v, 0) + 1

    def run(self) -> None:
        out: list[Eqn] = []
        for eqn in self.body.eqns:
            out += self.replaced(eqn)
        self.body.eqns = out
        self.body.outvars = [self.same.get(v, v) for v in self.body.outvars]

    def replaced(self, eqn: Eqn) -> list[Eqn]:
        """The equation, or what replaces it; remembers what its results are made of."""
        eqn.invars = [self.same.get(v, v) for v in eqn.invars]
        f = _nothing(eqn) or as_moves(eqn, self.known)
        if f is None:
            new = self.equation(eqn)
            self.made.update(dict.fromkeys(eqn.outvars, eqn))
            return new
        eqns, results = self.written_out(f, eqn, self.body)
        result: Var = results[0]
        for e in eqns:
            for v in e.invars:
                self.uses[v] = self.uses.get(v, 0) + 1
        new = [n for e in eqns for n in self.replaced(e)]
        self.same[eqn.outvars[0]] = self.same.get(result, result)
        return new

    def equation(self, eqn: Eqn) -> list[Eqn]:
        """One equation, merged with those before it."""
        if eqn.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Lit):
            self.scalars[eqn.outvars[0]] = eqn.invars[0]
        if eqn.name == "dynamic_slice" and (turned := self.turned(eqn)) is not None:
            return [turned]
        hoisted = self.hoisted(eqn) if eqn.name == "concatenate" else []
        cut = self.cut(eqn)
        if cut is None:
            return [eqn]
        composed = self.composed(cut)
        if len(composed.pieces) == 1 and _is_all(composed, eqn.outvars[0]):
            self.same[eqn.outvars[0]] = composed.pieces[0][0]
            return hoisted
        self.cuts[eqn.outvars[0]] = composed
        if (
            composed == cut
            and eqn.name not in ("add", "add_any")
            and (eqn.name != "concatenate" or _each_once(cut, eqn))
        ):
            return [eqn]
        if len(composed.pieces) > MAX_PIECES or not any(v.rank for v, _, _ in composed.pieces):
            self.cuts[eqn.outvars[0]] = cut
            return [eqn]
        return [*hoisted, _assembled(eqn, composed)]

    def turned(self, eqn: Eqn) -> Eqn | None:
        """A dynamic slice of an array joined to itself: the array turned around (`jnp.roll`)."""
        twice, (y,) = self.made.get(eqn.invars[0]), eqn.outvars
        if twice is None or twice.name != "concatenate":
            return None
        d, (x, *more) = twice.params["dimension"], twice.invars
        if more != [x] or x.shape != y.shape:
            return None
        return Eqn(
            rotate_p, [x, eqn.invars[1 + d]], [y], {"dimension": d}, [], eqn.info, eqn.id,
            eqn.callers,
        )  # fmt: skip

    def cut(self, eqn: Eqn) -> Cut | None:
        """What one equation cuts and joins, when it is along one dim and without strides."""
        f = {
            "slice": self.of_slice,
            "dynamic_slice": self.of_slice,
            "pad": self.of_pad,
            "concatenate": self.of_concatenate,
            "dynamic_update_slice": self.of_update,
            "add": self.of_sum,
            "add_any": self.of_sum,
        }.get(eqn.name)
        return f(eqn) if f is not None and 0 not in eqn.outvars[0].shape else None

    def of_slice(self, eqn: Eqn) -> Cut | None:
        x, y = eqn.invars[0], eqn.outvars[0]
        changed = [d for d in range(x.rank) if x.shape[d] != y.shape[d]]
        if not changed:
            return Cut(0, ((x, 0, y.shape[0]),)) if x.rank else None
        if len(changed) != 1 or any(s != 1 for s in eqn.params.get("strides") or ()):
            return None
        (d,) = changed
        if eqn.name == "slice":
            start = int(eqn.params["start_indices"][d])
        elif isinstance(at := eqn.invars[1 + d], Lit):
            start = int(np.clip(int(at.value), 0, x.shape[d] - y.shape[d]))
        else:
            return None
        return Cut(d, ((x, start, y.shape[d]),))

    def of_pad(self, eqn: Eqn) -> Cut | None:
        x, fill = eqn.invars
        config = [tuple(map(int, c)) for c in eqn.params["padding_config"]]
        changed = [d for d, c in enumerate(config) if any(c)]
        if len(changed) != 1 or config[changed[0]][2]:
            return None
        (d,) = changed
        low, high, _ = config[d]
        start, stop = max(0, -low), x.shape[d] - max(0, -high)
        if start >= stop:
            return None
        parts = [(fill, 0, low), (x, start, stop - start), (fill, 0, high)]
        return Cut(d, tuple(p for p in parts if p[2] > 0))

    def of_concatenate(self, eqn: Eqn) -> Cut | None:
        d = eqn.params["dimension"]
        return Cut(d, tuple((v, 0, v.shape[d]) for v in eqn.invars if v.shape[d]))

    def of_update(self, eqn: Eqn) -> Cut | None:
        """An update at a known place: three pieces."""
        x, u, *starts = eqn.invars
        changed = [d for d in range(x.rank) if x.shape[d] != u.shape[d]]
        if not changed:
            return Cut(0, ((u, 0, u.shape[0]),)) if u.rank else None
        (d, *more), rows = changed, u.shape[changed[0]]
        at = starts[d]
        if more or not rows or not isinstance(at, Lit):
            return None
        start = int(np.clip(int(at.value), 0, x.shape[d] - rows))
        parts = [(x, 0, start), (u, 0, rows), (x, start + rows, x.shape[d] - start - rows)]
        return Cut(d, tuple(p for p in parts if p[2] > 0))

    def of_sum(self, eqn: Eqn) -> Cut | None:
        """A sum of pieces that are padded with zeros to lie beside each other: the gradient of a roll."""
        a, b = (self.cuts.get(v) for v in eqn.invars)
        if a is None or b is None or a.dim != b.dim:
            return None
        parts = []
        ends = sorted({e for c in (a, b) for e in itertools.accumulate(n for _, _, n in c.pieces)})
        for lo, hi in itertools.pairwise([0, *ends]):
            (left,), (right,) = a.rows(lo, hi - lo), b.rows(lo, hi - lo)
            if not (_zeros(left[0]) or _zeros(right[0])):
                return None
            parts.append(right if _zeros(left[0]) else left)
        return Cut(a.dim, tuple(parts))

    def composed(self, cut: Cut) -> Cut:
        """The same pieces taken from where they first came from; neighbours joined again."""
        out: list[tuple[Var, int, int]] = []
        for source, start, n in cut.pieces:
            inner = self.cuts.get(source)
            fill = self.scalars.get(source)
            if inner is not None and inner.dim == cut.dim:
                parts = inner.rows(start, n)
            elif fill is not None and source.rank:
                parts = ((fill, 0, n),)
            else:
                parts = ((source, start, n),)
            for v, first, rows in parts:
                last = out[-1] if out else None
                if last and last[0] is v and (not v.rank or last[1] + last[2] == first):
                    out[-1] = (v, last[1], last[2] + rows)
                else:
                    out.append((v, first, rows))
        return Cut(cut.dim, tuple(out))

    def hoisted(self, eqn: Eqn) -> list[Eqn]:
        """Elementwise ops of slices that this concatenation reads, as slices of elementwise ops."""
        new: list[Eqn] = []
        for v in eqn.invars:
            made = self.made.get(v)
            if made is None or made.name not in _UNARY or self.uses.get(v) != 1:
                continue
            inner = self.cuts.get(made.invars[0])
            if inner is None or inner.dim != eqn.params["dimension"] or len(inner.pieces) != 1:
                continue
            source, start, n = inner.pieces[0]
            if not source.rank:
                continue
            whole = self.fresh(source.shape, v.dtype)
            new.append(Eqn(made.primitive, [source], [whole], made.params, [], made.info, made.id))
            self.cuts[v] = Cut(inner.dim, ((whole, start, n),))
        return new


def _assembled(eqn: Eqn, cut: Cut) -> Eqn:
    operands = list(dict.fromkeys(v for v, _, _ in cut.pieces))
    pieces = tuple((operands.index(v), start, n) for v, start, n in cut.pieces)
    params = {"dimension": cut.dim, "pieces": pieces}
    return Eqn(assemble_p, operands, eqn.outvars, params, [], eqn.info, eqn.id)


def _zeros(v: Var) -> bool:
    return isinstance(v, Lit) and not v.rank and not isinstance(v.value, bool) and v.value == 0


def _is_all(cut: Cut, y: Var) -> bool:
    """Whether the one piece of a cut is the whole of its source."""
    source, first, _ = cut.pieces[0]
    return source.shape == y.shape and first == 0


def _each_once(cut: Cut, eqn: Eqn) -> bool:
    """Whether a concatenation is of arrays that have rows, each once: an `assemble` has each only once
    as an operand, so that it is brought to its layout, and priced, once."""
    return len(cut.pieces) == len(eqn.invars) == len(set(eqn.invars))


def _nothing(eqn: Eqn) -> Any:
    """What makes a result without elements: it has no need of what it was computed from."""
    if len(eqn.outvars) != 1 or eqn.bodies:
        return None
    (y,) = eqn.outvars
    if 0 not in y.shape or not isinstance(y.dtype, np.dtype):
        return None
    if not eqn.invars or all(isinstance(v, Lit) for v in eqn.invars) or eqn.name in _KEPT:
        return None
    return lambda *_: lax.full(y.shape, 0, y.dtype)


def merge(body: Body, fresh: Any, written_out: Any) -> None:
    """Merge the moves of a program and of its bodies, in place.

    Args:
      fresh: (shape, dtype) -> a new variable.
      written_out: (function, equation, body) -> the equations of the function of its operands, and
        their results; constants go to the body.
    """
    for b in body.all():
        _Merge(b, fresh, written_out).run()
