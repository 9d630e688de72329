"""Quality by resource level, the ablation of the gating, and overflow by language: runs and their tables.

    python examples/translation/experiments.py train runs   # 13 runs, one after another
    python examples/translation/experiments.py report runs  # scores; QUALITY.md and pictures, here

A run that was stopped goes on where it was.  All runs are of one model but for the number of experts:
M 64, H 256, two layers in each stack, one of them with experts; the dense model's layer there is as wide
as the two experts a token goes to.  Runs of one seed see the same batches.  `--only` takes names of runs,
so that they can be shared out over machines.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from shardwise.demo import devices
from shardwise.translation.job import Job, JobOptions

HERE = pathlib.Path(__file__).parent
CACHE = "~/.cache/shardwise"

BASE = JobOptions(
    model=64, hidden=256, dispatch="gather", dropout=0.0, warmup=500, steps=600,
    lengths=((8, 6), (12, 8), (16, 12), (24, 16)), checkpoint_every=300, keep=1,
)  # fmt: skip
SEEDS, EXPERTS = (0, 1), (0, 4, 8, 16)
ABLATION_STEPS = 300
COMPARED = 100
"""Steps that the ablation's numbers are means over: the last ones of ABLATION_STEPS."""

QUALITY = {
    f"e{experts}-s{seed}": dataclasses.replace(BASE, experts=experts, seed=seed)
    for seed in SEEDS
    for experts in EXPERTS
}
TIGHT = 0.6
"""Capacity factor of the ablation: some 30 % of a batch is padding, which is routed to no expert, so that
this is 0.85 of the even load of the tokens there are."""

_OFF: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("all four", {"steps": 400}),
    "no-aux": ("no auxiliary loss", {"aux_loss": False}),
    "no-random": ("no random routing", {"random_routing": False}),
    "no-groups": ("no local groups", {"local_groups": False}),
    "no-capacity": ("no capacity", {"capacity_factor": None}),
}
ABLATION = {
    name: dataclasses.replace(
        BASE, **{"steps": ABLATION_STEPS, "capacity_factor": TIGHT, "experts": 8, **off}
    )
    for name, (_, off) in _OFF.items()
}
RUNS = {**QUALITY, **ABLATION}

Lines = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("train", "report"))
    parser.add_argument("directory", type=pathlib.Path, help="of the runs, each in one of its own")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices (default 1)")
    parser.add_argument(
        "--limit", type=int, default=40, help="test pairs of a language that are translated"
    )
    args = parser.parse_args()
    devices.start(args.devices)
    if args.command == "train":
        for name in args.only:
            train(args.directory / name, RUNS[name], args.devices)
        return
    scores = {
        name: scored(args.directory / name, args.limit, args.devices)
        for name in QUALITY
        if name in args.only
    }
    if args.only == list(RUNS):
        write(args.directory, scores, args.limit)


# -- runs --------------------------------------------------------------------------------------------


def train(directory: pathlib.Path, options: JobOptions, count: int) -> None:
    from shardwise.mesh import device_mesh
    from shardwise.translation.__main__ import progress

    print(directory.name, flush=True)
    with progress(options.steps, quiet=False) as on_step:
        mesh = device_mesh({"x": count})
        Job.load(options, CACHE).training(mesh).train(directory, on_step)


def scored(directory: pathlib.Path, limit: int, count: int) -> dict[str, Any]:
    """Scores of a run's last checkpoint on the test set, kept beside it."""
    from shardwise.mesh import device_mesh
    from shardwise.translation.evaluate import evaluate

    kept = directory / f"test-{limit}.json"
    if not kept.exists():
        job, mesh = Job.load(JobOptions.read(directory), CACHE), device_mesh({"x": count})
        step, params = job.trained(mesh, directory)
        if step != BASE.steps:
            raise SystemExit(f"{directory} is at step {step} of {BASE.steps}: train it first")
        report = evaluate(
            job.corpus, job.decoder(mesh, params), job.vocabularies,
            job.options.batch_options(job.multiple), limit=limit,
            likelihood=job.likelihood(mesh, params),
        )  # fmt: skip
        report.save(kept)
    return json.loads(kept.read_text())


def lines_of(directory: pathlib.Path) -> Lines:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


# -- tables ------------------------------------------------------------------------------------------


def write(directory: pathlib.Path, scores: dict[str, Any], limit: int) -> None:
    """QUALITY.md: the tables; beside it the pictures."""
    level_of = {name: s["level"] for name, s in next(iter(scores.values()))["languages"].items()}
    runs = {name: lines_of(directory / name) for name in RUNS}
    steps, (first, last) = BASE.steps, (ABLATION_STEPS - COMPARED + 1, ABLATION_STEPS)
    tokens = sum(line["tokens"] for line in runs["e8-s0"]) / 1e6
    text = TEXT.format(
        steps=steps, tokens=tokens, limit=limit, first=first, last=last, every=BASE.languages_every,
        tight=TIGHT, compared=COMPARED,
        quality=table(*quality(scores)), fitted=fitted(runs), gain=table(*gain(scores)),
        ablation=table(*ablation(runs)), overflow=table(*overflow(runs["all"], level_of)),
        extremes=table(*extremes(runs["all"], level_of)),
    )  # fmt: skip
    (HERE / "QUALITY.md").write_text(text)
    pictures(scores, runs["all"], level_of)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] + ["---:"] * (len(lines[0]) - 1))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _named(experts: int) -> str:
    return f"{experts} experts" if experts else "dense"


def _each(scores: dict[str, Any], experts: int, level: str, metric: str) -> list[float]:
    """The metric of each seed."""
    return [scores[f"e{experts}-s{seed}"]["levels"][level][metric] for seed in SEEDS]


def quality(scores: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    levels = list(next(iter(scores.values()))["levels"])
    rows = []
    for experts in EXPERTS:
        for metric, digits in (("nats", 3), ("chrf", 1), ("bleu", 1)):
            cells = []
            for level in levels:
                each = _each(scores, experts, level, metric)
                seeds = ", ".join(f"{v:.{digits}f}" for v in each)
                cells.append(f"{np.mean(each):.{digits}f} ({seeds})")
            name = {"nats": "nats a token", "chrf": "chrF", "bleu": "BLEU"}[metric]
            rows.append([f"{_named(experts)}, {name}", *cells])
    return ["model", *levels], rows


def fitted(runs: dict[str, Lines]) -> str:
    """Loss of the last batches trained on, of each model and seed."""
    parts = []
    for experts in EXPERTS:
        each = [
            np.mean([line["loss"] for line in runs[f"e{experts}-s{seed}"][-COMPARED:]])
            for seed in SEEDS
        ]
        parts.append(
            f"{_named(experts)} {np.mean(each):.3f} ({', '.join(f'{v:.3f}' for v in each)})"
        )
    return ", ".join(parts)


def gain(scores: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Nats a token less than the dense model of the same seed."""
    levels = list(next(iter(scores.values()))["levels"])
    rows = []
    for experts in EXPERTS[1:]:
        cells = []
        for level in levels:
            pairs = zip(
                _each(scores, 0, level, "nats"), _each(scores, experts, level, "nats"), strict=True
            )
            each = [dense - with_experts for dense, with_experts in pairs]
            cells.append(f"{np.mean(each):+.3f} ({', '.join(f'{v:+.3f}' for v in each)})")
        rows.append([_named(experts), *cells])
    return ["model", *levels], rows


def ablation(runs: dict[str, Lines]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, (words, _) in _OFF.items():
        chosen = runs[name][ABLATION_STEPS - COMPARED : ABLATION_STEPS]

        def mean(of: Callable[[dict[str, Any]], float], lines: Lines = chosen) -> float:
            return float(np.mean([of(line) for line in lines]))

        rows.append([
            words,
            f"{mean(lambda line: line['loss']):.3f}",
            f"{mean(lambda line: line['overflow']):.2%}",
            f"{mean(lambda line: line['dropped']):.2%}",
            f"{mean(lambda line: line['second']):.1%}",
            f"{mean(lambda line: line['aux_loss']):.3f}",
            f"{mean(lambda line: float(np.mean(_busiest(line)))):.2f}",
            f"{mean(lambda line: line['entropy']):.2f}",
        ])  # fmt: skip
    return [
        "gating", "loss", "overflow", "dropped", "second used", "auxiliary loss", "busiest / mean",
        "entropy",
    ], rows  # fmt: skip


def _busiest(line: dict[str, Any]) -> np.ndarray:
    """Of each layer: the busiest expert's load over the mean load."""
    load = np.array(line["load"])
    return load.max(axis=1) / load.mean(axis=1)


def _shares(line: dict[str, Any], of: Callable[[str], bool]) -> float | None:
    """Overflow of the languages together since the table began anew; None if nothing was routed."""
    chosen = [c for name, c in line["languages"].items() if of(name)]
    routed = sum(c["routed"] for c in chosen)
    return sum(c["overflow"] for c in chosen) / routed if routed else None


def _tables(lines: Lines) -> Lines:
    return [line for line in lines if line["step"] % BASE.languages_every == 0]


LEVELS = ("high", "mid", "low")


def overflow(lines: Lines, level_of: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for line in _tables(lines):
        parts = [_shares(line, lambda name, l=level: level_of.get(name) == l) for level in LEVELS]
        step = line["step"]
        rows.append([f"{step - BASE.languages_every + 1} to {step}", *(f"{p:.2%}" for p in parts)])
    return ["steps", *LEVELS], rows


def extremes(
    lines: Lines, level_of: dict[str, str], count: int = 6, fewest: float = 20_000
) -> tuple[list[str], list[list[str]]]:
    """The languages whose tokens overflowed most and least over the whole run."""
    names = level_of
    total = {n: np.zeros(3) for n in names}
    first = {}
    tables = _tables(lines)
    for i, line in enumerate(tables):
        for n, c in line["languages"].items():
            if n in total:
                total[n] += (c["overflow"], c["routed"], c["tokens"])
                if i == 0:
                    first[n] = c["overflow"] / max(c["routed"], 1)
    ranked = sorted(
        (n for n in names if total[n][1] >= fewest), key=lambda n: -total[n][0] / total[n][1]
    )
    rows = []
    for n in ranked[:count] + ranked[-count:]:
        last = tables[-1]["languages"][n]
        rows.append([
            n, level_of[n], f"{total[n][1]:,.0f}", f"{first[n]:.2%}",
            f"{last['overflow'] / max(last['routed'], 1):.2%}", f"{total[n][0] / total[n][1]:.2%}",
        ])  # fmt: skip
    every = BASE.languages_every
    return [
        "language", "level", "routed tokens", f"first {every} steps", f"last {every}", "whole run"
    ], rows  # fmt: skip


# -- pictures ----------------------------------------------------------------------------------------


def pictures(scores: dict[str, Any], lines: Lines, level_of: dict[str, str]) -> None:
    """quality.svg: nats gained over dense by training pairs, as Figure 6; overflow.svg: over the run."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "shardwise"  # the same file from the same numbers
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    ax = figure.subplots()
    languages = next(iter(scores.values()))["languages"]
    ordered = sorted(
        (n for n, s in languages.items() if s["pairs"] >= 10),
        key=lambda n: -languages[n]["training_pairs"],
    )
    window = 15
    middle = [languages[n]["training_pairs"] for n in ordered]
    for experts in EXPERTS[1:]:
        gains = [
            np.mean([
                scores[f"e0-s{s}"]["languages"][n]["nats"]
                - scores[f"e{experts}-s{s}"]["languages"][n]["nats"]
                for s in SEEDS
            ])
            for n in ordered
        ]  # fmt: skip
        smooth = np.convolve(gains, np.ones(window) / window, mode="valid")
        half = window // 2
        ax.plot(middle[half : len(middle) - half], smooth, label=_named(experts))
    ax.axhline(0, color="gray", linewidth=0.6)
    ax.set_xscale("log")
    ax.invert_xaxis()
    ax.set_xlabel(f"training pairs of the language (mean of {window} neighbours)")
    ax.set_ylabel("nats a token below dense")
    ax.legend(frameon=False)
    figure.savefig(HERE / "quality.svg", metadata={"Date": None})

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    ax = figure.subplots()
    tables = _tables(lines)
    for level in LEVELS:
        ax.plot(
            [line["step"] for line in tables],
            [_shares(line, lambda n, l=level: level_of.get(n) == l) for line in tables],
            marker="o", markersize=3, label=f"{level}-resource languages",
        )  # fmt: skip
    ax.set_xlabel("step")
    ax.set_ylabel("share of tokens no expert took")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    figure.savefig(HERE / "overflow.svg", metadata={"Date": None})


TEXT = """# Quality, gating and overflow

Written by `python examples/translation/experiments.py report runs`, from runs of `… train runs`.

Small runs: M 64, H 256, two layers in each stack, {steps} steps, {tokens:.2f} million target tokens each,
every model the same batches. Expect no translations worth reading from them; they compare models.

## Quality by resource level

Held-out messages whose English was trained on in no language; at most {limit} pairs of each language;
means over languages of a level ([DATA.md](DATA.md) says which), then over two seeds (in brackets). Beam 4.

{quality}

Loss of the last {compared} batches trained on: {fitted}.

Nats a token below the dense model of the same seed (above 0: the experts help):

{gain}

![Gain over dense by training pairs](quality.svg)

## The four mechanisms of the gating

8 experts, seed 0, capacity factor {tight}: 0.85 of the even load of tokens that are no padding, so that
some 15 % of the choices find no slot at best (with 1.0, as above, hardly any token overflows); one
mechanism off in each run; means over steps {first} to {last}. *Overflow*: tokens no expert took;
*dropped*: choices made that found no slot; *busiest / mean*: load of the busiest expert, over the mean (1
is even); entropy of a token's gates in nats (even: 2.08).

{ablation}

## Overflow by language and over training

The run with all four: the share of tokens that no expert took, of each {every} steps' tokens.

{overflow}

![Overflow over training](overflow.svg)

The languages that overflowed most and least (of those with at least 20,000 routed tokens):

{extremes}
"""


if __name__ == "__main__":
    main()
