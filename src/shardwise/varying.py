"""Along which axes blocks under manual control may differ: what `manual_to_auto` is checked against.

JAX knows this of values in a shard_map.  Between `auto_to_manual` and `manual_to_auto` it is found here,
from operands to results: blocks of a dim that an axis splits vary along it, and so does a device's index;
a sum, maximum or gather over an axis is the same along it; all else varies along what its operands do.
Loops and branches with collectives in them are not looked into: nothing is claimed of their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardwise.ops.collectives import USERS
from shardwise.program import Body, Eqn, Lit, Var

Atoms = frozenset[str]

EVEN = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")
"""Collectives whose result is the same on all devices of a group."""
OWN = ("all_to_all", "reduce_scatter", "axis_index")
"""Those that hand each device something of its own."""


class Varying:
    """Value -> the atoms along which it is seen to vary.

    Args:
      named: the atoms of the axes that a collective names.
    """

    def __init__(self, named: Callable[[Eqn], Iterable[str]]) -> None:
        self.named = named
        self.atoms: dict[Var, Atoms] = {}

    def of(self, values: Iterable[Var | Lit]) -> Atoms:
        none: Atoms = frozenset()
        return none.union(
            *(self.atoms.get(v, none) for v in values if not isinstance(v, Lit)), none
        )

    def equation(self, eqn: Eqn) -> None:
        """Notes what an equation's results vary along."""
        found = self.of(eqn.invars)
        if eqn.name in EVEN and eqn.params.get("axis_index_groups") is None:
            found -= set(self.named(eqn))
        elif eqn.name in OWN:
            found |= set(self.named(eqn))
        elif any(map(_communicates, eqn.bodies)):
            return
        self.note(eqn.outvars, found)

    def note(self, values: Iterable[Var], atoms: Iterable[str]) -> None:
        found = frozenset(atoms)
        if found:
            self.atoms.update(dict.fromkeys(values, found))


def _communicates(body: Body) -> bool:
    return any(e.name in USERS or any(map(_communicates, e.bodies)) for e in body.eqns)
