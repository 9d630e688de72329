"""`compile`: does the time to plan grow with the program's edges only, and not with devices?"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from benchmarks import programs, table
from shardwise.mesh import abstract_mesh, device_mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=64, help="unrolled layers (default 64)")
    parser.add_argument("--repeats", type=int, default=5, help="runs, of which the median counts")
    parser.add_argument("--strategy", default="final")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    deep = dataclasses.replace(
        programs.DENSE, layers=args.layers, model=64, hidden=256, vocab=256, scan=False
    )
    rows = []
    for remat in (None, "full"):
        rows += depth(dataclasses.replace(deep, remat=remat), args.strategy, args.repeats)
    rows += devices(args.strategy, args.repeats)
    table.show(
        f"Planning: {args.layers} layers unrolled, and device counts",
        rows,
        args.json,
        "seconds, medians of runs that alternate. With remat jax.jit traces and lowers the body "
        "of one layer and uses it for all",
    )
    return rows


def depth(config: Any, strategy: str, repeats: int) -> list[dict[str, Any]]:
    """Trace to lowered, both sides, on the unrolled step."""
    mesh = device_mesh(programs.MESH)
    values = programs.abstract_arguments(config, programs.BATCH, 32)

    def lower(side: str) -> Callable[[], Any]:
        return lambda: programs.partitioned(side, config, strategy, mesh).lower(*values)

    def plan() -> Any:
        return programs.partitioned("shardwise", config, strategy, mesh).plan(*values)

    ours, theirs, planned = seconds([lower("shardwise"), lower("jit"), plan], repeats)
    count = equations(programs.partitioned("jit", config, strategy, mesh), values)
    remat = "remat" if config.remat else "no remat"
    return [
        _row(f"{remat}, {count:,} equations: trace to lowered", ours, theirs, "jax.jit", 5.0),
        _row(f"{remat}: of it trace and complete", planned, theirs, "jax.jit", None),
    ]


def devices(strategy: str, repeats: int) -> list[dict[str, Any]]:
    """The plan of one step on abstract meshes of 8 and 65,536 devices."""
    # Sizes that split the same way on both meshes, so that only the device count differs.
    config = dataclasses.replace(
        programs.DENSE, model=8192, hidden=32768, heads=256, head_dim=32, vocab=32768
    )
    values = programs.abstract_arguments(config, 1024, 128)

    def planned(shape: dict[str, int]) -> Any:
        mesh: Any = abstract_mesh(shape)
        return programs.partitioned("shardwise", config, strategy, mesh).plan(*values)

    few, many = {"x": 2, "y": 4}, {"x": 256, "y": 256}
    plan = seconds([lambda: planned(few), lambda: planned(many)], repeats)
    priced = seconds([lambda: planned(few).comm_bytes, lambda: planned(many).comm_bytes], repeats)
    return [
        _row("65,536 devices: trace and complete", plan[1], plan[0], "8 devices", 1.2),
        _row("65,536 devices: and its collectives", priced[1], priced[0], "8 devices", 1.2),
    ]


def _row(what: str, a: float, b: float, beside: str, reach: float | None) -> dict[str, Any]:
    return {"what": what, "shardwise": a, "beside": b, "beside is": beside,
            "ratio": a / b, "to reach": reach}  # fmt: skip


def seconds(runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Median seconds of each, taken in turn; every run traces a new function, with no cache.

    The first round is not counted: it pays for imports and first uses.
    """
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, taken in zip(runs, times, strict=True):
            jax.clear_caches()
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[1:]) for taken in times]


def equations(step: Any, values: Any) -> int:
    """Equations of the traced step, those of calls and loops included."""

    def count(jaxpr: Any) -> int:
        return sum(1 + sum(map(count, _bodies(e))) for e in jaxpr.eqns)

    return count(step.trace(*values).jaxpr.jaxpr)


def _bodies(eqn: Any) -> list[Any]:
    bodies = []
    for value in eqn.params.values():
        for v in value if isinstance(value, tuple | list) else (value,):
            if isinstance(v, core.ClosedJaxpr):
                bodies.append(v.jaxpr)
            elif isinstance(v, core.Jaxpr):
                bodies.append(v)
    return bodies
