"""One example equation of every primitive that has a rule, by family."""

from __future__ import annotations

import importlib
import pkgutil

from shardwise.testing.primitives.examples.table import EXAMPLES, Example

for _m in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_m.name}")

__all__ = ["EXAMPLES", "Example"]
