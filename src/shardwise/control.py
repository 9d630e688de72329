"""Control flow and annotations: equations whose partitioning is about their bodies.

A value handed to a body, carried around a loop or returned from a branch is in the sharding completion
gave the body's variable: the loop's contract.  Inside, the body is partitioned like any program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise import tpu
from shardwise.accumulate import carry_shardings
from shardwise.cost import comm
from shardwise.ops.registry import LocalContext
from shardwise.partition import Handler, Note, Partitioner
from shardwise.program import Eqn, Var
from shardwise.sharding import Sharding
from shardwise.value import Value


def stacked(s: Sharding) -> Sharding:
    """The sharding of a stack of values: the loop dim first, whole."""
    return Sharding(((), *s.axes), s.partial, s.op)


def hand(p: Partitioner, eqn: Eqn, values: Sequence[Value], variables: Sequence[Var],
         shardings: Sequence[Sharding]) -> list[Any]:  # fmt: skip
    """Blocks of `values` in the shardings the body's variables have."""
    out = []
    for v, var, s in zip(values, variables, shardings, strict=True):
        same = v if len(v.shape) != len(var.shape) else p.repadded(v, var)
        out.append(p.get(same, s, Note(eqn, "loop", var=var)))
    return out


def annotation(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """The user's word: from here on the value lies as annotated."""
    (out,) = eqn.outvars
    s = p.wanted(out)
    v = p.repadded(ins[0], out)
    if v.free and v.make is not None:
        return [v]
    x = p.get(v, s, Note(eqn, "annotation", var=out))
    # Other layouts the operand is at hand in are no variants: a reader would take the cheapest of
    # them, and the annotation would be a gather that nobody reads.
    value = Value(out, v.padded, {s: x})
    value.behind = {**v.behind, **v.variants}
    return [value]


def scan(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    (body,) = eqn.bodies
    n, c = eqn.params["num_consts"], eqn.params["num_carry"]
    consts, init, xs = ins[:n], ins[n : n + c], ins[n + c :]
    const_vars, carry_vars, x_vars = body.invars[:n], body.invars[n : n + c], body.invars[n + c :]
    const_s = [p.wanted(v) for v in const_vars]
    x_s = [p.wanted(v) for v in x_vars]
    y_vars = body.outvars[c:]
    y_s = [Sharding(p.wanted(o).axes[1:]) for o in eqn.outvars[c:]]
    const_blocks = hand(p, eqn, consts, const_vars, const_s)
    x_blocks = hand(p, eqn, xs, eqn.invars[n + c :], [stacked(s) for s in x_s])

    def step(
        shardings: Sequence[Sharding], carry: Sequence[Any], x: Sequence[Any]
    ) -> tuple[list[Value], list[Value]]:
        values = [
            p.value(v, b, s) for v, b, s in zip(const_vars, const_blocks, const_s, strict=True)
        ]
        values += [p.value(v, b, s) for v, b, s in zip(carry_vars, carry, shardings, strict=True)]
        values += [p.value(v, b, s) for v, b, s in zip(x_vars, x, x_s, strict=True)]
        outs = p.run(body, values)
        return outs[:c], outs[c:]

    narrow = [tpu.read_as(body, v) if tpu.tracing() else None for v in x_vars]

    carry_s = carry_shardings(p, eqn, body, init, step, x_blocks)
    init_blocks = hand(p, eqn, init, carry_vars, carry_s)

    def f(carry: Any, x: Any) -> Any:
        x = [tpu.rounded(b, t) if t is not None else b for b, t in zip(x, narrow, strict=True)]
        new, ys = step(carry_s, carry, x)
        return (
            hand(p, eqn, new, carry_vars, carry_s),
            hand(p, eqn, ys, y_vars, y_s),
        )

    params = {k: eqn.params[k] for k in ("length", "reverse", "unroll") if k in eqn.params}
    final, ys = lax.scan(f, init_blocks, x_blocks, **params)
    out = [p.value(o, b, s) for o, b, s in zip(eqn.outvars[:c], final, carry_s, strict=True)]
    out += [p.value(o, b, stacked(s)) for o, b, s in zip(eqn.outvars[c:], ys, y_s, strict=True)]
    return out


def while_loop(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """A loop until a predicate is false; vmapped, until all of a batch of predicates are.

    A batch of predicates means that each element stops by itself.  Where neither body communicates, a
    device runs until its own elements are done; else all devices agree in every iteration.
    """
    cond, body = eqn.bodies
    n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry_vars = body.invars[m:]
    (go_var,) = cond.outvars
    carry_s = _aligned(p.wanted(go_var), [p.wanted(v) for v in carry_vars])
    cond_s = [p.wanted(v) for v in cond.invars[:n]]
    body_s = [p.wanted(v) for v in body.invars[:m]]
    cond_blocks = hand(p, eqn, ins[:n], cond.invars[:n], cond_s)
    body_blocks = hand(p, eqn, ins[n : n + m], body.invars[:m], body_s)
    init = hand(p, eqn, ins[n + m :], carry_vars, carry_s)

    def predicate(carry: Sequence[Any]) -> Value:
        values = [
            p.value(v, b, s) for v, b, s in zip(cond.invars[:n], cond_blocks, cond_s, strict=True)
        ]
        values += [
            p.value(v, b, s) for v, b, s in zip(cond.invars[n:], carry, carry_s, strict=True)
        ]
        return p.run(cond, values)[0]

    def step(carry: Sequence[Any]) -> list[Any]:
        values = [
            p.value(v, b, s) for v, b, s in zip(body.invars[:m], body_blocks, body_s, strict=True)
        ]
        values += [p.value(v, b, s) for v, b, s in zip(carry_vars, carry, carry_s, strict=True)]
        return hand(p, eqn, p.run(body, values), carry_vars, carry_s)

    if not go_var.shape:
        go = lambda carry: p.get(predicate(carry), Sharding(()), Note(eqn, "loop", var=go_var))  # noqa: E731
        final = lax.while_loop(go, step, init)
    else:
        final = _batched_while(p, eqn, go_var, predicate, step, carry_s, init)
    return [p.value(o, b, s) for o, b, s in zip(eqn.outvars, final, carry_s, strict=True)]


def _batched_while(
    p: Partitioner, eqn: Eqn, go_var: Var, predicate: Callable[..., Value],
    step: Callable[..., list[Any]], carry_s: Sequence[Sharding], init: Sequence[Any],
) -> Any:  # fmt: skip
    """Elements whose predicate is false keep their carry; the loop ends when none is left."""
    rank = go_var.rank
    aligned = Sharding(carry_s[0].axes[:rank])
    note = Note(eqn, "loop", var=go_var)

    def going(carry: Sequence[Any]) -> Any:
        """The predicates as the carries lie, false in the padding (it must not keep a loop alive)."""
        value = predicate(carry)
        x = p.get(value, aligned, note)
        ctx = LocalContext(p.mesh, None, {}, (), ())  # type: ignore[arg-type]
        for d in range(rank):
            x = ctx.mask(x, value.layout(aligned), d, False)
        return x

    def kept(carry: Sequence[Any]) -> list[Any]:
        go, new = going(carry), step(carry)
        return [
            lax.select(lax.broadcast_in_dim(go, a.shape, range(rank)), a, b)
            for a, b in zip(new, carry, strict=True)
        ]

    trial = jax.make_jaxpr(lambda c: (going(c), step(c)))(list(init))
    alone = not comm.find(trial, p.mesh)

    def some(carry: Sequence[Any]) -> Any:
        left = lax.reduce_or(going(carry), tuple(range(rank)))
        if alone or not aligned.used:
            return left
        with p.noted(note):
            return lax.pmax(left.astype(jnp.int32), p.mesh.sort(aligned.used)) > 0

    return lax.while_loop(some, kept, list(init))


def _aligned(predicate: Sharding, carries: Sequence[Sharding]) -> list[Sharding]:
    """Carries of a vmapped loop with their batch dims split as the predicates are."""
    n, used = predicate.rank, predicate.used
    return [Sharding((*predicate.axes, *(s.drop(used).axes[n:]))) if n else s for s in carries]


def cond(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """Operands in the finest sharding the branches agree on; results in the completed one."""
    index = p.get(ins[0], Sharding(()), Note(eqn, "loop", var=eqn.invars[0]))
    first = eqn.bodies[0]
    in_s = [p.wanted(v) for v in first.invars]
    out_s = [p.wanted(o) for o in eqn.outvars]
    blocks = hand(p, eqn, ins[1:], first.invars, in_s)

    def branch(body: Any) -> Callable[..., Any]:
        def run(*xs: Any) -> Any:
            values = [
                Value(v, p.padded(w), {s: x})
                for v, w, x, s in zip(body.invars, first.invars, xs, in_s, strict=True)
            ]
            return hand(p, eqn, p.run(body, values), eqn.outvars, out_s)

        return run

    outs = lax.switch(index, [branch(b) for b in eqn.bodies], *blocks)
    return [p.value(o, x, s) for o, x, s in zip(eqn.outvars, outs, out_s, strict=True)]


def checkpoint(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """The body in place.  In a backward pass its inputs go through an optimisation barrier, as JAX
    itself does, so that the compiler does not reuse the forward pass's values instead of recomputing."""
    (body,) = eqn.bodies
    prevent = eqn.params.get("prevent_cse", True)
    values = []
    held = [v for v in ins if not v.free]
    if eqn.params.get("differentiated", False) and (
        any(prevent) if isinstance(prevent, tuple) else prevent
    ):
        blocks = lax.optimization_barrier([v.variants[v.first] for v in held])
        fresh = dict(zip(map(id, held), blocks, strict=True))
        for v, var in zip(ins, body.invars, strict=True):
            values.append(v if v.free else Value(var, v.padded, {v.first: fresh[id(v)]}))
    else:
        values = ins
    return p.run(body, values)


HANDLERS: dict[str, Handler] = {
    "annotation": annotation,
    "sharding_constraint": annotation,
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "checkpoint": checkpoint,
    "remat": checkpoint,
    "remat2": checkpoint,
}
