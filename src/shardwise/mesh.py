"""Mesh axes, and the prime *atoms* every axis is split into.

A mesh axis `x` of size 8 is three atoms of size 2, `x.0 x.1 x.2`, major first.  An axis of prime
size is its own single atom and keeps its name; an axis of size 1 has none.  All of shardwise works
on atoms, so that a reshape, or a dim smaller than an axis, can use *part* of an axis with no
further machinery.  Reports merge atoms back into the user's names: `x`, or `x[0:4]` for a major
part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardwise.errors import ShardingError

_T = TypeVar("_T", bound=type)


def hashed_once(cls: _T) -> _T:
    """A frozen dataclass whose hash is worked out once: planning looks up the same values very often."""
    it: Any = cls
    compute: Any = cls.__hash__

    def __hash__(self: Any) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = compute(self)
        return known

    it.__hash__ = __hash__
    # Strings hash differently in another process.
    it.__getstate__ = lambda self: {k: v for k, v in self.__dict__.items() if k != "_hash"}
    return cls


def prime_factors(n: int) -> tuple[int, ...]:
    """`12 -> (2, 2, 3)`: the prime factors of n, smallest first (empty for 1)."""
    out, p = [], 2
    while p * p <= n:
        while n % p == 0:
            out.append(p)
            n //= p
        p += 1
    return (*out, n) if n > 1 else tuple(out)


@hashed_once
@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """The axes of a mesh with their atoms: all that planning needs to know of a mesh.

    Attributes:
      names: the user's axis names, in mesh order.
      sizes: their sizes.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(mesh: Mesh | AbstractMesh | MeshAxes) -> MeshAxes:
        if isinstance(mesh, MeshAxes):
            return mesh
        return MeshAxes(
            tuple(str(n) for n in mesh.axis_names), tuple(mesh.shape[n] for n in mesh.axis_names)
        )

    @functools.cached_property
    def _atoms_of(self) -> dict[str, tuple[str, ...]]:
        out = {}
        for name, size in zip(self.names, self.sizes, strict=True):
            n = len(prime_factors(size))
            out[name] = (name,) if n == 1 else tuple(f"{name}.{i}" for i in range(n))
        return out

    @functools.cached_property
    def size_of(self) -> dict[str, int]:
        """Atom -> its (prime) size."""
        out = {}
        for name, size in zip(self.names, self.sizes, strict=True):
            out.update(zip(self._atoms_of[name], prime_factors(size), strict=True))
        return out

    @functools.cached_property
    def axis_of(self) -> dict[str, str]:
        """Atom -> the user's axis it is part of."""
        return {a: n for n, atoms in self._atoms_of.items() for a in atoms}

    @functools.cached_property
    def atoms(self) -> tuple[str, ...]:
        """All atoms, in mesh order."""
        return tuple(self.size_of)

    @functools.cached_property
    def order(self) -> dict[str, int]:
        """Atom -> its position in mesh order."""
        return {a: i for i, a in enumerate(self.atoms)}

    @property
    def device_count(self) -> int:
        return math.prod(self.sizes)

    def size(self, atoms: Iterable[str]) -> int:
        """Number of shards over `atoms`."""
        n, size_of = 1, self.size_of
        for a in atoms:
            n *= size_of[a]
        return n

    def sort(self, atoms: Iterable[str]) -> tuple[str, ...]:
        """`atoms` in mesh order, each once."""
        return tuple(sorted(set(atoms), key=self.order.__getitem__))

    def expand(self, axis: str) -> tuple[str, ...]:
        """The atoms of one of the user's axes, or of `x[a:b]`, or an atom itself."""
        if axis in self._atoms_of:
            return self._atoms_of[axis]
        if axis in self.size_of:
            return (axis,)
        if part := self._part(axis):
            return part
        raise ShardingError(
            f"unknown mesh axis {axis!r}",
            facts=f"the mesh has {self}",
            hint="use one of the mesh's axis names, or build the mesh with that axis",
        )

    def _part(self, text: str) -> tuple[str, ...]:
        """The atoms of `x[a:b]` as `merge` prints it; none where there is no such part."""
        match = re.fullmatch(r"(.+)\[(\d+):(\d+)\]", text)
        if not match or match[1] not in self._atoms_of:
            return ()
        whole, start, stop = self._atoms_of[match[1]], int(match[2]), int(match[3])
        strides = [self.size(whole[:k]) for k in range(len(whole) + 1)]
        if max(start, 1) not in strides or stop not in strides:
            return ()
        return whole[strides.index(max(start, 1)) : strides.index(stop)]

    def merge(self, atoms: Sequence[str]) -> tuple[str, ...]:
        """Atoms in the user's terms: `('x.0','x.1') -> ('x',)`; `('x.0',)` of 8 -> `('x[0:2]',)`.

        `x[i:j]` is the part of `x` whose factor runs from stride product i to j: `x[0:2]` are the
        two major halves, `x[2:8]` the positions within a half.
        """
        out, i = [], 0
        while i < len(atoms):
            axis = self.axis_of[atoms[i]]
            whole = self._atoms_of[axis]
            k = whole.index(atoms[i])
            j = 1
            while i + j < len(atoms) and k + j < len(whole) and atoms[i + j] == whole[k + j]:
                j += 1
            if j == len(whole):
                out.append(axis)
            else:
                lo = self.size(whole[:k])
                out.append(f"{axis}[{lo if k else 0}:{self.size(whole[: k + j])}]")
            i += j
        return tuple(out)

    def exact(self, atoms: Sequence[str]) -> tuple[str, ...] | None:
        """Atoms as whole user axes, or None where only part of an axis is used."""
        merged = self.merge(atoms)
        return merged if all(m in self._atoms_of for m in merged) else None

    def text(self, atoms: Sequence[str]) -> str:
        """`x`, `xy`-style text for messages: `x`, `(x, y)`, or `-` for none."""
        merged = self.merge(atoms)
        if not merged:
            return "-"
        return merged[0] if len(merged) == 1 else "(" + ", ".join(merged) + ")"

    def __str__(self) -> str:
        return " ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))

    def _atom_shape(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        # An axis of size 1 has no atoms; keep one axis so that a one-device mesh is still a mesh.
        names = self.atoms or (self.names[0],)
        return names, tuple(self.size_of.get(a, 1) for a in names)

    def atom_mesh(self, mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
        """The same devices in the same order, as a mesh whose axes are the atoms."""
        names, sizes = self._atom_shape()
        if isinstance(mesh, Mesh):
            return Mesh(np.asarray(mesh.devices).reshape(sizes), names)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


@dataclasses.dataclass(frozen=True)
class ManualAxes(MeshAxes):
    """A mesh some of whose atoms the user has under manual control (GSPMD 3.4).

    Values differ between devices along those atoms in ways only the user knows, so the partitioner
    works with the others: `atoms` are what is left.  Sizes and names are those of the whole mesh.

    Attributes:
      manual: the atoms under manual control.
      spelled: the axes by the names the user's collectives call them, with their atoms, in the
        order of the mesh they were named on.
    """

    manual: tuple[str, ...] = ()
    spelled: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @functools.cached_property
    def atoms(self) -> tuple[str, ...]:
        return tuple(a for a in self.size_of if a not in self.manual)

    @functools.cached_property
    def order(self) -> dict[str, int]:
        return {a: i for i, a in enumerate(self.size_of)}

    def called(self, names: str | Iterable[str]) -> tuple[str, ...]:
        """The atoms of the axes a collective names, in the order it names them."""
        known = dict(self.spelled)
        names = (names,) if isinstance(names, str) else tuple(names)
        return tuple(a for n in names for a in known[n])


def abstract_mesh(axes: dict[str, int]) -> AbstractMesh:
    """An `AbstractMesh` from `{"x": 2, "y": 4}`: for planning with no device."""
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def device_mesh(axes: dict[str, int]) -> Mesh:
    """A `Mesh` over the first devices of this process's backend, in row-major order.

    Raises:
      ShardingError: when there are fewer devices than the axes need.
    """
    need = math.prod(axes.values())
    devices = jax.devices()
    if need > len(devices):
        raise ShardingError(
            f"a mesh of {need} devices was asked for, and there are {len(devices)}",
            facts=f"axes {axes}; backend {jax.default_backend()}",
            hint="for a CPU set XLA_FLAGS=--xla_force_host_platform_device_count="
            f"{need} before importing jax, or plan on an abstract mesh",
        )
    return Mesh(np.array(devices[:need]).reshape(tuple(axes.values())), tuple(axes))
