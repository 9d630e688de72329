"""`top_k` and `approx_top_k`: each block's own best, merged over one atom after the other.

Every device finds the best k of its block.  Over an atom of two the halves' candidates are gathered and
the best k of both kept, then over the next: k rows for every factor of two, where gathering all
candidates at once takes k rows of every other device.  Equal values are found in the order of their
positions, as on one device, since lists are joined in that order and the primitive keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.moves import empty
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn

approx_top_k_p = lax.approx_top_k_p


@rule(lax.top_k_p, approx_top_k_p)
def _top_k(eqn: Eqn) -> list[FactorRule]:
    """`i s -> i k, i k  special=s whole=k`, and `whole=s,k`: gathered, or moved to another dim."""
    d, rules = _axis(eqn), []
    for variant in ("merged", "whole")[not _merges(eqn) :]:
        b = RuleBuilder()
        dims = b.factors(eqn.invars[0].shape)
        outs = [*dims[:d], b.factor(eqn.outvars[0].shape[d]), *dims[d + 1 :]]
        whole = [outs[d]] if variant == "merged" else [dims[d], outs[d]]
        special = [dims[d]] if variant == "merged" else []
        rules.append(b.build([dims], [outs, outs], special=special, whole=whole, variant=variant))
    return rules


def _axis(eqn: Eqn) -> int:
    p = eqn.params
    return p["axis"] if "axis" in p else p["reduction_dimension"] % eqn.invars[0].rank


def _merges(eqn: Eqn) -> bool:
    """Not the form that returns more candidates than asked for: how many depends on the size."""
    return bool(eqn.params.get("aggregate_to_topk", True))


@local(lax.top_k_p, approx_top_k_p)
def _top_k_local(ctx: LocalContext, eqn: Eqn, x: Any) -> Any:
    d, atoms = _axis(eqn), ctx.ins[0].sharding.axes[_axis(eqn)]
    if not atoms or empty(ctx):
        return eqn.primitive.bind(x, **eqn.params)
    x, block, at = ctx.mask(x, ctx.ins[0], d, _least(eqn)), x.shape[d], None
    for step in _steps(ctx, eqn):
        if step.atom:
            x = lax.all_gather(x, step.atom, axis=d, tiled=True)
            if at is not None:
                at = lax.all_gather(at, step.atom, axis=d, tiled=True)
        if not step.select:
            continue
        x, here = _best(eqn, x, step.keep, local=at is None)
        if at is None:  # the blocks of the atoms so far, in order
            first = ctx.block_index(atoms) // step.blocks * (step.blocks * block)
            at = here + first.astype(here.dtype)
        else:
            at = jnp.take_along_axis(at, here, axis=d, mode="promise_in_bounds")
    return x, at


class _Step(NamedTuple):
    """Candidates gathered over an atom (none at first), and the best of them kept.

    Attributes:
      sends: how many candidates a device sends; `positions`: whether theirs travel too (those of
        whole blocks need not).
      select: whether the best `keep` are picked out, or all kept as they are.
      blocks: the blocks the candidates are of.
    """

    atom: str
    sends: int
    positions: bool
    select: bool
    keep: int
    blocks: int


def _steps(ctx: LocalContext, eqn: Eqn) -> Iterator[_Step]:
    """Minor atoms first: lists are then joined in the order of their blocks."""
    d, k = _axis(eqn), eqn.params["k"]
    width, blocks = ctx.local_in(0)[d], 1
    positions = k < width
    yield _Step("", 0, False, positions, min(k, width), 1)
    width = min(k, width)
    atoms = ctx.ins[0].sharding.axes[d]
    for atom in reversed(atoms):
        p = ctx.mesh.size_of[atom]
        blocks *= p
        select = k < width * p or atom == atoms[0]
        yield _Step(atom, (p - 1) * width, positions, select, min(k, width * p), blocks)
        width, positions = min(k, width * p), positions or select


def _best(eqn: Eqn, x: Any, k: int, local: bool) -> Any:
    """The best k along the dim, equals in order, and where they were."""
    params, d = {**eqn.params, "k": k}, _axis(eqn)
    if eqn.primitive is approx_top_k_p:
        # The recall aimed at is that of all elements; of the few candidates none is to be lost.
        size = "reduction_input_size_override"
        given = params[size] if params[size] >= 0 else eqn.invars[0].shape[d]
        params[size] = max(given, x.shape[d]) if local else -1
        params["recall_target"] = params["recall_target"] if local else 1.0
    return eqn.primitive.bind(x, **params)


def _least(eqn: Eqn) -> Any:
    """What no element comes after: in the total order of floats NaN with its sign and all bits set."""
    dtype = jnp.dtype(eqn.invars[0].dtype)
    if eqn.primitive is approx_top_k_p:
        info = jnp.finfo(dtype)
        worst = -np.inf if eqn.params["is_max_k"] else np.inf
        bound = info.min if eqn.params["is_max_k"] else info.max
        return (
            np.array(worst, dtype) if np.isinf(np.array(worst, dtype)) else np.array(bound, dtype)
        )
    if dtype == np.dtype(bool):
        return np.False_
    if jnp.issubdtype(dtype, jnp.integer):
        return np.array(jnp.iinfo(dtype).min, dtype)
    return np.full(dtype.itemsize, 0xFF, np.uint8).view(dtype)[0]


@comm(lax.top_k_p, approx_top_k_p)
def _top_k_comm(ctx: LocalContext, eqn: Eqn) -> float:
    d = _axis(eqn)
    if not ctx.ins[0].sharding.axes[d] or empty(ctx):
        return 0.0
    value, position = (v.itemsize for v in eqn.outvars)
    rows = math.prod(n for e, n in enumerate(ctx.local_in(0)) if e != d)
    steps = _steps(ctx, eqn)
    return float(rows * sum(s.sends * (value + position * s.positions) for s in steps))
