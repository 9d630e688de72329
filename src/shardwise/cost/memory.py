"""Peak memory of a per-device jaxpr, by liveness.

A value is alive from the equation that makes it to the last that reads it; arguments and results are
alive throughout.  Compilers fuse: an elementwise value read once, by an elementwise equation, is never
written to memory, and counts nothing; a reshaped or transposed value lies where the value lies.  A loop
needs its body's peak once, and its carries twice, save those that are updated in place: an accumulator
that a term is added to, a stack that a slice is written into.  What a loop starts from, and nobody reads
later, is where its carry lies.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwise import _jax
from shardwise.cost.flops import subjaxprs

_FUSED = frozenset([
    "abs", "add", "add_any", "and", "bitcast_convert_type", "broadcast_in_dim", "ceil", "clamp",
    "convert_element_type", "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul",
    "ne", "neg", "not", "or", "pow", "reduce_max", "reduce_min", "reduce_sum", "rem", "reshape",
    "round", "rsqrt", "select_n", "shift_left", "shift_right_logical", "sign", "sin", "slice", "sqrt",
    "square", "squeeze", "sub", "tanh", "threefry2x32", "transpose", "xor",
])  # fmt: skip
# Another shape or order of dims of the same values: compilers lay a value out as its readers want it.
_VIEWS = frozenset(["reshape", "squeeze", "transpose"])


def nbytes(v: Any) -> int:
    return math.prod(v.aval.shape) * getattr(v.aval.dtype, "itemsize", 4)


def peak_memory(jaxpr: Any, donated: Sequence[bool] = ()) -> int:
    """Bytes: arguments, constants, results, and the largest set of temporaries alive at once.

    `donated`: which arguments' buffers hold results of their shape and type when the program ends.
    """
    inner, _ = _jax.open_jaxpr(jaxpr)
    fixed = sum(map(nbytes, [*inner.invars, *inner.constvars]))
    buffers = Counter(map(_buffer, itertools.compress(inner.invars, donated)))
    results = Counter(map(_buffer, _results(inner)))
    new = sum(size * n for (_, _, size), n in (results - buffers).items())
    return fixed + new + peak_temporaries(inner)


def _buffer(v: Any) -> tuple[tuple[int, ...], str, int]:
    return tuple(v.aval.shape), str(v.aval.dtype), nbytes(v)


def _results(jaxpr: Any) -> list[Any]:
    """Those that equations make; others are arguments."""
    made = {v for e in jaxpr.eqns for v in e.outvars}
    outs = dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, _jax.Literal))
    return [v for v in outs if v in made]


def peak_temporaries(jaxpr: Any) -> int:
    """The largest sum of temporaries alive at once, results excluded."""
    last: dict[Any, int] = {}
    reads: Counter[Any] = Counter()
    reader: dict[Any, str] = {}
    shown: dict[Any, Any] = {}
    for i, e in enumerate(jaxpr.eqns):
        if e.primitive.name in _VIEWS:
            shown[e.outvars[0]] = shown.get(e.invars[0], e.invars[0])
            continue
        for v in _buffers(e.invars, shown):
            last[v] = i
            reads[v] += 1
            reader[v] = e.primitive.name
    results = set(_buffers(jaxpr.outvars, shown))
    alive = peak = 0
    frees: dict[int, int] = {}
    counted: set[Any] = set()
    for i, e in enumerate(jaxpr.eqns):
        inside = sum((_inside(e, s) for s in subjaxprs(e)), start=0)
        for v in e.outvars:
            if v in shown or v in results or v not in last or _fused(e, v, reads, reader):
                continue
            alive += nbytes(v)
            frees[last[v]] = frees.get(last[v], 0) + nbytes(v)
            counted.add(v)
        handed_over = _handed_over(e, i, last, counted, shown)
        peak = max(peak, alive + inside - handed_over)
        alive -= frees.pop(i, 0)
    return peak


def _inside(eqn: Any, body: Any) -> int:
    """What a body needs beyond its caller's operands and results."""
    inside = peak_temporaries(body)
    if eqn.primitive.name in ("scan", "while"):
        first, count = _carries(eqn, body)
        pairs = zip(body.invars[first:], body.outvars[:count], strict=False)
        inside += sum(nbytes(v) for v, out in pairs if not _in_place(body, v, out))
    return inside


def _carries(eqn: Any, body: Any) -> tuple[int, int]:
    """Where the carries of a loop begin among the body's inputs, and how many there are."""
    params = _jax.params_of(eqn)
    if eqn.primitive.name == "scan":
        return params["num_consts"], params["num_carry"]
    return len(body.invars) - len(body.outvars), len(body.outvars)


def _in_place(body: Any, carry: Any, out: Any) -> bool:
    """Whether a carry's new value is written over the old one, entry by entry or a slice of it."""
    if isinstance(out, _jax.Literal) or out is carry:
        return True
    producer = {v: e for e in body.eqns for v in e.outvars}
    reads = Counter(v for e in body.eqns for v in e.invars if not isinstance(v, _jax.Literal))

    def from_carry(v: Any) -> bool:
        if v is carry:
            return True
        e = None if isinstance(v, _jax.Literal) else producer.get(v)
        if e is None or reads[v] > 1:
            return False
        name = e.primitive.name
        if name == "dynamic_update_slice" or name.startswith("scatter"):
            return from_carry(e.invars[0])
        if name == "scan":
            (inner,) = subjaxprs(e)
            first, count = _carries(e, inner)
            i = list(e.outvars).index(v)
            mine = i < count and _in_place(inner, inner.invars[first + i], inner.outvars[i])
            return mine and from_carry(e.invars[first + i])
        if name == "jit":
            (inner,) = subjaxprs(e)
            made = inner.outvars[list(e.outvars).index(v)]
            operands = zip(inner.invars, e.invars, strict=True)
            return any(from_carry(x) and _in_place(inner, mine, made) for mine, x in operands)
        same = [x for x in e.invars if nbytes(x) == nbytes(v)]
        return name in _FUSED and any(map(from_carry, same))

    return from_carry(out)


def _buffers(values: Iterable[Any], shown: Mapping[Any, Any]) -> list[Any]:
    """What values lie in: themselves, or what they are another shape of."""
    return [shown.get(v, v) for v in values if not isinstance(v, _jax.Literal)]


def _handed_over(
    eqn: Any, at: int, last: dict[Any, int], counted: set[Any], shown: Mapping[Any, Any]
) -> int:
    """Bytes of what a loop starts from that its results take the place of."""
    if eqn.primitive.name != "scan":
        return 0
    (body,) = subjaxprs(eqn)
    first, count = _carries(eqn, body)
    pairs = zip(eqn.invars[first : first + count], eqn.outvars, strict=False)
    return sum(
        nbytes(v)
        for start, out in pairs
        for v in _buffers([start], shown)
        if v in counted and out in counted and last[v] == at
    )


def _fused(eqn: Any, v: Any, reads: Counter[Any], reader: dict[Any, str]) -> bool:
    return eqn.primitive.name in _FUSED and reads[v] == 1 and reader[v] in _FUSED
