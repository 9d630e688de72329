"""What every operation uses: when it can be drawn, and the dim it is done to.

An operation takes the builder and the latest value and emits one line.  What cannot be done to a value
of that shape or dtype raises ValueError, and is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwise.testing.programs import Builder, Value

Operation = Callable[[Builder, Value], Value]


def need(condition: bool) -> None:
    if not condition:
        raise ValueError("not for this value")


def a_dim(b: Builder, v: Value) -> int:
    need(v.rank > 0)
    return b.choose(range(v.rank))


def size_of(v: Value) -> int:
    return math.prod(v.shape)
