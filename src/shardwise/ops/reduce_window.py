"""Windows that are reduced: pooling, and what its gradients reduce.

A split window dim is read through a halo of rows from the neighbours (`sliding`).  Other ways to do
it, priced beside that one:

    one window over the whole dim     a reduction: each device its rows, a pending sum over them
    windows longer than many shards   the dim whole, its atoms moved to another dim by an all-to-all
    an operand that lies whole        every device cuts the rows that its windows read

Where a device's windows reach over the end of the dim, and another's do not, what they meet there is
the reduction's identity; with a function we know nothing of, rows marked as not there: backends leave
padding out rather than reduce the initial value once for each of it.
"""

from __future__ import annotations

from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise import _jax, _jax_primitives
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.reduce import identity
from shardwise.ops.reduce_any import monoid_of
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.ops.sliding import Sliding, Split, WindowDim, slide, sliding, sliding_bytes
from shardwise.program import Eqn

_P = _jax_primitives.lax_primitives("windowed_reductions")
_KINDS = {
    _P["reduce_window_sum"]: "sum",
    _P["reduce_window_max"]: "max",
    _P["reduce_window_min"]: "min",
}
_EVERY = (*_KINDS, _P["reduce_window"], _P["select_and_gather_add"])


def window_dims(eqn: Eqn) -> list[WindowDim]:
    """The window along each dim."""
    p, ones = eqn.params, (1,) * len(eqn.params["window_dimensions"])
    return [
        WindowDim(int(size), int(stride), int(low), int(high), int(base), int(dilation))
        for size, stride, (low, high), base, dilation in zip(
            p["window_dimensions"], p["window_strides"], p["padding"],
            p.get("base_dilation") or ones, p.get("window_dilation") or ones, strict=True,
        )
    ]  # fmt: skip


def trivial(w: WindowDim) -> bool:
    """Whether a window is one row, at every row."""
    return w.size == w.stride == w.base == 1 and not (w.low or w.high)


def _total(w: WindowDim, windows: int) -> bool:
    """Whether there is one window, of adjacent rows."""
    return windows == 1 and not trivial(w) and w.base == w.dilation == 1


@rule(*_EVERY, level="dims")
def _reduce_window(eqn: Eqn) -> tuple[FactorRule, ...]:
    """`i w -> i w  special=w`; `i w -> i 1  sum=w` for one window; `i w -> i v  whole=w`."""
    windows, y = window_dims(eqn), eqn.outvars[0]
    count = len(eqn.outvars)
    data = 2 if eqn.name == "select_and_gather_add" else count
    scalars = [[] for _ in range(len(eqn.invars) - data)]
    b = RuleBuilder()
    dims = b.factors(eqn.invars[0].shape)
    slid = [d for d, w in zip(dims, windows, strict=True) if not trivial(w)]
    linear = ((0,),) if eqn.name == "reduce_window_sum" else ()
    ins, outs = [dims] * data + scalars, [dims] * count
    rules = [b.build(ins, outs, special=slid, linear=linear)]
    total = [d for d, w in enumerate(windows) if _total(w, y.shape[d])]
    if total and (op := _KINDS.get(eqn.primitive)):
        ones = [b.factor(1) if i in total else d for i, d in enumerate(dims)]
        rules.append(b.build(
            ins, [ones], reduced={dims[i]: op for i in total}, linear=linear, variant="total",
            special=[d for i, d in enumerate(dims) if d in slid and i not in total],
            whole=[ones[i] for i in total],
        ))  # fmt: skip
    if slid:
        cut = {d: b.factor(n) for d, n in zip(dims, y.shape, strict=True) if d in slid}
        rules.append(b.build(
            ins, [[cut.get(d, d) for d in dims]] * count, linear=linear, variant="whole",
            special=cut.values(), whole=slid,
        ))  # fmt: skip
    return tuple(rules)


def _plans(ctx: LocalContext, eqn: Eqn) -> dict[int, Sliding]:
    """How each window dim that is split, and not a reduction, slides."""
    x, y = ctx.ins[0], ctx.outs[0]
    return {
        d: sliding(Split.of(x, d, ctx.mesh), w, Split.of(y, d, ctx.mesh))
        for d, w in enumerate(window_dims(eqn))
        if not trivial(w) and y.sharding.axes[d]
    }


def _fills(eqn: Eqn, xs: Any) -> list[Any]:
    """What a window meets where there are no rows, for each operand: a number."""
    if op := _KINDS.get(eqn.primitive):
        return [identity(op, xs[0].dtype).item()]
    if eqn.name == "select_and_gather_add":
        op = "max" if eqn.params["select_prim"] is lax.ge_p else "min"
        return [0, identity(op, xs[1].dtype).item()]
    if op := monoid_of(eqn):
        return [identity(op, xs[0].dtype).item()]
    return [0] * (len(xs) // 2)  # anything: they are marked as not there


@local(*_EVERY)
def _reduce_window_local(ctx: LocalContext, eqn: Eqn, *xs: Any) -> Any:
    plans, fills = _plans(ctx, eqn), _fills(eqn, xs)
    moved = [slide(x, plans, fill) for x, fill in zip(xs, fills, strict=False)]
    windows = [plans[d].window if d in plans else w for d, w in enumerate(window_dims(eqn))]
    if ctx.rule.variant == "total":
        for d, atoms in enumerate(ctx.ins[0].sharding.axes):
            if atoms and d not in plans and not trivial(windows[d]):
                moved[0] = _within(ctx, moved[0], d, windows[d], fills[0])
                windows[d] = WindowDim(moved[0].shape[d])
    params = {
        "window_dimensions": tuple(w.size for w in windows),
        "padding": tuple((w.low, w.high) for w in windows),
        "base_dilation": tuple(w.base for w in windows),
        "window_strides": eqn.params["window_strides"],
        "window_dilation": eqn.params["window_dilation"],
    }
    if plans and eqn.primitive is _P["reduce_window"] and not monoid_of(eqn):
        there = slide(jnp.ones(xs[0].shape, bool), plans, False)
        return _reduce_those_there(eqn, [*moved, there], xs[len(moved) :], params)
    return eqn.primitive.bind(*moved, *xs[len(moved) :], **{**eqn.params, **params})


def _reduce_those_there(eqn: Eqn, xs: Any, starts: Any, params: dict[str, Any]) -> Any:
    """A generic reduction of rows of which the last of `xs` says whether they are there."""
    run = jex.jaxpr_as_fun(_jax.with_consts(eqn.params["jaxpr"], eqn.params["consts"]))

    def both(a: Any, b: Any) -> Any:
        (*x, has_x), (*y, has_y) = a, b
        each = zip(run(*x, *y), x, y, strict=True)
        got = [jnp.where(has_x & has_y, z, jnp.where(has_y, q, p)) for z, p, q in each]
        return (*got, has_x | has_y)

    out = lax.reduce_window(tuple(xs), (*starts, np.array(True)), both, **params)
    return list(out)[:-1]


def _within(ctx: LocalContext, x: Any, dim: int, w: WindowDim, fill: Any) -> Any:
    """The rows of this block that the only window does not hold, filled."""
    n = ctx.ins[0].shape[dim]
    lo, hi = max(0, -w.low), min(n, w.size - w.low)
    if lo == 0 and hi == n and not ctx.ins[0].uneven(dim):
        return x
    row = ctx.global_iota(ctx.ins[0], dim)
    inside = ((row >= lo) & (row < hi)).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    return jnp.where(inside, x, jnp.asarray(fill, x.dtype))


@comm(*_EVERY)
def _reduce_window_comm(ctx: LocalContext, eqn: Eqn) -> float:
    """The halos of every operand."""
    plans = _plans(ctx, eqn)
    data = [v for v in eqn.invars if v.rank]
    return sum(sliding_bytes(ctx.local_in(i), plans, v.itemsize) for i, v in enumerate(data))
