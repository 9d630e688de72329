"""Packages that come with `pip install 'shardwise[translation]'`, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str, distribution: str | None = None) -> Any:
    """The module.

    Raises:
      ImportError: it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        name = distribution or module
        raise ImportError(
            f"{name} is needed here: pip install 'shardwise[translation]'", name=e.name
        ) from e
