"""`reshape`: dims split and merged, by common factors where they exist, by realignment where not.

(6, 8) <-> (48,)        factors 6 and 8: local for every contiguous split of either
(6, 4)  -> (24,)        over 8 devices: blocks of one row become blocks of three elements, which
                        no common factor expresses: rows are realigned (GSPMD 4.3, Figure 5c)
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from jax import lax

from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import window, window_rows
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn
from shardwise.regroup import Regrouping, plan_regrouping, regroup

FLAT, TURNED = "flat", "turned"
MAX_RUNS = 1 << 16  # of a turned unit: the tables that move them are constants of the program


def common_factors(
    src: tuple[int, ...], dst: tuple[int, ...]
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Split the dims of two shapes of one size into common factors, major first.

    `(6, 8), (48,) -> [[0],[1]], [[0,1]], sizes [6, 8]`.  Where two dims have only a common divisor it
    is shared as the major part: `(12, 8), (16, 6)` share a factor 4; what is left up to where the
    shapes meet again is unrelated (such factors appear on one side only).
    """
    sizes: list[int] = []
    ins: list[list[int]] = [[] for _ in src]
    outs: list[list[int]] = [[] for _ in dst]

    def factor(size: int, *owners: list[int]) -> None:
        for owner in owners:
            owner.append(len(sizes))
        sizes.append(size)

    # What is left of each side, major first: [dim's factor list, size still to be explained].
    left = [[f, s] for f, s in zip(ins, src, strict=True) if s > 1]
    right = [[f, s] for f, s in zip(outs, dst, strict=True) if s > 1]
    while left and right:
        g = math.gcd(left[0][1], right[0][1])
        if g > 1:
            factor(g, left[0][0], right[0][0])
            for side in (left, right):
                side[0][1] //= g
        else:
            a = b = 1
            while a != b or a == 1:
                side = left if a <= b else right
                owner, size = side.pop(0)
                factor(size, owner)
                a, b = (a * size, b) if side is left else (a, b * size)
        for side in (left, right):
            if side and side[0][1] == 1:
                side.pop(0)
    return ins, outs, sizes


Unit = tuple[list[int], list[int]]


def units(src: tuple[int, ...], dst: tuple[int, ...]) -> list[Unit]:
    """The smallest runs of dims of both shapes that hold the same elements, in order.

    `(2, 6, 4), (2, 24) -> ([0], [0]), ([1, 2], [1])`; dims of size 1 go with what comes before.
    """
    out: list[Unit] = []
    i = j = 0
    while i < len(src) or j < len(dst):
        left: list[int] = []
        right: list[int] = []
        a = b = 1
        while (a != b or not left or not right or a == 1) and (i < len(src) or j < len(dst)):
            if i < len(src) and (a <= b or j == len(dst)):
                left.append(i)
                a *= src[i]
                i += 1
            elif j < len(dst):
                right.append(j)
                b *= dst[j]
                j += 1
        out.append((left, right))
    return out


def _flat_units(eqn: Eqn) -> list[Unit]:
    """The units that change, with a major dim on either side that a split can be of."""
    x, y = eqn.invars[0].shape, eqn.outvars[0].shape
    return [
        (a, b) for a, b in units(x, y)
        if [x[i] for i in a if x[i] > 1] != [y[j] for j in b if y[j] > 1] and a and b
    ]  # fmt: skip


@rule(lax.reshape_p, level="dims")
def _reshape(eqn: Eqn) -> list[FactorRule]:
    """`(a b) c -> a b c`: compound dims on either side; factors of one side only stay whole.

    Flat: the major dim of a unit is split on both sides, over the same atoms, and blocks of elements
    are realigned; whatever the sizes.  Turned: any dim of the unit is split on either side, evenly.
    """
    x, (y,) = eqn.invars[0], eqn.outvars
    if 0 in x.shape:
        b = RuleBuilder()
        ins, outs = b.factors(x.shape), b.factors(y.shape)
        return [b.build([ins], [outs], whole=(*ins, *outs))]
    return [_by_factors(x.shape, y.shape), *_flat(eqn, x.shape, y.shape)]


def _by_factors(src: tuple[int, ...], dst: tuple[int, ...]) -> FactorRule:
    b = RuleBuilder()
    ins, outs, sizes = common_factors(src, dst)
    b.sizes.extend(sizes)
    shared = {f for d in ins for f in d} & {f for d in outs for f in d}
    whole = [f for f in range(len(sizes)) if f not in shared]
    return b.build([ins], [outs], whole=whole, linear=((0,),))


def _flat(eqn: Eqn, src: tuple[int, ...], dst: tuple[int, ...]) -> list[FactorRule]:
    """The rules that move data: flat for all units at once, turned for one unit at a time."""
    changed = _flat_units(eqn)
    if not changed:
        return []
    majors = {tuple(a): (_major(a, src), _major(b, dst)) for a, b in changed}
    rules = [_tied(src, dst, majors, FLAT)]
    for left, right in changed:
        for i in left:
            for j in right:
                if (i, j) != majors[tuple(left)] and src[i] > 1 and dst[j] > 1:
                    rules.append(_tied(src, dst, {tuple(left): (i, j)}, f"{TURNED} {i} {j}"))
    return rules


def _tied(
    src: tuple[int, ...],
    dst: tuple[int, ...],
    ties: dict[tuple[int, ...], tuple[int, int]],
    variant: str,
) -> FactorRule:
    """A rule by which, in some units, one dim of either side is tied to one of the other."""
    b = RuleBuilder()
    ins: list[int | None] = [None] * len(src)
    outs: list[int | None] = [None] * len(dst)
    special, whole = [], []
    for left, right in units(src, dst):
        a, c = [i for i in left if src[i] > 1], [j for j in right if dst[j] > 1]
        if [src[i] for i in a] == [dst[j] for j in c]:
            for i, j in zip(a, c, strict=True):
                ins[i] = outs[j] = b.factor(src[i])
            continue
        tie = ties.get(tuple(left))
        for side, dims, shape in ((ins, a, src), (outs, c, dst)):
            for d in dims:
                side[d] = b.factor(shape[d])
                if tie is None or d != tie[side is outs]:
                    whole.append(side[d])
        if tie is not None and (f := ins[tie[0]]) is not None:
            outs[tie[1]] = f
            special.append(f)
            if variant != FLAT:
                b.sizes[f] = math.gcd(src[tie[0]], dst[tie[1]])
    even = () if variant == FLAT else special
    return b.build(
        [ins], [outs], special=special, whole=whole, even=even, linear=((0,),), variant=variant
    )


def _major(dims: list[int], shape: tuple[int, ...]) -> int:
    return next((d for d in dims if shape[d] > 1), dims[0])


@local(lax.reshape_p)
def _reshape_local(ctx: LocalContext, eqn: Eqn, x: Any, *_: Any) -> Any:
    if ctx.rule.variant:
        both, local_in = units(eqn.invars[0].shape, eqn.outvars[0].shape), ctx.local_in(0)
        x = lax.reshape(x, [math.prod(local_in[i] for i in left) for left, _ in both])
        for at, (left, right) in enumerate(both):
            if (turn := _turn(ctx, eqn, left, right)) is not None:
                atoms, run, plan = turn
                assert plan is not None, "a layout without a price was chosen: a shardwise bug"
                x = lax.reshape(x, (*x.shape[:at], x.shape[at] // run, run, *x.shape[at + 1 :]))
                x = regroup(x, at, atoms, plan)
                x = lax.reshape(x, (*x.shape[:at], x.shape[at] * run, *x.shape[at + 2 :]))
            elif (w := _window(ctx, eqn, left, right)) is not None:
                atoms, block, size, length = w
                x = window(
                    x, at, atoms, ctx.mesh, block=block, size=size, start=(length, 0), length=length
                )
    return lax.reshape(x, ctx.local_out())


@functools.lru_cache(maxsize=1024)
def plan_turn(
    src: tuple[int, ...], i: int, dst: tuple[int, ...], j: int, shards: int
) -> tuple[int, Regrouping] | None:
    """How the split of dim `i` of a unit becomes one of dim `j` of its other shape.

    Returns:
      the elements of a run that stays together, and the plan that moves runs; None where the unit has
      too many.
    """
    run = math.gcd(math.prod(src[i:]) // shards, math.prod(dst[j:]) // shards)
    if math.prod(src) // run > MAX_RUNS:
        return None
    holder, held_at = _places(src, i, shards, run)
    taker, taken_at = _places(dst, j, shards, run)
    block = math.prod(src) // run // shards
    index = np.zeros((shards, block), np.int64)
    index[taker, taken_at] = holder * block + held_at
    return run, plan_regrouping(index, block)


def _places(shape: tuple[int, ...], dim: int, shards: int, run: int) -> tuple[Any, Any]:
    """For each run of elements of a shape split along `dim`: its device, and its number there."""
    inside = math.prod(shape[dim:]) // shards // run
    major, rest = np.divmod(np.arange(math.prod(shape) // run), inside * shards)
    device, at = np.divmod(rest, inside)
    return device, major * inside + at


def _turn(
    ctx: LocalContext, eqn: Eqn, left: list[int], right: list[int]
) -> tuple[tuple[str, ...], int, Regrouping | None] | None:
    """How a unit's split is moved to another of its dims: atoms, elements of a run, the plan (or None
    where it would be too long, or a dim has padding)."""
    kind, *dims = ctx.rule.variant.split()
    if kind != TURNED or int(dims[0]) not in left:
        return None
    i, j = map(int, dims)
    atoms = ctx.ins[0].sharding.axes[i]
    if not atoms:
        return None
    src, dst = eqn.invars[0].shape, eqn.outvars[0].shape
    if ctx.ins[0].padded[i] != src[i] or ctx.outs[0].padded[j] != dst[j]:
        return atoms, 0, None
    plan = plan_turn(
        tuple(src[d] for d in left), left.index(i),
        tuple(dst[d] for d in right), right.index(j), ctx.mesh.size(atoms),
    )  # fmt: skip
    return (atoms, *plan) if plan is not None else (atoms, 0, None)


def _window(
    ctx: LocalContext, eqn: Eqn, left: list[int], right: list[int]
) -> tuple[tuple[str, ...], int, int, int] | None:
    """How a unit is realigned: atoms, elements of a block, of the unit, and of a result's block."""
    if ctx.rule.variant != FLAT or (left, right) not in _flat_units(eqn):
        return None
    src = eqn.invars[0].shape
    atoms = ctx.ins[0].sharding.axes[_major(left, src)]
    if not atoms:
        return None
    block = math.prod(ctx.local_in(0)[i] for i in left)
    length = math.prod(ctx.local_out()[j] for j in right)
    return atoms, block, math.prod(src[i] for i in left), length


@comm(lax.reshape_p)
def _reshape_comm(ctx: LocalContext, eqn: Eqn) -> float:
    """Elements moved in each unit, times what lies beside the unit."""
    if not ctx.rule.variant:
        return 0.0
    total, itemsize = 0.0, eqn.invars[0].itemsize
    both = units(eqn.invars[0].shape, eqn.outvars[0].shape)
    shape = [math.prod(ctx.local_in(0)[i] for i in left) for left, _ in both]
    for at, (left, right) in enumerate(both):
        if (turn := _turn(ctx, eqn, left, right)) is not None:
            if turn[2] is None:
                return math.inf
            moved = turn[1] * turn[2].rows
        elif (w := _window(ctx, eqn, left, right)) is not None:
            atoms, block, size, length = w
            moved = window_rows(
                ctx.mesh.size(atoms), block=block, size=size, start=(length, 0), length=length
            )
            shape[at] = length
        else:
            continue
        beside = math.prod(n for k, n in enumerate(shape) if k != at)
        total += moved * beside * itemsize
    return total
