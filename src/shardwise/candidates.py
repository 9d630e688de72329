"""The layouts worth pricing for one equation: assignments of atoms to a rule's factors.

They come from how the operands lie now and how the results are wanted, atom by atom; there are few, and
never a search over everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.factors import Assignment, FactorRule, assignment_fits, dim_axes, spread
from shardwise.mesh import MeshAxes
from shardwise.sharding import Sharding

MAX_CANDIDATES = 512


class Operand(NamedTuple):
    """An operand as the choice sees it.

    Attributes:
      variants: the shardings its value is at hand in.
      free: it can be made in any sharding, and nothing is sent (literals, iota, broadcast scalars).
      zero: it is known to be zero, so it can count as a term of any pending sum.
      uses: how many equations read it; `dots`: how many dots do.
      times: a value from outside a loop is brought to a layout once for so many iterations, where the
        block takes at most `room` bytes.
      same: the place of an earlier operand that is this very value (x * x): brought once for both.
      effort: flops an element of a free value takes to make.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    itemsize: int
    variants: tuple[Sharding, ...]
    free: bool = False
    zero: bool = False
    uses: int = 1
    dots: int = 1
    times: int = 1
    room: float = 0
    same: int | None = None
    effort: float = 0.0


class Result(NamedTuple):
    """A result as the choice sees it.

    Attributes:
      wanted: the completed sharding, or its only reader's; `open`: nobody asked for one.
      terms: as a pending sum it is one of so many that are finished together (a loop adds them up), so
        finishing costs that part.
      in_place: rows of the first operand become it where they lie; the others are not touched.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    itemsize: int
    wanted: Sharding
    open: bool = False
    terms: int = 1
    in_place: bool = False


def candidates(
    rule: FactorRule,
    operands: Sequence[Operand],
    results: Sequence[Result],
    mesh: MeshAxes,
    anywhere: bool = False,
    elsewhere: bool = True,
) -> Iterator[Assignment]:
    """Assignments worth pricing, each once, the plain ones (one value's own layout) first.

    An atom may split the factors some value has it on, or none; one that some value has on a factor
    that must lie whole may also split another (`elsewhere`).  `anywhere` lets it split any factor: a
    contraction split over an axis can be cheaper with the axis on its batch, by an all-to-all before
    and an all-gather after, than as a pending sum and an all-reduce.
    """
    layouts = sources(rule, operands, results, mesh)
    seen = set()

    def fresh(a: Assignment) -> bool:
        key = tuple(sorted(a.items()))
        if key in seen or not fits(rule, a, operands, results, mesh):
            return False
        seen.add(key)
        return True

    plain = [{f: x for f, x in s.items() if f not in rule.whole} for s in layouts]
    for a in (*plain, {}):
        if fresh(a):
            yield a
    for a in _elsewhere(rule, layouts, mesh) if elsewhere else ():
        if fresh(a):
            plain.append(a)
            yield a
    groups = _groups(plain, mesh)
    fixed = rule.whole | rule.special  # windows follow some value's split, or none
    every = [f for f in range(len(rule.sizes)) if anywhere and f not in fixed]
    options = [(*dict.fromkeys([*_options(g[0], plain), *every]), None) for g in groups]
    for picks in itertools.islice(itertools.product(*options), MAX_CANDIDATES):
        a: Assignment = {}
        for group, f in zip(groups, picks, strict=True):
            if f is not None:
                a[f] = (*a.get(f, ()), *group)
        a = {f: _ordered(f, atoms, plain) for f, atoms in a.items()}
        if fresh(a):
            yield a


def sources(
    rule: FactorRule, operands: Sequence[Operand], results: Sequence[Result], mesh: MeshAxes
) -> list[Assignment]:
    """What each value's own layout says about the factors: results' wishes, then operands."""
    out: list[Assignment] = []

    def add(dims: Sequence[tuple[int, ...]], s: Sharding) -> None:
        a: Assignment = {}
        for factors, axes in zip(dims, s.axes, strict=True):
            a.update(spread(factors, axes, rule.sizes, mesh))
        if a and a not in out:
            out.append(a)

    for dims, r in zip(rule.results, results, strict=True):
        add(dims, r.wanted)
    for dims, o in zip(rule.operands, operands, strict=True):
        for v in o.variants:
            add(dims, v)
    return out


def _elsewhere(
    rule: FactorRule, sources: Sequence[Assignment], mesh: MeshAxes
) -> Iterator[Assignment]:
    """Sources that split a factor which must lie whole, with those atoms on factors that need not.

    A sort of rows that are split is one all-to-all to whole rows, and one back: (g-1)/g of a block
    each, where gathering the rows is (g-1) blocks and leaves every device the whole work.  The atoms
    go to one other factor, the largest first; or they are spread over several, as far as they divide
    them.
    """
    free = [
        f
        for f, size in sorted(enumerate(rule.sizes), key=lambda x: -x[1])
        if size > 1 and f not in rule.whole and f not in rule.special and not rule.op_of(f)
    ]
    for source in sources:
        stuck = [a for f, atoms in source.items() if f in rule.whole for a in atoms]
        if not stuck:
            continue
        kept = {f: atoms for f, atoms in source.items() if f not in rule.whole}
        for f in free:
            yield {**kept, f: (*kept.get(f, ()), *stuck)}
        spread_out = dict(kept)
        for f in free:
            while stuck and rule.sizes[f] % mesh.size((*spread_out.get(f, ()), stuck[0])) == 0:
                spread_out[f] = (*spread_out.get(f, ()), stuck.pop(0))
        yield spread_out


def _options(atom: str, sources: Sequence[Assignment]) -> list[int]:
    """The factors some source gives this atom to, in the order of the sources."""
    return list(dict.fromkeys(f for s in sources for f, atoms in s.items() if atom in atoms))


def _groups(sources: Sequence[Assignment], mesh: MeshAxes) -> list[tuple[str, ...]]:
    """Atoms of one axis that every source treats alike move together: fewer combinations."""
    places: dict[str, list[tuple[int, int]]] = {}
    for i, source in enumerate(sources):
        for f, atoms in source.items():
            for a in atoms:
                places.setdefault(a, []).append((i, f))
    runs = itertools.groupby(mesh.atoms, lambda a: (mesh.axis_of[a], places.get(a)))
    return [tuple(atoms) for (_, placed), atoms in runs if placed]


def _ordered(f: int, atoms: tuple[str, ...], sources: Sequence[Assignment]) -> tuple[str, ...]:
    """Atoms of a factor in the order of the first source that has them there."""
    order = dict.fromkeys(a for s in sources for a in s.get(f, ()))
    return (*(a for a in order if a in atoms), *(a for a in atoms if a not in order))


def fits(
    rule: FactorRule,
    a: Assignment,
    operands: Sequence[Operand],
    results: Sequence[Result],
    mesh: MeshAxes,
) -> bool:
    """Whether the rule allows the assignment, and every dim's padded size takes its split."""
    return assignment_fits(rule, a, mesh) and _pads(rule, a, operands, results, mesh)


def _pads(
    rule: FactorRule,
    a: Assignment,
    operands: Sequence[Operand],
    results: Sequence[Result],
    mesh: MeshAxes,
) -> bool:
    """Whether every dim's padded size splits evenly: one class of dims, one padded size.

    A factor of a compound dim splits evenly or not at all, so its other dims must have no padding;
    neither must those, of the factor's own size, of a factor the rule says so of.
    """
    for values, dims_of in ((operands, rule.operands), (results, rule.results)):
        for v, dims in zip(values, dims_of, strict=True):
            for size, padded, factors in zip(v.shape, v.padded, dims, strict=True):
                axes = dim_axes(factors, a)
                if not axes:
                    continue
                if padded % mesh.size(axes) or size == 0:
                    return False
                if padded != size and not _unpadded(rule).isdisjoint(factors):
                    return False
                if padded != size and any(
                    f in rule.even and rule.sizes[f] == size for f in factors
                ):
                    return False
    return True


def _unpadded(rule: FactorRule) -> frozenset[int]:
    """The factors of compound dims: they split evenly, so their other dims must have no padding."""
    dims_of_all = (*rule.operands, *rule.results)
    return frozenset(f for dims in dims_of_all for fs in dims if len(fs) > 1 for f in fs)
