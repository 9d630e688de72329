"""Convolutions of a small operand with a large reversed one, the other way around.

A convolution is symmetric in its operands but for an order: to exchange them, reverse both. JAX writes the
gradient of a kernel's gradient with respect to its input as

    conv(c, rev(g))        c: 3 taps, padded to hundreds of rows; g: hundreds of taps, reversed

where g is as large as an activation, and may be split: to reverse it sends every shard, and its taps would
leave a term of the whole result on every device. Here it becomes

    conv(g, rev(c))        a halo, and as few multiplications as the convolution it comes from
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from jax import lax

from shardwise.program import Body, Eqn, Var

Fresh = Callable[[tuple[int, ...], Any], Var]


def swap(body: Body, fresh: Fresh) -> None:
    """Exchange the operands of such convolutions of a program and of its bodies, in place.

    Args:
      fresh: (shape, dtype) -> a new variable.
    """
    for b in body.all():
        _swap(b, fresh)


def _swap(body: Body, fresh: Fresh) -> None:
    reversed_: dict[Var, Eqn] = {}
    out: list[Eqn] = []
    for eqn in body.eqns:
        if eqn.name == "rev":
            reversed_[eqn.outvars[0]] = eqn
        large = _reversed_kernel(eqn, reversed_)
        out += [eqn] if large is None else _swapped(eqn, large, fresh)
    used = Counter(v for e in out for v in e.invars) + Counter(body.outvars)
    body.eqns = [e for e in out if e.name != "rev" or used[e.outvars[0]]]


def _reversed_kernel(eqn: Eqn, reversed_: dict[Var, Eqn]) -> Var | None:
    """What a convolution's kernel reverses, if it has more taps than lhs has rows."""
    if eqn.name != "conv_general_dilated" or eqn.invars[1] not in reversed_:
        return None
    lhs, rhs = eqn.invars
    _, rows, taps = _spatial(eqn)
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    if groups > 1 or 0 in (*lhs.shape, *rhs.shape, *eqn.outvars[0].shape):
        return None
    made = reversed_[rhs]
    long = {d for d in taps if rhs.shape[d] > 1}
    if {d for d in made.params["dimensions"] if rhs.shape[d] > 1} != long:
        return None
    more = math.prod(rhs.shape[d] for d in taps) > math.prod(lhs.shape[d] for d in rows)
    return made.invars[0] if more else None


def _spatial(eqn: Eqn) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    numbers = eqn.params["dimension_numbers"]
    return numbers, numbers.lhs_spec[2:], numbers.rhs_spec[2:]


def _swapped(eqn: Eqn, large: Var, fresh: Fresh) -> list[Eqn]:
    """conv(small, rev(large)) as conv(large, rev(small)): batch and output features trade places."""
    p, small = eqn.params, eqn.invars[0]
    numbers, rows, taps = _spatial(eqn)
    turned = fresh(small.shape, small.dtype)
    rev = Eqn(lax.rev_p, [small], [turned], {"dimensions": tuple(rows)}, [], eqn.info, eqn.id)
    padding = []
    for d, k, (low, high), base, dilation in zip(
        rows, taps, p["padding"], p["lhs_dilation"], p["rhs_dilation"], strict=True
    ):
        more = (small.shape[d] - 1) * base - (large.shape[k] - 1) * dilation
        padding.append((low + more, high + more))
    batch, features, *rest = numbers.out_spec
    precision = p["precision"]
    params = {
        **p,
        "dimension_numbers": lax.ConvDimensionNumbers(
            numbers.rhs_spec, numbers.lhs_spec, (features, batch, *rest)
        ),
        "padding": tuple(padding),
        "lhs_dilation": p["rhs_dilation"],
        "rhs_dilation": p["lhs_dilation"],
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    return [
        rev,
        Eqn(eqn.primitive, [large, turned], eqn.outvars, params, [], eqn.info, eqn.id, eqn.callers),
    ]
