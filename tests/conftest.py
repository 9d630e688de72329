"""8 virtual CPU devices for every test, set before JAX starts; and the fixtures tests share.

This file runs before any test module is imported, and once in every pytest-xdist worker, so each
worker is a process of its own with 8 devices.
"""

from __future__ import annotations

import os
import pathlib

DEVICES = 8
_FLAG = "--xla_force_host_platform_device_count"

# A count the caller's environment asks for would come last and win: it is replaced.
_kept = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_FLAG)]
# A program runs once here, and compiling it well takes longer than running it badly.  (The demo that
# `.ci/run` runs, and the benchmarks, are compiled as users' programs are.)
_QUICK = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
os.environ["XLA_FLAGS"] = " ".join([*_QUICK, *_kept, f"{_FLAG}={DEVICES}"])
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis  # noqa: E402
import pytest  # noqa: E402

_REPO = pathlib.Path(__file__).resolve().parent.parent
_MISSING = "NOT RUN: the folder ../shared beside this checkout is missing"

# Examples are the same in every run and on every machine; a slow machine is not a failing test.
hypothesis.settings.register_profile("shardwise", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("shardwise")


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
    """Fails every test, with one clear message, when the devices above were not granted."""
    import jax

    if len(jax.devices()) != DEVICES:
        pytest.fail(f"the tests need {DEVICES} CPU devices, and JAX has {jax.devices()}")


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder `../shared` (papers' tables, cases); tests that need it are skipped without it."""
    folder = _REPO.parent / "shared"
    if not folder.is_dir():
        pytest.skip(_MISSING)
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many tests were skipped for want of `../shared`: `-q` would hide it."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if _MISSING in str(r.longrepr)]
    if skipped:
        terminalreporter.section("NOT RUN", sep="!", yellow=True)
        terminalreporter.line(f"{len(skipped)} tests need the folder ../shared, which is missing:")
        for report in skipped:
            terminalreporter.line(f"  {report.nodeid}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that start processes and train come first: the last test of a run should be a short one."""
    items.sort(key=lambda item: "translation" not in item.path.parts)
