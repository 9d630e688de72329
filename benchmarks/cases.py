"""`cases`: small programs after real reports; right numbers, none refused, beside jax.jit's."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import measure, shared, table

SIDES = ("shardwise", "jit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_shared_argument(parser)
    parser.add_argument("names", nargs="*", help="case_01 …; default: all that are there")
    parser.add_argument("--only-shardwise", action="store_true", help="leave jax.jit out")
    parser.add_argument("--failures", action="store_true", help="print only what is not right")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    folder = shared.cases_folder(args.shared)
    names = args.names or sorted(p.stem for p in folder.glob("case_*.py"))
    sides = SIDES[:1] if args.only_shardwise else SIDES
    rows = [row for name in names for row in one_file(folder, name, sides)]
    right = sum(r["shardwise"] == "right" for r in rows)
    shown = [r for r in rows if not args.failures or r["shardwise"] != "right"]
    slow = [r for r in rows if "jit s" in r and _slow(r["shardwise s"], r["jit s"])]
    table.show(
        f"Programs of user reports: {right} of {len(rows)} right",
        shown,
        args.json,
        "against the one-device run; each file in a process of its own; s: from the first call to its "
        f"result, in {len(slow)} programs more than 15 % and 100 ms above jax.jit's",
    )
    return rows


def _slow(ours: float | None, theirs: float | None) -> bool:
    return None not in (ours, theirs) and ours > max(1.15 * theirs, theirs + 0.1)  # type: ignore[operator]


def one_file(folder: Path, name: str, sides: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of one file.  XLA may abort on jax.jit's side: each side has its own process."""
    results = {side: _worker(folder, name, side) for side in sides}
    programs = list(dict.fromkeys(p for r in results.values() for p in r if p != "*"))
    rows = []
    for program in programs or ["*"]:
        row: dict[str, Any] = {"case": name, "program": program}
        for side in sides:
            died = results[side].get("*", {"status": "not run", "wire": None, "seconds": None})
            result = results[side].get(program, died)
            row[side] = result["status"]
            row[f"{side} bytes"], row[f"{side} s"] = result["wire"], result["seconds"]
        rows.append(row)
    return rows


def _worker(folder: Path, name: str, side: str) -> dict[str, Any]:
    try:
        return measure.in_a_process("benchmarks.cases", str(folder), name, side)
    except measure.WorkerFailed as e:
        return {"*": {"status": f"died: {e}", "wire": None, "seconds": None}}


def run_file(folder: str, name: str, side: str) -> dict[str, dict[str, Any]]:
    """Program name -> status, wire bytes and seconds to the first result, in this process."""
    return {p.name: run_program(p, side) for p in shared.load(Path(folder), name).build()}


def run_program(program: Any, side: str) -> dict[str, Any]:
    """One program on 8 devices: "right", "wrong ..." or "refused ..."."""
    try:
        one = jax.jit(functools.partial(program.fn, lambda x, spec: x))(*program.args)
        want = program.ref if program.ref is not None else one
        got, wire, seconds = partitioned(program, side)
        leaves = zip(_leaves(got), _leaves(want), strict=True)
        diff = max((shared.difference(a, b) for a, b in leaves), default=0.0)
    except Exception as e:  # a refusal is a result here, whatever its type
        return {
            "status": f"refused: {type(e).__name__}: {str(e).splitlines()[0][:90]}",
            "wire": None,
            "seconds": None,
        }
    status = "right" if diff <= program.tol else f"wrong by {diff:.2g}"
    return {"status": status, "wire": wire, "seconds": seconds}


def partitioned(program: Any, side: str) -> tuple[Any, float, float]:
    """Its result, the bytes one device sends, and the seconds from the first call to its result."""
    # Not at the top: a case may switch on 64-bit types before anything is built.
    import shardwise as sw
    from benchmarks import programs
    from shardwise.mesh import device_mesh

    mesh = device_mesh(program.mesh)
    out = None if isinstance(program.out_specs, str) else program.out_specs
    if side == "shardwise":
        f = sw.spmd(
            functools.partial(program.fn, sw.annotate),
            mesh=mesh,
            in_shardings=program.in_specs,
            out_shardings=out,
        )
        result, seconds = _first_call(f, program.args)
        return result, _wire(f.lower(*program.args).compile().as_text()), seconds
    options = {"in_shardings": programs.shardings_of(mesh, program.in_specs)}
    if out is not None:
        options["out_shardings"] = programs.shardings_of(mesh, out)
    f = jax.jit(functools.partial(program.fn, programs.jit_annotate(mesh)), **options)
    result, seconds = _first_call(f, program.args)
    return result, _wire(f.lower(*program.args).compile().as_text()), seconds


def _first_call(f: Any, args: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = jax.block_until_ready(f(*args))
    return result, time.perf_counter() - start


def _wire(text: str | None) -> float:
    from shardwise import hlo

    return hlo.wire_bytes(text or "")


def _leaves(tree: Any) -> list[np.ndarray]:
    import shardwise as sw

    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, sw.PaddedArray))
    return [np.asarray(x) for x in leaves]


if __name__ == "__main__":
    from shardwise.demo import devices

    devices.start(8)
    print(json.dumps(run_file(*sys.argv[1:])))
