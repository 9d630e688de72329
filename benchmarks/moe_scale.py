"""`moe-scale`: what an MoE layer costs a device as experts and devices grow together (GShard 3.1, Table 4).

Tokens of a device stay the same: S = 4096 in one group, one expert a device, capacity C = 2S/E.
Forward and backward pass of one layer, planned on abstract meshes of 8 to 2048 devices; nothing runs.
GShard says what each part should do: the experts, dispatching and combining O(1) a device, the gate's
softmax O(D), and an all-to-all, of the same bytes on any mesh, O(sqrt D) in time on a torus.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shardwise as sw
from benchmarks import table
from shardwise.cost.flops import flops_by_scope
from shardwise.mesh import abstract_mesh
from shardwise.nn import encoder_decoder, moe
from shardwise.nn.gating import GatingConfig

TOKENS = 4096
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LINK_BYTES_PER_SECOND = 82e9
"""Of one direction of a TPU v3 link."""

PARTS: dict[str, tuple[str, ...]] = {
    "gate GFLOP": ("gsm,me->gse",),
    "dispatch, combine": ("gsec,gsm->egcm", "gsec,gecm->gsm"),
    "experts": ("egcm,emh->egch", "egch,ehm->egcm"),
}
"""Column -> the einsums it counts, forward and backward."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, nargs="*", default=list(DEVICES))
    parser.add_argument(
        "--paper", action="store_true", help="the 36-layer models of GShard Table 1"
    )
    parser.add_argument(
        "--plot", type=Path, help="write the growth as a picture (needs matplotlib)"
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = [paper(n) for n in (128, 512, 2048)] if args.paper else [layer(n) for n in args.devices]
    title = (
        "The 36-layer models of GShard Table 1" if args.paper else "One MoE layer, M 1024, H 8192"
    )
    note = (
        "a device; all-to-all ms: bytes x mean hops / links of a square torus, 82 GB/s a direction"
    )
    if not args.paper and len(rows) > 1:
        rows.append(growth(rows))
        note += (
            f"; D^p: growth between the last two rows ({args.devices[-2]} to {args.devices[-1]})"
        )
    table.show(f"{title}: a training step, a device", rows, args.json, note)
    if args.plot:
        plot(rows[:-1], args.plot)
    return rows


def layer(devices: int) -> dict[str, Any]:
    """One MoE layer on as many devices as experts."""
    gating = GatingConfig(devices, min_capacity=1)
    config = moe.MoeConfig(1024, 8192, gating, dtype="bfloat16")
    params = jax.eval_shape(functools.partial(moe.init, config), jax.random.key(0))
    x = jax.ShapeDtypeStruct((devices, TOKENS, config.model), jnp.bfloat16)
    shard = moe.sharder(sw.annotate, "gshard", ("x", "x"))

    def loss(params: Any, x: Any, seed: Any) -> Any:
        y, stats = moe.layer(config, params, x, key=jax.random.key(seed), shard=shard)
        return jnp.sum(y.astype(jnp.float32)) + stats.aux_loss

    step = sw.spmd(jax.grad(loss, argnums=(0, 1)), mesh=abstract_mesh({"x": devices}))
    plan = step.plan(params, x, jax.ShapeDtypeStruct((), jnp.uint32))
    found = flops_by_scope(plan.jaxpr)
    row: dict[str, Any] = {"devices": devices}
    for part, einsums in PARTS.items():
        row[part] = sum(n for scope, n in found.items() if scope in einsums) / 1e9
    row["other GFLOP"] = plan.flops / 1e9 - sum(row[part] for part in PARTS)
    return row | sent(plan, devices) | {"peak MB": plan.peak_memory / 1e6}


def paper(experts: int) -> dict[str, Any]:
    """A training step of a paper's model: gradients and plain descent, 4096 source and target tokens."""
    config = dataclasses.replace(
        encoder_decoder.PAPER[f"moe_{experts}e_36l"], dtype="bfloat16", dropout=0.0
    )
    batch, seq = 4 * experts, 1024
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)

    def step(params: Any, batch: Any, seed: Any) -> Any:
        def loss(params: Any) -> Any:
            return encoder_decoder.loss(
                config, params, batch, key=jax.random.key(seed), annotate=sw.annotate, axes=("x",)
            )[0]

        return jax.tree.map(lambda w, g: w - 0.01 * g, params, jax.grad(loss)(params))

    params = encoder_decoder.abstract_params(config)
    step = sw.spmd(step, mesh=abstract_mesh({"x": experts}), donate_argnums=(0,))
    data = {"source": tokens, "target": tokens}
    plan = step.plan(params, data, jax.ShapeDtypeStruct((), jnp.uint32))
    billions = encoder_decoder.parameter_count(config) / 1e9
    row = {"devices": experts, "parameters, 10^9": billions, "TFLOP": plan.flops / 1e12}
    return row | sent(plan, experts) | {"peak GB": plan.peak_memory / 1e9}


def sent(plan: Any, devices: int) -> dict[str, Any]:
    """What a device sends: by all-to-all, and else; and how often."""
    exchanges = [c for c in plan.collectives if c.kind == "all-to-all"]
    moved = sum(c.total_bytes for c in exchanges)
    return {
        "all-to-alls": sum(c.count or 1 for c in exchanges),
        "their MB": moved / 1e6,
        "all-to-all ms": 1e3 * exchange_seconds(moved, devices),
        "other MB": (plan.comm_bytes - moved) / 1e6,
    }


def exchange_seconds(sent: float, devices: int) -> float:
    """An all-to-all on a square torus (GShard appendix A.5): t = d h / l.

    Data d is what all devices send, h a message's mean hops (a quarter of a side along each of two axes,
    side / 2 in all), l all links' directions (4 a device).
    """
    hops = math.sqrt(devices) / 2
    return sent * devices * hops / (4 * devices * LINK_BYTES_PER_SECOND)


def growth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The power of D that each column grows with, between the last two rows."""
    a, b = rows[-2:]
    steps = math.log(b["devices"] / a["devices"])

    def power(key: str) -> str:
        return f"D^{math.log(b[key] / a[key]) / steps:.2f}" if a[key] and b[key] else "-"

    return {key: "growth" if key == "devices" else power(key) for key in a}


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Growth from the first row on, one line a column, both axes logarithmic."""
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise SystemExit("no matplotlib\n  hint  pip install 'shardwise[translation]'") from e
    lines: dict[str, Callable[[dict[str, Any]], float]] = {
        "experts: FLOPs, O(1)": lambda r: r["experts"],
        "dispatch and combine: FLOPs, O(1)": lambda r: r["dispatch, combine"],
        "gate: FLOPs, O(D)": lambda r: r["gate GFLOP"],
        "all-to-all: bytes, O(1)": lambda r: r["their MB"],
        "all-to-all: time on a torus, O(sqrt D)": lambda r: r["all-to-all ms"],
        "peak memory": lambda r: r["peak MB"],
    }
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, value in lines.items():
        axes.loglog(
            [r["devices"] for r in rows], [value(r) / value(rows[0]) for r in rows],
            marker="o", label=label, base=2,
        )  # fmt: skip
    axes.set_xlabel("devices = experts")
    axes.set_ylabel(f"of a device, beside {rows[0]['devices']} devices")
    axes.set_title("One MoE layer, forward and backward, 4096 tokens a device")
    axes.legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
