"""cuDNN's kernels: attention, and dots of block-scaled numbers.

They are one GPU's calls, opaque but for what JAX's own partitioner says of them: batch and heads of
attention are independent; of a scaled dot, batch, rows and columns. Those stay local; the rest lies whole.
"""

from __future__ import annotations

from typing import Any

from shardwise import _jax_primitives
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn, Var

_P = _jax_primitives.cudnn_primitives()
_FORWARD = _P["dot_product_attention_fwd_wrapper"]
_BACKWARD = _P["dot_product_attention_bwd_wrapper"]
_SCALED = _P["scaled_matmul_wrapper"]
_HEADS_FIRST = 1  # JAX's layout BNTH; the other is BTNH


class _Dims:
    """The factors of one attention: `b n t h` of queries, `b m s h` of keys and values."""

    def __init__(self, eqn: Eqn):
        q, k, v = eqn.invars[:3]
        self.heads_first = eqn.params["layout"] == _HEADS_FIRST
        self.build = RuleBuilder()
        n, t = (1, 2) if self.heads_first else (2, 1)
        f = self.build.factor
        self.b, self.t, self.s = f(q.shape[0]), f(q.shape[t]), f(k.shape[t])
        self.h, self.w = f(q.shape[3]), f(v.shape[3])
        groups = q.shape[n] // k.shape[n]
        self.m = f(k.shape[n])
        self.n: Any = self.m if groups == 1 else [self.m, f(groups)]
        self.size = {self.b: q.shape[0], self.t: q.shape[t], self.s: k.shape[t]}
        self.heads = q.shape[n]

    def value(self, length: int, heads: Any, width: int) -> list[Any]:
        middle = [heads, length] if self.heads_first else [length, heads]
        return [self.b, *middle, width]

    def bias(self, v: Var) -> list[Any]:
        """`b n t s`, each of full size or 1; a stand-in where there is none."""
        if v.rank != 4:
            return [None] * v.rank
        dims = (self.b, self.n, self.t, self.s)
        return [d if size > 1 else None for d, size in zip(dims, v.shape, strict=True)]

    def lengths(self, v: Var) -> list[Any]:
        return [self.b] if v.shape == (self.size[self.b],) else [None] * v.rank


def _attention(eqn: Eqn) -> tuple[_Dims, list[list[Any]], set[int]]:
    """Factors, the dims of the ten operands both directions share, and what must lie whole."""
    x = _Dims(eqn)
    bias, *others = eqn.invars[3:10]
    operands = [
        x.value(x.t, x.n, x.h),
        x.value(x.s, x.m, x.h),
        x.value(x.s, x.m, x.w),
        x.bias(bias),
    ]
    operands += [x.lengths(v) for v in others[:2]] + [[None] * v.rank for v in others[2:]]
    whole = set(range(len(x.build.sizes))) - {x.b, x.m}
    packed = any(v.rank > 1 and v.size for v in others)
    own_sum = eqn.params["variadic_args"][1] and eqn.invars[3].shape[:2] != (
        x.size[x.b], x.heads,
    )  # fmt: skip
    if packed or own_sum or eqn.params["dropout_rate"]:
        # Offsets and pages number the whole batch, dropout draws for it, and the bias's gradient
        # is summed over it.
        whole |= {x.b, x.m}
    return x, operands, whole


@rule(_FORWARD, level="dims")
def _forward(eqn: Eqn) -> FactorRule:
    """`b t n h, b s n h, b s n w, .. -> b t n w, b n t`: batch and heads are local."""
    x, operands, whole = _attention(eqn)
    results = [x.value(x.t, x.n, x.w), [x.b, x.n, x.t]]
    return x.build.build(operands, results[: len(eqn.outvars)], whole=whole, even=[x.b, x.m])


@rule(_BACKWARD, level="dims")
def _backward(eqn: Eqn) -> FactorRule:
    """The same dims; results are the gradients of queries, keys, values, and of a bias."""
    x, operands, whole = _attention(eqn)
    out = x.value(x.t, x.n, x.w)
    more = [[x.b, x.n, x.t], out, out]
    return x.build.build(
        operands + more, operands[: len(eqn.outvars)], whole=whole, even=[x.b, x.m]
    )


@rule(_SCALED, level="dot")
def _scaled(eqn: Eqn) -> FactorRule:
    """`b m k, b n k, b m s, b n s -> b m n  whole=k,s`."""
    b = RuleBuilder()
    lhs, rhs, scales, _ = eqn.invars
    batch, m, n = b.factors((lhs.shape[0], lhs.shape[1], rhs.shape[1]))
    k, s = b.factors((lhs.shape[2], scales.shape[2]))
    return b.build(
        [[batch, m, k], [batch, n, k], [batch, m, s], [batch, n, s]], [[batch, m, n]],
        whole=[k, s], even=[batch, m, n],
    )  # fmt: skip


@local(_FORWARD, _BACKWARD, _SCALED)
def _kernel(ctx: LocalContext, eqn: Eqn, *xs: Any) -> Any:
    """The kernel itself, without JAX's partitioner around it."""
    return eqn.primitive.impl(*xs, **eqn.params)
