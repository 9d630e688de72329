"""The graph completion works on: one edge per equation and per hand-over between a body and its caller.

An edge ties values by a `FactorRule` and says, level by level, which side may shape which.  Control
flow is nothing special here: the operand of a scan and the variable of its body that holds it are
tied by an identity rule, with the scanned dim belonging to the operand only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import level_of, rules_of
from shardwise.outward import addend
from shardwise.program import ANNOTATIONS, Body, Eqn, Lit, Var

# Passes of an edge: (level, may operands be sources, may results be sources, targets likewise).
# Level 0: elementwise and hand-overs, both ways.  1: dims are moved, or the larger side shapes the
# smaller (a broadcast backward, a reduction forward: no communication either way).  2: dots and other
# contractions.  3: the smaller side shapes the larger, which creates splits nobody asked for yet.
BOTH, FORWARD, BACKWARD = "both", "forward", "backward"
PASSES: dict[str, tuple[tuple[int, str], ...]] = {
    "elementwise": ((0, BOTH),),
    "dims": ((1, BOTH),),
    "broadcast": ((1, BACKWARD), (3, FORWARD)),
    "reduce": ((1, FORWARD), (3, BACKWARD)),
    "dot": ((2, BOTH),),
}


@dataclasses.dataclass(eq=False)
class Edge:
    """Values tied by a rule.

    Attributes:
      values: operands, then results (literals and rank-0 values included; they hold no dims).
      passes: (level, direction) pairs.
      eqn: the equation it comes from; `label` what to call it in reasons.
      dims: the factors of every dim of every value.
    """

    rule: FactorRule
    values: list[Var]
    passes: tuple[tuple[int, str], ...]
    eqn: Eqn
    label: str

    def __post_init__(self) -> None:
        self.dims = (*self.rule.operands, *self.rule.results)

    @property
    def operand_count(self) -> int:
        return len(self.rule.operands)


def tie(a: Var, b: Var, eqn: Eqn, label: str, stacked: bool = False) -> Edge:
    """`i j -> i j` between two names of one value; `stacked`: `l i j -> i j`, `a` has the loop dim."""
    build = RuleBuilder()
    dims = build.factors(b.shape)
    lead = [build.factor(a.shape[0])] if stacked else []
    return Edge(build.build([lead + dims], [dims]), [a, b], PASSES["elementwise"], eqn, label)


def edges_of(body: Body, crossings: Mapping[Eqn, Sequence[Edge]] | None = None) -> list[Edge]:
    """All edges of a program, bodies included, in program order.

    Args:
      crossings: the edges of equations that go into or out of manual control (`regions`).
    """
    out: list[Edge] = []
    for eqn in body.eqns:
        if crossings and eqn in crossings:
            out += crossings[eqn]
        elif eqn.bodies:
            out += _control_flow(eqn)
        else:
            out += _equation(eqn)
        for sub in eqn.bodies:
            out += edges_of(sub, crossings)
    return out


def _equation(eqn: Eqn) -> list[Edge]:
    if eqn.name in ANNOTATIONS:
        return [tie(eqn.invars[0], eqn.outvars[0], eqn, "annotation")]
    rules = rules_of(eqn)
    if not rules or not any(v.shape for v in (*eqn.invars, *eqn.outvars)):
        return []
    return [
        Edge(rules[0], [*eqn.invars, *eqn.outvars], PASSES[level_of(eqn.primitive)], eqn, eqn.name)
    ]


def _control_flow(eqn: Eqn) -> list[Edge]:
    pairs = {"scan": _scan, "while": _while, "cond": _cond}.get(eqn.name, _call)(eqn)
    edges = [tie(a, b, eqn, eqn.name, stacked) for a, b, stacked in pairs if a.shape or b.shape]
    more = {"while": _batch_dims, "scan": _stacks}.get(eqn.name)
    return edges + (more(eqn) if more else [])


def _stacks(eqn: Eqn) -> list[Edge]:
    """A scan without order maps its stacks: `l i, l j -> l k`; they are split alike over the loop."""
    if not eqn.params["length"] or not orderless(eqn):
        return []
    n, c = eqn.params["num_consts"], eqn.params["num_carry"]
    build = RuleBuilder()
    length = build.factor(eqn.params["length"])
    xs, ys = eqn.invars[n + c :], eqn.outvars[c:]
    dims = [[length, *build.factors(v.shape[1:])] for v in (*xs, *ys)]
    rule = build.build(dims[: len(xs)], dims[len(xs) :])
    return [Edge(rule, [*xs, *ys], PASSES["dims"], eqn, "scan")]


def orderless(eqn: Eqn) -> bool:
    """Whether iterations of a scan do not depend on each other, but for sums: `lax.map`, its gradient."""
    (body,) = eqn.bodies
    n, c = eqn.params["num_consts"], eqn.params["num_carry"]
    carries = zip(body.invars[n : n + c], body.outvars, strict=False)
    return all(addend(body, v, out) is not None for v, out in carries)


def _batch_dims(eqn: Eqn) -> list[Edge]:
    """A vmapped loop has a batch of predicates: `b -> b i j` to every carry, so that they lie alike."""
    cond, body = eqn.bodies
    (go,) = cond.outvars
    if not go.shape or isinstance(go, Lit):
        return []
    out = []
    for v in body.invars[eqn.params["body_nconsts"] :]:
        build = RuleBuilder()
        dims = build.factors(v.shape)
        rule = build.build([dims[: go.rank]], [dims])
        out.append(Edge(rule, [go, v], PASSES["elementwise"], eqn, "while"))
    return out


Pairs = list[tuple[Var, Var, bool]]


def _plain(a: list[Var], b: list[Var]) -> Pairs:
    return [(x, y, False) for x, y in zip(a, b, strict=True) if not isinstance(x, Lit)]


def _scan(eqn: Eqn) -> Pairs:
    (body,) = eqn.bodies
    n, c = eqn.params["num_consts"], eqn.params["num_carry"]
    pairs = _plain(eqn.invars[: n + c], body.invars[: n + c])
    pairs += _plain(body.outvars[:c], body.invars[n : n + c])
    pairs += _plain(body.outvars[:c], eqn.outvars[:c])
    pairs += [(x, y, True) for x, y in zip(eqn.invars[n + c :], body.invars[n + c :], strict=True)]
    pairs += [
        (x, y, True)
        for x, y in zip(eqn.outvars[c:], body.outvars[c:], strict=True)
        if not isinstance(y, Lit)
    ]
    return pairs


def _while(eqn: Eqn) -> Pairs:
    cond, body = eqn.bodies
    n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    init = eqn.invars[n + m :]
    return [
        *_plain(eqn.invars[:n], cond.invars[:n]),
        *_plain(eqn.invars[n : n + m], body.invars[:m]),
        *_plain(init, body.invars[m:]),
        *_plain(body.outvars, body.invars[m:]),
        *_plain(body.invars[m:], cond.invars[n:]),
        *_plain(body.outvars, eqn.outvars),
    ]


def _cond(eqn: Eqn) -> Pairs:
    pairs: Pairs = []
    for branch in eqn.bodies:
        pairs += _plain(eqn.invars[1:], branch.invars) + _plain(branch.outvars, eqn.outvars)
    return pairs


def _call(eqn: Eqn) -> Pairs:
    """checkpoint: the body is the call."""
    (body,) = eqn.bodies
    return _plain(eqn.invars, body.invars) + _plain(body.outvars, eqn.outvars)
