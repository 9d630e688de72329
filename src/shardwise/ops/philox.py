"""`rng_bit_generator`: random bits of XLA's generators, the same however they are split.

Philox is counter-based: word w of the bits is word w % 4 of the hash of (key, counter + w // 4).  A
device that has a block of the bits hashes the counters of its own elements, from their positions;
nothing of global size is made, and nothing is sent.  XLA's other generators, and the hardware's own,
say nothing of how they count: their bits are made whole on every device and cut.

(Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011.)
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise import _jax, _jax_primitives
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.ops.random import positions, run_of, times
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn

_P = _jax_primitives.lax_primitives("lax")
_BITS, _UNIFORM = _P["rng_bit_generator"], _P["rng_uniform"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_ROUNDS = 10


@rule(_BITS, level="dims")
def _bits(eqn: Eqn) -> FactorRule:
    """`k -> k, i j  whole=k`."""
    b = RuleBuilder()
    key, dims = b.factors(eqn.invars[0].shape), b.factors(eqn.params["shape"])
    return b.build([key], [key, dims], whole=key)


@rule(_UNIFORM, level="dims")
def _uniform(eqn: Eqn) -> FactorRule:
    """`(), () -> i j  whole=i,j`: each device's own generator, in its own state."""
    b = RuleBuilder()
    dims = b.factors(eqn.params["shape"])
    return b.build([[], []], [dims], whole=dims)


@local(_UNIFORM)
def _uniform_local(ctx: LocalContext, eqn: Eqn, *bounds: Any) -> Any:
    """One device draws for all: copies of one value must be the same bits."""
    out = eqn.primitive.bind(*bounds, **eqn.params)
    if not (atoms := ctx.mesh.atoms):
        return out
    return lax.psum(jnp.where(ctx.block_index(atoms) == 0, out, jnp.zeros((), out.dtype)), atoms)


@comm(_UNIFORM)
def _uniform_comm(ctx: LocalContext, eqn: Eqn) -> float:
    n = ctx.mesh.device_count
    return 2 * eqn.outvars[0].nbytes * (n - 1) / n


@local(_BITS)
def _bits_local(ctx: LocalContext, eqn: Eqn, key: Any) -> Any:
    out = ctx.outs[1]
    if not any(out.sharding.axes):
        return eqn.primitive.bind(key, **eqn.params)
    if _is_philox(eqn):
        return _next_key(key, eqn), _block(ctx, eqn, key)
    new, bits = eqn.primitive.bind(key, **eqn.params)
    for d, n in enumerate(ctx.local_out(1)):
        if atoms := out.sharding.axes[d]:
            bits = jnp.pad(bits, [(0, (out.padded[d] - out.shape[d]) * (e == d))
                                  for e in range(bits.ndim)])  # fmt: skip
            bits = lax.dynamic_slice_in_dim(bits, ctx.block_index(atoms) * n, n, d)
    return new, bits


def _is_philox(eqn: Eqn) -> bool:
    """Whether the algorithm is Philox, with the state as four words; CPUs have it by default."""
    key, algorithm = eqn.invars[0], int(eqn.params["algorithm"])
    platform = _jax.tracing_platform() or jax.default_backend()
    default = platform == "cpu" and algorithm == int(lax.RandomAlgorithm.RNG_DEFAULT)
    philox = default or algorithm == int(lax.RandomAlgorithm.RNG_PHILOX)
    return philox and key.shape == (4,) and key.dtype == np.uint32


def _words(eqn: Eqn) -> int:
    """32-bit words of one element; narrow elements are the low bits of one."""
    return max(1, np.dtype(eqn.params["dtype"]).itemsize // 4)


def _next_key(key: Any, eqn: Eqn) -> Any:
    """The state after the call: its counter is further by the hashes drawn."""
    count = -(-math.prod(eqn.params["shape"]) * _words(eqn) // 4)
    low = key[2] + np.uint32(count % (1 << 32))
    high = key[3] + np.uint32(count >> 32) + (low < key[2]).astype(np.uint32)
    return jnp.stack([key[0], key[1], low, high])


def _block(ctx: LocalContext, eqn: Eqn, key: Any) -> Any:
    """This device's block of the bits.

    Along the last dim a hash gives several elements at once, where it begins and ends with one.
    """
    layout, shape, dtype = ctx.outs[1], ctx.local_out(1), np.dtype(eqn.params["dtype"])
    each = 4 // _words(eqn)
    if (run := run_of(ctx, layout, each)) is not None:
        return jnp.stack(_elements(_philox(key, *run), dtype), -1).reshape(shape)
    aligned = shape[-1] % each == 0 and layout.shape[-1] % each == 0
    high, low = positions(ctx, layout, each if aligned else 1)
    shift = np.uint32(each.bit_length() - 1)
    counter = high >> shift, (low >> shift) | (high << (np.uint32(32) - shift))
    several = _elements(_philox(key, *counter), dtype)
    if aligned:
        return jnp.stack(several, -1).reshape(shape)
    lane = low & np.uint32(each - 1)
    out = several[0]
    for i in range(1, each):
        out = jnp.where(lane == i, several[i], out)
    return out


def _elements(words: list[Any], dtype: np.dtype) -> list[Any]:
    """The elements that a hash's four words make."""
    words = [w.astype(dtype) for w in words]
    if dtype.itemsize <= 4:
        return words
    return [words[i] | (words[i + 1] << np.uint64(32)) for i in (0, 2)]


def _philox(key: Any, high: Any, low: Any) -> list[Any]:
    """The hashes (four words each) of the state's counter plus the numbers (high, low)."""
    c0 = key[2] + low
    carry = (c0 < low).astype(np.uint32)
    c1 = key[3] + high + carry
    over = (c1 < high) | ((c1 == high) & (carry == 1) & (key[3] == np.uint32(0xFFFFFFFF)))
    c2 = key[0] + over.astype(np.uint32)
    c3 = key[1] + (c2 < key[0]).astype(np.uint32)
    words, k = [c0, c1, c2, c3], [key[0], key[1]]
    for _ in range(_ROUNDS):
        high0, low0 = times(words[0], _MULTIPLIERS[0])
        high1, low1 = times(words[2], _MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ k[0], low1, high0 ^ words[3] ^ k[1], low0]
        k = [k[0] + _WEYL[0], k[1] + _WEYL[1]]
    return words
