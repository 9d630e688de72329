"""`unet`: GSPMD's Table 8, a 3D U-Net split in space by one annotation.

    python -m benchmarks unet                    the plan of every row, on abstract meshes
    python -m benchmarks unet --compile          and one row compiled for TPU v3, beside jax.jit

Compiling takes `libtpu` (pip install 'jax[tpu]'), no TPU, and ten minutes or so a side: what is slow is
the compiler's choice of tiles for each convolution.  `--side` compiles one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import shardwise as sw
from benchmarks import measure, table, tpu
from benchmarks.studies.unet import TOPOLOGIES, program
from shardwise.models import unet

SIDES = ("shardwise", "jit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compile", action="store_true", help="compile a row for TPU v3")
    parser.add_argument("--row", choices=tuple(unet.PAPER), default="128^3, 1x16", help="which row")
    parser.add_argument("--side", choices=SIDES, help="default: both, in turn")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    if not args.compile:
        rows = [planned(name, row) for name, row in unet.PAPER.items()]
        table.show("Table 8: 3D U-Net, batch x space", rows, args.json, _NOTE)
        return rows
    found = {side: in_a_process(side, args.row) for side in SIDES if args.side in (None, side)}
    rows = tpu.compared(found.get("shardwise", {}), found.get("jit", {}))
    table.show(f"Table 8, {args.row}: a core, compiled for TPU v3", rows, args.json)
    return rows


_NOTE = (
    "a device; GB 10^9 bytes; paper: TPU v3 core, with its padding. The paper's model is not known: "
    "base width 96, four levels, chosen for its operations"
)


def planned(name: str, row: unet.ImageRow) -> dict[str, Any]:
    """A row's plan, beside what the paper measured."""
    p = program(row, sw.annotate)
    start = time.perf_counter()
    plan = sw.spmd(
        p.step, mesh=sw.abstract_mesh(dict(row.mesh)), in_shardings=p.in_shardings,
        out_shardings=p.out_shardings, donate_argnums=p.donate,
    ).plan(*p.args)  # fmt: skip
    sent: dict[str, float] = {}
    for c in plan.collectives:
        sent[c.kind] = sent.get(c.kind, 0) + c.total_bytes / 1e9
    halos = sent.pop("collective-permute", 0.0)
    sums = sent.pop("all-reduce", 0.0)
    return {
        "row": name,
        "paper GB": row.published["memory GB"],
        "plan GB": plan.peak_memory / 1e9,
        "Tflop": plan.flops / 1e12,
        "halos GB": halos,
        "sums GB": sums,
        "other GB": sum(sent.values()),
        "fallbacks": len(plan.fallbacks),
        "plan s": time.perf_counter() - start,
    }


# ---- one compilation -------------------------------------------------------------------------


def in_a_process(side: str, row: str) -> dict[str, Any]:
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no metadata server to ask
    try:
        return measure.in_a_process("benchmarks.unet", json.dumps([side, row]), timeout=7200)
    except measure.WorkerFailed as e:
        raise SystemExit(
            f"cannot compile for TPU v3: {e}\n"
            "  hint  pip install 'jax[tpu]' of this jax's version; no TPU is needed"
        ) from e


def pod(row: unet.ImageRow) -> Mesh:
    """As many cores of the smallest pod as the row has, those of a chip next to each other."""
    from jax.experimental import topologies

    described = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[row.devices])
    cores = sorted(described.devices, key=lambda d: (*reversed(d.coords), d.core_on_chip))
    grid = np.array(cores[: row.devices]).reshape(tuple(row.mesh.values()))
    return Mesh(grid, tuple(row.mesh))


def compiled(side: str, name: str) -> dict[str, Any]:
    """What the compiled program of a side takes; `compile CPU s` is what this process used for it."""
    row = unet.PAPER[name]
    mesh = pod(row)

    def constrain(x: Any, spec: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    p = program(row, sw.annotate if side == "shardwise" else constrain)
    ins, outs = p.in_shardings, p.out_shardings
    if side == "shardwise":
        f: Any = sw.spmd(
            p.step, mesh=mesh, in_shardings=ins, out_shardings=outs, donate_argnums=p.donate
        )
    else:
        ins, outs = jax.tree.map(lambda s: NamedSharding(mesh, s), (ins, outs))
        f = jax.jit(p.step, in_shardings=ins, out_shardings=outs, donate_argnums=p.donate)
    start = time.process_time()
    out = tpu.figures(f, p.args, side == "shardwise")
    return {**out, "compile CPU s": time.process_time() - start}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    print(json.dumps(compiled(*json.loads(sys.argv[1]))))
