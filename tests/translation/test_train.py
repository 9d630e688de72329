"""The training loop: numbers, resumption after a kill at any moment, another mesh, errors."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from shardwise.errors import ShardingError
from shardwise.mesh import device_mesh
from shardwise.nn import encoder_decoder as model
from shardwise.padded import PaddedArray
from shardwise.translation.checkpoint import Checkpoints, Lines
from shardwise.translation.step import make_step
from shardwise.translation.train import TIMES, Training, TrainOptions, check_options

JOB = pathlib.Path(tiny.__file__)


def lines_of(directory: pathlib.Path) -> list[dict]:
    text = (directory / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def start(directory: pathlib.Path, cache: pathlib.Path, *args: str) -> subprocess.Popen:
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(JOB), str(directory), *args]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def test_killed_at_any_moment_it_goes_on_to_the_same_digits(tmp_path):
    steps, every, cache = 40, 3, tmp_path / "cache"
    whole = start(tmp_path / "whole", cache, str(steps), str(every))
    _, errors = whole.communicate(timeout=600)
    assert whole.returncode == 0, errors
    want = lines_of(tmp_path / "whole")
    assert [line["step"] for line in want] == list(range(1, steps + 1))

    moments, seed = random.Random(), time.time_ns()
    moments.seed(seed)
    killed = tmp_path / "killed"
    log = killed / "metrics.jsonl"
    for _ in range(2):
        run = start(killed, cache, str(steps), str(every), "0.05")
        before = log.stat().st_size if log.exists() else 0
        while run.poll() is None and (not log.exists() or log.stat().st_size <= before):
            time.sleep(0.02)  # until it writes lines of its own
        time.sleep(moments.uniform(0.0, 0.6))
        run.send_signal(signal.SIGKILL)
        run.communicate()
        assert run.returncode == -signal.SIGKILL, f"done before it was killed (seed {seed})"
    last = start(killed, cache, str(steps), str(every))
    _, errors = last.communicate(timeout=600)
    assert last.returncode == 0, errors
    assert lines_of(killed) == want, f"seed {seed}"


def test_it_is_the_one_device_step(tmp_path):
    """Losses, statistics and the table of languages of some steps; then on from the checkpoint."""
    options = dataclasses.replace(tiny.STEP, model=dataclasses.replace(tiny.MODEL, dropout=0.0))
    names = ("a", "b", "c")
    run = Training(
        TrainOptions(options, steps=6, checkpoint_every=4, names=names), tiny.Numbers(),
        device_mesh({"x": 4}),
    )  # fmt: skip
    lines: list[dict] = []
    fresh = run.initial()
    state = jax.tree.map(np.asarray, fresh)
    got = run.train(tmp_path, on_step=lines.append, state=fresh)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    step = jax.jit(make_step(options))
    for i, line in enumerate(lines):
        state, want = step(state, tiny.Numbers().batch(i))
        for name in ("loss", "total", "aux_loss", "overflow", "load", "second", "entropy", "rate"):
            np.testing.assert_allclose(line[name], want[name], rtol=2e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(
        got["params"]["source_embedding"], state["params"]["source_embedding"], atol=1e-4
    )
    assert set(lines[4]["languages"]) == {"a", "b", "c"}  # after 5 steps, and at the end
    table = lines[5]["languages"]
    assert sum(row["tokens"] for row in table.values()) == lines[5]["tokens"]  # begun anew
    assert "languages" not in lines[3]
    layers = 2
    routed = sum(row["routed"] for row in table.values())
    batch = tiny.Numbers().batch(5)
    assert routed == (batch["source"] != 0).sum() + (batch["target"][:, 1:] != 0).sum()
    assert len(lines[5]["load"]) == layers

    # To its end already: nothing is computed; further: from there.
    assert int(run.train(tmp_path)["step"]) == 6
    run.options = dataclasses.replace(run.options, steps=7)
    lines.clear()
    run.train(tmp_path, on_step=lines.append)
    _, want = step(state, tiny.Numbers().batch(6))
    assert [line["step"] for line in lines] == [7]
    np.testing.assert_allclose(lines[0]["loss"], want["loss"], rtol=2e-4)


def test_a_checkpoint_of_another_mesh(tmp_path):
    """Four experts on two devices, then on three: each dim with the padding of its mesh."""
    first = tiny.training(1, 1, {"x": 2})
    state = first.initial()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    second = Training(TrainOptions(tiny.STEP), _Rows(6), device_mesh({"x": 3}))
    with Checkpoints(tmp_path) as checkpoints:
        moved = checkpoints.restore(1, second.places())
    w = moved["params"]["encoder"][0]["moe"]["w_in"]
    assert isinstance(w, PaddedArray) and w.array.shape == (1, 6, 16, 16)
    is_padded = lambda x: isinstance(x, PaddedArray)
    for a, b in zip(jax.tree.leaves(moved, is_leaf=is_padded), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    with Checkpoints(tmp_path / "uneven") as checkpoints:
        checkpoints.save(1, moved)
    with Checkpoints(tmp_path / "uneven") as checkpoints:
        back = checkpoints.restore(1, first.places())
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


class _Rows(tiny.Numbers):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.shapes = (tiny.Shape(rows, 6, 6),)


def test_a_checkpoint_of_another_model(tmp_path):
    state = {"a": jnp.zeros(3)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints._manager.wait_until_finished()
        run = tiny.training(1, 1)
        with pytest.raises(ShardingError, match="the checkpoint is of another model"):
            checkpoints.restore(1, run.places())


def test_batches_that_do_not_divide():
    with pytest.raises(ValueError, match="batches of 9 rows do not divide over x=4"):
        Training(TrainOptions(tiny.STEP), _Rows(9), device_mesh({"x": 4}))


def test_a_directory_of_another_run(tmp_path):
    path = tmp_path / "options.json"
    options = TrainOptions(tiny.STEP, data={"seed": 0})
    check_options(path, options, write=True)
    check_options(path, dataclasses.replace(options, steps=7), write=True)
    other = dataclasses.replace(tiny.STEP, model=dataclasses.replace(tiny.MODEL, hidden=64))
    with pytest.raises(ValueError, match=r"step.model.hidden: 16 there, 64 here"):
        check_options(path, dataclasses.replace(options, step=other), write=True)
    with pytest.raises(ValueError, match=r"data.seed: 0 there, 1 here"):
        check_options(path, dataclasses.replace(options, data={"seed": 1}), write=True)


def test_lines_go_on_after_a_crash(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    lines = Lines(path, after=2)
    lines.write({"step": 3, "new": True})
    lines.close()
    assert [json.loads(x) for x in path.read_text().splitlines()] == [
        {"step": 1}, {"step": 2}, {"step": 3, "new": True},
    ]  # fmt: skip


def test_no_numbers_below_one():
    with pytest.raises(ValueError, match="keep must be at least 1, not 0"):
        TrainOptions(tiny.STEP, keep=0)
    assert model.PAD == 0
