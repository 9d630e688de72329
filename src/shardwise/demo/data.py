"""Real text that is already on the machine: the Python sources of the standard library, as bytes.

The files are read in the order of their paths, so a corpus depends on the interpreter's version and
on nothing else; batches are drawn with a seed.
"""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCAB = 256  # a token is a byte
# Not the library itself, or tables rather than text.
_LEAVE_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as tokens.

    Attributes:
      tokens: uint8 [bytes], files one after the other.
      files: how many files were read.
      source: the folder they came from.
    """

    tokens: np.ndarray
    files: int
    source: str

    def batches(self, batch: int, seq: int, seed: int = 0) -> Iterator[np.ndarray]:
        """Endless int32 [batch, seq] windows at random places, the same ones for the same seed."""
        rng = np.random.default_rng(seed)
        while True:
            starts = rng.integers(0, len(self.tokens) - seq + 1, size=batch)
            yield self.tokens[starts[:, None] + np.arange(seq)].astype(np.int32)


def standard_library(max_bytes: int = 4_000_000, folder: Path | None = None) -> Corpus:
    """The Python sources of the interpreter's standard library, at most `max_bytes` of them.

    Args:
      folder: where to read instead of the standard library.

    Raises:
      FileNotFoundError: when the folder holds no Python source.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        (p for p in root.rglob("*.py") if not _LEAVE_OUT & set(p.relative_to(root).parts)),
        key=lambda p: p.relative_to(root).as_posix(),
    )
    parts, size, files = [], 0, 0
    for path in paths:
        if size >= max_bytes:
            break
        parts.append(np.frombuffer(path.read_bytes(), np.uint8))
        size, files = size + len(parts[-1]), files + 1
    if not size:
        raise FileNotFoundError(f"no Python source in {root}: the demo trains on them")
    return Corpus(np.concatenate(parts)[:max_bytes], files, str(root))
