"""`placement`: how robust is a plan to where annotations are put?  (An open question of the paper.)

The dense Transformer's training step under the "final" strategy is planned with annotations dropped or
moved, on an abstract mesh: no device runs.  Each row is set beside the plan with all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from jax.sharding import PartitionSpec as P

import shardwise as sw
from benchmarks import programs, table
from shardwise.nn import transformer

CONFIG = dataclasses.replace(programs.DENSE, vocab=2048)
WEIGHTS = ("w_qkv", "w_o", "w_in", "w_out")
ACTIVATIONS = ("bsm", "bsnd", "bsh")
ENDS = ("embedding", "logits")
ALL = (*WEIGHTS, *ACTIVATIONS, *ENDS)


def tensor_of(x: Any) -> str:
    """Which of the annotated tensors this is, told by its shape."""
    c = CONFIG
    tails = {
        (c.vocab, c.model): "embedding",
        (c.model, c.hidden): "w_in",
        (c.hidden, c.model): "w_out",
        (c.heads, c.depth_per_head, c.model): "w_o",
        (programs.BATCH, programs.SEQ, c.model): "bsm",
        (programs.BATCH, programs.SEQ, c.hidden): "bsh",
        (programs.BATCH, programs.SEQ, c.vocab): "logits",
        (3, c.model, c.heads, c.depth_per_head): "w_qkv",
        (3, programs.BATCH, programs.SEQ, c.heads, c.depth_per_head): "bsnd",
    }
    return tails[tuple(x.shape)]


def plan_with(kept: tuple[str, ...], open_dims: bool = False) -> Any:
    """The plan when only the tensors `kept` are annotated; `open_dims` leaves whole dims open."""

    def annotate(x: Any, spec: P) -> Any:
        if tensor_of(x) not in kept:
            return x
        if open_dims:
            spec = P(*(P.UNCONSTRAINED if e is None else e for e in spec))
        return sw.annotate(x, spec)

    step = programs.training_step(CONFIG, "final", annotate)
    arguments = programs.abstract_arguments(CONFIG, programs.BATCH, programs.SEQ)
    return sw.spmd(step, mesh=sw.abstract_mesh(programs.MESH)).plan(*arguments)


def by_in_shardings() -> Any:
    """Weights and tokens given as in_shardings, activations annotated: no annotation on a weight."""
    step = programs.training_step(
        CONFIG, "final", lambda x, s: sw.annotate(x, s) if tensor_of(x) in ACTIVATIONS + ENDS else x
    )
    params, tokens = programs.abstract_arguments(CONFIG, programs.BATCH, programs.SEQ)
    specs = dict.fromkeys(params) | {"layers": dict.fromkeys(params["layers"])}
    for name in WEIGHTS:
        specs["layers"][name] = P(None, *transformer.spec("final", name))
    plan = sw.spmd(step, mesh=sw.abstract_mesh(programs.MESH), in_shardings=(specs, None))
    return plan.plan(params, tokens)


def variants() -> list[tuple[str, Any]]:
    out = [("all nine", plan_with(ALL))]
    out += [(f"without {t}", plan_with(tuple(a for a in ALL if a != t))) for t in ALL]
    out += [
        ("the seven of the layers only", plan_with(WEIGHTS + ACTIVATIONS)),
        ("weights only", plan_with(WEIGHTS)),
        ("weights and bsm", plan_with((*WEIGHTS, "bsm"))),
        ("activations only", plan_with(ACTIVATIONS)),
        ("bsm and bsh only", plan_with(("bsm", "bsh"))),
        ("bsm only", plan_with(("bsm",))),
        ("all nine, whole dims left open", plan_with(ALL, open_dims=True)),
        ("weights by in_shardings", by_in_shardings()),
    ]
    return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    base: list[str] = []
    base_bytes = 0.0
    rows = []
    for name, plan in variants():
        mine = [v for v in plan.body.variables() if v.rank and "annotation" not in v.name]
        shardings = [plan.completion.sharding(v).text(plan.axes) for v in mine]
        sharded = sum(v.nbytes for v in mine if plan.completion.sharding(v).used)
        if not base:
            base, base_bytes = shardings, plan.comm_bytes
        rows.append({
            "annotations": name,
            "wire MB": plan.comm_bytes / 1e6,
            "ratio": plan.comm_bytes / base_bytes,
            "peak MB": plan.peak_memory / 1e6,
            "GFLOP a device": plan.flops / 1e9,
            "bytes of values that are split": f"{100 * sharded / sum(v.nbytes for v in mine):.0f} %",
        })  # fmt: skip
    table.show(
        "Where the annotations are put (strategy final, scan, remat, mesh 2x4)", rows, args.json
    )
    return rows
