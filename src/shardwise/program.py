"""The captured program: a flat list of equations over variables, with bodies for control flow.

It is a jaxpr with what the passes need made explicit: every variable is unique in the whole program
(bodies included), control flow holds its bodies in one field, calls are inlined, and each equation
knows where in the user's code it came from.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from shardwise import _jax

ANNOTATIONS = ("annotation", "sharding_constraint")
"""Identities that say how a value lies."""
CHECKPOINTS = ("checkpoint", "remat", "remat2")


class Var:
    """One value of the program: its shape, dtype and, for arguments, the user's name for it."""

    __slots__ = ("dtype", "id", "name", "nbytes", "shape")

    def __init__(self, id: int, shape: tuple[int, ...], dtype: Any, name: str = ""):
        self.id, self.shape, self.dtype, self.name = id, shape, dtype, name
        self.nbytes = self.size * self.itemsize

    @property
    def label(self) -> str:
        """What reports call it."""
        return self.name or f"v{self.id}"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return getattr(self.dtype, "itemsize", 4)

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"{self.label}:{self.dtype}[{dims}]"


class Lit(Var):
    """A literal operand: a scalar written into the program."""

    __slots__ = ("value",)

    def __init__(self, id: int, value: Any, shape: tuple[int, ...], dtype: Any):
        super().__init__(id, shape, dtype)
        self.value = value

    def __repr__(self) -> str:
        return f"{self.value}"


class Memo:
    """What follows from an equation alone: its rules, once somebody asked."""

    __slots__ = ("rules",)

    def __init__(self) -> None:
        self.rules: Any = None


@dataclasses.dataclass(eq=False)
class Eqn:
    """One equation.

    Attributes:
      primitive: the JAX primitive; `params` its parameters (bodies removed).
      invars, outvars: operands and results.
      bodies: the sub-programs of control flow: scan [body]; while [cond, body]; cond branches;
        remat [body]; shard_map [body].
      info: JAX's source info, from which file and line are taken when asked for.
      id: position in the program, in program order.
      callers: source infos of the calls it was inlined from, innermost first.
      memo: what was worked out from the equation alone; it and its copies have one.
    """

    primitive: Any
    invars: list[Var]
    outvars: list[Var]
    params: dict[str, Any]
    bodies: list[Body]
    info: Any
    id: int
    callers: tuple[Any, ...] = ()
    memo: Memo = dataclasses.field(default_factory=lambda: Memo(), init=False, repr=False)

    @functools.cached_property
    def source(self) -> str:
        """`file.py:line` of the user's code: its own, or of the innermost call that has one."""
        found = (_jax.source_of(i) for i in (self.info, *self.callers) if i is not None)
        return next((s for s in found if s != _jax.UNKNOWN), _jax.UNKNOWN)

    @property
    def name(self) -> str:
        return self.primitive.name

    def __repr__(self) -> str:
        outs = " ".join(map(repr, self.outvars))
        return f"{outs} = {self.name} " + " ".join(map(repr, self.invars))


@dataclasses.dataclass(eq=False)
class Body:
    """A program or a sub-program: inputs, equations, outputs; `consts` are values baked in.

    `origin` is the body this one is a copy of (`copies`).
    """

    invars: list[Var]
    outvars: list[Var]
    eqns: list[Eqn]
    consts: list[tuple[Var, np.ndarray | Any]]
    origin: Body | None = None

    def all(self) -> list[Body]:
        """This body and those in it, inner ones first, each once."""
        found: dict[Body, None] = {}
        for eqn in self.eqns:
            for sub in eqn.bodies:
                if sub not in found:
                    found.update(dict.fromkeys(sub.all()))
        return [*found, self]

    def equations(self) -> list[Eqn]:
        """Its equations and those of the bodies in it, in program order."""
        out = []
        for eqn in self.eqns:
            for sub in eqn.bodies:
                out += sub.equations()
            out.append(eqn)
        return out

    def variables(self) -> list[Var]:
        """Its variables and those of the bodies in it, in program order."""
        out = [*self.invars, *(v for v, _ in self.consts)]
        for eqn in self.eqns:
            for sub in eqn.bodies:
                out += sub.variables()
            out += eqn.outvars
        return out
