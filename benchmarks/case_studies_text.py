"""docs/case_studies.md, of what `case-studies` found."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from benchmarks.studies import Case

LIMIT = 15.48
"""GiB of a TPU v3 core that a program may take."""

HEAD = """# The paper's case studies

Made by `python -m benchmarks case-studies --write`, of what these found (kept in
`benchmarks/case_studies.json`; `--only NAME` takes one row, or those of a table):

    python -m benchmarks case-studies --save              # plans: no libtpu, no device
    python -m benchmarks case-studies --compile --save    # and compiled for TPU v3, beside jax.jit

Every row is a configuration of a table of GSPMD (arXiv 2105.04663), section 5, at its own size: one
training step, gradients and plain gradient descent (the paper: Adafactor, whose factored statistics are
small), parameters donated, float32 weights, bfloat16 activations. **Nothing here has run**: plans are made
on an abstract mesh of the paper's size; "TPU" is what the compiler says of the program it made for that
many TPU v3 cores. All figures are of one core and one step.

- *annotations*: calls of `sw.annotate` in the model (a scanned layer counts once), and their share of the
  tensors of the captured training step. The paper says 7 a layer, 0.7 % of all tensors. A pipeline's
  include those that `sw.pipeline` makes by itself.
- *collectives a layer*: how many run in a step, divided by the layers (in a pipeline a layer runs once a
  tick, bubbles too), and the bytes one core sends for them.
- *plan GiB* is the plan's own count of what is alive at once (`cost/memory.py`), made without the compiler.
  *TPU GiB* is all that the compiler allocates, and in brackets what it has alive at once; a core has 15.48.
- *jax.jit* gets the same function, annotations and argument shardings; of a pipeline, this package's
  wrapper. *compile s* is from CPU cores busy with other work: not a comparison.
- *paper GB* as printed, where it is. The paper's FLOPs and times were measured on programs whose sizes it
  does not give in full (what was assumed is under each table): compare memory first.
"""


def document(cases: Sequence[Case], saved: dict[str, Any]) -> str:
    """The whole page."""
    parts = [HEAD]
    for t in dict.fromkeys(c.table for c in cases):
        mine = [c for c in cases if c.table == t]
        parts.append(f"## {t}: {mine[0].model}\n")
        parts.append(_plans([(c, saved.get(c.name, {})) for c in mine]))
        if built := [(c, saved[c.name]) for c in mine if _built(saved.get(c.name, {}))]:
            parts.append(_compiled(built))
        parts.append(_assumed(mine))
    parts.append(_losses(cases, saved))
    return "\n".join(parts)


def row(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """One row on the terminal."""
    plan = found["plan"]
    out = {
        "annotations": f"{plan['annotations']} ({100 * plan['annotations'] / plan['tensors']:.1f} %)",
        "collectives a layer": sum(plan["collectives"].values()) / case.layers,
        "MB a layer": plan["sent GB"] * 1e3 / case.layers,
        "TFLOP": plan["TFLOP"],
        "sent GB": plan["sent GB"],
        "plan GiB": plan["memory GiB"],
    }
    for side in ("shardwise", "jit"):
        if side in found:
            out[f"{side} TPU GiB"] = _memory(found[side])
    return out | {"paper GB": case.published.get("memory GB"), "fallbacks": plan["fallbacks"]}


def refused(message: str) -> str | None:
    """How much a program wanted that the compiler refused for want of memory; None for another error."""
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    found = re.search(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?)", message)
    return f"{found.group(1)} of {found.group(2)}" if found else "more than there is"


def _plans(rows: Sequence[tuple[Case, dict[str, Any]]]) -> str:
    lines = [
        "| row | mesh | annotations | collectives a layer | MB a layer | sent GB | TFLOP | plan GiB "
        "| paper GB | paper s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, found in rows:
        mesh = " ".join(f"{k}={n}" for k, n in case.mesh.items())
        memory, seconds = (_or_dash(case.published.get(k)) for k in ("memory GB", "step s"))
        if "plan" not in found:
            lines.append(
                f"| {case.row} | {mesh} | | | | | | not planned yet | {memory} | {seconds} |"
            )
            continue
        p = found["plan"]
        lines.append(
            f"| {case.row} | {mesh} | {p['annotations']} ({100 * p['annotations'] / p['tensors']:.1f} %) "
            f"| {sum(p['collectives'].values()) / case.layers:.1f} "
            f"| {p['sent GB'] * 1e3 / case.layers:,.0f} | {p['sent GB']:.1f} | {p['TFLOP']:.1f} "
            f"| {p['memory GiB']:.2f} | {memory} | {seconds} |"
        )
    return "\n".join(lines) + "\n"


def _compiled(rows: Sequence[tuple[Case, dict[str, Any]]]) -> str:
    lines = [
        "| compiled for TPU v3 | GiB: shardwise | jax.jit | sent GB: shardwise | jax.jit "
        "| step s, estimated: shardwise | jax.jit | compile s | jax.jit | paper GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, found in rows:
        a, b = found.get("shardwise", {}), found.get("jit", {})
        cells = [_memory(a), _memory(b)]
        for key, form in (
            ("wire GB", "{:.1f}"),
            ("step s (sum)", "{:.2f}"),
            ("compile s", "{:.0f}"),
        ):
            cells += [form.format(x[key]) if key in x else "-" for x in (a, b)]
        cells.append(_or_dash(case.published.get("memory GB")))
        lines.append(f"| {case.row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _losses(cases: Sequence[Case], saved: dict[str, Any]) -> str:
    """Where jax.jit's program is better, and what the plan says will not fit."""
    lines = []
    figures = {"HBM GiB": "GiB", "wire GB": "GB sent", "compute s": "s of computing, estimated"}
    for c in cases:
        found = saved.get(c.name, {})
        a, b = found.get("shardwise", {}), found.get("jit", {})
        for key, unit in figures.items():
            if key in a and key in b and a[key] > 1.005 * b[key]:
                lines.append(f"- {c.row}: {a[key]:.2f} {unit} against jax.jit's {b[key]:.2f}")
        if "refused" in a:
            lines.append(f"- {c.row}: does not fit, and is refused; of jax.jit: {_memory(b)}")
        if not a and found.get("plan", {}).get("memory GiB", 0) > LIMIT:
            planned = found["plan"]["memory GiB"]
            lines.append(f"- {c.row}: the plan estimates {planned:.1f} GiB, and a core has {LIMIT}")
    return "## Where it loses\n\n" + ("\n".join(lines) or "Nowhere among these rows.") + "\n"


def _built(found: dict[str, Any]) -> bool:
    return "shardwise" in found or "jit" in found


def _memory(side: dict[str, Any]) -> str:
    if not side:
        return "-"
    if "refused" in side:
        return f"**refused**: {side['refused']}"
    if "error" in side:
        return "not compiled: " + str(side["error"]).splitlines()[0][:80]
    fits = "" if side["HBM GiB"] <= LIMIT else " **too much**"
    return f"{side['HBM GiB']:.2f} ({side['  alive at once GiB']:.2f}){fits}"


def _assumed(cases: Sequence[Case]) -> str:
    """What the paper does not say, for all rows of a table and for some."""
    common = [a for a in cases[0].assumed if all(a in c.assumed for c in cases)]
    lines = [f"- {a}" for a in common]
    for c in cases:
        if own := [a for a in c.assumed if a not in common]:
            lines.append(f"- {c.row}: {'; '.join(own)}")
    return "Assumed:\n\n" + "\n".join(lines) + "\n" if lines else ""


def _or_dash(x: float | None) -> str:
    return "-" if x is None else f"{x:g}"
