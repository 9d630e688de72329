"""`batched`: a function of the user's that maps over a dim; each device calls it on its own rows.

A batch dim is split evenly or not at all, as the function must see no padding.  Sums over rows (the
gradient of an argument without a batch dim) are finished at once.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from shardwise import _jax
from shardwise.batched import ONCE, SUM, Places, batched_p
from shardwise.errors import ShardingError
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn, Var


@rule(batched_p)
def _batched(eqn: Eqn) -> FactorRule:
    """`b i, j -> b k`: the batches, factors 0, 1, ..., may be split, all else is whole."""
    values = [*zip(eqn.invars, eqn.params["ins"], strict=True)]
    values += zip(eqn.outvars, eqn.params["outs"], strict=True)
    count = len(values[0][1]) if values else 0
    build = RuleBuilder()
    for k in range(count):
        sizes = [v.shape[d[k]] for v, d in values if isinstance(d[k], int)]
        build.factor(sizes[0] if sizes else 1)

    def dims(v: Var, places: Places) -> list[int]:
        return [places.index(d) if d in places else build.factor(s) for d, s in enumerate(v.shape)]

    named = [dims(v, d) for v, d in values]
    n = len(eqn.invars)
    return build.build(
        named[:n], named[n:], whole=range(count, len(build.sizes)), even=range(count),
        special=[k for k in range(count) if any(d[k] == SUM for d in eqn.params["outs"])],
    )  # fmt: skip


@local(batched_p)
def _rows(ctx: LocalContext, eqn: Eqn, *xs: Any) -> list[Any]:
    xs = tuple(
        x if _is_first(ctx, d) is None else jnp.where(_is_first(ctx, d), x, jnp.zeros_like(x))
        for x, d in zip(xs, eqn.params["ins"], strict=True)
    )
    ys = _jax.opaque(eqn.params["fn"], *xs)
    for i, (y, places) in enumerate(zip(ys, eqn.params["outs"], strict=True)):
        if y.shape != ctx.local_out(i):
            raise ShardingError(
                "batched: the function does not map over the dims it was said to",
                where=eqn.params["source"],
                facts=f"of {[list(x.shape) for x in xs]} it makes {list(y.shape)}, "
                f"where its rows of the whole have {list(ctx.local_out(i))}",
                hint="take shapes from the arguments; a result without a batch dim has out_dims None",
            )
        if atoms := _atoms(ctx, places, SUM):
            ys[i] = lax.psum(y, atoms)
    return ys


def _atoms(ctx: LocalContext, places: Places, kind: str) -> tuple[str, ...]:
    """The atoms over which batches are split that a value goes with in this way."""
    return tuple(a for k, place in enumerate(places) if place == kind for a in ctx.axes(k))


def _is_first(ctx: LocalContext, places: Places) -> Any:
    """Whether this device is the one that counts an operand; None where all do."""
    atoms = _atoms(ctx, places, ONCE)
    return ctx.block_index(atoms) == 0 if atoms else None


@comm(batched_p)
def _sums(ctx: LocalContext, eqn: Eqn) -> float:
    out = 0.0
    for v, layout, places in zip(eqn.outvars, ctx.outs, eqn.params["outs"], strict=True):
        g = ctx.mesh.size(_atoms(ctx, places, SUM))
        block = v.nbytes / max(ctx.mesh.size(a for d in layout.sharding.axes for a in d), 1)
        out += 2 * block * (g - 1) / g
    return out
