"""Windowed einsum: a dot whose collective is a loop of permutes and partial dots (GSPMD 4.4).

    all-gather, then dot        blocks of the operand go around a ring; each, while it is here, is
                                multiplied with what it meets, and gives its part of the result
    dot, then reduce-scatter    sums of blocks of the result go around; each collects a term from
                                every device, computed when it comes by, and ends where it belongs

What the collective would have needed at once, the gathered operand or the terms of the whole
result, is never there: a device holds one block of it.  As many bytes are sent, in g - 1 permutes
of a block, and a turn's permute does not wait for the turn's dot, so that both can run at once.

    on x=4, f32[64@x, 32] . f32[32, 16@x] -> f32[64@x, 16]: rhs would be gathered, [32, 16]
    rhs goes around, [32, 4] at a time: turn t gives the 4 columns that came from t devices ahead

This module says how; `windows` says when.  Blocks may lie along any dims, several at once: along
one that the other operand has too, that operand is cut; along one of the result, the part is put
there; along a contracted one, the parts are added up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwise.factors import Dims
from shardwise.mesh import MeshAxes
from shardwise.sharding import Axes, Layout

if TYPE_CHECKING:
    from shardwise.ops.registry import LocalContext

Array = jax.Array
Dot = Callable[[Array, Array], Array]
Factors = Sequence[int]  # one for each dim of a value
Block = Mapping[int, Array]  # factor -> the number of the block along it


@dataclasses.dataclass(frozen=True)
class Window:
    """What goes around instead of being gathered, or scattered, at once.

    Attributes:
      operand: the operand whose blocks go around; None when the result's sums do.
      whole: the layout that never exists: the operand gathered, or the result with its terms.
      block: the layout of what goes around: some dims of `whole` cut further.
      bytes: what `whole` would take on one device.
      limit: what it may take; `option` is the option of `spmd` that says so.
    """

    operand: int | None
    whole: Layout
    block: Layout
    bytes: int
    limit: float
    option: str

    @property
    def cuts(self) -> dict[int, Axes]:
        """dim -> the atoms that cut it into blocks, of the dims that are cut."""
        pairs = zip(self.whole.sharding.axes, self.block.sharding.axes, strict=True)
        return {d: b[len(w) :] for d, (w, b) in enumerate(pairs) if b != w}

    @property
    def atoms(self) -> Axes:
        """The atoms the blocks go around."""
        return sum(self.cuts.values(), ())


def windowed(ctx: LocalContext, dot: Dot, lhs: Array, rhs: Array, dtype: Any) -> Array:
    """A dot as a loop over the blocks of `ctx.window`, inside `jax.shard_map`.

    Args:
      ctx: its `ins` and `outs` are the layouts around the loop: the operand that goes around, or
        the result whose sums do, as one block.
      dot: the product of two local operands.
      lhs, rhs: the local operands, padding of contracted dims masked.
      dtype: of the result.

    Returns:
      This device's block of the result; where it holds padding, that is garbage.
    """
    window = ctx.window
    assert window is not None
    factors, result = [_factors(v) for v in ctx.rule.operands], _factors(ctx.rule.results[0])
    i = window.operand
    if i is None:
        return _sums_around(_Ring.of(window, result, ctx.mesh), dot, lhs, rhs, *factors)
    ring = _Ring.of(window, factors[i], ctx.mesh)
    adds = any(ctx.rule.op_of(f) for f in ring.cuts)
    out = ring.zeros(ctx.local_out(), result, _summed_in(dtype) if adds else dtype)
    moving, other = (lhs, rhs) if i == 0 else (rhs, lhs)
    other = ring.widened(other, factors[1 - i])

    def part(x: Array, at: Block) -> Array:
        y = ring.cut(other, factors[1 - i], at)
        return dot(x, y) if i == 0 else dot(y, x)

    out = _operand_around(ring, part, moving, out, result, adds)
    return lax.slice(out, [0] * out.ndim, ctx.local_out()).astype(dtype)


def _factors(dims: Dims) -> Factors:
    """The factor of each dim; a dot has no compound dims."""
    return [f for (f,) in dims]


def _summed_in(dtype: Any) -> Any:
    """One dot adds up in at least single precision; so do its parts."""
    short = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.float32 if short else dtype


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The devices of a ring in the order in which their blocks are numbered.

    Attributes:
      cuts: factor -> the atoms that cut it; `lengths`: factor -> the length of a block along it.
    """

    cuts: dict[int, Axes]
    lengths: dict[int, int]
    mesh: MeshAxes

    @staticmethod
    def of(window: Window, factors: Factors, mesh: MeshAxes) -> _Ring:
        local = window.block.local_shape(mesh)
        return _Ring(
            {factors[d]: atoms for d, atoms in window.cuts.items()},
            {factors[d]: local[d] for d in window.cuts},
            mesh,
        )

    @property
    def atoms(self) -> Axes:
        return sum(self.cuts.values(), ())

    @property
    def size(self) -> int:
        return self.mesh.size(self.atoms)

    def turns(self, start: int, stop: int) -> Array:
        return jnp.arange(start, stop, dtype=jnp.int32)

    def block(self, ahead: Array | int) -> Block:
        """The block that belongs to the device so many places ahead."""
        number = (lax.axis_index(self.atoms) + ahead) % self.size
        out = {}
        for f, atoms in reversed(self.cuts.items()):
            out[f] = number % self.mesh.size(atoms)
            number = number // self.mesh.size(atoms)
        return out

    def send(self, x: Array, ahead: int) -> Array:
        """`x` to the device so many places ahead."""
        # `lax.ppermute` numbers devices in mesh order, whatever the order of the names.
        names = self.mesh.sort(self.atoms)
        grid = np.arange(self.size).reshape([self.mesh.size_of[a] for a in names])
        device = grid.transpose([names.index(a) for a in self.atoms]).reshape(-1)
        pairs = zip(device.tolist(), np.roll(device, -ahead).tolist(), strict=True)
        return lax.ppermute(x, names, list(pairs))

    def whole(self, shape: Sequence[int], factors: Factors) -> list[int]:
        """A local shape with the cut dims as long as all their blocks, padding included."""
        return [
            self.lengths[f] * self.mesh.size(self.cuts[f]) if f in self.cuts else n
            for n, f in zip(shape, factors, strict=True)
        ]

    def zeros(self, shape: Sequence[int], factors: Factors, dtype: Any) -> Array:
        return jnp.zeros(self.whole(shape, factors), dtype)

    def widened(self, x: Array, factors: Factors) -> Array:
        """`x` padded with zeros, so that every cut is inside it."""
        grow = [(0, m - n, 0) for n, m in zip(x.shape, self.whole(x.shape, factors), strict=True)]
        return lax.pad(x, jnp.zeros((), x.dtype), grow) if any(g[1] for g in grow) else x

    def start(self, factors: Factors, at: Block) -> list[Any]:
        zero = np.int32(0)
        return [lax.mul(at[f], np.int32(self.lengths[f])) if f in at else zero for f in factors]

    def cut(self, x: Array, factors: Factors, at: Block) -> Array:
        """The part of `x` that belongs to a block."""
        if at.keys().isdisjoint(factors):
            return x
        sizes = [self.lengths.get(f, n) for n, f in zip(x.shape, factors, strict=True)]
        return lax.dynamic_slice(x, self.start(factors, at), sizes)

    def put(self, out: Array, part: Array, factors: Factors, at: Block, adds: bool) -> Array:
        """`out` with a block's part in its place, or added there."""
        if adds:
            part = self.cut(out, factors, at) + part.astype(out.dtype)
        if at.keys().isdisjoint(factors):
            return part
        return lax.dynamic_update_slice(out, part, self.start(factors, at))


def _operand_around(
    ring: _Ring,
    part: Callable[[Array, Block], Array],
    x: Array,
    out: Array,
    result: Factors,
    adds: bool,
) -> Array:
    """Blocks of an operand go around; every one gives its part of the result."""

    def turn(x: Array, out: Array, t: Array | int) -> Array:
        """In turn t the block of the device t places ahead is here."""
        at = ring.block(t)
        return ring.put(out, part(x, at), result, at, adds)

    def step(carry: tuple[Array, Array], t: Array) -> tuple[tuple[Array, Array], None]:
        x, out = carry
        return (ring.send(x, -1), turn(x, out, t)), None

    last = ring.size - 1  # after the last turn nothing is sent
    (x, out), _ = lax.scan(step, (x, out), ring.turns(0, last))
    return turn(x, out, last)


def _sums_around(
    ring: _Ring, dot: Dot, lhs: Array, rhs: Array, left: Factors, right: Factors
) -> Array:
    """Sums of the result's blocks go around; every one gets a term on every device."""
    lhs, rhs = ring.widened(lhs, left), ring.widened(rhs, right)

    def term(t: Array | int) -> Array:
        """In turn t the sum here has `size - 1 - t` places to go."""
        at = ring.block(ring.size - 1 - t)
        return dot(ring.cut(lhs, left, at), ring.cut(rhs, right, at))

    def step(total: Array, t: Array) -> tuple[Array, None]:
        return ring.send(total, 1) + term(t), None

    return lax.scan(step, term(0), ring.turns(1, ring.size))[0]
