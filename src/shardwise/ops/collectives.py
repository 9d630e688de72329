"""The user's own collectives, inside manual subgraphs (GSPMD 3.4): a nested `jax.shard_map`, `manual`.

They name mesh axes that are under manual control; the values they work on may be split over the other
atoms by the partitioner.  Over those a collective is like any op: dims it passes through stay split
and the dim it gathers, scatters or exchanges along lies whole.  The axes' names become atoms here.

All are linear but the maximum and minimum, so a sum pending over other atoms is carried through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise import _jax_primitives
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import all_to_all
from shardwise.mesh import ManualAxes
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn

_P = _jax_primitives.collective_primitives()
# What the typed forms (`check_vma`) are once types are checked: the same collectives.
_PLAIN = {"psum_invariant": "psum", "all_gather_invariant": "all_gather"}
USERS = frozenset(
    ["psum", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_gather_invariant",
     "all_to_all", "reduce_scatter", "axis_index"]
)  # fmt: skip


def _primitives(*names: str) -> list[Any]:
    return [_P[n] for n in names if n in _P]


def _atoms(ctx: LocalContext, eqn: Eqn) -> tuple[str, ...]:
    """The atoms of the axes an equation names, in the order it names them."""
    names = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    assert isinstance(ctx.mesh, ManualAxes), "a collective outside manual control: a shardwise bug"
    return ctx.mesh.called(names)


def _bind(ctx: LocalContext, eqn: Eqn, xs: Sequence[Any], key: str, **changed: Any) -> list[Any]:
    p = _P[_PLAIN.get(eqn.name, eqn.name)]
    params = {**eqn.params, key: _atoms(ctx, eqn), **changed}
    if p.name == "psum":
        params.setdefault("axis_index_groups", None)
    return [p.bind(x, **params) for x in xs]


def _alike(eqn: Eqn, linear: bool) -> FactorRule:
    """`i j -> i j` for each operand."""
    b = RuleBuilder()
    values = [b.factors(v.shape) for v in eqn.invars]
    groups = [(i,) for i in range(len(values))] if linear else ()
    return b.build(values, values, linear=groups)


@rule(*_primitives("psum", "psum_invariant", "ppermute"))
def _linear(eqn: Eqn) -> FactorRule:
    return _alike(eqn, linear=True)


@rule(*_primitives("pmax", "pmin"))
def _extreme(eqn: Eqn) -> FactorRule:
    return _alike(eqn, linear=False)


@local(*_primitives("psum", "psum_invariant", "pmax", "pmin"))
def _reduce(ctx: LocalContext, eqn: Eqn, *xs: Any) -> list[Any]:
    return _bind(ctx, eqn, xs, "axes") if _atoms(ctx, eqn) else list(xs)


@local(*_primitives("ppermute"))
def _permute(ctx: LocalContext, eqn: Eqn, x: Any) -> list[Any]:
    """A permutation numbers devices in mesh order, in whatever order the axes are named."""
    assert isinstance(ctx.mesh, ManualAxes)
    names = eqn.params["axis_name"]
    names = (names,) if isinstance(names, str) else tuple(names)
    theirs = tuple(a for n, atoms in ctx.mesh.spelled if n in names for a in atoms)
    perm = tuple(tuple(map(int, pair)) for pair in eqn.params["perm"])
    if not theirs:
        return [x if perm else jnp.zeros_like(x)]
    ours = ctx.mesh.sort(theirs)
    grid = np.arange(ctx.mesh.size(ours)).reshape([ctx.mesh.size_of[a] for a in ours])
    number = grid.transpose([ours.index(a) for a in theirs]).ravel().tolist()
    perm = tuple((number[s], number[d]) for s, d in perm)
    return [_P["ppermute"].bind(x, **{**eqn.params, "axis_name": ours, "perm": perm})]


@rule(*_primitives("all_gather", "all_gather_invariant"))
def _gather(eqn: Eqn) -> FactorRule:
    """`i n -> g i n` or, tiled, `i n -> i (g n)`: the new or grown dim whole, the others as they lie."""
    return _resized(eqn, eqn.params["all_gather_dimension"], grows=True)


@rule(*_primitives("reduce_scatter"))
def _scatter(eqn: Eqn) -> FactorRule:
    """`g i n -> i n` or, tiled, `i (g n) -> i n`."""
    return _resized(eqn, eqn.params["scatter_dimension"], grows=False)


def _resized(eqn: Eqn, dim: int, grows: bool) -> FactorRule:
    small, large = (eqn.invars[0], eqn.outvars[0]) if grows else (eqn.outvars[0], eqn.invars[0])
    b = RuleBuilder()
    less, grown = b.factors(small.shape), b.factor(large.shape[dim])
    more, whole = list(less), {grown}
    if eqn.params["tiled"]:
        more[dim] = grown
        whole.add(less[dim])
    else:
        more.insert(dim, grown)
    operand, result = (less, more) if grows else (more, less)
    return b.build([operand], [result], whole=whole, linear=[(0,)])


@local(*_primitives("all_gather", "all_gather_invariant"))
def _gather_local(ctx: LocalContext, eqn: Eqn, x: Any) -> list[Any]:
    if _atoms(ctx, eqn):
        return _bind(ctx, eqn, [x], "axis_name")
    return [x if eqn.params["tiled"] else jnp.expand_dims(x, eqn.params["all_gather_dimension"])]


@local(*_primitives("reduce_scatter"))
def _scatter_local(ctx: LocalContext, eqn: Eqn, x: Any) -> list[Any]:
    if _atoms(ctx, eqn):
        return _bind(ctx, eqn, [x], "axis_name")
    return [x if eqn.params["tiled"] else lax.squeeze(x, (eqn.params["scatter_dimension"],))]


@rule(*_primitives("all_to_all"))
def _exchange(eqn: Eqn) -> FactorRule:
    """`(g i) j k -> i (g j) k`: both dims whole."""
    (x,), (y,) = eqn.invars, eqn.outvars
    b = RuleBuilder()
    operand = b.factors(x.shape)
    result = list(operand)
    whole = {eqn.params["split_axis"], eqn.params["concat_axis"]}
    for d in whole:
        result[d] = b.factor(y.shape[d])
    factors = {f for d in whole for f in (operand[d], result[d])}
    return b.build([operand], [result], whole=factors, linear=[(0,)])


@local(*_primitives("all_to_all"))
def _exchange_local(ctx: LocalContext, eqn: Eqn, x: Any) -> list[Any]:
    """Through a leading dim of one part a device: see `halo.all_to_all` for why."""
    if not (atoms := _atoms(ctx, eqn)):
        return [x]
    if eqn.params.get("axis_index_groups") is not None:
        return _bind(ctx, eqn, [x], "axis_name")
    give, take, g = eqn.params["split_axis"], eqn.params["concat_axis"], ctx.mesh.size(atoms)
    parts = x.reshape((*x.shape[:give], g, x.shape[give] // g, *x.shape[give + 1 :]))
    parts = all_to_all(jnp.moveaxis(parts, give, 0), atoms)
    local = parts.shape[1:]
    joined = (*local[:take], g * local[take], *local[take + 1 :])
    return [jnp.moveaxis(parts, 0, take).reshape(joined)]


@rule(*_primitives("axis_index"))
def _index(eqn: Eqn) -> FactorRule:
    return RuleBuilder().build([], [[]])


@local(*_primitives("axis_index"))
def _index_local(ctx: LocalContext, eqn: Eqn) -> list[Any]:
    return [ctx.block_index(_atoms(ctx, eqn))]
