"""The captured program: a flat list of equations over variables, with bodies for control flow.

It is a jaxpr with what the passes need made explicit: every variable is unique in the whole program
(bodies included), control flow holds its bodies in one field, calls are inlined, and each equation
knows where in the user's code it came from.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from shardwise import _jax


class Var:
    """One value of the program: its shape, dtype and, for arguments, the user's name for it."""

    __slots__ = ("dtype", "id", "name", "shape")

    def __init__(self, id: int, shape: tuple[int, ...], dtype: Any, name: str = ""):
        self.id, self.shape, self.dtype, self.name = id, shape, dtype, name

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def itemsize(self) -> int:
        return getattr(self.dtype, "itemsize", 4)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"{self.name or f'v{self.id}'}:{self.dtype}[{dims}]"


class Lit(Var):
    """A literal operand: a scalar written into the program."""

    __slots__ = ("value",)

    def __init__(self, id: int, value: Any, shape: tuple[int, ...], dtype: Any):
        super().__init__(id, shape, dtype)
        self.value = value

    def __repr__(self) -> str:
        return f"{self.value}"


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
    """

    primitive: Any
    invars: list[Var]
    outvars: list[Var]
    params: dict[str, Any]
    bodies: list[Body]
    info: Any
    id: int
    callers: tuple[Any, ...] = ()

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
    """A program or a sub-program: inputs, equations, outputs; `consts` are values baked in."""

    invars: list[Var]
    outvars: list[Var]
    eqns: list[Eqn]
    consts: list[tuple[Var, np.ndarray | Any]]
