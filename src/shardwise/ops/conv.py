"""Convolution: an einsum with windows (GSPMD 4.3 and A.2).

Batch and features are factors as in a dot; with groups, dims are made of (group, rest):

    n (g c) l, (g o) c k -> n (g o) w   sum=c,k        feature groups
    (g n) c l, (g o) c k -> n (g o) w   sum=c,k        batch groups

A spatial dim has rows l of lhs, taps k of rhs and windows w of the result, of which any may be split.
There is a kind of rule for each way in which rows may lie (`ops.sliding` brings each device what it reads):

    windows   l w    rows split as the windows are: a halo, rhs is whole or taps are split besides
    taps      l k    rows split as the taps are: a halo, and every device has one term of each result.
                     The gradient of a kernel is of this kind: its taps are the windows of the forward
                     convolution, so neither of its large operands moves
    apart            rows are whole: devices cut what their windows or taps read

A dim along which nothing slides is a factor like any other: rows and windows the same (1 x 1 kernels), or
rows and taps (one window, that takes in everything).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.ops.sliding import Sliding, Split, WindowDim, slide, sliding, sliding_bytes
from shardwise.program import Eqn

WINDOWS, TAPS, APART = "windows", "taps", "apart"
SAME, FULL = "same", "full"  # nothing slides: windows are rows; or one window takes in all rows


class Spatial(NamedTuple):
    """A spatial dim: its place in lhs, rhs and result, its rows and windows, and its window."""

    lhs: int
    rhs: int
    out: int
    rows: int
    windows: int
    window: WindowDim

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of rule for it; first the one by which the larger dims are split alike."""
        w = self.window
        plain = w.base == w.dilation == 1 and w.low == w.high == 0
        if plain and w.size == w.stride == 1:
            return (SAME,)
        if plain and w.size == self.rows and self.windows == 1:
            return (FULL,)
        if w.size == 1:
            return (WINDOWS, APART)
        if self.windows == 1:
            return (TAPS, APART)
        both = (WINDOWS, TAPS) if self.windows >= w.size else (TAPS, WINDOWS)
        return (*both, APART)


def spatial_dims(eqn: Eqn) -> list[Spatial]:
    p, (lhs, rhs), out = eqn.params, eqn.invars, eqn.outvars[0]
    numbers = p["dimension_numbers"]
    specs = (s[2:] for s in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    return [
        Spatial(
            i, k, o, lhs.shape[i], out.shape[o],
            WindowDim(rhs.shape[k], stride, low, high, base, dilation),
        )
        for i, k, o, stride, (low, high), base, dilation in zip(
            *specs, p["window_strides"], p["padding"], p["lhs_dilation"], p["rhs_dilation"],
            strict=True,
        )
    ]  # fmt: skip


def kinds_of(dims: list[Spatial]) -> Iterator[tuple[str, ...]]:
    """The kinds of rule of an equation: every combination, but of three dims one may be unlike."""
    first = tuple(d.kinds[0] for d in dims)
    for kinds in itertools.product(*(d.kinds for d in dims)):
        unlike = sum(k != f for k, f in zip(kinds, first, strict=True))
        sliding = {k for k in kinds if k not in (SAME, FULL)}
        if len(dims) < 3 or unlike <= 1 or len(sliding) == 1:
            yield kinds


@rule(lax.conv_general_dilated_p, level="dot")
def _conv(eqn: Eqn) -> list[FactorRule]:
    dims = spatial_dims(eqn)
    return [_conv_rule(eqn, dims, kinds) for kinds in kinds_of(dims)]


def _conv_rule(eqn: Eqn, dims: list[Spatial], kinds: tuple[str, ...]) -> FactorRule:
    """The rule by which spatial dims are of these kinds.

    The sizes of their factors are those that work counts: of windows and of taps, not of rows.
    """
    b = RuleBuilder()
    lhs, rhs, out, contracted = _outer_factors(eqn, b)
    reduced: dict[int, str] = dict.fromkeys(contracted, "sum")
    special, whole = [], []
    for d, kind in zip(dims, kinds, strict=True):
        rows, taps, windows = None, None, None
        if kind == SAME:
            rows = windows = b.factor(d.rows)
        elif kind == FULL:
            rows = taps = b.factor(d.rows)
        else:
            windows = b.factor(d.windows)
            taps = b.factor(d.window.size) if d.window.size > 1 else None
            rows = {WINDOWS: windows, TAPS: taps}.get(kind)
            special += [f for f in (windows, taps) if f is not None]
            if rows is None:
                rows = b.factor(1)
                whole.append(rows)
        if taps is not None:
            reduced[taps] = "sum"
        lhs[d.lhs], rhs[d.rhs], out[d.out] = rows, taps, windows
    return b.build(
        [[lhs[i] for i in range(len(lhs))], [rhs[i] for i in range(len(rhs))]],
        [[out[i] for i in range(len(out))]],
        reduced=reduced, special=special, whole=whole, linear=((0,), (1,)),
        variant=" ".join(kinds),
    )  # fmt: skip


def _outer_factors(eqn: Eqn, b: RuleBuilder) -> tuple[dict[int, Any], ...]:
    """Batch and feature dims: dim -> factors of lhs, rhs and result; and the contracted factors."""
    (lhs, rhs), numbers = eqn.invars, eqn.params["dimension_numbers"]
    (n, c), (o, i), (out_n, out_c) = (
        s[:2] for s in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    )
    groups = (eqn.params["feature_group_count"], eqn.params["batch_group_count"])
    g = b.factor(max(groups)) if max(groups) > 1 else None
    by_feature, by_batch = (g if count > 1 else None for count in groups)

    def rest(size: int) -> int | None:
        """What a dim is made of besides the groups, if anything."""
        return b.factor(size) if size != 1 or g is None else None

    batch = rest(lhs.shape[n] // groups[1])
    inner, outer = rest(rhs.shape[i]), rest(rhs.shape[o] // max(groups))
    return (
        {n: _dim(by_batch, batch), c: _dim(by_feature, inner)},
        {o: _dim(g, outer), i: inner},
        {out_n: batch, out_c: _dim(g, outer)},
        {} if inner is None else {inner: None},
    )


def _dim(*factors: int | None) -> list[int]:
    return [f for f in factors if f is not None]


def _sliding(ctx: LocalContext, eqn: Eqn) -> dict[int, tuple[int, Sliding]]:
    """number of the spatial dim -> its place in lhs, and how it slides, of those that are split."""
    out = {}
    for j, (d, kind) in enumerate(zip(spatial_dims(eqn), ctx.rule.variant.split(), strict=True)):
        rows, taps, windows = (
            Split.of(layout, dim, ctx.mesh)
            for layout, dim in ((ctx.ins[0], d.lhs), (ctx.ins[1], d.rhs), (ctx.outs[0], d.out))
        )
        if kind not in (SAME, FULL) and (rows.atoms or taps.atoms or windows.atoms):
            out[j] = d.lhs, sliding(rows, d.window, windows, taps)
    return out


def _nothing(ctx: LocalContext) -> bool:
    """Whether there is nothing to send: no results, or nothing to add up for them."""
    return any(0 in layout.shape for layout in (*ctx.ins, *ctx.outs))


def _masked(ctx: LocalContext) -> list[int]:
    """Dims of lhs that are added up and have padding, which would count."""
    plain = [(f,) for f, _ in ctx.rule.reduced if f not in ctx.rule.special]
    dims = enumerate(ctx.rule.operands[0])
    return [d for d, factors in dims if factors in plain and ctx.ins[0].uneven(d)]


def _received(ctx: LocalContext) -> dict[Any, Any] | None:
    """What was received of lhs before; None where it is masked first, and so is not the block it was."""
    return ctx.received[0] if ctx.received and not _masked(ctx) else None


@local(lax.conv_general_dilated_p)
def _conv_local(ctx: LocalContext, eqn: Eqn, lhs: Any, rhs: Any) -> Any:
    if _nothing(ctx):
        return lax.full(ctx.local_out(), 0, eqn.outvars[0].dtype)
    for f, _ in ctx.rule.reduced:  # padding would count: 0 times NaN is NaN
        rhs = ctx.mask(rhs, ctx.ins[1], ctx.rule.operands[1].index((f,)), 0)
    for d in _masked(ctx):
        lhs = ctx.mask(lhs, ctx.ins[0], d, 0)
    dims = _sliding(ctx, eqn)
    lhs = slide(lhs, dict(dims.values()), 0, _received(ctx))
    p = eqn.params
    padding, dilation = list(p["padding"]), list(p["lhs_dilation"])
    for j, (_, s) in dims.items():
        padding[j], dilation[j] = (s.window.low, s.window.high), s.window.base
    lhs, padding, dilation = padded(lhs, p["dimension_numbers"], padding, dilation)
    groups = _groups_here(ctx, eqn)
    counts = {
        name: groups if p[name] > 1 else 1 for name in ("feature_group_count", "batch_group_count")
    }
    return eqn.primitive.bind(
        lhs, rhs, **{**p, **counts, "padding": padding, "lhs_dilation": dilation}
    )


def padded(
    lhs: Any, numbers: Any, padding: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> tuple[Any, tuple[tuple[int, int], ...], tuple[int, ...]]:
    """lhs padded along the spatial dims where a convolution would cut one end and pad the other.

    XLA's CPU compiler of jax 0.10.2 reads memory beyond lhs there, for one device too.

    Args:
      numbers, padding, dilation: `dimension_numbers`, `padding` and `lhs_dilation` of the convolution.

    Returns:
      The new lhs, and the padding and dilation left for the convolution to do.
    """
    mixed = [min(ends) < 0 < max(ends) for ends in padding]
    if any(mixed):
        config = [(0, 0, 0)] * lhs.ndim
        for d, (low, high), base, here in zip(
            numbers.lhs_spec[2:], padding, dilation, mixed, strict=True
        ):
            config[d] = (low, high, base - 1) if here else (0, 0, 0)
        lhs = lax.pad(lhs, np.zeros((), lhs.dtype), config)
    ends = tuple((0, 0) if here else e for here, e in zip(mixed, padding, strict=True))
    return lhs, ends, tuple(1 if here else n for here, n in zip(mixed, dilation, strict=True))


def _groups_here(ctx: LocalContext, eqn: Eqn) -> int:
    """The groups of a block, those of padding included: the major factor of rhs's output features."""
    outer = eqn.params["dimension_numbers"].rhs_spec[0]
    _, *rest = ctx.rule.operands[1][outer]
    each = math.prod(ctx.rule.sizes[f] // ctx.mesh.size(ctx.axes(f)) for f in rest)
    return ctx.local_in(1)[outer] // each


@comm(lax.conv_general_dilated_p)
def _conv_comm(ctx: LocalContext, eqn: Eqn) -> float:
    if _nothing(ctx):
        return 0.0
    dims = dict(_sliding(ctx, eqn).values())
    return sliding_bytes(ctx.local_in(0), dims, eqn.invars[0].itemsize, _received(ctx))
