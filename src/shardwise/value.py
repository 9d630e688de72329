"""`Value`: one value of the program while it is being partitioned, in the layouts it is at hand in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.program import Var
from shardwise.sharding import Layout, Sharding


class Value:
    """A value of the program on this device.

    Attributes:
      shape, padded, itemsize: of the global value (see `Layout`).
      variants: sharding -> this device's block.  A value is brought to a layout once; whoever wants
        the same layout later finds it here.
      make: for a *created* value (literals, iota, broadcast scalars, masks made of them): the block
        in any sharding, at no communication.  Such a value takes the sharding of what uses it.
      zero: it is zero everywhere, so it can be a term of any pending sum.
      behind: the blocks an annotated value had before it was brought to the annotated sharding.  No
        layout is chosen for them; who only cuts such a block out of the annotated one finds it here.
    """

    __slots__ = ("behind", "itemsize", "make", "name", "padded", "shape", "variants", "zero")

    def __init__(
        self,
        var: Var,
        padded: tuple[int, ...],
        variants: dict[Sharding, Any] | None = None,
        make: Callable[[Sharding], Any] | None = None,
        zero: bool = False,
    ):
        self.shape, self.padded, self.itemsize = var.shape, padded, var.itemsize
        self.name = var.name or f"v{var.id}"
        self.variants: dict[Sharding, Any] = variants or {}
        self.make = make
        self.zero = zero
        self.behind: dict[Sharding, Any] = {}

    @property
    def free(self) -> bool:
        return self.make is not None

    @property
    def first(self) -> Sharding:
        """The sharding it was computed in."""
        return next(iter(self.variants))

    def layout(self, sharding: Sharding) -> Layout:
        return Layout(self.shape, self.padded, sharding)


def reachable(source: Sharding, target: Sharding) -> bool:
    """A pending sum can be finished; it cannot be made from a finished value, save a free zero."""
    return not target.partial or (
        set(target.partial) <= set(source.partial) and source.op == target.op
    )
