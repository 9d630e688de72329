"""`tpu`: the 64B Transformer of GSPMD's Table 2, compiled for 2048 TPU v3 cores, with no TPU.

`libtpu` compiles for any topology on a machine without one (`pip install 'jax[tpu]'`).  Memory,
collectives and the compiler's estimate of its cycles are read from the compiled program; it never
runs.  Each compilation has a process of its own and takes one to five minutes.

    python -m benchmarks tpu --remat full        shardwise beside jax.jit
    python -m benchmarks tpu --plan-only         planning alone: seconds, and no libtpu
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardwise as sw
from benchmarks import measure, programs, table, tpu_hlo
from shardwise import hlo
from shardwise.mesh import abstract_mesh
from shardwise.nn import transformer

SIDES = ("shardwise", "jit")
STRATEGY = "final"
EMBEDDINGS = {"vocab": P("y", "x"), "model": P(None, "y")}
"""The embedding [V, M]: V over y and M over x, or as in the authors' code, M over y."""
GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Settings:
    """One compilation: the program, the pod, the side that partitions it.

    Attributes:
      topology: what libtpu calls the pod; `x`, `y` the mesh, row-major over the sorted cores.
      remat: "full" or "dots" (see TransformerConfig); `embedding` a key of EMBEDDINGS.
      donate: the new parameters take the old ones' memory.
      batch, seq: B and S.
    """

    side: str
    remat: str
    embedding: str
    donate: bool = False
    topology: str = "v3:32x32"
    x: int = 32
    y: int = 64
    layers: int = 32
    batch: int = 1024
    seq: int = 1024

    @property
    def config(self) -> transformer.TransformerConfig:
        return transformer.TransformerConfig(
            layers=self.layers, model=8192, hidden=65536, heads=128, head_dim=256, vocab=32000,
            scan=True, remat=self.remat, dtype="bfloat16",
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--remat", choices=("full", "dots"), help="default: both, in turn")
    parser.add_argument("--embedding", choices=tuple(EMBEDDINGS), default="vocab")
    parser.add_argument("--layers", type=int, default=32, help="as a scan: no effect on compiling")
    parser.add_argument("--donate", action="store_true", help="donate the parameters")
    parser.add_argument("--only-shardwise", action="store_true", help="leave jax.jit out")
    parser.add_argument("--plan-only", action="store_true", help="no compiling, no libtpu")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for remat in (args.remat,) if args.remat else ("full", "dots"):
        settings = Settings("shardwise", remat, args.embedding, args.donate, layers=args.layers)
        if args.plan_only:
            rows += [{"remat": remat, **row} for row in plan_rows(settings)]
            continue
        ours = in_a_process(settings)
        beside = dataclasses.replace(settings, side="jit")
        theirs = {} if args.only_shardwise else in_a_process(beside)
        rows += [{"remat": remat, **row} for row in compared(ours, theirs)]
    table.show(
        "64B Transformer (GSPMD Table 2), training step, 2048 TPU v3 cores, mesh x=32 y=64",
        rows,
        args.json,
        "never run: seconds are the compiler's cycles at 0.94 GHz and bytes over two 82 GB/s links",
    )
    return rows


# ---- the program ---------------------------------------------------------------------------------


def lowerable(s: Settings, mesh: Any) -> Any:
    """The training step, plain gradient descent, ready to `.lower`."""
    config, embedding = s.config, EMBEDDINGS[s.embedding]
    plain = sw.annotate if s.side == "shardwise" else programs.jit_annotate(mesh)

    def annotate(x: jax.Array, spec: P) -> jax.Array:
        return plain(x, embedding if x.shape == (config.vocab, config.model) else spec)

    step = programs.training_step(config, STRATEGY, annotate)
    params, tokens = parameter_specs(embedding), P("x", None)
    donated = (0,) if s.donate else ()
    if s.side == "shardwise":
        return sw.spmd(
            step, mesh=mesh, in_shardings=(params, tokens), out_shardings=(params, P()),
            donate_argnums=donated,
        )  # fmt: skip
    return jax.jit(
        step,
        in_shardings=programs.shardings_of(mesh, (params, tokens)),
        out_shardings=programs.shardings_of(mesh, (params, P())),
        donate_argnums=donated,
    )


def parameter_specs(embedding: P) -> dict[str, Any]:
    """Each parameter where its annotation wants it; layers are stacked on a leading dim."""
    weights = ("w_qkv", "w_o", "w_in", "w_out")
    layers = {name: P(None, *transformer.spec(STRATEGY, name)) for name in weights}
    return {
        "embedding": embedding,
        "layers": {**layers, "attention_norm": P(), "ffn_norm": P()},
        "norm": P(),
    }


def plan_rows(s: Settings) -> list[dict[str, Any]]:
    """What the plan says, on an abstract mesh."""
    step = lowerable(s, abstract_mesh({"x": s.x, "y": s.y}))
    start = time.perf_counter()
    plan = step.plan(*programs.abstract_arguments(s.config, s.batch, s.seq))
    sent, planned = plan.comm_bytes, time.perf_counter() - start
    rows = [
        {"what": "plan s", "shardwise": planned},
        {"what": "plan.comm_bytes GB", "shardwise": sent / 1e9},
        {"what": "plan.peak_memory GiB", "shardwise": plan.peak_memory / GIB},
        {"what": "plan.flops T", "shardwise": plan.flops / 1e12},
        {"what": "fallbacks", "shardwise": len(plan.fallbacks)},
    ]
    for c in sorted(plan.collectives, key=lambda c: -c.total_bytes)[:12]:
        what = f"{c.kind} {','.join(c.axes)} {c.dtype}{list(c.shape)} x{c.count} GB ({c.op})"
        rows.append({"what": what, "shardwise": c.total_bytes / 1e9})
    return rows


# ---- one compilation -----------------------------------------------------------------------------


def in_a_process(s: Any, module: str = "benchmarks.tpu") -> dict[str, Any]:
    """Compile in a fresh process: the compiler's memory goes back, and a crash is a message."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no metadata server to ask
    try:
        return measure.in_a_process(module, json.dumps(dataclasses.asdict(s)), timeout=1800)
    except measure.WorkerFailed as e:
        raise SystemExit(
            f"cannot compile for {s.topology}: {e}\n"
            "  hint  pip install 'jax[tpu]' of this jax's version; no TPU is needed"
        ) from e


def pod(topology: str, shape: dict[str, int]) -> Mesh:
    """The mesh over a pod that is not there: rows of chips, the core fastest."""
    # Loads libtpu, an optional extra.
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    ordered = sorted(devices, key=lambda d: (*reversed(d.coords), d.core_on_chip))
    return Mesh(np.array(ordered).reshape(tuple(shape.values())), tuple(shape))


def compiled(s: Settings) -> dict[str, Any]:
    step = lowerable(s, pod(s.topology, {"x": s.x, "y": s.y}))
    values = programs.abstract_arguments(s.config, s.batch, s.seq)
    return figures(step, values, s.side == "shardwise")


def figures(step: Any, values: Any, planned: bool) -> dict[str, Any]:
    """Lower and compile; everything the table shows, in GiB, GB and seconds."""
    start = time.perf_counter()
    lowered = step.lower(*values)
    lower = time.perf_counter() - start
    start = time.perf_counter()
    executable = lowered.compile()
    compiling = time.perf_counter() - start
    text = executable.as_text()
    wire = hlo.wire_report(text)
    compute = tpu_hlo.compute_seconds(text, tpu_hlo.V3)
    comm = wire.bytes / tpu_hlo.V3.ring_bytes_per_second
    out = {
        **memory(executable.memory_analysis()),
        "wire GB": wire.bytes / 1e9,
        **{f"  {kind} GB": sent / 1e9 for kind, sent in wire.by_kind().items()},
        **{
            f"  {kind}s a step": sum(op.times for op in wire.collectives if op.kind == kind)
            for kind in wire.by_kind()
        },
        "compute s": compute,
        "communication s": comm,
        "step s (sum)": compute + comm,
        "trace to lowered s": lower,
        "compile s": compiling,
        "loops of unknown length": len(wire.unknown_loops),
    }
    if planned:
        plan = step.plan(*values)
        out["plan.comm_bytes GB"] = plan.comm_bytes / 1e9
        out["plan.peak_memory GiB"] = plan.peak_memory / GIB
    return out


def memory(m: Any) -> dict[str, float]:
    """HBM of one core: all that is allocated, and the most that is alive at once."""
    allocated = (
        m.argument_size_in_bytes
        + m.output_size_in_bytes
        + m.temp_size_in_bytes
        - m.alias_size_in_bytes
        + m.generated_code_size_in_bytes
    )
    return {"HBM GiB": allocated / GIB, "  alive at once GiB": m.peak_memory_in_bytes / GIB}


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per figure, ours beside theirs."""
    rows = []
    for what in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(what), theirs.get(what)
        ratio = a / b if a is not None and b else None
        rows.append({"what": what, "shardwise": a, "jax.jit": b, "ratio": ratio})
    return rows


if __name__ == "__main__":
    # The one array that is really made, a random key, is made on the CPU.
    jax.config.update("jax_platforms", "cpu")
    print(json.dumps(compiled(Settings(**json.loads(sys.argv[1])))))
