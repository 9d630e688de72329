"""Collectives of a per-device jaxpr: kind, axes, bytes one device sends, how often, and why.

Bytes follow ring algorithms, per execution: all-reduce 2n(g-1)/g; all-gather and all-to-all (n the
result) n(g-1)/g; reduce-scatter (n the operand) n(g-1)/g; collective-permute n.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise import _jax
from shardwise.mesh import MeshAxes

KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a plan.

    Attributes:
      kind: "all-reduce", "all-gather", "all-to-all", "reduce-scatter" or "collective-permute".
      axes: the mesh axes it runs over, in the user's names (`x[0:2]` for part of an axis).
      group_size: devices that take part in one group.
      bytes: what one device sends per execution (ring algorithm).
      count: executions per call: loop trips multiplied; 1 per iteration where the number of trips is
        known at run time only (`per_iteration`).
      op: the primitive on whose behalf it runs; `source` the user's file:line.
      reason: why it is there.
      shape, dtype: of the local operand.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: float
    count: int
    op: str
    source: str
    reason: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    per_iteration: bool = False

    @property
    def total_bytes(self) -> float:
        return self.bytes * self.count


@dataclasses.dataclass(frozen=True)
class Found:
    """A collective equation as found: before its notes are looked up.

    `notes` are the numbers it stands under: those of the equations it is in a body of, outermost first, and
    its own.
    """

    kind: str
    atoms: tuple[str, ...]
    bytes: float
    count: int
    notes: tuple[int, ...]
    info: Any
    shape: tuple[int, ...]
    dtype: str
    per_iteration: bool


def find(jaxpr: Any, mesh: MeshAxes) -> list[Found]:
    """All collectives of a jaxpr, bodies included, in program order."""
    return list(_walk(_jax.open_jaxpr(jaxpr)[0], mesh, 1, False, ()))


def _walk(
    jaxpr: Any, mesh: MeshAxes, times: int, unknown: bool, outer: tuple[int, ...]
) -> Iterator[Found]:
    """`outer`: the notes of the equations this jaxpr is in a body of; a body's name stacks start anew."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        own = note_of(eqn.source_info)
        note = outer if own is None else (*outer, own)
        if name in KINDS:
            yield from _found(eqn, name, mesh, times, unknown, note)
        elif name == "scan":
            inner = _jax.open_jaxpr(eqn.params["jaxpr"])[0]
            yield from _walk(inner, mesh, times * eqn.params["length"], unknown, note)
        elif name == "while":
            for key in ("cond_jaxpr", "body_jaxpr"):
                yield from _walk(_jax.open_jaxpr(eqn.params[key])[0], mesh, times, True, note)
        elif name == "cond":
            # one branch runs: count the one that sends most
            branches = [
                list(_walk(_jax.open_jaxpr(b)[0], mesh, times, unknown, note))
                for b in eqn.params["branches"]
            ]
            yield from max(branches, key=lambda cs: sum(c.bytes * c.count for c in cs))
        else:
            for sub in _subjaxprs(eqn.params):
                yield from _walk(sub, mesh, times, unknown, note)


def _subjaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for v in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(_jax.open_jaxpr(v)[0], "eqns"):
                yield _jax.open_jaxpr(v)[0]


def _found(
    eqn: Any, name: str, mesh: MeshAxes, times: int, unknown: bool, note: tuple[int, ...]
) -> Iterator[Found]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    atoms = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    atoms = tuple(a for a in atoms if isinstance(a, str))
    g = mesh.size(a for a in atoms if a in mesh.size_of)
    kind = KINDS[name]
    for x, y in zip(eqn.invars, eqn.outvars, strict=True):
        n_in, n_out = (math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in (x, y))
        sent = {
            "all-reduce": 2 * n_in * (g - 1) / g,
            "all-gather": n_out * (g - 1) / g,
            "all-to-all": n_out * (g - 1) / g,
            "reduce-scatter": n_in * (g - 1) / g,
            "collective-permute": n_in,
        }[kind]
        if g == 1 or not n_in:
            continue
        yield Found(
            kind, atoms, sent, times, note, eqn.source_info,
            tuple(x.aval.shape), str(x.aval.dtype), unknown,
        )  # fmt: skip


def note_of(info: Any) -> int | None:
    """The innermost note number in an equation's name stack."""
    found = re.findall(r"\bsw(\d+)\b", str(info.name_stack))
    return int(found[-1]) if found else None


def total(collectives: Sequence[Collective]) -> float:
    """Bytes one device sends per call."""
    return sum(c.total_bytes for c in collectives)
