"""Linear algebra: batch dims are split freely, the matrix lies whole on a device.

A split matrix dim is moved to a batch dim, where there is one, by an all-to-all (`choose`); a single
matrix is gathered, and reported.  Right-hand sides are independent of each other: the columns of a
triangular or tridiagonal solve, and of what a Q is applied to, split like a batch.

Each primitive is a line of letters, one a matrix dim; batch dims lead every operand and result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise import _jax_primitives
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.registry import LocalContext, local, rule
from shardwise.program import Eqn

_P = _jax_primitives.lax_primitives("linalg")


def _ormqr(params: dict[str, Any]) -> str:
    return "mk k mF -> mF" if params["left"] else "mk k Fm -> Fm"


def _qr(params: dict[str, Any]) -> str:
    return "mn -> mk kn" + " n" * params["pivoting"]


def _eig(params: dict[str, Any]) -> str:
    vectors = params["compute_left_eigenvectors"] + params["compute_right_eigenvectors"]
    return "mn -> m" + " mn" * vectors


def _schur(params: dict[str, Any]) -> str:
    return "mn -> mn" + " mn" * params["compute_schur_vectors"]


def _svd(params: dict[str, Any]) -> str:
    if not params["compute_uv"]:
        return "mn -> k"
    return "mn -> k mp qn" if params["full_matrices"] else "mn -> k mk kn"


def _triangular_solve(params: dict[str, Any]) -> str:
    return "mn mF -> mF" if params["left_side"] else "mn Fm -> Fm"


# The matrix dims of operands and results; capital letters are free, the others whole.
_SPECS: dict[str, str | Callable[[dict[str, Any]], str]] = {
    "cholesky": "mn -> mn",
    "cholesky_update": "mn m -> mn",
    "eig": _eig,
    "eigh": "mn -> mk k",
    "geqp3": "mn n -> mn n k",
    "geqrf": "mn -> mn k",
    "hessenberg": "mn -> mn k",
    "householder_product": "mn k -> mn",
    "lu": "mn -> mn k m",
    "lu_pivots_to_permutation": "k -> m",
    "ormqr": _ormqr,
    "qr": _qr,
    "schur": _schur,
    "svd": _svd,
    "symmetric_product": "mk mn -> mn",  # elsewhere than on GPUs it is written out, as a dot
    "triangular_solve": _triangular_solve,
    "tridiagonal": "mn -> mn k l l",
    "tridiagonal_solve": "m m m mF -> mF",
}

# Iterations that padding, which may hold NaN, would send round for nothing.
_ITERATIVE = ("eig", "eigh", "schur", "svd")


@rule(*(_P[name] for name in _SPECS if name in _P), level="dims")
def _matrix(eqn: Eqn) -> FactorRule:
    """`b m n -> b m n  whole=m,n`, and so on."""
    spec = _SPECS[eqn.name]
    operands, results = (spec if isinstance(spec, str) else spec(eqn.params)).split(" -> ")
    words = operands.split() + results.split()
    values = [*eqn.invars, *eqn.outvars]
    b = RuleBuilder()
    batch = b.factors(values[0].shape[: values[0].rank - len(words[0])])
    factor: dict[str, int] = {}
    dims = []
    for v, letters in zip(values, words, strict=True):
        for letter, size in zip(letters, v.shape[len(batch) :], strict=True):
            if letter not in factor:
                factor[letter] = b.factor(size)
        dims.append([*batch, *(factor[letter] for letter in letters)])
    count = len(eqn.invars)
    whole = [f for letter, f in factor.items() if letter.islower()]
    return b.build(dims[:count], dims[count:], whole=whole)


@local(*(_P[name] for name in _ITERATIVE))
def _iterative_local(ctx: LocalContext, eqn: Eqn, x: Any) -> Any:
    for d in range(x.ndim - 2):
        x = ctx.mask(x, ctx.ins[0], d, 0)
    return eqn.primitive.bind(x, **eqn.params)
