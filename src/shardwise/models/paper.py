"""A row of one of GSPMD's tables: a configuration, and what the paper measured with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Generic, TypeVar

Config = TypeVar("Config")

FIGURES = {
    "memory GB": "peak memory of a core",
    "step s": "step time",
    "utilisation": "share of the peak FLOPs, as a profiler counts: bubbles and recomputing included",
    "bubbles": "share of the time in pipeline bubbles",
    "recompute": "share of the time recomputing",
    "all-to-all": "share of the time in all-to-alls",
    "params": "parameters, in units of 2^30 (the paper prints 64B for 64 of these)",
}
"""Keys of `Row.published`, and what they mean."""


@dataclasses.dataclass(frozen=True)
class Row(Generic[Config]):
    """One configuration of the paper.

    Attributes:
      table: "Table 2".
      config: the model's.
      mesh: axis -> size, major first.
      batch: sequences (images) of a step, in all.
      published: under keys of FIGURES; what the paper does not print is left out.
      assumed: what the paper does not say and was chosen here, a sentence each.
    """

    table: str
    config: Config
    mesh: Mapping[str, int]
    batch: int
    published: Mapping[str, float]
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := set(self.published) - set(FIGURES):
            raise ValueError(f"no such figure: {', '.join(sorted(unknown))}")

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())
