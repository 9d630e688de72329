"""`compile`: does the time to plan grow with the program's edges only, and not with devices?"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from benchmarks import programs, table
from shardwise.mesh import abstract_mesh, device_mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=64, help="unrolled layers (default 64)")
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the median counts")
    parser.add_argument("--strategy", default="final")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    deep = dataclasses.replace(
        programs.DENSE, layers=args.layers, model=64, hidden=256, vocab=256, scan=False
    )
    rows = depth(deep, args.strategy, args.repeats) + devices(args.strategy, args.repeats)
    table.show(
        f"Planning: {args.layers} layers unrolled, and device counts", rows, args.json, "seconds"
    )
    return rows


def depth(config: Any, strategy: str, repeats: int) -> list[dict[str, Any]]:
    """Trace to lowered, both sides, on the unrolled step."""
    mesh = device_mesh(programs.MESH)
    values = programs.abstract_arguments(config, programs.BATCH, 32)
    # The first lowering in a process pays for imports and first uses: let a small one pay.
    small = dataclasses.replace(config, layers=1)
    for side in ("shardwise", "jit"):
        step = programs.partitioned(side, small, strategy, mesh)
        step.lower(*programs.abstract_arguments(small, programs.BATCH, 32))

    def lower(side: str) -> Callable[[], Any]:
        return lambda: programs.partitioned(side, config, strategy, mesh).lower(*values)

    def plan() -> Any:
        return programs.partitioned("shardwise", config, strategy, mesh).plan(*values)

    ours, theirs, planned = (seconds(f, repeats) for f in (lower("shardwise"), lower("jit"), plan))
    count = equations(programs.partitioned("jit", config, strategy, mesh), values)
    return [
        {"what": f"trace to lowered, {count:,} equations", "shardwise": ours, "beside": theirs,
         "beside is": "jax.jit", "ratio": ours / theirs, "to reach": 5.0},
        {"what": "of it: plan", "shardwise": planned, "beside": theirs, "beside is": "jax.jit",
         "ratio": planned / theirs, "to reach": None},
    ]  # fmt: skip


def devices(strategy: str, repeats: int) -> list[dict[str, Any]]:
    """The plan of one step on abstract meshes of 8 and 65,536 devices."""
    # Sizes that split the same way on both meshes, so that only the device count differs.
    config = dataclasses.replace(
        programs.DENSE, model=8192, hidden=32768, heads=256, head_dim=32, vocab=32768
    )
    values = programs.abstract_arguments(config, 1024, 128)
    times = {}
    for shape in ({"x": 2, "y": 4}, {"x": 256, "y": 256}):
        mesh: Any = abstract_mesh(shape)
        times[shape["x"]] = seconds(
            lambda mesh=mesh: programs.partitioned("shardwise", config, strategy, mesh).plan(
                *values
            ),
            repeats,
        )
    few, many = times[2], times[256]
    return [
        {"what": "plan, 65,536 devices", "shardwise": many, "beside": few,
         "beside is": "8 devices", "ratio": many / few, "to reach": 1.2},
    ]  # fmt: skip


def seconds(f: Callable[[], Any], repeats: int) -> float:
    """Median seconds; every run traces anew, since `f` wraps a new function each time."""
    times = []
    for _ in range(repeats):
        jax.clear_caches()
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


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
