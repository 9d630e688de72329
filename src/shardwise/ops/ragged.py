"""`ragged_dot_general`: a dot whose rows belong to groups of given sizes, side by side.

    m k, g k n, g -> m n       every group of rows has its own matrix (mixture of experts)
    m k, k n, g -> g m n       a contracted dim is cut in groups: the gradient of the above
    b m k, b k n, g -> b m n   a batch dim is

What lies on a device of the ragged dim, or of the groups, is a stretch of the groups' offsets: sizes
are cut to the block's rows, and to its groups, whose first row is brought to the front.  Groups split
over an axis leave a pending sum over it: of a row, all terms but its own group's are zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardwise import _jax_primitives
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn

_P = _jax_primitives.lax_primitives("lax")["ragged_dot_general"]


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """The dims of a ragged dot.

    Attributes:
      contract, batch: pairs of dims of lhs and rhs; `kept`: the others of each.
      ragged: the ragged dim of lhs; `group`: the group dim of rhs, if it has one.
      prefix: dims of lhs that the group sizes also have, where they have any.
    """

    contract: tuple[tuple[int, int], ...]
    batch: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, ...], tuple[int, ...]]
    ragged: int
    group: int | None
    prefix: tuple[int, ...]

    @staticmethod
    def of(eqn: Eqn) -> _Numbers:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
        (ragged,), groups = numbers.lhs_ragged_dimensions, tuple(numbers.rhs_group_dimensions)
        lhs, rhs, sizes = eqn.invars
        left = tuple(d for d in range(lhs.rank) if d not in (*lc, *lb))
        right = tuple(d for d in range(rhs.rank) if d not in (*rc, *rb, *groups))
        lists = (lb,) if ragged in lb else (lb, lc if ragged in lc else left)
        outer = [d for dims in lists for d in dims]
        return _Numbers(
            tuple(zip(lc, rc, strict=True)),
            tuple(zip(lb, rb, strict=True)),
            (left, right),
            ragged,
            groups[0] if groups else None,
            tuple(outer[: outer.index(ragged)]) if sizes.rank > 1 else (),
        )

    @property
    def mode(self) -> str:
        """What kind of dim of lhs is ragged: "kept", "contract" or "batch"."""
        if self.ragged in self.kept[0]:
            return "kept"
        return "contract" if self.ragged in dict(self.contract) else "batch"

    def in_rhs(self, dim: int) -> int:
        return {**dict(self.batch), **dict(self.contract)}[dim]

    def in_result(self, dim: int) -> int:
        """Where a batch or kept dim of lhs is in the result, where it has no dim of groups."""
        return [*dict(self.batch), *self.kept[0]].index(dim)


@rule(_P, level="dims")
def _ragged(eqn: Eqn) -> FactorRule | tuple[FactorRule, ...]:
    """`m k, g k n, s -> m n  sum=g,k  special=s` and so on; the sizes may lie as they like."""
    if eqn.params.get("group_offset") is not None:
        return ()  # no backend implements it
    d = _Numbers.of(eqn)
    lhs, rhs, sizes = eqn.invars
    b = RuleBuilder()
    left = dict(enumerate(b.factors(lhs.shape)))
    right = {j: left[i] for i, j in (*d.batch, *d.contract)}
    right.update({j: b.factor(rhs.shape[j]) for j in range(rhs.rank) if j not in right})
    out = [left[i] for i, _ in d.batch] + [left[i] for i in d.kept[0]]
    out += [right[j] for j in d.kept[1]]
    reduced = {left[i]: "sum" for i, _ in d.contract}
    if d.group is not None:
        reduced[right[d.group]] = "sum"
    if d.mode == "contract":
        out = [b.factor(sizes.shape[-1]), *out]
    lengths = b.factor(sizes.shape[-1])
    return b.build(
        [[left[i] for i in range(lhs.rank)], [right[j] for j in range(rhs.rank)],
         [*(left[i] for i in d.prefix), lengths]],
        [out],
        reduced=reduced,
        special=[lengths],
        linear=((0,), (1,)),
    )  # fmt: skip


def _groups(ctx: LocalContext, d: _Numbers) -> int | None:
    """The factor of the groups: of rhs, or of the result."""
    if d.group is not None:
        return ctx.rule.operands[1][d.group][0]
    return ctx.rule.results[0][0][0] if d.mode == "contract" else None


@local(_P)
def _ragged_local(ctx: LocalContext, eqn: Eqn, lhs: Any, rhs: Any, sizes: Any) -> Any:
    d = _Numbers.of(eqn)
    for i, j in d.contract:
        lhs, rhs = ctx.mask(lhs, ctx.ins[0], i, 0), ctx.mask(rhs, ctx.ins[1], j, 0)
    if d.group is not None:
        rhs = ctx.mask(rhs, ctx.ins[1], d.group, 0)
    for k, i in enumerate(d.prefix):  # sizes of rows that are not there
        sizes = ctx.mask(sizes, ctx.ins[2], k, 0) if ctx.ins[0].uneven(i) else sizes
    sizes = _all_sizes(ctx, sizes)

    def dot(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return eqn.primitive.bind(lhs, rhs, sizes, **{**eqn.params, "out_sharding": None})

    factor = _groups(ctx, d)
    groups = ctx.axes(factor) if factor is not None else ()
    if not groups and not ctx.ins[0].sharding.axes[d.ragged]:
        return dot(lhs, rhs, sizes)
    first, sizes = _block_sizes(ctx, d, groups, sizes, lhs.shape[d.ragged])
    if not groups:
        return dot(lhs, rhs, sizes)
    lhs = _rotated(lhs, d.ragged, d.prefix, first)
    if d.mode == "contract":
        rhs = _rotated(rhs, d.in_rhs(d.ragged), [d.in_rhs(i) for i in d.prefix], first)
        return dot(lhs, rhs, sizes)
    out = dot(lhs, rhs, sizes)
    row, prefix = d.in_result(d.ragged), [d.in_result(i) for i in d.prefix]
    total = _spread(jnp.sum(sizes, -1), out.ndim, prefix)
    here = lax.broadcasted_iota(jnp.int32, out.shape, row) < total
    return _rotated(jnp.where(here, out, jnp.zeros((), out.dtype)), row, prefix, -first)


def _all_sizes(ctx: LocalContext, sizes: Any) -> Any:
    """The sizes of all groups: the offset of one is the sum of those before it."""
    layout, last = ctx.ins[2], sizes.ndim - 1
    if atoms := layout.sharding.axes[last]:
        sizes = lax.all_gather(sizes, atoms, axis=last, tiled=True)
        sizes = lax.slice_in_dim(sizes, 0, layout.shape[last], axis=last)
    return sizes


def _block_sizes(
    ctx: LocalContext, d: _Numbers, groups: Sequence[str], sizes: Any, rows: int
) -> tuple[Any, Any]:
    """(rows of this block before its first group, rows of the block in each of its groups)."""
    if groups:
        count = ctx.local_out()[0] if d.group is None else ctx.local_in(1)[d.group]
        more = ctx.mesh.size(groups) * count - sizes.shape[-1]
        sizes = jnp.pad(sizes, [(0, 0)] * (sizes.ndim - 1) + [(0, more)])
    ends = jnp.cumsum(sizes, -1, dtype=jnp.int32)
    starts = ends - sizes.astype(jnp.int32)
    if groups:
        at = ctx.block_index(groups) * count
        starts, ends = (lax.dynamic_slice_in_dim(x, at, count, -1) for x in (starts, ends))
    lo = ctx.block_index(ctx.ins[0].sharding.axes[d.ragged]) * rows
    hi = jnp.minimum(lo + rows, ctx.ins[0].shape[d.ragged])
    starts, ends = (jnp.clip(x, jnp.minimum(lo, hi), hi) - lo for x in (starts, ends))
    return starts[..., 0], (ends - starts).astype(sizes.dtype)


def _spread(x: Any, rank: int, dims: Sequence[int]) -> Any:
    """`x`, whose dims are `dims` of a value, shaped to broadcast against it (a scalar fits any)."""
    if x.ndim == 0:
        return x
    order = sorted(range(x.ndim), key=lambda k: dims[k])
    shape = [1] * rank
    for k in order:
        shape[dims[k]] = x.shape[k]
    return jnp.transpose(x, order).reshape(shape)


def _rotated(x: Any, dim: int, prefix: Sequence[int], by: Any) -> Any:
    """`x` with row `by` of `dim` first, and the rows before it last."""
    n = x.shape[dim]
    if not n:
        return x
    shape = [1] * x.ndim
    shape[dim] = n
    place = lax.broadcasted_iota(jnp.int32, shape, dim) + _spread(by, x.ndim, prefix)
    return jnp.take_along_axis(x, jnp.mod(place, n), axis=dim, mode="clip")


@comm(_P)
def _ragged_comm(ctx: LocalContext, eqn: Eqn) -> float:
    """The gathering of the sizes, where they are split by group."""
    atoms = ctx.ins[2].sharding.axes[-1]
    n = 1
    for s in ctx.local_in(2):
        n *= s
    return float(n * eqn.invars[2].itemsize * (ctx.mesh.size(atoms) - 1))
