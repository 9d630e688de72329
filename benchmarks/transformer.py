"""`transformer`: the dense Transformer training step, shardwise beside jax.jit in one run."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

from benchmarks import measure, programs, table
from shardwise.mesh import device_mesh

SIDES = ("shardwise", "jit")
STRATEGIES = ("final", "attempt2", "attempt1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strategy", choices=STRATEGIES, help="one strategy (default: all)")
    parser.add_argument("--unrolled", action="store_true", help="layers unrolled, not scanned")
    parser.add_argument("--pairs", type=int, default=20, help="paired timing rounds (default 20)")
    parser.add_argument(
        "--first-calls", type=int, default=3, help="fresh processes a side for the first call"
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    config = dataclasses.replace(programs.DENSE, scan=not args.unrolled)
    strategies = [args.strategy] if args.strategy else STRATEGIES
    rows = [row for s in strategies for row in compare(config, s, args.pairs, args.first_calls)]
    table.show(
        f"Transformer training step, {'unrolled' if args.unrolled else 'scan'}, remat, mesh 2x4",
        rows,
        args.json,
        "ratio: shardwise / jax.jit; times are medians, their ratio the median of paired ratios",
    )
    return rows


def compare(config: Any, strategy: str, pairs: int, first_calls: int) -> list[dict[str, Any]]:
    """The rows of one strategy: what is measured, both sides, and their ratio."""
    mesh = device_mesh(programs.MESH)
    values = programs.arguments(config, programs.BATCH, programs.SEQ)
    steps = {side: programs.partitioned(side, config, strategy, mesh) for side in SIDES}
    rows = beside({"strategy": strategy}, steps, values, pairs)
    if first_calls:
        ours, theirs = first_call_times(config, strategy, first_calls)
        rows.insert(3, figure({"strategy": strategy}, "first call s", ours, theirs))
    return rows


def figure(
    label: dict[str, Any], what: str, ours: Any, theirs: Any, ratio: Any = None
) -> dict[str, Any]:
    """A row: ours, jax.jit's, and their ratio."""
    ratio = ours / theirs if ratio is None and theirs else ratio
    return {**label, "what": what, "shardwise": ours, "jax.jit": theirs, "ratio": ratio}


def beside(
    label: dict[str, Any], steps: dict[str, Any], values: Any, pairs: int
) -> list[dict[str, Any]]:
    """The rows of one step partitioned by both sides (`steps`), run on the same values."""
    built = {s: measure.Compiled.of(step.lower(*values).compile()) for s, step in steps.items()}
    runs = [runner(steps[s], built[s], values, own_call=s == "shardwise") for s in SIDES]
    error = largest_difference(runs[0](), runs[1]())
    ours, theirs = measure.paired_times(runs, pairs)
    plan = steps["shardwise"].plan(*values)
    row = functools.partial(figure, label)
    a, b = built["shardwise"], built["jit"]
    return [
        row("wire MB a step", a.wire.bytes / 1e6, b.wire.bytes / 1e6),
        row(
            "step ms",
            statistics.median(ours) * 1e3,
            statistics.median(theirs) * 1e3,
            measure.median_ratio(ours, theirs),
        ),
        row("temporary MB", a.temp_bytes / 1e6, b.temp_bytes / 1e6),
        row("plan.comm_bytes / wire", plan.comm_bytes / 1e6, a.wire.bytes / 1e6),
        row("plan.peak_memory / compiler's", plan.peak_memory / 1e6, a.peak_bytes / 1e6),
        row("largest difference of results", error, 0.0, 0.0),
        row("values replicated for want of a rule", len(plan.fallbacks), 0, 0.0),
    ]


def runner(step: Any, built: measure.Compiled, values: Any, own_call: bool) -> Any:
    """A call of the compiled program on arguments that lie where it wants them."""
    if own_call:
        placed = measure.place(built.executable, values)
        return lambda: step(*placed)
    placed = measure.place(built.executable, values)
    return lambda: built.executable(*placed)


def largest_difference(a: Any, b: Any) -> float:
    """Largest |a - b| over all leaves, in units of each leaf's largest value."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        worst = max(worst, float(np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-30)))
    return worst


def first_call_times(config: Any, strategy: str, repeats: int) -> tuple[float, float]:
    """Seconds from the wrapped function to its first result, each in fresh processes in turn."""
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    settings = json.dumps(dataclasses.asdict(config))
    for k in range(repeats):
        for side in SIDES if k % 2 == 0 else reversed(SIDES):
            out = measure.in_a_process("benchmarks.transformer", side, strategy, settings)
            times[side].append(out["seconds"])
    return statistics.median(times["shardwise"]), statistics.median(times["jit"])


def first_call(side: str, strategy: str, settings: str) -> float:
    """One first call in this (fresh) process: trace, complete, partition, lower, compile, run."""
    config = programs.transformer.TransformerConfig(**json.loads(settings))
    mesh = device_mesh(programs.MESH)
    values = jax.block_until_ready(programs.arguments(config, programs.BATCH, programs.SEQ))
    start = time.perf_counter()
    step = programs.partitioned(side, config, strategy, mesh)
    jax.block_until_ready(step(*values))
    return time.perf_counter() - start


if __name__ == "__main__":
    from shardwise.demo import devices

    devices.start(8)
    print(json.dumps({"seconds": first_call(*sys.argv[1:])}))
