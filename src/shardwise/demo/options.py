"""What the demo is asked to do."""

from __future__ import annotations

import dataclasses
import math

from shardwise.nn.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """Options of `shardwise demo`, checked by the command line.

    Attributes:
      mesh: the two axes, batch first: {"x": 2, "y": 4}.
      strategy: a key of `nn.transformer.STRATEGIES`.
      batch, seq: sequences a step, and bytes in each.
      rate: Adam's learning rate.
    """

    model: TransformerConfig
    mesh: dict[str, int]
    strategy: str
    steps: int
    batch: int
    seq: int
    rate: float
    seed: int

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def axes(self) -> tuple[str, str]:
        x, y = self.mesh
        return x, y
