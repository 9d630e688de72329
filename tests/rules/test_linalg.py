"""Linear algebra: batches stay local, split matrices move to the batch or are gathered and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg
from jax.sharding import PartitionSpec as P

from shardwise import _jax_primitives
from shardwise.testing import check
from shardwise.testing.rules import check_rule

PRIMITIVES = _jax_primitives.lax_primitives("linalg")


def values(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.normal(size=shape)
    return x.astype(dtype)


def positive(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    x = values(*shape, dtype=dtype)
    return x @ x.conj().swapaxes(-1, -2) + shape[-1] * np.eye(shape[-1], dtype=dtype)


def lower(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.tril(values(*shape, dtype=dtype)) + 3 * np.eye(shape[-1], dtype=dtype)


def bound(name: str, **params: Any) -> Callable[..., Any]:
    return lambda *xs: PRIMITIVES[name].bind(*xs, **params)


def cholesky(a: Any) -> Any:
    return linalg.cholesky(a, symmetrize_input=False)


B = 5  # over 2 or 3 devices with padding
ONE_MATRIX = {
    "cholesky": (linalg.cholesky, positive(B, 4, 4)),
    "eig": (linalg.eig, values(B, 4, 4)),
    "eigh": (lambda a: linalg.eigh(a, symmetrize_input=False), positive(B, 4, 4)),
    "geqrf": (linalg.geqrf if hasattr(linalg, "geqrf") else bound("geqrf"), values(B, 4, 3)),
    "hessenberg": (linalg.hessenberg, values(B, 4, 4)),
    "lu": (linalg.lu, values(B, 4, 3)),
    "lu_pivots_to_permutation": (
        lambda p: linalg.lu_pivots_to_permutation(p, 5), np.array([[1, 1, 3]] * B, np.int32)
    ),
    "qr": (lambda a: linalg.qr(a, full_matrices=False), values(B, 4, 3)),
    "schur": (linalg.schur, values(B, 4, 4)),
    "svd": (lambda a: linalg.svd(a, full_matrices=False), values(B, 4, 3)),
    "tridiagonal": (linalg.tridiagonal, positive(B, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_MATRIX)
def test_batches_split(name: str) -> None:
    fn, a = ONE_MATRIX[name]
    found = check_rule(fn, (a,), {"x": 3}, primitive=name, tol=1e-4)
    assert found["wrong"] == []
    assert any("{0: ('x',)}" in s for s in found["splits"])


SEVERAL = {
    "geqp3": (bound("geqp3", use_magma=None), (values(B, 4, 3), np.zeros((B, 3), np.int32))),
    "householder_product": (linalg.householder_product, (values(B, 4, 3), values(B, 3))),
    "ormqr": (bound("ormqr", left=True, transpose=False),
              (values(3, 4, 3), values(3, 3), values(3, 4, 5))),
    "triangular_solve": (
        lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True),
        (lower(3, 4, 4), values(3, 4, 5))),
    "tridiagonal_solve": (linalg.tridiagonal_solve,
                          (values(3, 4), values(3, 4) + 5, values(3, 4), values(3, 4, 5))),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_batches_and_right_hand_sides_split(name: str) -> None:
    fn, args = SEVERAL[name]
    found = check_rule(fn, args, {"x": 2}, primitive=name, tol=1e-4)
    assert found["wrong"] == []
    count = 1 + (len(args[-1].shape) == 3)  # the batch; and the columns, where there are some
    assert len(found["splits"]) == 1 + count


def test_rows_as_right_hand_sides() -> None:
    def solve(a: Any, b: Any) -> Any:
        return linalg.triangular_solve(a, b, left_side=False, lower=True, transpose_a=True)

    found = check_rule(solve, (lower(4, 4), values(5, 4)), tol=1e-4)
    assert found["wrong"] == []
    assert len(found["splits"]) > 3
    check(solve, (lower(4, 4), values(64, 4)), {"x": 8}, (None, P("x")), P("x"), kinds=[])


def test_one_matrix_is_gathered_and_reported() -> None:
    plan = check(cholesky, (positive(16, 16),), {"x": 8}, (P("x"),), kinds=["all-gather"])
    assert [(f.op, f.shape) for f in plan.fallbacks] == [("cholesky", (16, 16))]
    r, w = lower(4, 4).T, values(4)
    plan = check(bound("cholesky_update"), (r, w), {"x": 2}, (P("x"), P("x")), grad=False)
    assert [f.op for f in plan.fallbacks] == ["cholesky_update"] * 2


@pytest.mark.parametrize(("spec", "batch"), [(P(None, "x"), 16), (P(None, None, "x"), 13)])
def test_a_split_matrix_moves_to_the_batch(spec: P, batch: int) -> None:
    block = 2 * 8 * 8 * 4 * 7 / 8  # 16 matrices, or 13 padded to 16, over 8 devices
    plan = check(
        cholesky, (positive(batch, 8, 8),), {"x": 8}, (spec,), spec,
        kinds={"all-to-all": 2}, bytes=2 * block, wire=True,
    )  # fmt: skip
    assert not plan.fallbacks


GRADIENTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "solve": (jnp.linalg.solve, (positive(6, 4, 4), values(6, 4, 3))),
    "inv": (jnp.linalg.inv, (positive(6, 4, 4),)),
    "det": (jnp.linalg.slogdet, (positive(6, 4, 4),)),
    "cholesky": (jnp.linalg.cholesky, (positive(6, 4, 4),)),
    "eigh": (lambda a: jnp.linalg.eigh(a)[0], (positive(6, 4, 4),)),
    "svd": (lambda a: jnp.linalg.svd(a, compute_uv=False), (values(6, 4, 3),)),
    "pinv": (jnp.linalg.pinv, (values(6, 4, 3),)),
    "qr": (lambda a: jnp.linalg.qr(a)[1], (values(6, 4, 3),)),
    "lu_solve": (lambda a, b: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(a), b),
                 (positive(6, 4, 4), values(6, 4, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_batched_programs_and_gradients_stay_local(name: str) -> None:
    fn, args = GRADIENTS[name]
    specs = tuple(P("x") for _ in args)
    plan = check(fn, args, {"x": 4}, specs, kinds=[], tol=1e-3)
    assert not plan.fallbacks


def test_right_hand_sides_split_and_their_gradient() -> None:
    def solve(a: Any, b: Any) -> Any:
        return jax.scipy.linalg.solve_triangular(a, b, lower=True)

    args = (lower(8, 8), values(8, 16))
    plan = check(solve, args, {"x": 8}, (None, P(None, "x")), P(None, "x"), kinds=[], bytes=0)
    assert not plan.fallbacks


@pytest.mark.parametrize("dtype", [np.complex64, np.float32])
def test_dtypes(dtype: Any) -> None:
    for fn in (linalg.cholesky, lambda a: linalg.svd(a, compute_uv=False)):
        check(fn, (positive(6, 4, 4, dtype=dtype),), {"x": 3}, (P("x"),), kinds=[], grad=False)


def test_a_symmetric_product_is_a_dot() -> None:
    def product(a: Any, c: Any) -> Any:
        return linalg.symmetric_product(a, c, alpha=2.0, beta=0.5, symmetrize_output=False)

    args = (values(8, 16), values(8, 8))
    plan = check(product, args, {"x": 4}, (P(None, "x"), P()), P("x"), grad=False)
    assert Counter(c.kind for c in plan.collectives) == {"reduce-scatter": 1}
