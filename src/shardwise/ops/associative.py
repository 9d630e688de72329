"""`associative_scan` with an elementwise function, found again in what JAX writes for it there.

As the cumulative sums are (`cumulative`): each device scans its block, and what the earlier blocks come to
reaches it in log2(P) permutes of one row; the function given combines.  It need not commute, and need
have no identity.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import Device, where
from shardwise.ops.cumulative import steps
from shardwise.ops.moves import empty
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn, Lit, Var

associative_scan_p = jex.Primitive("associative_scan")
associative_scan_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class Combine:
    """The function a scan combines with, as equations on rows of any number.

    Attributes:
      earlier, later: what stands for its arguments, one variable each for the arrays scanned.
      extra: scalars it takes from outside; `results` what it returns.
    """

    eqns: tuple[Eqn, ...]
    earlier: tuple[Var, ...]
    later: tuple[Var, ...]
    extra: tuple[Var, ...]
    results: tuple[Var, ...]

    def __call__(self, a: Sequence[Any], b: Sequence[Any], extra: Sequence[Any]) -> list[Any]:
        env = dict(zip((*self.earlier, *self.later, *self.extra), (*a, *b, *extra), strict=True))
        for eqn in self.eqns:
            xs = [
                np.asarray(v.value, v.dtype)[()] if isinstance(v, Lit) else env[v]
                for v in eqn.invars
            ]
            params = eqn.params
            if eqn.name == "broadcast_in_dim":  # a scalar, to as many rows as there are
                params = {**params, "shape": a[0].shape}
            out = eqn.primitive.bind(*xs, **params)
            env.update(
                zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True)
            )
        return [env[v] for v in self.results]


def _scan(xs: Sequence[Any], axis: int, combine: Combine) -> list[Any]:
    k = len(combine.results)
    return lax.associative_scan(lambda a, b: combine(a, b, xs[k:]), list(xs[:k]), axis=axis)


@associative_scan_p.def_impl
def _whole(*xs: Any, axis: int, combine: Combine) -> Any:
    return _scan(xs, axis, combine)


@associative_scan_p.def_abstract_eval
def _types(*avals: Any, axis: int, combine: Combine) -> Any:
    return list(avals[: len(combine.results)])


@rule(associative_scan_p)
def _rule(eqn: Eqn) -> FactorRule:
    """`i s, i s, () -> i s, i s  special=s`."""
    b = RuleBuilder()
    dims = b.factors(eqn.invars[0].shape)
    ins = [dims if v.rank else [] for v in eqn.invars]
    return b.build(ins, [dims] * len(eqn.outvars), special=[dims[eqn.params["axis"]]])


@local(associative_scan_p)
def _local(ctx: LocalContext, eqn: Eqn, *xs: Any) -> Any:
    axis, combine = eqn.params["axis"], eqn.params["combine"]
    if empty(ctx):
        return list(xs[: len(eqn.outvars)])
    ys, extra = _scan(xs, axis, combine), xs[len(eqn.outvars) :]
    if not (rounds := steps(ctx, axis)):
        return ys
    device = Device(ctx.ins[0].sharding.axes[axis])
    count = ctx.mesh.size(device.atoms)
    n = ys[0].shape[axis]
    run = [lax.slice_in_dim(y, n - 1, n, axis=axis) for y in ys]
    before: list[Any] = []
    for step in range(rounds):
        # `run` is the last 2**step totals up to this block, `before` those that are not its own.
        reach = 1 << step
        pairs = [(i, i + reach) for i in range(count - reach)]
        got = [device.receive(t, pairs) for t in run]
        there = device.index >= reach
        both = combine(got, before, extra) if before else got
        before = (
            [where(there, b, old) for b, old in zip(both, before, strict=True)] if before else both
        )
        if step + 1 < rounds:
            run = [where(there, b, t) for b, t in zip(combine(got, run, extra), run, strict=True)]
    before = [jnp.broadcast_to(b, y.shape) for b, y in zip(before, ys, strict=True)]
    return [
        where(device.index > 0, z, y) for z, y in zip(combine(before, ys, extra), ys, strict=True)
    ]


@comm(associative_scan_p)
def _comm(ctx: LocalContext, eqn: Eqn) -> float:
    """One row of each array for each permute."""
    axis = eqn.params["axis"]
    if empty(ctx):
        return 0.0
    rows = math.prod(n for d, n in enumerate(ctx.local_in(0)) if d != axis)
    return float(steps(ctx, axis) * rows * sum(v.itemsize for v in eqn.outvars))
