"""How one equation is partitioned: candidate layouts, their prices, the cheapest.

A candidate is a rule and an assignment of atoms to its factors.  Candidates come from how the operands
lie now and how the result is wanted, atom by atom; there are few.  The price, in bytes one device
sends: bringing operands to the layout, what the local code sends, bringing the result to what is
wanted, and the local work converted to bytes (redundant compute counts against a layout that sends
less).  The runner-up is kept for `explain`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardwise.factors import Assignment, FactorRule, assignment_fits, dim_axes, spread
from shardwise.mesh import MeshAxes
from shardwise.ops.registry import LocalContext, layouts_for
from shardwise.ops.windowed import Window
from shardwise.reshard import reshard_bytes
from shardwise.sharding import Axes, Layout, Sharding

# How much work is worth one byte on the wire.  A TPU v3 core does 750 flops, and reads 5 bytes of its
# memory, in the time one byte takes over its links; CPUs are nearer to 5 and 1.  Low figures make
# redundant compute dear, which is the safe side.
FLOPS_PER_BYTE = 64.0
MEMORY_PER_BYTE = 8.0
MAX_CANDIDATES = 512

# A dot whose result would be all-reduced may be moved to a layout none of its values has (an all-to-all
# before, an all-gather after), where that saves clearly: it relayouts blocks and shortens dims, which
# costs time the price leaves out.
FEWER_BYTES = 0.85
LOWER_PRICE = 0.95


class Operand(NamedTuple):
    """An operand as the choice sees it.

    Attributes:
      variants: the shardings its value is at hand in.
      free: it can be made in any sharding at no cost (literals, iota, broadcast scalars).
      zero: it is known to be zero, so it can count as a term of any pending sum.
      uses: how many equations read it; `dots`: how many dots do.
      times: a value from outside a loop is brought to a layout once for so many iterations, where the
        block takes at most `room` bytes.
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


class Result(NamedTuple):
    """A result as the choice sees it.

    Attributes:
      wanted: the completed sharding, or its only reader's; `open`: nobody asked for one.
      terms: as a pending sum it is one of so many that are finished together (a loop adds them up), so
        finishing costs that part.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    itemsize: int
    wanted: Sharding
    open: bool = False
    terms: int = 1


@dataclasses.dataclass(frozen=True)
class Choice:
    """A candidate with its price.

    A `window` says that a value goes around in blocks (`windows`): `ins` and `outs` are then the layouts
    before and after its loop.
    """

    rule: FactorRule
    assignment: tuple[tuple[int, Axes], ...]
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    bytes: float
    work: float
    window: Window | None = None
    brought: float = 0.0

    @property
    def price(self) -> float:
        return self.bytes + self.work

    def context(self, mesh: MeshAxes) -> LocalContext:
        return LocalContext(
            mesh, self.rule, dict(self.assignment), self.ins, self.outs, self.window
        )

    def text(self, mesh: MeshAxes) -> str:
        ins = " ".join(l.sharding.text(mesh) for l in self.ins)
        outs = " ".join(l.sharding.text(mesh) for l in self.outs)
        return f"{ins} -> {outs}: {self.bytes:.0f} B sent, work worth {self.work:.0f} B"


def choose(
    rules: Sequence[FactorRule],
    operands: tuple[Operand, ...],
    results: tuple[Result, ...],
    mesh: MeshAxes,
    comm: Callable[[LocalContext], float],
    dot: bool = False,
) -> tuple[Choice, Choice | None]:
    """The cheapest candidate and the runner-up (None when nothing could be cheaper than the first).

    `comm` prices the op's own communication.  Ties go to the candidate found first: the wanted
    result's layout, then the operands' in order.
    """

    def priced(anywhere: bool) -> list[Choice]:
        found = [
            _priced(rule, assignment, pending, operands, results, mesh, comm, dot)
            for rule in (rules[:1] if anywhere else rules)
            for assignment in candidates(rule, operands, results, mesh, anywhere)
            for pending in _pending_sums(rule, operands)
        ]
        # stable: the first found wins a tie
        return sorted((c for c in found if c is not None), key=_order)

    if (easy := _undisputed(rules, operands, results, mesh, dot)) is not None:
        return easy, None
    best = priced(anywhere=False)
    if dot and _all_reduces(best[0], results):
        new = priced(anywhere=True)[0]
        if new.bytes < FEWER_BYTES * best[0].bytes and new.price < LOWER_PRICE * best[0].price:
            return new, best[0]
    return best[0], (best[1] if len(best) > 1 else None)


def _order(c: Choice) -> tuple[float, float]:
    """The cheapest first; of equals the one that moves results, not operands: the next equation may
    want them as they are."""
    return round(c.price, 3), round(c.brought, 3)


def _undisputed(
    rules: Sequence[FactorRule],
    operands: tuple[Operand, ...],
    results: tuple[Result, ...],
    mesh: MeshAxes,
    dot: bool,
) -> Choice | None:
    """The layout all values that are split agree on, where nothing is sent for it.

    Every other candidate splits less: it does more work, and sends no less than nothing.
    """
    rule = rules[0]
    sources = _sources(rule, operands, results, mesh)
    pending = any(v.partial for o in operands for v in o.variants)
    if len(rules) > 1 or len(sources) != 1 or pending or rule.special:
        return None
    (a,) = sources
    if not assignment_fits(rule, a, mesh) or not _pads(rule, a, operands, results, mesh):
        return None
    found = _priced(rule, a, {}, operands, results, mesh, lambda ctx: 0.0, dot)
    return found if found is not None and found.bytes == 0 else None


def _all_reduces(c: Choice, results: Sequence[Result]) -> bool:
    """Whether a pending sum would be finished by an all-reduce: its atoms do not split what is wanted."""
    return any(
        not r.wanted.used.issuperset(o.sharding.partial)
        for r, o in zip(results, c.outs, strict=True)
    )


def candidates(
    rule: FactorRule,
    operands: Sequence[Operand],
    results: Sequence[Result],
    mesh: MeshAxes,
    anywhere: bool = False,
) -> Iterator[Assignment]:
    """Assignments worth pricing, each once, the plain ones (one value's own layout) first.

    An atom may split the factors some value has it on, or none; one that some value has on a factor
    that must lie whole may also split another (`_elsewhere`).  `anywhere` lets it split any factor:
    a contraction split over an axis can be cheaper with the axis on its batch, by an all-to-all before
    and an all-gather after, than as a pending sum and an all-reduce.
    """
    sources = _sources(rule, operands, results, mesh)
    seen = set()

    def fresh(a: Assignment) -> bool:
        key = tuple(sorted(a.items()))
        if (
            key in seen
            or not assignment_fits(rule, a, mesh)
            or not _pads(rule, a, operands, results, mesh)
        ):
            return False
        seen.add(key)
        return True

    plain = [{f: x for f, x in s.items() if f not in rule.whole} for s in sources]
    for a in (*plain, {}):
        if fresh(a):
            yield a
    for a in _elsewhere(rule, sources, mesh):
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


def _sources(
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
    out: list[list[str]] = []
    last = None
    for a in mesh.atoms:
        options = tuple(tuple(f for f, atoms in s.items() if a in atoms) for s in sources)
        if not any(options):
            last = None
            continue
        key = (mesh.axis_of[a], options)
        if key == last:
            out[-1].append(a)
        else:
            out.append([a])
        last = key
    return [tuple(g) for g in out]


def _ordered(f: int, atoms: tuple[str, ...], sources: Sequence[Assignment]) -> tuple[str, ...]:
    """Atoms of a factor in the order of the first source that has them there."""
    order = [a for s in sources for a in s.get(f, ())]
    return tuple(sorted(atoms, key=lambda a: order.index(a) if a in order else len(order)))


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


def _pending_sums(rule: FactorRule, operands: Sequence[Operand]) -> Iterator[dict[int, Axes]]:
    """{} (finish every pending sum first), then each way to carry one through a linear op."""
    yield {}
    for group in rule.linear:
        carried = {
            v.partial for i in group for v in operands[i].variants if v.partial and v.op == "sum"
        }
        for atoms in sorted(carried):
            if all(
                operands[i].zero
                or any(v.partial == atoms and v.op == "sum" for v in operands[i].variants)
                for i in group
            ):
                yield dict.fromkeys(group, atoms)


def _priced(
    rule: FactorRule,
    assignment: Assignment,
    pending: dict[int, Axes],
    operands: tuple[Operand, ...],
    results: tuple[Result, ...],
    mesh: MeshAxes,
    comm: Callable[[LocalContext], float],
    dot: bool,
) -> Choice | None:
    carried = next(iter(pending.values()), ())
    ins = layouts_for(rule, assignment, [(o.shape, o.padded) for o in operands], "operands", mesh)
    outs = layouts_for(rule, assignment, [(r.shape, r.padded) for r in results], "results", mesh)
    if carried:
        used = {a for axes in assignment.values() for a in axes}
        if used & set(carried) or any(o.sharding.partial and o.sharding.op != "sum" for o in outs):
            return None
        ins = tuple(
            l.with_sharding(l.sharding.with_partial(carried)) if i in pending else l
            for i, l in enumerate(ins)
        )
        outs = tuple(
            l.with_sharding(l.sharding.with_partial(mesh.sort((*l.sharding.partial, *carried))))
            for l in outs
        )
    total = comm(LocalContext(mesh, rule, assignment, ins, outs)) if rule.special else 0.0
    brought = 0.0
    for i, (o, l) in enumerate(zip(operands, ins, strict=True)):
        if o.free or (o.zero and i in pending):
            continue
        # where a halo would do, the next to read an operand may not want it gathered as well
        brought += _bring(o, l, mesh, dot and not rule.special)
    total += brought
    for r, l in zip(results, outs, strict=True):
        total += _deliver(r, l, mesh)
    work = _work(rule, assignment, ins, outs, operands, results, mesh, dot)
    return Choice(rule, tuple(sorted(assignment.items())), ins, outs, total, work, None, brought)


def _bring(o: Operand, layout: Layout, mesh: MeshAxes, dot: bool) -> float:
    """Bytes to bring an operand to a layout, shared among those that will read it there."""
    prices = []
    for v in o.variants:
        if v.partial and layout.sharding.partial and v.partial != layout.sharding.partial:
            continue
        if layout.sharding.partial and not v.partial:
            continue
        share = o.uses if v.partial else (o.dots if dot else 1)
        if o.times > 1 and math.prod(layout.local_shape(mesh)) * o.itemsize <= o.room:
            share = max(share, 1) * o.times
        prices.append(
            reshard_bytes(layout.with_sharding(v), layout.sharding, o.itemsize, mesh)
            / max(share, 1)
        )
    return min(prices) if prices else math.inf


def _deliver(r: Result, layout: Layout, mesh: MeshAxes) -> float:
    """Bytes from the layout computed to the one wanted."""
    terms = r.terms if layout.sharding.op == "sum" and layout.sharding.partial else 1
    if not r.open:
        return reshard_bytes(layout, r.wanted, r.itemsize, mesh) / terms
    # nobody asked for a layout: a pending sum will pay for a reduce-scatter at least
    n = math.prod(layout.local_shape(mesh)) * r.itemsize
    g = mesh.size(layout.sharding.partial)
    return n * (g - 1) / g / terms


def _work(
    rule: FactorRule,
    assignment: Assignment,
    ins: Sequence[Layout],
    outs: Sequence[Layout],
    operands: Sequence[Operand],
    results: Sequence[Result],
    mesh: MeshAxes,
    dot: bool,
) -> float:
    if dot:
        flops = 2.0
        for f, size in enumerate(rule.sizes):
            flops *= -(-size // mesh.size(assignment.get(f, ())))
        return flops / FLOPS_PER_BYTE
    touched = sum(
        math.prod(l.local_shape(mesh)) * v.itemsize
        for l, v in zip((*ins, *outs), (*operands, *results), strict=True)
    )
    return touched / MEMORY_PER_BYTE
