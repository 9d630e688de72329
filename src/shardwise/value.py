"""`Value`: one value of the program while it is being partitioned, in the layouts it is at hand in."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from shardwise.program import Eqn, Var
from shardwise.sharding import Layout, Sharding

EFFORT = {"threefry2x32": 100.0, "erf_inv": 20.0}
"""Flops of an element of created values that are not made for nothing (random bits, normal numbers)."""


class Value:
    """A value of the program on this device.

    Attributes:
      shape, padded, itemsize: of the global value (see `Layout`).
      variants: sharding -> this device's block.  A value is brought to a layout once; whoever wants
        the same layout later finds it here.
      make: for a *created* value (literals, iota, broadcast scalars, masks made of them): the block
        in any sharding, at no communication.  Such a value takes the sharding of what uses it.
      effort: flops an element of a created value takes to make, where that is many (random bits).
      zero: it is zero everywhere, so it can be a term of any pending sum.
      behind: the blocks an annotated value had before it was brought to the annotated sharding.  No
        layout is chosen for them; who only cuts such a block out of the annotated one finds it here.
      received: sharding -> what equations received of other devices' blocks (`ops.sliding`): halos
        that a convolution got are at hand for the gradient of its kernel.
      times: in a loop's body: it is the same in so many iterations, so that what moves it can be done
        once before the loop.
      asked: in a trial of a loop's body: how often each layout was asked for.
      onto: the carry of a loop that is added to it already (`accumulate`).
    """

    __slots__ = (
        "asked", "behind", "effort", "itemsize", "make", "name", "onto", "padded", "received", "shape",
        "times", "variants", "zero",
    )  # fmt: skip

    def __init__(
        self,
        var: Var,
        padded: tuple[int, ...],
        variants: dict[Sharding, Any] | None = None,
        make: Callable[[Sharding], Any] | None = None,
        zero: bool = False,
        effort: float = 0.0,
    ):
        self.shape, self.padded, self.itemsize = var.shape, padded, var.itemsize
        self.name = var.label
        self.variants: dict[Sharding, Any] = variants or {}
        self.make = make
        self.zero = zero
        self.effort = effort
        self.behind: dict[Sharding, Any] = {}
        self.received: defaultdict[Sharding, dict[Any, Any]] = defaultdict(dict)
        self.times = 1
        self.asked: Counter[Sharding] | None = None
        self.onto: Var | None = None

    @property
    def free(self) -> bool:
        return self.make is not None

    @property
    def first(self) -> Sharding:
        """The sharding it was computed in."""
        return next(iter(self.variants))

    @property
    def at_hand(self) -> frozenset[Any]:
        """A key of what was received of it, in all layouts."""
        return frozenset(
            (sharding, where, step)
            for sharding, places in self.received.items()
            for where, steps in places.items()
            for step in steps
        )

    def moved(self, padded: tuple[int, ...], variants: dict[Sharding, Any]) -> Value:
        """The same value at hand in other layouts only."""
        out = copy.copy(self)
        out.padded, out.variants, out.make = padded, variants, None
        return out

    def accumulated(self, eqn: Eqn) -> Value:
        """Of a stack that was added to its carry as it was made, under an equation's name for it: after the
        addition it is the sum."""
        out = Value(eqn.outvars[0], self.padded, dict(self.variants))
        out.onto = None if self.onto in eqn.invars else self.onto
        return out

    def layout(self, sharding: Sharding) -> Layout:
        return Layout(self.shape, self.padded, sharding)


def reachable(source: Sharding, target: Sharding) -> bool:
    """A pending sum can be finished; it cannot be made from a finished value, save a free zero."""
    return not target.partial or (
        set(target.partial) <= set(source.partial) and source.op == target.op
    )


def received_in(values: Sequence[Value], layouts: Sequence[Layout]) -> tuple[dict[Any, Any], ...]:
    """What was received of each value's block in its layout; to be added to."""
    return tuple(v.received[l.sharding] for v, l in zip(values, layouts, strict=True))
