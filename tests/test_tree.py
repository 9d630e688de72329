"""The tree itself: small files, one reading order, one door to JAX's internals."""

from __future__ import annotations

import pathlib

SOURCE = pathlib.Path(__file__).resolve().parent.parent / "src" / "shardwise"
LINES = 450

# The reading order: a module imports only those above it.  A package stands for its modules, which
# may import each other; `__init__` (the public names) imports what it likes.
ORDER = """
    errors  _jax  mesh  sharding  padded  program
    device_tensor  convert  annotate  resolve
    factors  messages  rounds  halo
    ops
"""
