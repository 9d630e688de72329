"""How things are measured: the same way for shardwise and for jax.jit."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from shardwise import hlo

REPO = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program.

    Attributes:
      wire: its collectives; `temp_bytes`, `peak_bytes`: memory of one device, from the compiler.
    """

    executable: Any
    wire: hlo.WireReport
    temp_bytes: int
    peak_bytes: int

    @staticmethod
    def of(executable: Any) -> Compiled:
        memory = executable.memory_analysis()
        held = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
        return Compiled(
            executable, hlo.wire_report(executable.as_text()), memory.temp_size_in_bytes, held
        )


def paired_times(
    runs: Sequence[Callable[[], Any]], pairs: int = 20, warmup: int = 2
) -> list[list[float]]:
    """Seconds of each run, taken in turn: `out[i][k]` is run i in round k.

    The sides alternate, and the order flips every round, so that drift of the machine meets both.
    """
    for run in runs:
        for _ in range(warmup):
            jax.block_until_ready(run())
    out: list[list[float]] = [[] for _ in runs]
    for k in range(pairs):
        order = range(len(runs)) if k % 2 == 0 else reversed(range(len(runs)))
        for i in order:
            start = time.perf_counter()
            jax.block_until_ready(runs[i]())
            out[i].append(time.perf_counter() - start)
    return out


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median over rounds of a/b: what a paired comparison says."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def place(compiled: Any, args: Sequence[Any]) -> list[Any]:
    """Arguments where a compiled program wants them."""
    leaves, tree = jax.tree.flatten(list(args))
    wanted = jax.tree.leaves(compiled.input_shardings[0])
    return jax.tree.unflatten(
        tree, [jax.device_put(x, s) for x, s in zip(leaves, wanted, strict=True)]
    )


class WorkerFailed(RuntimeError):
    """A child process died or printed no result; the message ends with what it last said."""


def in_a_process(module: str, *args: str, timeout: float = 600) -> Any:
    """Run `python -m module args` in a fresh process; its last line of output, read as JSON.

    A fresh process has no caches, and if XLA aborts, only that process dies.
    """
    path = os.pathsep.join(p for p in (str(REPO), os.environ.get("PYTHONPATH")) if p)
    # A compilation cache on disk would hide what a first call costs.
    env = {**os.environ, "PYTHONPATH": path, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *args],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as e:
        raise WorkerFailed(f"no result after {timeout:.0f} s") from e
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["(nothing)"]
        raise WorkerFailed(f"exit status {done.returncode}: {said[-1][:300]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
