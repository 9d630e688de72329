"""Longer spellings: integer products, philox keys, sparse arrays, functions on references.

What `spelling.py` is for, of primitives whose own code is long: what is written here is what JAX lowers
them to, in primitives that have rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise import _jax, _jax_primitives


def _mulhi(eqn: Any, _: str) -> Callable[..., Any]:
    """The high half of a product by products of half words: XLA cannot compile its own inside
    `shard_map` ("failed to legalize mhlo.unknown")."""
    dtype = eqn.outvars[0].aval.dtype
    bits = np.iinfo(dtype).bits
    word = np.dtype(f"uint{bits}")
    half, mask = word.type(bits // 2), word.type((1 << bits // 2) - 1)

    def unsigned(x: Any, y: Any) -> Any:
        xh, xl, yh, yl = x >> half, x & mask, y >> half, y & mask
        middle = xh * yl + (xl * yl >> half)
        return xh * yh + (middle >> half) + (xl * yh + (middle & mask) >> half)

    def high(x: Any, y: Any) -> Any:
        z = unsigned(lax.convert_element_type(x, word), lax.convert_element_type(y, word))
        z = lax.convert_element_type(z, dtype)
        if dtype == word:
            return z
        # A negative number is 2**bits too large when read as unsigned.
        return z - jnp.where(x < 0, y, 0).astype(dtype) - jnp.where(y < 0, x, 0).astype(dtype)

    return high


def _philox(eqn: Any, _: str) -> Callable[..., Any]:
    f = _jax_primitives.philox_rounds(eqn.primitive)
    return lambda *xs: list(f(*xs))


def _of_philox(use: str) -> Callable[[Any, str], Callable[..., Any] | None]:
    """Seeds, splits and messages of philox keys, whose own code has `mulhi` in it."""

    def respelled(eqn: Any, _: str) -> Callable[..., Any] | None:
        keys = (eqn.outvars if use == "seed" else eqn.invars)[0].aval
        if not _jax.key_impl_name(keys.dtype).startswith("philox"):
            return None
        one = _jax.key_function(keys.dtype, use)
        rest = (eqn.params["shape"],) if use == "split" else ()

        def run(first: Any, *xs: Any) -> Any:
            def f(*a: Any) -> Any:
                return one(*a, *rest)

            for _ in keys.shape:
                f = jax.vmap(f)
            raw = first if use == "seed" else jax.random.key_data(first)
            shape = keys.shape
            xs = tuple(jnp.broadcast_to(x, shape) for x in xs)
            return _jax.wrap_key_data(f(raw, *xs), keys.dtype)

        return run

    return respelled


def _sparse(eqn: Any, _: str) -> Callable[..., Any] | None:
    """What a primitive of `jax.experimental.sparse` does, in gathers, scatters and dots."""
    f = _jax_primitives.implementation(eqn.primitive)
    return None if f is None else lambda *xs: f(*xs, **eqn.params)


_SPARSE = """
    bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices
    bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general bcsr_extract
    bcsr_fromdense bcsr_todense coo_fromdense coo_matmat coo_matvec coo_todense csr_fromdense
    csr_matmat csr_matvec csr_todense todense
"""


def _run_state(eqn: Any, _: str) -> Any | None:
    """A function on mutable references, as one on values; None where some start without a value."""
    if not all(eqn.params["is_initialized"]):
        return None
    return _jax.run_state_body(eqn.params["jaxpr"])


LONG: dict[str, Callable[[Any, str], Any]] = {
    "mulhi": _mulhi,
    "philox2x32": _philox,
    "philox4x32": _philox,
    "random_fold_in": _of_philox("fold_in"),
    "random_seed": _of_philox("seed"),
    "random_split": _of_philox("split"),
    "run_state": _run_state,
    **dict.fromkeys(_SPARSE.split(), _sparse),
}
