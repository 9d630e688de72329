"""Peak memory of a per-device jaxpr, by liveness.

A value is alive from the equation that makes it to the last that reads it; arguments and results are
alive throughout.  Compilers fuse: an elementwise value read once, by an elementwise equation, is never
written to memory, and counts nothing.  A loop needs its carries twice and its body's peak once.
"""

from __future__ import annotations

import math
from collections import Counter
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


def nbytes(v: Any) -> int:
    return math.prod(v.aval.shape) * getattr(v.aval.dtype, "itemsize", 4)


def peak_memory(jaxpr: Any) -> int:
    """Bytes: arguments, constants, results, and the largest set of temporaries alive at once."""
    inner, consts = _jax.open_jaxpr(jaxpr)
    fixed = sum(map(nbytes, [*inner.invars, *inner.constvars]))
    del consts
    return fixed + _results(inner) + peak_temporaries(inner)


def _results(jaxpr: Any) -> int:
    made = {v for e in jaxpr.eqns for v in e.outvars}
    outs = dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, _jax.Literal))
    return sum(nbytes(v) for v in outs if v in made)


def peak_temporaries(jaxpr: Any) -> int:
    """The largest sum of temporaries alive at once, results excluded."""
    last: dict[Any, int] = {}
    reads: Counter[Any] = Counter()
    reader: dict[Any, str] = {}
    for i, e in enumerate(jaxpr.eqns):
        for v in e.invars:
            if not isinstance(v, _jax.Literal):
                last[v] = i
                reads[v] += 1
                reader[v] = e.primitive.name
    results = {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)}
    alive = peak = 0
    frees: dict[int, int] = {}
    for i, e in enumerate(jaxpr.eqns):
        inside = sum((_inside(e, s) for s in subjaxprs(e)), start=0)
        for v in e.outvars:
            if v in results or v not in last or _fused(e, v, reads, reader):
                continue
            alive += nbytes(v)
            frees[last[v]] = frees.get(last[v], 0) + nbytes(v)
        peak = max(peak, alive + inside)
        alive -= frees.pop(i, 0)
    return peak


def _inside(eqn: Any, body: Any) -> int:
    """What a body needs beyond its caller's operands and results."""
    inside = peak_temporaries(body)
    if eqn.primitive.name in ("scan", "while"):
        carries = _jax.params_of(eqn).get("num_carry", len(body.outvars))
        inside += sum(nbytes(v) for v in body.outvars[:carries] if not isinstance(v, _jax.Literal))
    return inside


def _fused(eqn: Any, v: Any, reads: Counter[Any], reader: dict[Any, str]) -> bool:
    return eqn.primitive.name in _FUSED and reads[v] == 1 and reader[v] in _FUSED
