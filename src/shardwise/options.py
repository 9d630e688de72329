"""What the caller of `spmd` asked of arguments and results, and how arrays already lie.

`in_shardings` and `out_shardings` are prefix trees of specs, as for `jax.jit`.  Where there is no
in_shardings, an array committed to the program's devices asks for the sharding it has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise.arguments import type_text
from shardwise.complete import Given
from shardwise.convert import from_named, from_spec, open_dims, spec_text
from shardwise.device_tensor import Placement
from shardwise.errors import ShardingError

AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class Option:
    """`in_shardings` or `out_shardings`: a prefix tree of specs, and where it was written."""

    name: str
    specs: Any
    mesh: AnyMesh
    where: str

    @property
    def kind(self) -> str:
        return "argument" if self.name == "in_shardings" else "result"

    def flat(self, tree: Any, avals: Sequence[Any], names: Sequence[str]) -> list[Given | None]:
        """What is asked of each leaf of a tree of arguments or results (None: nothing).

        Raises:
          ShardingError: not a prefix of the tree, not specs, or specs that cannot be.
        """
        if self.specs is None:
            return [None] * len(avals)
        spec_of: list[Any] = [None] * tree.num_leaves

        def assign(s: Any, sub: Any) -> None:
            for i in jax.tree.leaves(sub):
                spec_of[i] = s

        specs = self._specs(tree)
        try:
            whole = jax.tree.unflatten(tree, range(tree.num_leaves))
            jax.tree.map(assign, specs, whole, is_leaf=_is_spec)
        except ValueError:
            raise ShardingError(
                f"{self.name} is not a prefix of the tree of {self.kind}s",
                where=self.where,
                facts=f"specs {jax.tree.structure(specs, is_leaf=_is_spec)}, {self.kind}s {tree}",
            ) from None
        return [self._given(*x) for x in zip(spec_of, avals, names, strict=True)]

    def _specs(self, tree: Any) -> Any:
        """The tree of specs, checked at the top where mistakes are commonest."""
        specs = self.specs
        if (
            not isinstance(specs, (tuple, list))
            or isinstance(specs, P)
            or hasattr(specs, "_fields")
        ):
            return specs
        node = tree.node_data()
        if node is None or node[0] not in (tuple, list):
            return specs
        if len(specs) != len(tree.children()):
            raise ShardingError(
                f"{self.name} has {len(specs)} specs for {len(tree.children())} {self.kind}s",
                where=self.where,
                hint=f"one spec per {self.kind} (None leaves it to completion), or one for all",
            )
        return node[0](specs)

    def _given(self, spec: Any, aval: Any, name: str) -> Given | None:
        if spec is None:
            return None
        of = f"{self.kind} {name}: {type_text(aval)}"
        if not _is_spec(spec):
            raise ShardingError(
                f"{self.name} needs PartitionSpecs, not {spec!r:.60}",
                where=self.where,
                facts=f"for {of}",
                hint="write P('x', None), with P = jax.sharding.PartitionSpec",
            )
        rank = len(aval.shape)
        try:
            placed = _placement(spec, rank, self.mesh, self.where)
        except ShardingError as e:
            facts = f"{of}; {e.facts}" if e.facts else of
            raise ShardingError(e.what, where=self.where, facts=facts, hint=e.hint) from None
        if placed.sharding.partial:
            raise ShardingError(
                f"{self.name} cannot ask for a pending sum: {spec_text(spec)}",
                where=self.where,
                facts=of,
            )
        free = open_dims(spec if isinstance(spec, P) else spec.spec)
        source = f"{self.name} at {self.where}"
        return Given(placed.sharding.axes, free, source, self.kind, placed.device_order)


def _is_spec(s: Any) -> bool:
    return s is None or isinstance(s, (P, NamedSharding))


def _placement(spec: P | NamedSharding, rank: int, mesh: AnyMesh, where: str) -> Placement:
    if isinstance(spec, P):
        return Placement(from_spec(spec, rank, mesh, where))
    return from_named(spec, rank, mesh, where)


@functools.lru_cache(maxsize=4096)
def own_axes(sharding: NamedSharding, rank: int, mesh: AnyMesh) -> Any:
    """The axes of each dim of an array that lies on the program's devices in their order, else None."""
    if isinstance(sharding.mesh, Mesh) and isinstance(mesh, Mesh):
        mine, theirs = sharding.mesh.devices.ravel(), mesh.devices.ravel()
        if len(mine) != len(theirs) or (mine != theirs).any():
            return None
    placed = from_named(sharding, rank, mesh)
    return placed.sharding.axes if not placed.sharding.partial else None


def placed_axes(x: Any, mesh: AnyMesh) -> Any:
    """How an argument already lies on the mesh (or a ShapeDtypeStruct says it does), if it does.

    An array that JAX is free to move (uncommitted), or that lies elsewhere, says nothing.
    """
    s = getattr(x, "sharding", None)
    if not isinstance(s, NamedSharding) or isinstance(x, Tracer):
        return None
    if isinstance(x, jax.Array) and not x.committed:
        return None
    return own_axes(s, len(x.shape), mesh)


def given_of(axes: Any) -> Given | None:
    if axes is None:
        return None
    return Given(axes, frozenset(), "the array's own sharding", "argument")
