"""docs/primitives.md, written from the rules: what every primitive does with every split.

For each primitive with a rule its example is captured, and each dim is looked up in the rules of that
equation.  What a split dim sends is found by tracing the local code of one device of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import numpy as np

from shardwise import _jax, _jax_primitives, refused
from shardwise.capture import _INLINED, capture_jaxpr
from shardwise.cost import comm
from shardwise.factors import FactorRule
from shardwise.mesh import MeshAxes
from shardwise.ops.registry import rules_of, run_local
from shardwise.program import Eqn
from shardwise.testing import rules
from shardwise.testing.primitives import classes
from shardwise.testing.primitives.examples import EXAMPLES, Example

_TWO = MeshAxes(("x",), (2,))
_MODES = ("local", "pending", "sends", "whole")  # the best first

_HEAD = """# Primitives

What happens to each primitive of JAX {version} when a dim of it is split. Written by
`python -m shardwise.testing.primitives > docs/primitives.md` from the rules themselves; each line is
one example equation, which the tests also run on every split.

A rule names each dim with a letter, as in an einsum. *Local*: each device computes on its own block,
nothing is sent. *Pending*: each device computes a part of a sum (a maximum, ...), finished later by
whoever reads it: by an all-reduce, or a reduce-scatter where the reader is split. *Sends*: the
op's own exchange, with the collectives it takes. *Whole*: the dim is gathered (or moved to another dim)
first, and where nothing else was possible `plan.fallbacks` says so. Uneven dims and several axes
a dim are fine everywhere unless a line says otherwise. {count} primitives have rules.
"""


def page() -> str:
    """The whole page."""
    lines = [_HEAD.format(version=_release(), count=len(classes.ruled()))]
    families: dict[str, list[Example]] = {}
    own = classes.ruled()
    for e in EXAMPLES.values():
        if e.primitive in own:
            families.setdefault(e.family, []).append(e)
    for family, examples in families.items():
        lines += ["", f"## {family}", ""]
        lines += [
            "| primitive | rule | local | pending | sends | whole |",
            "|---|---|---|---|---|---|",
        ]
        lines += [row(e) for e in sorted(examples, key=lambda e: e.primitive)]
    return "\n".join([*lines, "", *_others()])


def _release() -> str:
    return "0.10.2"


# -- rows --------------------------------------------------------------------------------------------


def row(e: Example) -> str:
    """One primitive's line."""
    eqn = equation(e)
    found = rules_of(eqn)
    first = found[0]
    text, _, _ = str(first).partition("  ")
    modes: dict[str, list[str]] = {m: [] for m in _MODES}
    for factor in range(len(first.sizes)):
        letter = _letter(first, factor)
        mode, detail = _best(eqn, found, factor)
        modes[mode].append(f"{letter}: {detail}" if detail else letter)
    cells = [" ".join(modes["local"]), *("; ".join(modes[m]) for m in _MODES[1:])]
    return f"| `{e.primitive}` | `{text}` | " + " | ".join(cells) + " |"


def equation(e: Example) -> Eqn:
    """The example's equation."""
    traced = jax.make_jaxpr(e.fn)(*map(_aval, e.args))
    body = capture_jaxpr(traced, platform=e.platform)
    return rules.find_eqn(body, e.primitive)[0]


def _aval(x: object) -> jax.ShapeDtypeStruct:
    x = x if hasattr(x, "shape") else np.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype)  # type: ignore[attr-defined]


def _letter(rule: FactorRule, factor: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[factor]


def _places(rule: FactorRule, factor: int) -> list[tuple[str, int, int]]:
    """Where a factor is: operands' dims, or results' where no operand has it."""
    for which in ("operands", "results"):
        found = [
            (which, i, d)
            for i, dims in enumerate(getattr(rule, which))
            for d, factors in enumerate(dims)
            if factor in factors
        ]
        if found:
            return found
    return []


def _best(eqn: Eqn, found: tuple[FactorRule, ...], factor: int) -> tuple[str, str]:
    """How the dims of a factor of the first rule are best split, by any of the rules."""
    options = [_mode(eqn, found[0], factor)]
    for rule in found[1:]:
        for which, i, d in _places(found[0], factor):
            options += [_mode(eqn, rule, f) for f in getattr(rule, which)[i][d][:1]]
    return min(options, key=lambda o: (_MODES.index(o[0]), o[1]))


def _mode(eqn: Eqn, rule: FactorRule, factor: int) -> tuple[str, str]:
    if factor in rule.whole:
        return "whole", ""
    if op := rule.op_of(factor):
        return "pending", op
    sent = ", ".join(_sent(eqn, rule, factor))
    return ("sends", sent) if sent else ("local", "")


def _sent(eqn: Eqn, rule: FactorRule, factor: int) -> list[str]:
    """The collectives of the local code where a factor is split in two."""
    assignment = {factor: _TWO.atoms}
    size = _TWO.device_count
    if rule.sizes[factor] < size or not _fits(rule, assignment):
        return []
    ctx = rules.context_of(eqn, rule, assignment, _TWO)
    blocks = [
        jax.ShapeDtypeStruct(lay.local_shape(_TWO), v.dtype)
        for lay, v in zip(ctx.ins, eqn.invars, strict=True)
    ]
    names = [(a, _TWO.size_of[a]) for a in _TWO.atoms]
    traced = jax.make_jaxpr(lambda *xs: run_local(ctx, eqn, xs), axis_env=names)(*blocks)
    kinds = sorted({comm.KINDS[n] for n in _primitives(traced) if n in comm.KINDS})
    return kinds


def _fits(rule: FactorRule, assignment: Mapping[int, tuple[str, ...]]) -> bool:
    return rules.assignment_fits(rule, dict(assignment), _TWO)


def _primitives(jaxpr: object) -> Iterator[str]:
    """The names of a jaxpr's primitives, those of bodies included."""
    inner, _ = _jax.open_jaxpr(jaxpr)
    for eqn in inner.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for sub in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(sub, "eqns") or hasattr(sub, "jaxpr"):
                    yield from _primitives(sub)


# -- the rest ----------------------------------------------------------------------------------------


def _others() -> Iterator[str]:
    """Primitives without a rule of their own."""
    own = classes.ruled()
    present = _jax_primitives.all_primitives()

    def listed(found: object) -> str:
        return ", ".join(f"`{n}`" for n in sorted(found) if n not in own and n in present)  # type: ignore[call-overload]

    by: dict[str, list[str]] = {}
    for name in present:
        by.setdefault((classes.classes_of(name) or ["none"])[0], []).append(name)
    yield "## Bodies and annotations"
    yield ""
    yield "Partitioned from within, each body like any program, or the user's own word:"
    yield listed(classes.handled()) + "."
    yield ""
    yield "## Written out"
    yield ""
    yield "Calls that are inlined: " + listed(_INLINED) + "."
    yield "Nothing but their operand: " + listed(by.get("identity", [])) + "."
    yield "Short for others, and replaced by them before rules see them: "
    yield listed(by.get("spelled", [])) + "."
    yield "Mutable references and high-level types, made ordinary values: "
    yield listed(by.get("lowered", [])) + "."
    yield ""
    yield "## Inside `jax.shard_map` and Pallas kernels only"
    yield ""
    yield "Collectives and casts of manual regions: " + listed(by.get("manual", [])) + "."
    yield "Inside kernels: " + listed(by.get("kernel", [])) + "."
    yield ""
    yield "## Fall back"
    yield ""
    yield "Run whole on every device, with a line in `plan.fallbacks`."
    yield ""
    yield "| primitive | why |"
    yield "|---|---|"
    for name, why in sorted(classes.FALLBACK.items()):
        if name in present and name not in own:
            yield f"| `{name}` | {why} |"
    yield ""
    yield "## Refused"
    yield ""
    yield "An error that says what to do instead."
    yield ""
    yield "| primitive | why | instead |"
    yield "|---|---|---|"
    for name, (why, instead) in sorted(refused.REFUSED.items()):
        if name in present:
            yield f"| `{name}` | {why} | {instead} |"
    yield ""
