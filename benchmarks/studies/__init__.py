"""The configurations of GSPMD's section 5, in one form: what `case-studies` plans, compiles and prints.

A model's module, `benchmarks/studies/NAME.py`, has `cases() -> list[Case]`, one for each row of its
tables; `MODULES` names the modules.  A case says how to build the step for a given annotation hook, so
that shardwise and jax.jit get the same function, annotations and argument shardings.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

MODULES = ("transformer", "moe", "conformer", "unet")
"""Models, in the order of the document; those without a module yet are left out."""

Annotate = Callable[[jax.Array, PartitionSpec], jax.Array]


@dataclasses.dataclass(frozen=True)
class Program:
    """A step, ready to plan or to compile.

    Attributes:
      step: `step(*args)`, annotated.
      args: trees of ShapeDtypeStruct.
      in_shardings, out_shardings: trees of PartitionSpec like arguments and results (None: open).
      donate: arguments whose memory the results may take.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    in_shardings: Any = None
    out_shardings: Any = None
    donate: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table of the paper.

    Attributes:
      model: the module, as in MODULES.
      table: as printed, "Table 2".
      row: what tells it from the other rows of the table: "64B, 2048 cores".
      mesh: axis -> size, major first.
      build: annotation hook -> the program.
      layers: by which collectives are divided for "per layer": the repeated blocks of the model.
      published: the paper's figures, under keys of `models.paper.FIGURES`; what it does not print is
        left out.
      assumed: what the paper does not say and we chose, a sentence each.
      topology: what libtpu calls a pod with enough cores (None: the smallest square-like v3 slice).
      compile: whether `--compile` compiles it (not if it takes more than ten minutes).
      flags: options of `sw.spmd` (memory_limit, ...).
    """

    model: str
    table: str
    row: str
    mesh: Mapping[str, int]
    build: Callable[[Annotate], Program]
    layers: int
    published: Mapping[str, float]
    assumed: tuple[str, ...] = ()
    topology: str | None = None
    compile: bool = True
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def cores(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def name(self) -> str:
        """What `--only` looks for."""
        return f"{self.model} {self.table} {self.row}"


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every case of every model that has a module here."""
    found: list[Case] = []
    for name in MODULES:
        if importlib.util.find_spec(f"benchmarks.studies.{name}") is not None:
            found += importlib.import_module(f"benchmarks.studies.{name}").cases()
    return tuple(found)
