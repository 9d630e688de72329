"""The lax code of a reshard's steps, on one device's block inside `jax.shard_map`.

A block is stored as `Layout` says: a whole dim at its own size, a split dim as padded / shards.  So
a step first pads the whole dims it splits (with zeros; nobody reads them) and last cuts the padding
off the dims it makes whole.  In between, a collective that touches several dims sees them through
two helpers: `_to_front` cuts dims into parts and brings the parts to one leading dim, in the order
in which the collective counts devices, and `_from_front` puts such a dim's parts back.

    (x, -) -> (-, x)       [d0/4, d1] -> [4, d0/4, d1/4] -> all-to-all -> [d0, d1/4]

Which block goes where is static; what differs from device to device depends on `lax.axis_index`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise import tpu
from shardwise.halo import all_to_all
from shardwise.mesh import MeshAxes
from shardwise.reshard_model import Step, common, emulated
from shardwise.reshard_rounds import rounds
from shardwise.sharding import Axes, Layout

Array = jax.Array
Runs = tuple[Axes, ...]  # runs of atoms that move together


def emit_step(x: Array, src: Layout, step: Step, mesh: MeshAxes) -> Array:
    """One step on the local block `x`; of `src` only the global shape and padded sizes are read."""
    before, after = src.with_sharding(step.before), src.with_sharding(step.after)
    if 0 in src.shape:
        return jnp.zeros(after.local_shape(mesh), x.dtype)
    x = _padded(x, before, after)
    if step.kind == "slice":
        x = _slice(x, before, after, mesh)
    elif step.kind == "all-gather":
        x = _all_gather(x, before, after, mesh)
    elif step.kind == "all-to-all":
        x = _all_to_all(x, before, after, mesh)
    elif step.kind == "reduce-scatter":
        x = _reduce_scatter(x, before, after, mesh)
    elif step.kind == "all-reduce":
        x = _all_reduce(x, step, mesh)
    else:
        x = _exchange(x, before, after, step.atoms, mesh)
    return _trimmed(x, before, after)


# ---- padding -------------------------------------------------------------------------------------


def _padded(x: Array, before: Layout, after: Layout) -> Array:
    """The whole dims that the step splits, brought to their padded size."""
    grow = [
        before.padded[d] - before.shape[d] if b != a and not b else 0
        for d, (b, a) in enumerate(zip(before.sharding.axes, after.sharding.axes, strict=True))
    ]
    if not any(grow):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, g, 0) for g in grow])


def _trimmed(x: Array, before: Layout, after: Layout) -> Array:
    """The dims that the step made whole, cut to their own size."""
    ends = [
        after.shape[d] if b != a and not a else x.shape[d]
        for d, (b, a) in enumerate(zip(before.sharding.axes, after.sharding.axes, strict=True))
    ]
    return x if ends == list(x.shape) else lax.slice(x, [0] * x.ndim, ends)


def _minor(a: Layout, b: Layout) -> dict[int, Axes]:
    """Per dim that differs: the atoms of `a` beyond what the dim has in common with `b`."""
    out = {}
    for d, (p, q) in enumerate(zip(a.sharding.axes, b.sharding.axes, strict=True)):
        if rest := p[common(p, q) :]:
            out[d] = rest
    return out


# ---- moving parts of dims to a leading dim and back ----------------------------------------------


def _to_front(x: Array, parts: Mapping[int, Runs], order: Runs, mesh: MeshAxes) -> Array:
    """[.., d, ..] -> [g, .., d/g, ..]: dim d cut by the runs `parts[d]`, counted as in `order`."""
    shape: list[int] = []
    at: dict[Axes, int] = {}
    stay = []
    for d, size in enumerate(x.shape):
        cut = [mesh.size(run) for run in parts.get(d, ())]
        at.update((run, len(shape) + i) for i, run in enumerate(parts.get(d, ())))
        stay.append(len(shape) + len(cut))
        shape += [*cut, size // math.prod(cut)]
    x = x.reshape(shape).transpose([at[run] for run in order] + stay)
    return x.reshape((math.prod(x.shape[: len(order)]), *x.shape[len(order) :]))


def _from_front(x: Array, parts: Mapping[int, Runs], order: Runs, mesh: MeshAxes) -> Array:
    """[g, .., d/g, ..] -> [.., d, ..]: the inverse of `_to_front`."""
    local = x.shape[1:]
    x = x.reshape([mesh.size(run) for run in order] + list(local))
    perm, shape = [], []
    for d, size in enumerate(local):
        runs = parts.get(d, ())
        perm += [order.index(run) for run in runs] + [len(order) + d]
        shape.append(size * math.prod(mesh.size(run) for run in runs))
    return x.transpose(perm).reshape(shape)


def _leads(x: Array, dim: int) -> bool:
    """Whether a block along `dim` is contiguous in memory.

    A collective sends contiguous blocks.  Left to itself, XLA gives its operand and result a layout
    with the dim outermost, which is a transpose element by element on either side, and may spread to
    what reads the value; cut into parts first, whole rows are copied.  (TPUs do this in their tiles.)
    """
    return math.prod(x.shape[:dim]) == 1


# ---- the steps -----------------------------------------------------------------------------------


def _slice(x: Array, before: Layout, after: Layout, mesh: MeshAxes) -> Array:
    starts: list[Array | np.int32] = [np.int32(0)] * x.ndim
    sizes = list(x.shape)
    for d, won in _minor(after, before).items():
        sizes[d] //= mesh.size(won)
        starts[d] = lax.mul(lax.axis_index(won), np.int32(sizes[d]))
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def _all_gather(x: Array, before: Layout, after: Layout, mesh: MeshAxes) -> Array:
    lost = _minor(before, after)
    if len(lost) == 1:
        [(d, atoms)] = lost.items()
        if tpu.gathers_badly(x, d, mesh.size(atoms)):
            columns = x.ndim - 1
            x = _turned(x, columns, d, atoms, mesh)
            return lax.all_gather(x, atoms, axis=columns, tiled=True)
        if tpu.tracing() or _leads(x, d):
            return lax.all_gather(x, atoms, axis=d, tiled=True)
    order = tuple(lost.values())
    x = lax.all_gather(x, sum(order, ()), axis=0, tiled=False)
    return _from_front(x, {d: (atoms,) for d, atoms in lost.items()}, order, mesh)


def _all_to_all(x: Array, before: Layout, after: Layout, mesh: MeshAxes) -> Array:
    lost, won = _minor(before, after), _minor(after, before)
    takes = {e: _runs(atoms, lost) for e, atoms in won.items()}
    every = sum(takes.values(), ())
    gives = {d: tuple(sorted((r for r in every if r[0] in atoms), key=lambda r: atoms.index(r[0])))
             for d, atoms in lost.items()}  # fmt: skip
    order = sum(gives.values(), ())
    x = _to_front(x, takes, order, mesh)
    x = all_to_all(x, sum(order, ()))
    return _from_front(x, gives, order, mesh)


def _runs(atoms: Axes, others: Mapping[int, Axes]) -> Runs:
    """`atoms` cut where they do not follow each other on one of the other dims."""
    at = {a: (d, i) for d, axes in others.items() for i, a in enumerate(axes)}
    runs: list[Axes] = []
    for a in atoms:
        d, i = at[a]
        if runs and at[runs[-1][-1]] == (d, i - 1):
            runs[-1] = (*runs[-1], a)
        else:
            runs.append((a,))
    return tuple(runs)


def _reduce_scatter(x: Array, before: Layout, after: Layout, mesh: MeshAxes) -> Array:
    won, op = _minor(after, before), before.sharding.op
    order = tuple(won.values())
    atoms = sum(order, ())
    if op == "sum" and len(won) == 1:
        (dim,) = won
        if (via := tpu.scatter_dim(x, dim, mesh.size(atoms))) is not None:
            y = lax.psum_scatter(x, atoms, scatter_dimension=via, tiled=True)
            return _turned(y, dim, via, atoms, mesh)
        if tpu.tracing() or _leads(x, dim):
            return lax.psum_scatter(x, atoms, scatter_dimension=dim, tiled=True)
    x = _to_front(x, {d: (axes,) for d, axes in won.items()}, order, mesh)
    if op == "sum":
        return lax.psum_scatter(x, atoms, scatter_dimension=0, tiled=False)
    return _reduced(all_to_all(x, atoms), op)


def _turned(x: Array, split: int, joined: int, atoms: Axes, mesh: MeshAxes) -> Array:
    """One all-to-all that splits one dim and joins another, through a leading dim."""
    x = _to_front(x, {split: (atoms,)}, (atoms,), mesh)
    x = all_to_all(x, atoms)
    return _from_front(x, {joined: (atoms,)}, (atoms,), mesh)


# ---- reductions ----------------------------------------------------------------------------------

_LOCAL: dict[str, Callable[..., Array]] = {
    "sum": lax.reduce_sum,
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "prod": lax.reduce_prod,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
    "xor": lax.reduce_xor,
}


def _reduced(terms: Array, op: str) -> Array:
    """The terms along dim 0, reduced."""
    return _LOCAL[op](terms, (0,))


def _all_reduce(x: Array, step: Step, mesh: MeshAxes) -> Array:
    """A collective of its own where there is one; `emulated` says when to do what instead.

    The planner does not know the dtype: for `and` and `or` it takes one byte for a boolean, and for
    max and min it takes no element for complex.  Those reduce as the dtype needs.
    """
    op = step.before.op
    if op == "sum":
        return lax.psum(x, step.atoms)
    if op in ("max", "min") and not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _extreme(x, step.atoms, op)
    if op in ("and", "or") and x.dtype == jnp.bool_:
        return (lax.pmin if op == "and" else lax.pmax)(x, step.atoms)
    g = mesh.size(step.atoms)
    gather, scatter = emulated(x.size, g)
    if gather <= scatter:
        return _reduced(lax.all_gather(x, step.atoms, axis=0, tiled=False), op)
    flat = x.reshape(-1)
    flat = jnp.pad(flat, (0, -x.size % g)).reshape(g, -1)
    terms = all_to_all(flat, step.atoms)
    whole = lax.all_gather(_reduced(terms, op), step.atoms, axis=0, tiled=True)
    return whole[: x.size].reshape(x.shape)


_INTEGER = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int64}
_SIGN_MAGNITUDE = ("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2")


def _extreme(x: Array, atoms: Axes, op: str) -> Array:
    """All-reduce with max or min in which, as on one device, NaN wins.

    `lax.pmax` on floats does not promise that (on the CPU it depends on which device holds the
    NaN), so floats travel as integers of the same width and order, with NaN beyond all others.
    """
    reduce = lax.pmax if op == "max" else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x, atoms)
    if x.dtype.itemsize == 1 and x.dtype.name not in _SIGN_MAGNITUDE:
        return _extreme(x.astype(jnp.bfloat16), atoms, op).astype(x.dtype)
    integer = _INTEGER[x.dtype.itemsize]
    low, high = jnp.iinfo(integer).min, jnp.iinfo(integer).max

    def swap(bits: Array) -> Array:  # negative floats are ordered the other way; its own inverse
        return jnp.where(bits < 0, bits ^ integer(high), bits)

    key = swap(lax.bitcast_convert_type(x, integer))
    key = jnp.where(x != x, integer(high if op == "max" else low), key)
    return lax.bitcast_convert_type(swap(reduce(key, atoms)), x.dtype)


# ---- permutes ------------------------------------------------------------------------------------


def _exchange(x: Array, before: Layout, after: Layout, atoms: Axes, mesh: MeshAxes) -> Array:
    """Every device gets its new block from those that hold it: one permute a round.

    `atoms` must be in mesh order: `lax.ppermute` numbers devices so, whatever the names' order.
    """
    lost, won = _minor(before, after), _minor(after, before)
    dims = tuple(sorted({*lost, *won}))
    plan = rounds(
        tuple(tuple(map(atoms.index, lost.get(d, ()))) for d in dims),
        tuple(tuple(map(atoms.index, won.get(d, ()))) for d in dims),
        tuple(mesh.size_of[a] for a in atoms),
    )
    if len(plan.pairs) == 1:
        return lax.ppermute(x, atoms, plan.pairs[0])
    piece, block = list(x.shape), list(x.shape)
    for d, cut, paste in zip(dims, plan.cut, plan.paste, strict=True):
        piece[d] //= cut
        block[d] = piece[d] * paste
    device = lax.axis_index(atoms)
    out = jnp.zeros(block, x.dtype)
    for pairs, sent, placed in zip(plan.pairs, plan.sent, plan.placed, strict=True):
        start = _starts(sent, device, dims, piece)
        part = lax.dynamic_slice(x, start, piece, allow_negative_indices=False)
        part = lax.ppermute(part, atoms, pairs)
        start = _starts(placed, device, dims, piece)
        out = lax.dynamic_update_slice(out, part, start, allow_negative_indices=False)
    return out


def _starts(
    table: np.ndarray, device: Array, dims: Sequence[int], piece: Sequence[int]
) -> list[Array | np.int32]:
    """Where this device's piece of a round starts: `table` has its number per device and dim."""
    row = lax.dynamic_index_in_dim(
        jnp.asarray(table), device, keepdims=False, allow_negative_indices=False
    )
    starts: list[Array | np.int32] = [np.int32(0)] * len(piece)
    for i, d in enumerate(dims):
        starts[d] = lax.mul(row[i], np.int32(piece[d]))
    return starts
