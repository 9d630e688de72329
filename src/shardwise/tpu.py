"""What the TPU compiler makes badly of plain collectives, and when to spell them otherwise.

Found by compiling the 64B Transformer of GSPMD Table 2 for TPU v3:32x32 (docs/at_scale.md has the figures).
On other platforms, and on meshes without devices, nothing here applies.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from shardwise import _jax
from shardwise.program import ANNOTATIONS, CHECKPOINTS, Body, Lit, Var


def tracing() -> bool:
    """Whether the program being traced is for TPUs."""
    return _jax.tracing_platform() == "tpu"


def scatter_dim(x: Any, dim: int, group: int) -> int | None:
    """The dim to scatter over instead of the minor one where blocks of that would be narrow.

    An all-reduce, twice the bytes, is made of a reduce-scatter of 16-bit sums to blocks less than 256
    wide.  Scattering another dim is a true reduce-scatter, and an all-to-all of the blocks, 1/group of
    the bytes, turns them.
    """
    narrow = x.shape[dim] // group < 256 and x.dtype.itemsize <= 2
    if dim != x.ndim - 1 or not narrow or not tracing():
        return None
    others = [d for d in range(x.ndim - 1) if x.shape[d] % group == 0]
    return max(others, key=lambda d: (x.shape[d], d), default=None)


def gathers_badly(x: Any, dim: int, group: int) -> bool:
    """Whether an all-gather of rows copies its whole result: blocks of rows no multiple of 8.

    Turned into blocks of columns first, by an all-to-all of 1/group of the bytes, it does not.
    """
    ragged = dim == x.ndim - 2 and x.shape[dim] % 8 != 0
    return ragged and x.shape[-1] % (128 * group) == 0 and tracing()


def read_as(body: Body, v: Var) -> Any | None:
    """The narrower float type that all readers of a float value convert it to first, if there is one.

    Readers are followed through annotations and bodies that are run in place.
    """
    found: set[Any] = set()
    if v in body.outvars or not jnp.issubdtype(v.dtype, jnp.floating):
        return None
    for eqn in body.eqns:
        for i, operand in enumerate(eqn.invars):
            if operand is not v or isinstance(operand, Lit):
                continue
            if eqn.name in ANNOTATIONS:
                found.add(read_as(body, eqn.outvars[0]))
            elif eqn.name in CHECKPOINTS:
                found.add(read_as(eqn.bodies[0], eqn.bodies[0].invars[i]))
            elif eqn.name == "convert_element_type":
                found.add(jnp.dtype(eqn.params["new_dtype"]))
            else:
                return None
    dtype = found.pop() if len(found) == 1 else None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return None
    return dtype if dtype.itemsize < v.itemsize else None


def rounded(x: Any, dtype: Any) -> Any:
    """`x` rounded to a narrower float type, in its own type.

    On a loop's slice of a stack that is only read in the narrow type, this keeps the compiler from
    making a narrow copy of the whole stack before the loop; it changes nothing else.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)
