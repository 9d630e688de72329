"""FFT: transformed dims lie whole, or one of them is transformed where it lies, in four steps.

A split transformed dim is moved to another dim by an all-to-all, and back (`choose`); a transform of
several dims, none of which can take the others' splits at once, runs dim by dim (`fft_passes`).  A
vector has no other dim.  Its n = P m elements are a matrix [P, m], a row a device, and

    X[k1 + P k2] = sum_j2 w_m^(j2 k2) w_n^(j2 k1) sum_j1 w_P^(j1 k1) x[j1 m + j2]

is an FFT of columns, a product, an FFT of rows and a transposition: three all-to-alls of a block
((g-1)/g of it each) where gathering the vector takes g - 1 blocks, and every device the whole work.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from shardwise import _jax
from shardwise.factors import FactorRule, RuleBuilder
from shardwise.halo import all_to_all
from shardwise.ops.registry import LocalContext, comm, local, rule
from shardwise.program import Eqn

FFT, IFFT, RFFT, IRFFT = (
    lax.FftType.FFT, lax.FftType.IFFT, lax.FftType.RFFT, lax.FftType.IRFFT
)  # fmt: skip


def transformed(eqn: Eqn) -> tuple[int, ...]:
    """The dims transformed: the last ones, unless a pass says which (`fft_passes`)."""
    rank = eqn.invars[0].rank
    return eqn.params.get("dims") or tuple(range(rank - len(eqn.params["fft_lengths"]), rank))


@rule(lax.fft_p, level="dims")
def _fft(eqn: Eqn) -> tuple[FactorRule, ...]:
    """`i n -> i n  whole=n`; a single transformed dim also in four steps, where P divides it."""
    b = RuleBuilder()
    dims = b.factors(eqn.invars[0].shape)
    over = [dims[d] for d in transformed(eqn)]
    rules = [b.build([dims], [dims], whole=over)]
    if len(over) == 1 and eqn.params["fft_type"] != IRFFT:
        rules.append(b.build([dims], [dims], special=over, even=over, variant="four steps"))
    return tuple(rules)


@local(lax.fft_p)
def _fft_local(ctx: LocalContext, eqn: Eqn, x: Any) -> Any:
    kind, lengths = eqn.params["fft_type"], eqn.params["fft_lengths"]
    dims = transformed(eqn)
    last = range(x.ndim - len(dims), x.ndim)
    x = jnp.moveaxis(x, dims, last)
    if ctx.rule.variant and ctx.ins[0].sharding.axes[dims[0]]:
        y = _four_steps(ctx, dims[0], x, kind)
    else:
        y = _transform(x, kind, lengths)
    return jnp.moveaxis(y, last, dims)


def _transform(x: Any, kind: Any, lengths: Any) -> Any:
    """XLA's layouts follow collectives and transposes; its FFT on CPUs takes and gives rows only."""
    return _row_major(lax.fft_p.bind(_row_major(x), fft_type=kind, fft_lengths=lengths))


def _row_major(x: Any) -> Any:
    if _jax.tracing_platform() not in ("", "cpu"):
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _four_steps(ctx: LocalContext, dim: int, x: Any, kind: Any) -> Any:
    """The transform along the last dim of `x`, of which this device has a block (dim `dim` of ctx)."""
    atoms = ctx.ins[0].sharding.axes[dim]
    shards, m, me = ctx.mesh.size(atoms), x.shape[-1], ctx.block_index(atoms)
    n = shards * m
    inverse = kind == IFFT
    one = IFFT if inverse else FFT

    def exchange(y: Any) -> Any:
        """[.., P, c], a row for each device, to the rows all devices have for this one."""
        axis = y.ndim - 2
        return all_to_all(y, atoms, axis)

    def transform(y: Any) -> Any:
        return _transform(y, one, (y.shape[-1],))

    columns = -(-m // shards)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, shards * columns - m)])
    y = exchange(x.reshape(*x.shape[:-1], shards, columns))
    y = jnp.swapaxes(transform(jnp.swapaxes(y.astype(_complex(x.dtype)), -1, -2)), -1, -2)
    y = exchange(y * _twiddles(me, shards, columns, n, inverse, y.dtype))
    y = transform(y.reshape(*x.shape[:-1], shards * columns)[..., :m])
    return _in_order(exchange, y, me, shards, ctx.local_out()[dim])


def _complex(dtype: Any) -> Any:
    return jnp.result_type(dtype, jnp.complex64)


def _twiddles(me: Any, shards: int, columns: int, n: int, inverse: bool, dtype: Any) -> Any:
    """w_n^(j2 k1) for all k1 and this device's columns j2; angles from exact fractions of a turn."""
    column = me * columns + lax.iota(jnp.int32, columns)
    turn = lax.iota(jnp.int32, shards)[:, None] * jnp.minimum(column, n // shards - 1)
    turn = jnp.where(turn > n // 2, turn - n, turn)
    real = jnp.finfo(dtype).dtype
    angle = turn.astype(real) * real.type((2 if inverse else -2) * np.pi / n)
    return lax.complex(jnp.cos(angle), jnp.sin(angle))


def _in_order(exchange: Any, y: Any, me: Any, shards: int, block: int) -> Any:
    """Device k1 has the elements k1 + P k2 of the result, in `y`; to blocks of `block` elements.

    The block of device d has those with k2 from ceil((d block - k1) / P) on, at most ceil(block/P).
    """
    m, count = y.shape[-1], -(-block // shards)
    if block == m and m % shards == 0:
        y = exchange(y.reshape(*y.shape[:-1], shards, count))
        return jnp.swapaxes(y, -1, -2).reshape(*y.shape[:-2], m)
    device, k = lax.iota(jnp.int32, shards), me * block + lax.iota(jnp.int32, block)
    start = lax.div(device * block - me + shards - 1, jnp.int32(shards))
    rows = jnp.minimum(start[:, None] + lax.iota(jnp.int32, count), m - 1)
    got = exchange(jnp.take(y, rows, axis=-1, mode="clip"))
    k1 = lax.rem(k, jnp.int32(shards))
    first = lax.div(me * block - k1 + shards - 1, jnp.int32(shards))
    place = k1 * count + lax.div(k, jnp.int32(shards)) - first
    return jnp.take(got.reshape(*got.shape[:-2], shards * count), place, axis=-1, mode="clip")


@comm(lax.fft_p)
def _fft_comm(ctx: LocalContext, eqn: Eqn) -> float:
    """Three all-to-alls: of the block, of it transformed, and of the result's block."""
    (dim,) = transformed(eqn)
    shards = ctx.mesh.size(ctx.ins[0].sharding.axes[dim])
    if shards == 1:
        return 0.0
    m, block = ctx.local_in(0)[dim], ctx.local_out()[dim]
    rows = math.prod(ctx.local_in(0)) // max(m, 1)
    there, back = -(-m // shards), -(-block // shards)
    wide = eqn.outvars[0].itemsize
    return rows * (shards - 1) * (there * (eqn.invars[0].itemsize + wide) + back * wide)
