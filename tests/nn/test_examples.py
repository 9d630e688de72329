"""The layer inside other libraries' modules: each example runs, and gives what one device gives."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

REPO = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["flax_nnx", "equinox_layer"])
def test_the_example_runs(name):
    path = os.pathsep.join(p for p in (str(REPO / "src"), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, str(REPO / "examples" / "translation" / f"{name}.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout
    assert "w_in lies PartitionSpec('x', None, None)" in said or "w_in lies P('x'" in said
    assert said.count("  all-to-all of 14,336 bytes") == 4 and "all-gather" not in said
    (error,) = re.findall(r"largest difference from one device: (\S+)", said)
    assert float(error) < 1e-5
