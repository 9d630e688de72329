"""The partitioner: an interpreter that runs a program on one device's blocks (GSPMD 4).

It runs under `jax.shard_map` over the atom mesh, equation by equation: choose the layouts (`choose`),
bring the operands there (`reshard`), run the op's local code, keep the result in the layout it came
out in, pending sums included.  Nothing is finished, gathered or sliced before somebody needs it so.
What differs between devices depends on `lax.axis_index` only: one program for all of them.

Every collective is emitted under a name scope `sw<n>`, and `notes[n]` says which equation wanted it and
why; the per-device jaxpr is later read back into `Plan.collectives` through these.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise import _jax
from shardwise.accumulate import added_to
from shardwise.candidates import Operand, Result
from shardwise.choose import Choice, choose
from shardwise.complete import Completion
from shardwise.factors import spread
from shardwise.mesh import MeshAxes
from shardwise.notes import Fallback, Note, gathers
from shardwise.ops.registry import (
    LocalContext,
    comm_bytes,
    layouts_for,
    level_of,
    rules_of,
    run_local,
)
from shardwise.program import ANNOTATIONS, Body, Eqn, Lit, Var
from shardwise.reshard import emit_reshard, reshard_bytes
from shardwise.sharding import Sharding
from shardwise.share import work
from shardwise.value import EFFORT, Value, reachable, received_in
from shardwise.windows import Limits, windowed_choice

Handler = Callable[["Partitioner", Eqn, list[Value]], list[Value]]


class Partitioner:
    """Runs bodies on local blocks.  One per trace of a plan.

    `handlers` run the primitives that need more than a rule: control flow, annotations.
    """

    def __init__(
        self,
        completion: Completion,
        limits: Limits | None = None,
        handlers: Mapping[str, Handler] | None = None,
    ):
        self.completion = completion
        self.handlers = handlers or {}
        self.limits = limits or Limits()
        self.mesh: MeshAxes = completion.mesh
        self.notes: list[Note] = []
        self.fallbacks: list[Fallback] = []
        self._choices: dict[Any, tuple[Choice, Choice | None]] = {}
        self.eqn_choices: dict[Eqn, tuple[Choice, Choice | None]] = {}
        self.uses: dict[Var, Counter[str]] = {}
        self.sole_reader: dict[Var, Var] = {}
        self.terms: dict[Var, int] = {}  # of a loop's sum: how many terms are finished together
        self.passes: dict[Any, list[Eqn]] = {}  # equations carried out as several (`fft_passes`)
        self._counted: set[Body] = set()
        self.emitted: dict[Any, Any] = {}  # of the body that runs: `repeats`
        self._on: dict[MeshAxes, Partitioner] = {}
        self.watch: dict[Var, Value | None] = {}  # values a trial run wants to see
        self.loops: dict[Any, Any] = {}  # what was decided for each loop, by how its operands lie
        self.invariant: set[Var] = set()  # what bodies make of loop constants only
        self.preferred: dict[Var, Sharding] = {}  # how a loop wants what its body hands out
        # stack -> the carry it is added to, its value, and the dim that is the stack's first
        self.accumulators: dict[Var, tuple[Var, Value, int]] = {}

    def reset(self) -> None:
        """Forget what an earlier trace left: a plan may be traced again (lowered under another jit)."""
        self.notes.clear()
        self.fallbacks.clear()

    # -- values ------------------------------------------------------------------------------------

    def padded(self, v: Var) -> tuple[int, ...]:
        return self.completion.padded.get(v, v.shape)

    def wanted(self, v: Var) -> Sharding:
        return self.completion.sharding(v)

    def asked(self, v: Var) -> Sharding:
        """The sharding a result should be brought to: that of its only reader, where the user fixed it
        (an annotation, or the program's result), else the completed one."""
        if v in self.preferred:
            return self.preferred[v]
        reader = self.sole_reader.get(v)
        if reader is None or self.padded(reader) != self.padded(v):
            return self.wanted(v)
        return self.wanted(reader)

    def value(self, v: Var, x: Any, sharding: Sharding | None = None) -> Value:
        """A value at hand in one sharding (the completed one unless given)."""
        return Value(v, self.padded(v), {sharding or self.wanted(v): x})

    def literal(self, v: Lit) -> Value:
        def make(_: Sharding) -> Any:
            return np.asarray(v.value, v.dtype) if not _is_key(v.dtype) else v.value

        return Value(v, v.shape, make=make, zero=_is_zero(v.value))

    def constant(self, v: Var, x: Any) -> Value:
        """A constant of the program: every device has it whole and cuts its block."""
        return Value(v, self.padded(v), {Sharding.replicated(v.rank): x}, zero=_is_zero(x))

    @contextlib.contextmanager
    def noted(self, note: Note) -> Any:
        self.notes.append(note)
        info = note.eqn.info if note.eqn else None
        with _jax.under_source(info, f"sw{len(self.notes) - 1}"):
            yield

    def get(self, value: Value, sharding: Sharding, note: Note | None = None) -> Any:
        """This device's block of a value in a sharding, brought there if need be (once)."""
        if value.asked is not None:
            value.asked[sharding] += 1
        if sharding in value.variants:
            return value.variants[sharding]
        if value.make is not None:
            x = value.make(sharding)
        elif sharding.partial and value.zero:
            x = self.get(value, sharding.tiling, note)
        elif not any(reachable(s, sharding) for s in value.variants):
            x = self.as_term(value, sharding, note)
        else:
            source = min(
                (s for s in value.variants if reachable(s, sharding)),
                key=lambda s: (
                    round(reshard_bytes(value.layout(s), sharding, value.itemsize, self.mesh), 3),
                    len(s.partial),
                ),
            )
            x = self.moved(value, source, sharding, note or Note(None, "bring"))
        value.variants[sharding] = x
        return x

    def moved(self, value: Value, source: Sharding, sharding: Sharding, note: Note) -> Any:
        layout = value.layout(source)
        if sharding in value.behind and not reshard_bytes(
            layout, sharding, value.itemsize, self.mesh
        ):
            return value.behind[sharding]  # frees the annotated block, which may be a gathered one
        note = dataclasses.replace(note, value=value.name, before=source, after=sharding)
        with self.noted(note):
            return emit_reshard(value.variants[source], layout, sharding, self.mesh)

    def as_term(self, value: Value, sharding: Sharding, note: Note | None) -> Any:
        """A finished value as one term of a pending sum: itself on the first block, zero elsewhere."""
        x = self.get(value, sharding.tiling, note)
        first = lax.axis_index(sharding.partial) == 0
        return jnp.where(first, x, jnp.zeros((), x.dtype))

    # -- programs ----------------------------------------------------------------------------------

    def run(self, body: Body, values: Sequence[Value]) -> list[Value]:
        """Run a body on values for its inputs; returns values for its outputs."""
        env: dict[Var, Value] = dict(zip(body.invars, values, strict=True))
        outside, self.emitted = self.emitted, {}
        env.update({v: self.constant(v, x) for v, x in body.consts})
        self._count_uses(body)
        manual = self.completion.regions.meshes

        def read(v: Var) -> Value:
            return self.literal(v) if isinstance(v, Lit) else env[v]

        for eqn in body.eqns:
            ins = [read(v) for v in eqn.invars]
            p = self.on(manual[eqn]) if eqn in manual else self
            outs = self.handlers.get(eqn.name, Partitioner.equation)(p, eqn, ins)
            env.update(zip(eqn.outvars, outs, strict=True))
            for v, out in zip(eqn.outvars, outs, strict=True):
                if v in self.invariant:
                    out.times = min((x.times for x in ins if not x.free), default=1)
                if v in self.watch:
                    out.asked = Counter() if out.asked is None else out.asked
                    self.watch[v] = out
        self.emitted = outside
        return [read(v) for v in body.outvars]

    def counted(self, body: Body) -> Body:
        """A body made of another's equations, whose uses are known."""
        self._counted.add(body)
        return body

    def on(self, mesh: MeshAxes) -> Partitioner:
        """This partitioner on the mesh that a manual region sees; notes and reports are shared."""
        if mesh == self.mesh:
            return self
        if mesh not in self._on:
            self._on[mesh] = other = copy.copy(self)
            other.mesh, other._choices = mesh, {}
        return self._on[mesh]

    def _count_uses(self, body: Body) -> None:
        if body in self._counted:  # bodies run more than once: trial runs, branches
            return
        self._counted.add(body)
        results = self.completion.results if body is self.completion.body else []
        fixed = [(e.invars[0], e.outvars[0]) for e in body.eqns if e.name in ANNOTATIONS]
        fixed += [
            (v, r)
            for v, r in zip(body.outvars, results, strict=False)
            if r in self.completion.fixed
        ]
        for eqn in body.eqns:
            for v in dict.fromkeys(eqn.invars):
                self.uses.setdefault(v, Counter())[eqn.name] += 1
        for v in body.outvars:
            self.uses.setdefault(v, Counter())["result"] += 1
        self.sole_reader.update({v: r for v, r in fixed if sum(self.uses[v].values()) == 1})

    def equation(self, eqn: Eqn, ins: list[Value]) -> list[Value]:
        """One equation with a rule; without one, a reported fallback."""
        if (done := next((v for v in ins if v.onto is not None), None)) is not None:
            return [done.accumulated(eqn)]
        rules = rules_of(eqn)
        if not rules:
            return self.fallback(eqn, ins, f"no sharding rule for `{eqn.name}`")
        if level_of(eqn.primitive) in ("elementwise", "broadcast") and all(
            v.free or (not v.shape and Sharding(()) in v.variants) for v in ins
        ):
            return [self.created(eqn, rules[0], ins, k) for k in range(len(eqn.outvars))]
        choice, second = self.choice(eqn, rules, ins)
        self.eqn_choices[eqn] = (choice, second)
        target = added_to(self, eqn, ins, choice)
        xs = [] if target is None else [target[1]]
        for v, var, layout in list(zip(ins, eqn.invars, choice.ins, strict=True))[len(xs) :]:
            note = Note(eqn, "bring", var=var, choice=choice, runner_up=second)
            xs.append(self.get(v, layout.sharding, note))
        self.fallbacks += gathers(eqn, ins, rules, choice, self.mesh)
        received = received_in(ins, choice.ins)
        ctx = dataclasses.replace(choice.context(self.mesh), received=received)
        ys = self.local(eqn, ctx, xs, choice)
        outs = [
            Value(var, self.padded(var), {layout.sharding: y})
            for var, layout, y in zip(eqn.outvars, choice.outs, ys, strict=True)
        ]
        if target is not None:
            outs[0].onto = target[0]
        return outs

    def local(
        self, eqn: Eqn, ctx: LocalContext, xs: Sequence[Any], choice: Choice | None = None
    ) -> list[Any]:
        with self.noted(Note(eqn, "local", choice=choice)):
            return run_local(ctx, eqn, xs)

    def created(self, eqn: Eqn, rule: Any, ins: list[Value], k: int) -> Value:
        """A value made of created values: made again wherever, and however, it is needed."""
        var = eqn.outvars[k]

        def make(sharding: Sharding) -> Any:
            assignment = {}
            for factors, axes in zip(rule.results[k], sharding.axes, strict=True):
                assignment.update(spread(factors, axes, rule.sizes, self.mesh))
            shapes_in = [(v.shape, v.padded) for v in ins]
            shapes_out = [(o.shape, self.padded(o)) for o in eqn.outvars]
            ctx = LocalContext(
                self.mesh, rule, assignment,
                layouts_for(rule, assignment, shapes_in, "operands", self.mesh),
                layouts_for(rule, assignment, shapes_out, "results", self.mesh),
            )  # fmt: skip
            xs = [self.get(v, l.sharding) for v, l in zip(ins, ctx.ins, strict=True)]
            return self.local(eqn, ctx, xs)[k]

        zero = (
            eqn.name in ("broadcast_in_dim", "convert_element_type", "neg", "copy") and ins[0].zero
        )
        effort = EFFORT.get(eqn.name, 0.0) + max((v.effort for v in ins), default=0.0)
        return Value(var, self.padded(var), make=make, zero=zero, effort=effort)

    def choice(self, eqn: Eqn, rules: Any, ins: list[Value]) -> tuple[Choice, Choice | None]:
        """The layouts for an equation; equal situations (the next layer) are looked up."""
        dot = level_of(eqn.primitive) == "dot"
        operands = tuple(
            Operand(
                v.shape, v.padded, v.itemsize, tuple(v.variants), v.free, v.zero,
                *self._readers(eqn, var, v, dot),
                v.times,
                self.limits.room if v.times > 1 else 0,
                next((j for j, w in enumerate(ins[:i]) if w is v), None),
                v.effort,
            )
            for i, (v, var) in enumerate(zip(ins, eqn.invars, strict=True))
        )  # fmt: skip
        results = tuple(
            Result(
                shape=v.shape,
                padded=self.padded(v),
                itemsize=v.itemsize,
                wanted=self.asked(v),
                open=v not in self.completion.axes and v not in self.sole_reader,
                terms=self.terms.get(v, 1),
                in_place=eqn.name == "scatter-add" and v in self.terms and ins[0].zero,
            )
            for v in eqn.outvars
        )
        special = any(r.special for r in rules)
        at_hand = tuple(v.at_hand for v in ins) if special else ()
        key = (dot, work(eqn) if special else None, rules, operands, results, at_hand)
        if key not in self._choices:

            def local_bytes(ctx: LocalContext) -> float:
                return comm_bytes(dataclasses.replace(ctx, received=received_in(ins, ctx.ins)), eqn)

            best, second = choose(rules, operands, results, self.mesh, local_bytes, dot)
            if eqn.name == "dot_general":
                best = windowed_choice(best, operands, results, self.mesh, self.limits)
            self._choices[key] = best, second
        return self._choices[key]

    def _readers(self, eqn: Eqn, var: Var, v: Value, dot: bool) -> tuple[int, int]:
        """How many equations read a value, and how many of this kind; 1 where no price depends on it."""
        uses = self.uses.get(var, {})
        pending = any(s.partial for s in v.variants)
        return (sum(uses.values()) or 1) if pending else 1, uses.get(eqn.name, 1) if dot else 1

    # -- fallbacks ---------------------------------------------------------------------------------

    def fallback(self, eqn: Eqn, ins: list[Value], why: str) -> list[Value]:
        """Gather every operand, run the op whole on every device: always valid, never silent."""
        source = eqn.source
        xs = []
        for v, var in zip(ins, eqn.invars, strict=True):
            whole = Sharding.replicated(len(v.shape))
            if not v.free and whole not in v.variants:
                self.fallbacks.append(Fallback(eqn.name, source, v.name, v.shape, var.nbytes, why))
            xs.append(self.get(v, whole, Note(eqn, "fallback", var=var)))
        with self.noted(Note(eqn, "fallback")):
            ys = eqn.primitive.bind(*xs, **eqn.params)
        ys = list(ys) if eqn.primitive.multiple_results else [ys]
        return [
            self.value(o, y, Sharding.replicated(o.rank))
            for o, y in zip(eqn.outvars, ys, strict=True)
        ]

    def results(self, body: Body, values: Sequence[Value]) -> list[Any]:
        """The program's results in the shardings completed for them."""
        out = []
        for v, stand_in, var in zip(values, self.completion.results, body.outvars, strict=True):
            note = Note(None, "result", var=var)
            out.append(self.get(self.repadded(v, stand_in), self.wanted(stand_in), note))
        return out

    def repadded(self, v: Value, var: Var) -> Value:
        """`v` under the padded sizes of another name for it (equal unless the dims were never tied)."""
        if v.padded == self.padded(var):
            return v
        new = Value(var, self.padded(var), make=v.make, zero=v.zero, effort=v.effort)
        for s, x in v.variants.items():
            if all(
                not axes or a == b for axes, a, b in zip(s.axes, v.padded, new.padded, strict=True)
            ):
                new.variants[s] = x
        if not new.variants and new.make is None:
            s = v.first
            keep = tuple(
                axes if a == b else ()
                for axes, a, b in zip(s.axes, v.padded, new.padded, strict=True)
            )
            new.variants[Sharding(keep)] = self.get(
                v, Sharding(keep), Note(None, "result", var=var)
            )
        return new


def _is_zero(x: Any) -> bool:
    try:
        return np.ndim(x) == 0 and not isinstance(x, bool) and x == 0
    except Exception:
        return False


def _is_key(dtype: Any) -> bool:
    return not isinstance(dtype, np.dtype)
