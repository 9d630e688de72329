"""Plans as text: every value with its sharding and reason, every collective with its cause.

plan.explain()          the listing
plan.why("params.wi")   the chain of equations back to the annotation
plan.diff(other)        what changes between two plans of one program
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from shardwise.complete import Reason
from shardwise.errors import ShardingError
from shardwise.ops.collectives import USERS
from shardwise.program import Body, Eqn, Lit, Var

if TYPE_CHECKING:
    from shardwise.notes import Note
    from shardwise.ops.windowed import Window
    from shardwise.plan import Plan


def size(n: float) -> str:
    """Bytes for people: `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000 or unit == "GB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return ""


def name(v: Var) -> str:
    return repr(v) if isinstance(v, Lit) else v.label


def sharded(plan: Plan, v: Var) -> str:
    """`float32[64@x, 512]`: a value with its axes, as the listing prints it."""
    axes = plan.completion.sharding(v).axes
    dims = [f"{s}@{plan.axes.text(a)}" if a else str(s) for s, a in zip(v.shape, axes, strict=True)]
    return f"{v.dtype}[{', '.join(dims)}]"


# -- reasons -----------------------------------------------------------------------------------------


def reason(plan: Plan, note: Note) -> str:
    """Why a collective is there: what moved, between which layouts, on whose behalf."""
    mesh = plan.axes
    eqn = note.eqn
    if note.what == "local" and note.choice is not None and note.choice.window is not None:
        return around(plan, note.choice.window, eqn)
    if note.what == "local" and eqn is not None and eqn.name in USERS:
        return "the user's own"
    if note.what == "local":
        return f"{eqn.name} exchanges data along a dim that is split" if eqn else ""
    if note.what == "device order":
        return f"{note.value}: each block to the device that the order asked for names"
    if note.before is None or note.after is None:
        return f"{note.what} {note.value}".strip()
    text = f"{note.value}: {note.before.text(mesh)} -> {note.after.text(mesh)}"
    if note.what in _WHY:
        text += ", " + _WHY[note.what].format(eqn.name if eqn else "")
    if note.what == "bring" and note.choice is not None and note.runner_up is not None:
        text += f" (price {size(note.choice.price)}, next best {size(note.runner_up.price)})"
    return text


_WHY = {
    "bring": "the layout {} is computed in",
    "annotation": "as annotated",
    "fallback": "{} has no rule and runs whole on every device",
    "loop": "the sharding it has in the body of {}",
    "hoisted": "once before the {} that reads it so in every iteration",
    "stack": "so that the {} takes a slice at a time and the stack is not gathered",
    "callback": "{} runs on one device, on whole operands",
    "manual": "the layout it has at the border of {}",
    "result": "the sharding of the result",
}


def around(plan: Plan, w: Window, eqn: Eqn | None) -> str:
    """What goes around in a windowed dot, and why it is neither gathered nor scattered at once."""
    mesh = plan.axes
    v = None if eqn is None else eqn.outvars[0] if w.operand is None else eqn.invars[w.operand]
    what = "sums of blocks" if w.operand is None else "blocks"
    never = "whole before its sum" if w.operand is None else "gathered"
    return (
        f"windowed: {what} of {name(v) if v else '?'}, {w.block.sharding.text(mesh)}, go around "
        f"{mesh.text(w.atoms)}; {never} it would take {size(w.bytes)} "
        f"({w.option} allows {size(w.limit)})"
    )


def cause(plan: Plan, v: Var, dim: int) -> str:
    """One step: why this dim is split."""
    r = plan.completion.reasons.get((v, dim))
    return "nobody split it" if r is None else _step(plan, r)


def _step(plan: Plan, r: Reason) -> str:
    if r.kind != "rule":
        return f"{r.kind} ({r.source})"
    assert r.edge is not None and r.var is not None
    where = r.edge.eqn.source if r.edge.eqn.info is not None else "the result"
    return f"from {name(r.var)} dim {r.dim} through {r.edge.label} at {where}"


def why(plan: Plan, wanted: str) -> str:
    """The chain of reasons for every split dim of a value."""
    v = find(plan, wanted)
    c = plan.completion
    lines = [f"{name(v)}: {sharded(plan, v)}"]
    split = [d for d, axes in enumerate(c.sharding(v).axes) if axes]
    if not split:
        lines.append("  no dim is split: no annotation reaches it, or it was annotated whole")
        if v in c.annotated:
            lines.append(f"  {c.annotated[v].kind} ({c.annotated[v].source})")
    for d in split:
        lines.append(f"  dim {d} over {plan.axes.text(c.sharding(v).axes[d])}:")
        var, dim = v, d
        seen = set()
        while (r := c.reasons.get((var, dim))) is not None and (var, dim) not in seen:
            seen.add((var, dim))
            lines.append(f"    {_step(plan, r)}")
            if r.kind != "rule" or r.var is None:
                break
            var, dim = r.var, r.dim
    return "\n".join(lines)


def find(plan: Plan, wanted: str) -> Var:
    """A value by name: `params['wi']`, `params.wi`, `v12`, `result0`."""

    def plain(s: str) -> str:
        return re.sub(r"\['?([^'\]]+)'?\]", r".\1", s)

    values = {plain(name(v)): v for v in plan.body.variables()}
    values.update({v.name: v for v in plan.completion.results})
    if plain(wanted) in values:
        return values[plain(wanted)]
    raise ShardingError(
        f"the plan has no value called {wanted!r}",
        facts="arguments are " + ", ".join(v.name for v in plan.body.invars),
        hint="explain() lists every value by name",
    )


# -- the listing -------------------------------------------------------------------------------------


def explain(plan: Plan) -> str:
    """Every value with its sharding and why; then collectives, fallbacks and totals."""
    lines = [f"mesh {plan.axes}", ""]
    for v in plan.body.invars:
        lines.append(f"{name(v)}: {sharded(plan, v)}{_because(plan, v)}")
    lines += _listing(plan, plan.body, "")
    for v, r in zip(plan.body.outvars, plan.completion.results, strict=True):
        lines.append(f"{r.name} = {name(v)}: {sharded(plan, r)}{_because(plan, r)}")
        if r in plan.device_orders:
            ids = _ids(plan.device_orders[r])
            lines.append(f"    sent there at the end: devices {ids} hold the blocks in order")
    lines += ["", *_collectives(plan), *_fallbacks(plan)]
    return "\n".join(lines)


def _because(plan: Plan, v: Var) -> str:
    split = [d for d, a in enumerate(plan.completion.sharding(v).axes) if a]
    if not split:
        return ""
    return "   " + "; ".join(dict.fromkeys(cause(plan, v, d) for d in split))


def _listing(plan: Plan, body: Body, indent: str) -> list[str]:
    lines = []
    for eqn in body.eqns:
        args = " ".join(name(v) for v in eqn.invars)
        outs = ", ".join(f"{name(v)}: {sharded(plan, v)}" for v in eqn.outvars)
        because = _because(plan, eqn.outvars[0]) if eqn.outvars else ""
        lines.append(f"{indent}{outs} = {eqn.name} {args}{because}")
        lines += _chosen(plan, eqn, indent)
        if eqn.outvars and eqn.outvars[0] in plan.device_orders:
            ids = _ids(plan.device_orders[eqn.outvars[0]])
            lines.append(
                f"{indent}    asked for on devices {ids}: inside, blocks stay in the mesh's order"
            )
        for sub in eqn.bodies:
            lines += _listing(plan, sub, indent + "    ")
    return lines


def _ids(order: tuple[int, ...]) -> str:
    """`3, 1, 0, 2`, long lists shortened."""
    return ", ".join(map(str, order[:16])) + (", ..." if len(order) > 16 else "")


def _chosen(plan: Plan, eqn: Eqn, indent: str) -> list[str]:
    """How an equation is computed where that is not simply as completed."""
    _ = plan.jaxpr
    found: Any = plan.partitioner.eqn_choices.get(eqn)
    if found is None:
        return []
    choice, second = found
    as_completed = all(
        l.sharding == plan.completion.sharding(v)
        for v, l in zip(eqn.outvars, choice.outs, strict=True)
    )
    if as_completed and choice.bytes == 0:
        return []
    lines = [f"{indent}    computed as {choice.text(plan.axes)}"]
    if choice.window is not None:
        lines.append(f"{indent}    {around(plan, choice.window, eqn)}")
    if second is not None:
        lines.append(f"{indent}    next best   {second.text(plan.axes)}")
    return lines


def _collectives(plan: Plan) -> list[str]:
    rows: Counter[tuple[str, ...]] = Counter()
    times: Counter[tuple[str, ...]] = Counter()
    for c in plan.collectives:
        key = (c.kind, ",".join(c.axes), c.op, c.source, c.reason)
        rows[key] += int(c.total_bytes)
        times[key] += c.count
    lines = [f"collectives: {size(plan.comm_bytes)} sent by one device per call"]
    for key, total in rows.most_common():
        kind, axes, op, source, why_ = key
        lines.append(f"  {times[key]} x {kind} over {axes}, {size(total)}: {op} at {source}")
        if why_:
            lines.append(f"      {why_}")
    return lines


def _fallbacks(plan: Plan) -> list[str]:
    if not plan.fallbacks:
        return ["no fallbacks: nothing was replicated that the program did not ask for"]
    lines = ["fallbacks: replicated because no local way is known"]
    for f in plan.fallbacks:
        lines.append(f"  {f.value} {list(f.shape)}, {size(f.bytes)}: {f.op} at {f.source}: {f.why}")
    return lines


def diff(plan: Plan, other: Plan) -> str:
    """Values sharded otherwise, and the change in bytes, from `plan` to `other`."""
    lines = []
    mine, theirs = plan.body.variables(), other.body.variables()
    if [(v.shape, v.dtype) for v in mine] != [(v.shape, v.dtype) for v in theirs]:
        raise ShardingError(
            "the two plans are of different programs",
            facts=f"{len(mine)} values against {len(theirs)}",
            hint="diff compares plans of one function on arguments of the same shapes",
        )
    for a, b in zip(
        [*mine, *plan.completion.results], [*theirs, *other.completion.results], strict=True
    ):
        x, y = sharded(plan, a), sharded(other, b)
        if x != y:
            lines.append(f"{name(a)}: {x} -> {y}")
    lines.append(f"bytes sent by one device: {size(plan.comm_bytes)} -> {size(other.comm_bytes)}")
    return "\n".join(lines)
