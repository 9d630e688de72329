"""`case-studies`: the configurations of GSPMD's section 5, planned, and compiled for TPU v3 without one.

    python -m benchmarks case-studies                        plans: seconds a row, no libtpu
    python -m benchmarks case-studies --compile --only 64b   compiled too (jax[tpu]): minutes a row
    python -m benchmarks case-studies --write                docs/case_studies.md, of all that was saved

What a run finds is kept in benchmarks/case_studies.json (`--save`), so that rows can be compiled one at a
time; the document is made of that file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax

import shardwise as sw
from benchmarks import case_studies_text, measure, programs, studies, table, tpu
from benchmarks.studies import Case, Program
from shardwise.mesh import abstract_mesh

SAVED = Path(__file__).with_name("case_studies.json")
DOCUMENT = measure.REPO / "docs" / "case_studies.md"
SIDES = ("shardwise", "jit")

PODS = {
    2: "v3:1x1", 8: "v3:2x2", 32: "v3:4x4", 64: "v3:4x8", 128: "v3:8x8", 256: "v3:16x8",
    512: "v3:16x16", 2048: "v3:32x32",
}  # fmt: skip
"""Cores -> a slice of a TPU v3 pod with as many (a chip has two)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="rows whose name has this in it ('Table 4', '64b')")
    parser.add_argument("--compile", action="store_true", help="for TPU v3, beside jax.jit")
    parser.add_argument("--only-shardwise", action="store_true", help="leave jax.jit out")
    parser.add_argument("--save", action="store_true", help=f"keep what was found in {SAVED.name}")
    parser.add_argument("--write", action="store_true", help="write docs/case_studies.md of it")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    chosen = [c for c in studies.cases() if (args.only or "") in c.name]
    if not chosen:
        raise SystemExit(f"no row has {args.only!r} in its name")
    if args.write:
        DOCUMENT.write_text(case_studies_text.document(studies.cases(), saved()))
        return []
    rows = []
    for case in chosen:
        found: dict[str, Any] = {"plan": planned(case)}
        if args.compile and case.compile:
            for side in SIDES[:1] if args.only_shardwise else SIDES:
                found[side] = compiled_apart(case, side)
        if args.save:
            keep(case, found)
        rows.append({"row": case.name, **case_studies_text.row(case, found)})
    note = "a core and step; GB 10^9 bytes, GiB 2^30; TPU: compiled, never run"
    table.show("The case studies of GSPMD, section 5", rows, args.json, note)
    return rows


# ---- what is kept --------------------------------------------------------------------------------


def saved() -> dict[str, Any]:
    return json.loads(SAVED.read_text()) if SAVED.exists() else {}


def keep(case: Case, found: dict[str, Any]) -> None:
    """Add what was found of a row; what was compiled before stays."""
    everything = saved()
    everything[case.name] = {**everything.get(case.name, {}), **found}
    SAVED.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")


# ---- the plan ------------------------------------------------------------------------------------


def planned(case: Case) -> dict[str, Any]:
    """What the plan says, on an abstract mesh: of one device and step."""
    calls = 0

    def annotate(x: Any, spec: Any) -> Any:
        nonlocal calls
        calls += 1
        return sw.annotate(x, spec)

    start = time.perf_counter()
    plan = lowerable(case, case.build(annotate), "shardwise", abstract_mesh(dict(case.mesh)))
    plan = plan.plan(*case.build(sw.annotate).args)
    sent, seconds = plan.comm_bytes, time.perf_counter() - start
    kinds: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for c in plan.collectives:
        kinds[c.kind] += c.total_bytes
        times[c.kind] += c.count or 1
    tensors = [v for v in plan.body.variables() if v.rank]
    return {
        "annotations": calls,
        "tensors": len(tensors),
        "collectives": dict(times),
        "GB by kind": {k: n / 1e9 for k, n in kinds.items()},
        "sent GB": sent / 1e9,
        "TFLOP": plan.flops / 1e12,
        "memory GiB": plan.peak_memory / tpu.GIB,
        "fallbacks": len(plan.fallbacks),
        "plan s": seconds,
    }


def lowerable(case: Case, program: Program, side: str, mesh: Any) -> Any:
    """The step, ready to plan or to lower."""
    if side == "shardwise":
        return sw.spmd(
            program.step, mesh=mesh, in_shardings=program.in_shardings,
            out_shardings=program.out_shardings, donate_argnums=program.donate, **case.flags,
        )  # fmt: skip
    options = {}
    for name in ("in_shardings", "out_shardings"):
        if (specs := getattr(program, name)) is not None:
            options[name] = programs.shardings_of(mesh, specs)
    return jax.jit(program.step, donate_argnums=program.donate, **options)


# ---- compiled ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """One compilation, in a process of its own."""

    name: str
    side: str
    topology: str


def compiled_apart(case: Case, side: str) -> dict[str, Any]:
    """Figures of the compiled program, or why there are none (too much memory, too long)."""
    topology = case.topology or PODS.get(case.cores)
    if topology is None:
        return {"error": f"no slice of {case.cores} cores"}
    settings = Settings(case.name, side, topology)
    try:
        return tpu.in_a_process(settings, "benchmarks.case_studies")
    except SystemExit as e:
        return {"error": str(e)}


def compiled(s: Settings) -> dict[str, Any]:
    (case,) = (c for c in studies.cases() if c.name == s.name)
    mesh = tpu.pod(s.topology, dict(case.mesh))
    annotate = sw.annotate if s.side == "shardwise" else programs.jit_annotate(mesh)
    program = case.build(annotate)
    step = lowerable(case, program, s.side, mesh)
    try:
        return tpu.figures(step, program.args, planned=False)
    except jax.errors.JaxRuntimeError as e:
        if (wanted := case_studies_text.refused(str(e))) is None:
            raise
        return {"refused": wanted}


if __name__ == "__main__":
    # The one array that is really made, a random key, is made on the CPU.
    jax.config.update("jax_platforms", "cpu")
    print(json.dumps(compiled(Settings(**json.loads(sys.argv[1])))))
