"""Chains of slices, pads and concatenations merged into one move (GSPMD 4.6).

A shift can be spelled as a concatenation of slices, a pad and a slice, a roll, or updates of slices.
Each spelling, taken op by op, moves rows to an intermediate split and then again.  Here every such chain
along one dim becomes one `assemble` of pieces of the arrays it starts from.

    concatenate(slice(x, 1:), slice(x, :1))      -> assemble (x, 1, n-1), (x, 0, 1)
    concatenate(neg(slice(x, h:)), slice(x, :h)) -> assemble (neg x, h, h), (x, 0, h)

The last is the rotation of rotary embeddings: an elementwise op of a slice is a slice of the op.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from shardwise.ops.assemble import assemble_p
from shardwise.program import Body, Eqn, Lit, Var

MAX_PIECES = 64

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
    def __init__(self, body: Body, fresh: Any):
        self.body, self.fresh = body, fresh
        self.cuts: dict[Var, Cut] = {}
        self.scalars: dict[Var, Lit] = {}  # arrays of one element that hold a literal
        self.made: dict[Var, Eqn] = {}
        self.uses: dict[Var, int] = {}
        for eqn in body.eqns:
            for v in eqn.invars:
                self.uses[v] = self.uses.get(v, 0) + 1

    def run(self) -> None:
        out: list[Eqn] = []
        for eqn in self.body.eqns:
            out += self.equation(eqn)
            self.made.update(dict.fromkeys(eqn.outvars, eqn))
        self.body.eqns = out

    def equation(self, eqn: Eqn) -> list[Eqn]:
        """The equation, or what replaces it; remembers what its result is made of."""
        if eqn.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Lit):
            self.scalars[eqn.outvars[0]] = eqn.invars[0]
        hoisted = self.hoisted(eqn) if eqn.name == "concatenate" else []
        cut = self.cut(eqn)
        if cut is None:
            return [eqn]
        composed = self.composed(cut)
        self.cuts[eqn.outvars[0]] = composed
        if composed == cut:
            return [eqn]
        if len(composed.pieces) > MAX_PIECES or not any(v.rank for v, _, _ in composed.pieces):
            self.cuts[eqn.outvars[0]] = cut
            return [eqn]
        return [*hoisted, _assembled(eqn, composed)]

    def cut(self, eqn: Eqn) -> Cut | None:
        """What one equation cuts and joins, when it is along one dim and without strides."""
        f = {
            "slice": self.of_slice,
            "pad": self.of_pad,
            "concatenate": self.of_concatenate,
            "scatter": self.of_update,
            "dynamic_update_slice": self.of_update,
        }.get(eqn.name)
        return f(eqn) if f is not None and 0 not in eqn.outvars[0].shape else None

    def of_slice(self, eqn: Eqn) -> Cut | None:
        (x,), (y,) = eqn.invars, eqn.outvars
        changed = [d for d in range(x.rank) if x.shape[d] != y.shape[d]]
        if len(changed) != 1 or any(s != 1 for s in eqn.params["strides"] or ()):
            return None
        (d,) = changed
        return Cut(d, ((x, int(eqn.params["start_indices"][d]), y.shape[d]),))

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
        """`x.at[a:b].set(u)` with a known `a`: three pieces."""
        if eqn.name == "scatter":
            x, index, u = eqn.invars
            n = eqn.params["dimension_numbers"]
            plain = (
                not n.inserted_window_dims and not n.operand_batching_dims
                and len(n.scatter_dims_to_operand_dims) == 1 and index.shape == (1,)
                and eqn.params.get("update_jaxpr") is None
            )  # fmt: skip
            lit = self.scalars.get(index)
            if not plain or lit is None:
                return None
            d, start = n.scatter_dims_to_operand_dims[0], int(lit.value)
        else:
            x, u, *starts = eqn.invars
            changed = [d for d in range(x.rank) if x.shape[d] != u.shape[d]]
            if len(changed) != 1 or not all(isinstance(s, Lit) for s in starts):
                return None
            d = changed[0]
            start = int(np.clip(int(starts[d].value), 0, x.shape[d] - u.shape[d]))  # type: ignore[attr-defined]
        rows = u.shape[d]
        if [s for e, s in enumerate(x.shape) if e != d] != [
            s for e, s in enumerate(u.shape) if e != d
        ]:
            return None
        if start < 0 or start + rows > x.shape[d] or not rows or rows == x.shape[d]:
            return None
        parts = [(x, 0, start), (u, 0, rows), (x, start + rows, x.shape[d] - start - rows)]
        return Cut(d, tuple(p for p in parts if p[2] > 0))

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


def merge(body: Body, fresh: Any) -> None:
    """Merge the moves of a program and of its bodies, in place.

    Args:
      fresh: (shape, dtype) -> a new variable.
    """
    for eqn in body.eqns:
        for sub in eqn.bodies:
            merge(sub, fresh)
    _Merge(body, fresh).run()
