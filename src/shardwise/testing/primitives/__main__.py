"""Print docs/primitives.md."""

from __future__ import annotations

import sys

from shardwise.testing.primitives.page import page

if __name__ == "__main__":
    sys.stdout.write(page())
