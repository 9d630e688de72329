"""Dots, convolutions, transforms, linear algebra."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import linalg

from shardwise import _jax_primitives
from shardwise.testing.primitives.examples.table import example, floats, ints, matrices

# -- dots --------------------------------------------------------------------------------------------

_DIMS = (((2,), (1,)), ((0,), (0,)))
example("dot_general", "Dots", lambda x, y: lax.dot_general(x, y, _DIMS), floats(2, 5, 4),
        floats(2, 4, 3))  # fmt: skip
example("scaled_dot", "Dots",
        lambda x, y, s, t: jax.nn.scaled_matmul(x, y, s, t, preferred_element_type=jnp.float32)
        if not hasattr(lax, "scaled_dot") else lax.scaled_dot(
            x, y, lhs_scale=s, rhs_scale=t, dimension_numbers=_SCALED,
            preferred_element_type=jnp.float32),
        floats(2, 5, 8), floats(2, 3, 8), floats(2, 5, 2), floats(2, 3, 2), tol=3e-2)  # fmt: skip
_SCALED = (((2,), (2,)), ((0,), (0,)))
example("ragged_dot_general", "Dots", lax.ragged_dot, floats(6, 4), floats(2, 4, 3),
        jnp.array([2, 3], jnp.int32))  # fmt: skip
example("conv_general_dilated", "Convolution",
        lambda x, k: lax.conv_general_dilated(x, k, (2,), [(1, 1)]),
        floats(2, 4, 9), floats(6, 4, 3))  # fmt: skip

# -- cuDNN's kernels ---------------------------------------------------------------------------------

_CUDNN = _jax_primitives.cudnn_primitives()
_NONE = [floats(0)] * 7  # no bias, lengths, offsets, pages
_ATTENTION = {
    "scale": 1.0, "seed": 0, "dropout_rate": 0.0, "variadic_args": (False, False),
    "mask_type": 0, "layout": 0, "sliding_window_length": None,
}  # fmt: skip
_Q, _KV = floats(2, 4, 6, 8), floats(2, 5, 3, 8)
example("dot_product_attention_fwd_wrapper", "cuDNN",
        lambda *xs: _CUDNN["dot_product_attention_fwd_wrapper"].bind(
            *xs, **_ATTENTION, is_training=True),
        _Q, _KV, _KV, *_NONE, runs=False)  # fmt: skip
example("dot_product_attention_bwd_wrapper", "cuDNN",
        lambda *xs: _CUDNN["dot_product_attention_bwd_wrapper"].bind(*xs, **_ATTENTION),
        _Q, _KV, _KV, *_NONE, floats(2, 6, 4), _Q, _Q, runs=False)  # fmt: skip
example("scaled_matmul_wrapper", "cuDNN",
        lambda *xs: _CUDNN["scaled_matmul_wrapper"].bind(*xs, preferred_element_type=jnp.float32),
        floats(2, 4, 64), floats(2, 6, 64), floats(2, 4, 2), floats(2, 6, 2), runs=False)  # fmt: skip

# -- transforms --------------------------------------------------------------------------------------

example("fft", "Transforms", lambda x: jnp.fft.fft(x, axis=-1), floats(3, 8))

# -- linear algebra ----------------------------------------------------------------------------------

_LINEAR = "Linear algebra"
example("cholesky", _LINEAR, linalg.cholesky, matrices(3, 4, 4))
example("cholesky_update", _LINEAR, linalg.cholesky_update, jnp.linalg.cholesky(matrices(4, 4)).T,
        floats(4))  # fmt: skip
example("eig", _LINEAR, lambda x: linalg.eig(x)[0], matrices(3, 4, 4))
example("eigh", _LINEAR, lambda x: linalg.eigh(x)[1], matrices(3, 4, 4))
example("geqrf", _LINEAR, lambda x: jnp.linalg.qr(x, mode="raw"), floats(3, 4, 4))
example("hessenberg", _LINEAR, linalg.hessenberg, matrices(3, 4, 4))
example("householder_product", _LINEAR, linalg.householder_product, floats(3, 4, 4), floats(3, 4))
example("lu", _LINEAR, linalg.lu, matrices(3, 4, 4))
example("lu_pivots_to_permutation", _LINEAR,
        lambda p: linalg.lu_pivots_to_permutation(p, 5), ints(3, 4, high=4))  # fmt: skip
example("qr", _LINEAR, linalg.qr, matrices(3, 4, 4))
example("schur", _LINEAR, lambda x: linalg.schur(x)[0], matrices(3, 4, 4))
example("svd", _LINEAR, lambda x: linalg.svd(x)[1], matrices(3, 4, 4))
example("symmetric_product", _LINEAR, linalg.symmetric_product, floats(3, 4, 2), matrices(3, 4, 4),
        runs=False, platform="cuda")  # fmt: skip
example("triangular_solve", _LINEAR,
        lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True),
        matrices(3, 4, 4), floats(3, 4, 2))  # fmt: skip
example("tridiagonal", _LINEAR, lambda x: linalg.tridiagonal(x)[1], matrices(3, 4, 4))
example("tridiagonal_solve", _LINEAR, linalg.tridiagonal_solve, floats(3, 4), floats(3, 4) + 3,
        floats(3, 4), floats(3, 4, 2))  # fmt: skip


def _bound(name: str, **params: Any) -> Any:
    """A primitive without a public function, bound as it stands."""
    return lambda *xs: _jax_primitives.all_primitives()[name].bind(*xs, **params)


example("geqp3", _LINEAR, _bound("geqp3", use_magma=None), floats(3, 4, 4), ints(3, 4, high=1))
example("ormqr", _LINEAR, _bound("ormqr", left=True, transpose=False), floats(3, 4, 4), floats(3, 4),
        floats(3, 4, 2))  # fmt: skip
