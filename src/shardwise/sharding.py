"""`Sharding`: how one value lies on the mesh; `Layout`: a sharding with the sizes it applies to.

A sharding names, for each dim of a value, the mesh atoms it is split over (major first), and the
atoms over which the value is *partial*: each device holds one term, and the value is the sum (or
max, min, ...) of the terms.  Atoms not named replicate: that is GSPMD's partial tiling.

    Sharding((("x.0", "x.1"), ()))          # dim 0 over both atoms of x, dim 1 whole
    Sharding(((),), partial=("y",))         # a pending sum over y

A `Layout` adds the global shape and, per dim, the *padded* size: a dim of size D over P shards is
stored as P blocks of `padded / P`.  A dim that is not split is stored at its own size, unpadded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from shardwise.mesh import MeshAxes, hashed_once

Axes = tuple[str, ...]


@hashed_once
@dataclasses.dataclass(frozen=True)
class Sharding:
    """Per dim an ordered tuple of atoms (major first), and the atoms a value is partial over.

    Attributes:
      axes: for each dim the atoms it is split over, major first.
      partial: atoms with a pending reduction, in mesh order.
      op: what the pending reduction is: "sum", "max", "min", "and", "or", "prod", "xor".
    """

    axes: tuple[Axes, ...]
    partial: Axes = ()
    op: str = "sum"

    @staticmethod
    def replicated(rank: int) -> Sharding:
        return Sharding(((),) * rank)

    @property
    def rank(self) -> int:
        return len(self.axes)

    @property
    def used(self) -> frozenset[str]:
        """Every atom that splits a dim or is partial."""
        return frozenset(a for d in self.axes for a in d) | frozenset(self.partial)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.axes)

    @property
    def tiling(self) -> Sharding:
        """The same split with nothing pending."""
        return Sharding(self.axes) if self.partial else self

    def with_dim(self, dim: int, axes: Iterable[str]) -> Sharding:
        return dataclasses.replace(
            self, axes=(*self.axes[:dim], tuple(axes), *self.axes[dim + 1 :])
        )

    def with_partial(self, partial: Axes, op: str = "sum") -> Sharding:
        return Sharding(self.axes, partial, op if partial else "sum")

    def drop(self, atoms: Iterable[str]) -> Sharding:
        """This sharding without `atoms` (each dim is cut before its first dropped atom)."""
        gone, out = set(atoms), []
        for dim in self.axes:
            n = next((i for i, a in enumerate(dim) if a in gone), len(dim))
            out.append(dim[:n])
        kept = tuple(a for a in self.partial if a not in gone)
        return Sharding(tuple(out), kept, self.op if kept else "sum")

    def shards(self, mesh: MeshAxes) -> tuple[int, ...]:
        """Number of blocks of each dim."""
        return tuple(mesh.size(d) for d in self.axes)

    def text(self, mesh: MeshAxes) -> str:
        """`[x, -, y] partial sum over z`: the way reports print it."""
        body = "[" + ", ".join(mesh.text(d) for d in self.axes) + "]"
        if self.partial:
            body += f" partial {self.op} over {mesh.text(self.partial)}"
        return body


def offset(sharding: Sharding, shape: Sequence[int], device: int, dim: int, mesh: MeshAxes) -> int:
    """GSPMD's `Offset(S, d, i)`: where device `device`'s block starts in dim `dim` (section 3.5)."""
    coord = device_coordinates(device, mesh)
    index = 0
    for a in sharding.axes[dim]:
        index = index * mesh.size_of[a] + coord[a]
    return index * math.ceil(shape[dim] / mesh.size(sharding.axes[dim]))


def device_coordinates(device: int, mesh: MeshAxes) -> dict[str, int]:
    """Atom -> the position of a device (numbered in mesh order) along it."""
    out = {}
    for a in reversed(mesh.atoms):
        device, out[a] = divmod(device, mesh.size_of[a])
    return out


def join_axes(a: Axes, b: Axes) -> Axes | None:
    """The finer of two splits of one dim, or None where neither refines the other.

    `x` and `(x, y)` give `(x, y)`: the blocks of the second lie inside those of the first.
    """
    if a[: len(b)] == b:
        return a
    return b if b[: len(a)] == a else None


def compatible(a: Sharding, b: Sharding) -> bool:
    """Whether one sharding refines both: every block starts where each of the two says (3.5)."""
    return join(a, b) is not None


def join(a: Sharding, b: Sharding) -> Sharding | None:
    """The coarsest sharding that refines both, or None (GSPMD 3.5, "merging compatible shardings").

    With blocks named by atoms the Offset condition says: in each dim one list of atoms is a prefix
    of the other, and no atom ends up on two dims.
    """
    out = []
    for da, db in zip(a.axes, b.axes, strict=True):
        d = join_axes(da, db)
        if d is None:
            return None
        out.append(d)
    named = [x for d in out for x in d]
    if len(named) != len(set(named)) or (a.partial, a.op) != (b.partial, b.op):
        return None
    if set(named) & set(a.partial):
        return None
    return Sharding(tuple(out), a.partial, a.op)


@hashed_once
@dataclasses.dataclass(frozen=True)
class Layout:
    """A sharding with the shape it applies to.

    Attributes:
      shape: the global (logical) shape.
      padded: per dim the size it is padded to when it is split; a multiple of the number of
        shards of every split the program uses for it, so that gathering or adding atoms never
        moves data between the remaining blocks.
      sharding: the split.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    sharding: Sharding

    def local_shape(self, mesh: MeshAxes) -> tuple[int, ...]:
        """The shape of one device's block: whole dims unpadded, split dims `padded / shards`."""
        return tuple(
            p // mesh.size(axes) if axes else s
            for s, p, axes in zip(self.shape, self.padded, self.sharding.axes, strict=True)
        )

    def with_sharding(self, sharding: Sharding) -> Layout:
        return Layout(self.shape, self.padded, sharding)

    def uneven(self, dim: int) -> bool:
        """Whether blocks of this dim hold padding on some device."""
        return bool(self.sharding.axes[dim]) and self.padded[dim] != self.shape[dim]

    def fits(self, sharding: Sharding, mesh: MeshAxes) -> bool:
        """Whether every dim's padded size splits evenly into the sharding's blocks."""
        return all(
            p % mesh.size(axes) == 0 for p, axes in zip(self.padded, sharding.axes, strict=True)
        )


def padded_size(size: int, shard_counts: Iterable[int]) -> int:
    """The least size >= `size` that every count of shards divides: `ceil(D/P)` blocks for one P."""
    lcm = math.lcm(*shard_counts)
    return -(-size // lcm) * lcm
