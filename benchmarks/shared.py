"""The shared folder of programs, which lies beside the checkout and is not part of it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks import measure


def add_shared_argument(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("SHARDWISE_SHARED", str(measure.REPO.parent / "shared"))
    parser.add_argument(
        "--shared",
        type=Path,
        default=Path(default),
        help="the folder that holds cases/ (or set SHARDWISE_SHARED); default ../shared",
    )


def cases_folder(shared: Path) -> Path:
    """`shared/cases`, or exit with what to do."""
    folder = shared / "cases"
    if not folder.is_dir():
        raise SystemExit(f"no folder {folder}\n  hint  give --shared DIR or set SHARDWISE_SHARED")
    return folder


def load(folder: Path, name: str) -> ModuleType:
    """Import a module of the folder by name (the modules import each other by bare names)."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def difference(got: Any, want: Any) -> float:
    """Largest |got - want|, relative to the largest |want| where that is above 1; inf where the
    shapes differ or NaN and infinities are not in the same places."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return float("inf")
    if not got.size:
        return 0.0
    if got.dtype == bool or np.issubdtype(got.dtype, np.integer):
        return float(np.max(np.abs(got.astype(np.int64) - want.astype(np.int64))))
    odd = ~np.isfinite(want)
    if not np.array_equal(got[odd], want[odd], equal_nan=True) or not np.isfinite(got[~odd]).all():
        return float("inf")
    scale = max(1.0, float(np.max(np.abs(want[~odd]), initial=0.0)))
    return float(np.max(np.abs(got[~odd] - want[~odd]), initial=0.0)) / scale
