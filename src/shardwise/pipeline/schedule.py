"""When which stage works on which microbatch.

A pipeline of S stages runs in *ticks*.  In tick t stage s works on *item* t - s; items follow each other
through the stages, one tick apart.  In a circular schedule (GSPMD 3.3) a microbatch goes around R times,
and a device has R stages: those of round r are layers r S, ..., r S + S - 1 (times the layers of a stage).

    gpipe      items 0, 1, ..., M - 1 are the microbatches
    circular   microbatches go in groups of S; a group makes its R rounds, then comes the next:
               item = group R S + round S + (place in the group)

So what leaves the last stage is, one tick later, just what the first needs for the next round: nothing
waits anywhere (with all M microbatches in a row, M - S of them would have to be stored between rounds).
GPipe is the case R = 1.  Stages without an item (before the first one, after the last one, and the missing
ones of a last group of less than S microbatches) are *bubbles*: they compute on what they have, and nobody
reads it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline's schedule.

    Attributes:
      stages: S, on as many devices (or groups of devices).
      microbatches: M.
      rounds: R; 1 is GPipe's schedule.

    Example:
      >>> Schedule(stages=4, microbatches=16).bubble_ratio == 3 / 19
      True
    """

    stages: int
    microbatches: int
    rounds: int = 1

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def items(self) -> int:
        """Items that enter the first stage, the missing ones of a last group included."""
        return self.item(self.rounds - 1, self.microbatches - 1) + 1

    @property
    def ticks(self) -> int:
        """Ticks from the first microbatch's start to the last one's end."""
        return self.items + self.stages - 1

    @property
    def bubble_ratio(self) -> float:
        """The share of a device's time that is bubbles.

        It is (S-1) / (R M + S - 1) where S divides M, or R is 1.
        """
        return 1 - self.rounds * self.microbatches / self.ticks

    def item(self, round: int, microbatch: int) -> int:
        """The place of a microbatch's round among all items."""
        if self.rounds == 1:
            return microbatch
        group, place = divmod(microbatch, self.stages)
        return (group * self.rounds + round) * self.stages + place

    def at(self, item: Any) -> tuple[Any, Any, Any]:
        """(round, microbatch, whether there is such an item) of an item, or of an array of them.

        Before the first item they are those of the first; for a microbatch that a last group lacks they
        are those of the last microbatch.
        """
        item = np.asarray(item) if isinstance(item, int) else item
        exists = (item >= 0) & (item < self.items)
        item = item * exists
        if self.rounds == 1:
            return item * 0, item, exists
        turn = item // self.stages
        microbatch = turn // self.rounds * self.stages + item % self.stages
        missing = microbatch >= self.microbatches
        last = self.microbatches - 1
        return turn % self.rounds, microbatch - (microbatch - last) * missing, exists & ~missing

    def work(self, tick: int, stage: int) -> tuple[int, int] | None:
        """(round, microbatch) that a stage works on in a tick; None in a bubble."""
        round, microbatch, exists = self.at(tick - stage)
        return (int(round), int(microbatch)) if exists else None
