"""How one equation is partitioned: candidate layouts, their prices, the cheapest.

A candidate is a rule and an assignment of atoms to its factors.  Candidates come from how the operands
lie now and how the result is wanted, atom by atom; there are few.  The price, in bytes one device
sends: bringing operands to the layout, what the local code sends, bringing the result to what is
wanted, and the local work converted to bytes (redundant compute counts against a layout that sends
less).  The runner-up is kept for `explain`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardwise.candidates import Operand, Result, candidates, fits, sources
from shardwise.factors import Assignment, FactorRule
from shardwise.mesh import MeshAxes
from shardwise.ops.registry import LocalContext, layouts_for
from shardwise.ops.windowed import Window
from shardwise.reshard import least_bytes, reshard_bytes
from shardwise.sharding import Axes, Layout, Sharding

# How much work is worth one byte on the wire.  A TPU v3 core does 750 flops, and reads 5 bytes of its
# memory, in the time one byte takes over its links; CPUs are nearer to 5 and 1.  Low figures make
# redundant compute dear, which is the safe side.
FLOPS_PER_BYTE = 64.0
MEMORY_PER_BYTE = 8.0

# A dot whose result would be all-reduced may be moved to a layout none of its values has (an all-to-all
# before, an all-gather after), where that saves clearly: it relayouts blocks and shortens dims, which
# costs time the price leaves out.
FEWER_BYTES = 0.85
LOWER_PRICE = 0.95

# A sum that stays pending in a result nobody asked for is priced as if it will be scattered; where it is
# asked for whole it costs twice that.  So where to finish it first costs as much (it widens on the way, or
# another equation reads it finished), that is the better bargain.
LATER = 1.001


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
    price = _Price(operands, results, mesh, comm, dot)
    if (easy := _undisputed(rules, price)) is not None:
        return easy, None
    first, *others = _cheapest(price, rules, 2)
    if dot and _all_reduces(first, results):
        new = _cheapest(price, rules[:1], 1, LOWER_PRICE * first.price, anywhere=True)
        if new and new[0].bytes < FEWER_BYTES * first.bytes:
            return new[0], first
    elif dot and first.brought and any(r.open for r in results):
        stays = _cheapest(price, rules, 1, elsewhere=False)
        if stays and not _saves(first, stays[0], results, mesh):
            return stays[0], first
    return first, (others[0] if others else None)


def _saves(moved: Choice, stays: Choice, results: Sequence[Result], mesh: MeshAxes) -> bool:
    """Whether operands should be moved to a layout none of them has, and leave a result that nobody
    asked for split, rather than a pending sum.

    The one has its blocks gathered later, or stays as it is; the other has them gathered too, or only
    scattered.  So the gathering counts on both sides.
    """
    pending = [(r, o) for r, o in zip(results, stays.outs, strict=True) if o.sharding.partial]
    # a scatter's bytes are a gather's
    later = sum(_deliver(r, o, mesh, least_bytes) for r, o in pending if r.open)
    return not pending or moved.bytes + later < FEWER_BYTES * (stays.bytes + later)


def _cheapest(
    price: _Price,
    rules: Sequence[FactorRule],
    count: int,
    below: float = math.inf,
    anywhere: bool = False,
    elsewhere: bool = True,
) -> list[Choice]:
    """The `count` cheapest candidates of a price below `below`, in order.

    What a candidate sends at the least is soon known, how it is best sent takes a search: those that
    could be among the cheapest are looked at in the order of the former.
    """
    found = (
        price.candidate(rule, assignment, pending)
        for rule in rules
        for assignment in candidates(
            rule, price.operands, price.results, price.mesh, anywhere, elsewhere
        )
        for pending in _pending_sums(rule, price.operands)
    )
    bounded = [(_order(price.of(c, least_bytes)), i, c) for i, c in enumerate(found) if c]
    best: list[tuple[tuple[float, float], int, Choice]] = []
    for (bound, _), i, candidate in sorted(bounded, key=lambda b: b[:2]):
        if bound >= below or (len(best) == count and bound > best[-1][0][0]):
            break
        choice = price.of(candidate, reshard_bytes)
        if choice.price < below:
            # of equals the one found first
            best = sorted([*best, (_order(choice), i, choice)], key=lambda b: b[:2])[:count]
    return [choice for *_, choice in best]


def _order(c: Choice) -> tuple[float, float]:
    """The cheapest first; of equals the one that moves results, not operands: the next equation may
    want them as they are."""
    return round(c.price, 3), round(c.brought, 3)


def _undisputed(rules: Sequence[FactorRule], price: _Price) -> Choice | None:
    """The layout all values that are split agree on, where nothing is sent for it.

    Every other candidate splits less: it does more work, and sends no less than nothing.
    """
    rule, operands, results, mesh = rules[0], price.operands, price.results, price.mesh
    layouts = sources(rule, operands, results, mesh)
    pending = any(v.partial for o in operands for v in o.variants)
    if len(rules) > 1 or len(layouts) != 1 or pending or rule.special:
        return None
    (a,) = layouts
    if not fits(rule, a, operands, results, mesh):
        return None
    found = price.candidate(rule, a, {})
    return (
        price.of(found, reshard_bytes) if found and not price.of(found, least_bytes).bytes else None
    )


def _all_reduces(c: Choice, results: Sequence[Result]) -> bool:
    """Whether a pending sum would be finished by an all-reduce: its atoms do not split what is wanted."""
    return any(
        not r.wanted.used.issuperset(o.sharding.partial)
        for r, o in zip(results, c.outs, strict=True)
    )


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


_Move = Callable[[Layout, Sharding, int, MeshAxes], float]


class _Candidate(NamedTuple):
    """A rule, an assignment, and the operands that are pending sums, with the layouts they give."""

    rule: FactorRule
    assignment: Assignment
    pending: dict[int, Axes]
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    local: float
    work: float


@dataclasses.dataclass(frozen=True)
class _Price:
    """What candidates for one equation cost."""

    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    mesh: MeshAxes
    comm: Callable[[LocalContext], float]
    dot: bool

    def candidate(
        self, rule: FactorRule, assignment: Assignment, pending: dict[int, Axes]
    ) -> _Candidate | None:
        mesh, operands, results = self.mesh, self.operands, self.results
        carried = next(iter(pending.values()), ())
        shapes = [(v.shape, v.padded) for v in operands], [(v.shape, v.padded) for v in results]
        ins = layouts_for(rule, assignment, shapes[0], "operands", mesh)
        outs = layouts_for(rule, assignment, shapes[1], "results", mesh)
        if carried:
            used = {a for axes in assignment.values() for a in axes}
            finished = any(l.sharding.partial and l.sharding.op != "sum" for l in outs)
            if used & set(carried) or finished:
                return None
            ins = tuple(
                l.with_sharding(l.sharding.with_partial(carried)) if i in pending else l
                for i, l in enumerate(ins)
            )
            outs = tuple(
                l.with_sharding(l.sharding.with_partial(mesh.sort((*l.sharding.partial, *carried))))
                for l in outs
            )
        special = (
            self.comm(LocalContext(mesh, rule, assignment, ins, outs)) if rule.special else 0.0
        )
        work = _work(rule, assignment, ins, outs, operands, results, mesh, self.dot)
        return _Candidate(rule, assignment, pending, ins, outs, special, work)

    def of(self, c: _Candidate, move: _Move) -> Choice:
        """A candidate's price, where `move` says what a reshard sends, or what it sends at least."""
        brought = 0.0
        # where a halo would do, the next to read an operand may not want it gathered as well
        shared = self.dot and not c.rule.special
        for i, (o, l) in enumerate(zip(self.operands, c.ins, strict=True)):
            again = o.same is not None and c.ins[o.same] == l
            if not (o.free or again or (o.zero and i in c.pending)):
                brought += _bring(o, l, self.mesh, shared, move)
        sent = c.local + brought
        for r, l in zip(self.results, c.outs, strict=True):
            sent += _deliver(r, l, self.mesh, move) * (LATER if c.pending and r.open else 1)
        assignment = tuple(sorted(c.assignment.items()))
        return Choice(c.rule, assignment, c.ins, c.outs, sent, c.work, None, brought)


def _bring(o: Operand, layout: Layout, mesh: MeshAxes, dot: bool, move: _Move) -> float:
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
        sent = move(layout.with_sharding(v), layout.sharding, o.itemsize, mesh)
        prices.append(sent / max(share, 1))
    return min(prices) if prices else math.inf


def _deliver(r: Result, layout: Layout, mesh: MeshAxes, move: _Move) -> float:
    """Bytes from the layout computed to the one wanted."""
    terms = r.terms if layout.sharding.op == "sum" and layout.sharding.partial else 1
    if not r.open:
        return move(layout, r.wanted, r.itemsize, mesh) / terms
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
    made = sum(
        math.prod(l.local_shape(mesh)) * o.effort for o, l in zip(operands, ins, strict=True)
    )
    if dot:
        flops = 2.0
        for f, size in enumerate(rule.sizes):
            flops *= -(-size // mesh.size(assignment.get(f, ())))
        return (flops + made) / FLOPS_PER_BYTE
    first = 1 if results and results[0].in_place else 0
    touched = sum(
        math.prod(l.local_shape(mesh)) * v.itemsize
        for layouts, values in ((ins, operands), (outs, results))
        for l, v in zip(layouts[first:], values[first:], strict=True)
    )
    return touched / MEMORY_PER_BYTE + made / FLOPS_PER_BYTE
