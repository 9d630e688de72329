"""`FactorRule`: how the dims of one equation correspond, as data (the one rule all passes read).

A *factor* is an index of the operation, as in an einsum.  A rule lists, for every dim of every
operand and result, the factors it is made of (major first):

    b m k, b k n -> b m n  sum=k            dot_general: k is contracted, partial results are summed
    (a b) c -> a b c                        a reshape that splits a dim: a compound dim
    a s -> a s  special=s                   a slice of the second dim: the op's own code when s is split
    a w -> a w  whole=w                     a sort: w must lie whole on every device

Completion, partition, cost and reports all read this value; there is no second statement of how a
primitive's dims correspond.  A factor's axes are the same on every dim it appears in.  A *special*
factor may tie dims of different sizes (a slice's operand and result); the op then moves the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from shardwise.mesh import MeshAxes, hashed_once

Factors = tuple[int, ...]  # of one dim, major first
Dims = tuple[Factors, ...]  # of one value


@hashed_once
@dataclasses.dataclass(frozen=True)
class FactorRule:
    """How an equation's dims correspond.

    Attributes:
      operands, results: per value, per dim, the factors the dim is made of.
      sizes: factor -> its size (for a special factor the size on the operand).
      reduced: (factor, op) pairs: when the factor is split, the results are partial with `op`.
      special: factors whose split needs the op's own code (`ops.local`) and its price (`ops.comm`).
      whole: factors that cannot be split; `even`: that can be split only where their size divides.
      linear: groups of operands in which the op is jointly linear, so that a pending sum on all of
        a group may be carried through: `mul` has ((0,), (1,)), `add` has ((0, 1),).
      variant: which of an op's several rules this is, for its local code.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    reduced: tuple[tuple[int, str], ...] = ()
    special: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    even: frozenset[int] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    variant: str = ""

    def op_of(self, factor: int) -> str | None:
        """The pending reduction a split of `factor` leaves on the results, if any."""
        return next((op for f, op in self.reduced if f == factor), None)

    def __str__(self) -> str:
        name = "abcdefghijklmnopqrstuvwxyz"

        def dim(fs: Factors) -> str:
            text = "".join(name[f] if f < 26 else f"f{f}" for f in fs)
            return "1" if not fs else text if len(fs) == 1 else f"({' '.join(text)})"

        def value(dims: Dims) -> str:
            return " ".join(map(dim, dims)) or "()"

        text = ", ".join(map(value, self.operands)) + " -> " + ", ".join(map(value, self.results))
        for op in sorted({o for _, o in self.reduced}):
            text += f"  {op}=" + ",".join(dim((f,)) for f, o in self.reduced if o == op)
        for label in ("special", "whole"):
            if fs := getattr(self, label):
                text += f"  {label}=" + ",".join(dim((f,)) for f in sorted(fs))
        return text


class RuleBuilder:
    """Builds a rule dim by dim: `f = b.factor(8)`; then `b.build([[f]], [[f]])`."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def factor(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def factors(self, sizes: Iterable[int]) -> list[int]:
        return [self.factor(s) for s in sizes]

    def build(
        self,
        operands: Sequence[Sequence[int | Sequence[int] | None]],
        results: Sequence[Sequence[int | Sequence[int] | None]],
        *,
        reduced: dict[int, str] | None = None,
        special: Iterable[int] = (),
        whole: Iterable[int] = (),
        even: Iterable[int] = (),
        linear: Iterable[Iterable[int]] = (),
        variant: str = "",
    ) -> FactorRule:
        """A dim is a factor, a list of factors (compound), or None (a dim of no factor, size 1)."""

        def dims(value: Sequence[int | Sequence[int] | None]) -> Dims:
            return tuple(
                () if d is None else (d,) if isinstance(d, int) else tuple(d) for d in value
            )

        return FactorRule(
            tuple(dims(v) for v in operands),
            tuple(dims(v) for v in results),
            tuple(self.sizes),
            tuple(sorted((reduced or {}).items())),
            frozenset(special),
            frozenset(whole),
            frozenset(even),
            tuple(tuple(g) for g in linear),
            variant,
        )


Assignment = dict[int, tuple[str, ...]]
"""factor -> the atoms it is split over, major first."""


def dim_axes(factors: Factors, assignment: Assignment) -> tuple[str, ...]:
    """The atoms of a dim: those of its factors, in order."""
    if len(factors) == 1:
        return assignment.get(factors[0], ())
    return tuple(a for f in factors for a in assignment.get(f, ()))


def assignment_fits(rule: FactorRule, assignment: Assignment, mesh: MeshAxes) -> bool:
    """Whether blocks of every dim are contiguous under the assignment.

    In a compound dim `(a b)` a block is contiguous only if `a` is split to single positions before
    `b` is split at all, and splits of its factors must be even.  No atom may split two factors that
    meet in one value.
    """
    for dims in (*rule.operands, *rule.results):
        seen: set[str] = set()
        for factors in dims:
            if assignment.keys().isdisjoint(factors):
                continue
            whole_before = True
            for f in factors:
                atoms = assignment.get(f, ())
                if not atoms:
                    whole_before = whole_before and rule.sizes[f] == 1
                    continue
                if not whole_before or not seen.isdisjoint(atoms):
                    return False
                seen.update(atoms)
                shards = mesh.size(atoms)
                if (len(factors) > 1 or f in rule.even) and rule.sizes[f] % shards:
                    return False
                whole_before = shards == rule.sizes[f]
    return not any(assignment.get(f) for f in rule.whole)


def spread(
    factors: Factors, axes: tuple[str, ...], sizes: Sequence[int], mesh: MeshAxes
) -> Assignment:
    """The atoms of a dim given to its factors, major first: what `dim_axes` undoes.

    A dim of one factor takes them all.  In a compound dim a factor takes atoms while they divide its
    size, and only one split to single positions lets atoms through to the next; atoms that find no
    place are left out.
    """
    if len(factors) == 1:
        return {factors[0]: axes} if axes else {}
    out: Assignment = {}
    rest = list(axes)
    for f in factors:
        left = sizes[f]
        taken: tuple[str, ...] = ()
        while rest and left % mesh.size_of[rest[0]] == 0:
            left //= mesh.size_of[rest[0]]
            taken = (*taken, rest.pop(0))
        if taken:
            out[f] = taken
        if left > 1:
            break
    return out


def gathered(
    factors: Factors, assignment: Assignment, sizes: Sequence[int], mesh: MeshAxes
) -> tuple[str, ...]:
    """The atoms of a dim under an assignment, cut where its blocks would stop being contiguous."""
    if len(factors) == 1:
        return assignment.get(factors[0], ())
    out: tuple[str, ...] = ()
    for f in factors:
        atoms = assignment.get(f, ())
        shards = mesh.size(atoms)
        if sizes[f] % shards or not set(out).isdisjoint(atoms):
            break
        out = (*out, *atoms)
        if shards != sizes[f]:
            break
    return out
