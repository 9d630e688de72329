"""`micro`: one operator or idiom each; right numbers, and bytes beside the best known plan."""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import shardwise as sw
from benchmarks import shared, table
from shardwise import hlo
from shardwise.mesh import device_mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_shared_argument(parser)
    parser.add_argument("names", nargs="*", help="programs; default: all")
    parser.add_argument("--failures", action="store_true", help="print only what is not right")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    programs = shared.load(shared.cases_folder(args.shared), "micro").PROGRAMS
    names = args.names or list(programs)
    if unknown := [n for n in names if n not in programs]:
        raise SystemExit(f"no program {', '.join(unknown)} in micro.py")
    rows = [one(name, programs[name]) for name in names]
    good = sum(r["numbers"] == "right" and r["ok"] is not False for r in rows)
    table.show(
        f"One operator each: {good} of {len(rows)} right and within the least known bytes",
        [r for r in rows if not args.failures or r["numbers"] != "right" or r["ok"] is False],
        args.json,
        "bytes that one device sends; best: by hand, xla: jax.jit, sdy: Shardy's own partitioner",
    )
    return rows


def one(name: str, program: dict[str, Any]) -> dict[str, Any]:
    """The row of one program."""
    known = [program[k] for k in ("best", "xla", "sdy")]
    least = min((v for v in known if v is not None), default=None)
    row: dict[str, Any] = {"program": name, "numbers": "", "bytes": None}
    row |= dict(zip(("best", "xla", "sdy"), known, strict=True)) | {"ok": None, "fallbacks": None}
    sizes, names = program["mesh"]
    try:
        f = sw.spmd(
            program["f"],
            mesh=device_mesh(dict(zip(names, sizes, strict=True))),
            in_shardings=tuple(P(*s) for s in program["in_specs"]),
            out_shardings=out_specs(program["out_spec"]),
        )
        args = concrete(program["args"])
        row["bytes"] = hlo.wire_bytes(f.lower(*args).compile().as_text())
        row["fallbacks"] = len(f.plan(*args).fallbacks)
        got, want = jax.tree.leaves(f(*args)), jax.tree.leaves(jax.jit(program["f"])(*args))
        diff = max(shared.difference(g, w) for g, w in zip(got, want, strict=True))
        row["numbers"] = "right" if diff <= 1e-4 else f"wrong by {diff:.2g}"
        # Half a per mille: XLA's own small change (a predicate, a counter) is not our traffic.
        row["ok"] = least is None or row["bytes"] <= least * 1.0005
    except Exception as e:  # a refusal is a result here, whatever its type
        row["numbers"] = f"refused: {type(e).__name__}: {str(e).splitlines()[0][:80]}"
        row["ok"] = False
    return row


def out_specs(spec: tuple[Any, ...]) -> Any:
    """The specs of a tuple of results are tuples themselves; those of one result are not."""
    many = bool(spec) and all(isinstance(s, tuple) and _is_spec(s) for s in spec)
    return tuple(P(*s) for s in spec) if many else P(*spec)


def _is_spec(s: tuple[Any, ...]) -> bool:
    return any(d is None for d in s)  # ("x", "y") is one dim split over two axes


def concrete(args: list[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    """Seeded values; integers are valid row numbers of the first array, or below 64."""
    rng = np.random.default_rng(0)
    rows = args[0].shape[0] if np.issubdtype(args[0].dtype, np.inexact) else 64
    out = []
    for a in args:
        if np.issubdtype(a.dtype, np.integer):
            out.append(rng.integers(0, rows, a.shape).astype(a.dtype))
        else:
            out.append(rng.standard_normal(a.shape).astype(a.dtype))
    return out
