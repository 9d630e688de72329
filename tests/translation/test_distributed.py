"""Several processes: the same losses as one, an end with a clear error, and resumption."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny

from shardwise.translation import distributed
from shardwise.translation.train import TIMES

JOB = str(pathlib.Path(tiny.__file__))


def lines_of(directory: pathlib.Path) -> list[dict]:
    text = (directory / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def test_two_processes(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    steps, every = 9, 4

    def launch(directory: str, *more: str) -> int:
        command = [sys.executable, JOB, str(tmp_path / directory), str(steps), str(every), *more]
        return distributed.launch(command, 2, 2, lambda: "Try again.")

    assert launch("whole") == 0
    two = lines_of(tmp_path / "whole")
    tiny.training(steps, every).train(tmp_path / "one")
    one = lines_of(tmp_path / "one")
    assert [line["step"] for line in two] == [line["step"] for line in one]
    for a, b in zip(two, one, strict=True):
        for name in b.keys() - {"languages"}:
            np.testing.assert_allclose(a[name], b[name], rtol=2e-4, atol=1e-6, err_msg=name)

    capfd.readouterr()
    started = time.monotonic()
    assert launch("killed", "0.2", "6") == 1
    took = time.monotonic() - started
    assert "process 1 of 2 was killed by SIGKILL; the others were stopped. Try again." in (
        capfd.readouterr().err
    )
    done = [line["step"] for line in lines_of(tmp_path / "killed")]
    assert done == list(range(1, len(done) + 1)) and len(done) < steps
    assert took < 60 + 200  # it had to start, too
    assert launch("killed") == 0
    assert lines_of(tmp_path / "killed") == two


def test_without_a_launcher_a_dead_process_ends_the_others(tmp_path, monkeypatch):
    """Processes on machines of their own: one is killed, and the other ends with an error within a minute,
    by the connection that broke or the heartbeat that it misses."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("count=8", "count=2"))
    monkeypatch.setenv(distributed.COORDINATOR, f"127.0.0.1:{distributed._free_port()}")
    monkeypatch.setenv(distributed.PROCESSES, "2")
    monkeypatch.setenv(distributed.HEARTBEAT, "10")
    command = [sys.executable, JOB, str(tmp_path / "run"), "9", "4", "0.2", "6"]
    processes = []
    for i in range(2):
        monkeypatch.setenv(distributed.PROCESS, str(i))
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    coordinator, killed = processes
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    died = time.monotonic()
    _, errors = coordinator.communicate(timeout=120)
    assert coordinator.returncode != 0 and time.monotonic() - died < 60
    assert re.search("heartbeat|unhealthy|connection", errors, re.IGNORECASE), errors[-2000:]


def test_the_launcher_ends_what_it_started(capfd):
    """One process fails; the other, which would run for long, is stopped within seconds."""
    code = (
        "import os, sys, time; me = os.environ['SHARDWISE_PROCESS'];"
        "sys.exit(3) if me == '1' else time.sleep(60)"
    )
    started = time.monotonic()
    assert distributed.launch([sys.executable, "-c", code], 2, 1) == 3
    assert time.monotonic() - started < 30
    assert "process 1 of 2 ended with exit status 3; the others were stopped." in (
        capfd.readouterr().err
    )


def test_a_launcher_that_is_ended_ends_its_processes(tmp_path):
    """No process outlives it: each writes its number while it is there."""
    inner = (
        "import os, pathlib, time; p = os.environ['SHARDWISE_PROCESS']\n"
        "while True: pathlib.Path(p).write_text(str(time.time())); time.sleep(0.05)"
    )
    outer = (
        "import sys; from shardwise.translation.distributed import launch\n"
        f"sys.exit(launch([sys.executable, '-c', {inner!r}], 2, 1))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", outer], cwd=tmp_path)
    while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
        assert launcher.poll() is None
        time.sleep(0.1)
    launcher.terminate()
    assert launcher.wait(30) == 128 + 15
    last = [(tmp_path / name).read_text() for name in "01"]
    time.sleep(1)
    assert last == [(tmp_path / name).read_text() for name in "01"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "x", "--devices", "8", "--processes", "3"], "must divide --devices 8"),
        (["evaluate", "nowhere"], "no job was trained in that directory"),
    ],
)
def test_bad_input_is_one_message(args, message, tmp_path):
    command = [sys.executable, "-m", "shardwise.translation", *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
