"""`shardwise demo --job translation`: plan, show, prove, train and translate, on virtual devices."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from rich.markup import escape

from shardwise import hlo
from shardwise.demo import facts
from shardwise.demo.report import Screen, add_row, dims
from shardwise.demo.train import Training as Ran
from shardwise.demo.train import whole_arrays
from shardwise.mesh import device_mesh
from shardwise.nn import encoder_decoder as model
from shardwise.nn import moe
from shardwise.translation.job import Job, JobOptions
from shardwise.translation.step import make_step
from shardwise.translation.train import Training

DEFAULTS: dict[str, Any] = {
    "model": 64, "hidden": 128, "tokens": 1024, "lengths": ((16, 12),), "dropout": 0.0, "steps": 200,
    "languages": ("de", "es", "fr", "it", "nl", "sv"), "source_vocab": 4000, "target_vocab": 2000,
    "warmup": 100, "languages_every": 200,
}  # fmt: skip
"""Of the demo, where they differ from the job's: under three minutes on two cores."""

PROOF_STEPS = 8
SENTENCES = 8


def demo(
    options: JobOptions,
    axes: dict[str, int],
    directory: str | None = None,
    cache: str | None = None,
    as_json: bool = False,
) -> int:
    """Run the demo; returns the exit status: 0, or 1 when the numbers are not the same."""
    screen = _Screen(quiet=as_json)
    out: dict[str, Any] = {}

    def show(name: str, fact: facts.Facts) -> None:
        out[name] = fact
        screen.show(name, fact)

    with screen.working("reading the catalogues, training vocabularies"):
        job = Job.load(options, cache)
    mesh = device_mesh(axes)
    with screen.working("completing and partitioning"):
        run = job.training(mesh)
        plan = run.plan
    show("setting", setting(job, run))
    show("annotations", annotated(job, run))
    show("shardings", facts.shardings(plan, ("state['params']", "batch")))
    show("collectives", facts.collectives(plan))
    show("proof", prove(run, mesh, screen, lambda fact: show("memory", fact)))
    lines: list[dict[str, Any]] = []
    started = time.perf_counter()
    with screen.progress(options.steps, "training") as bar:

        def on_step(line: dict[str, Any]) -> None:
            lines.append(line)
            bar(line["step"], line["loss"], line["tokens_per_second"] or 0.0)

        state = run.train(directory, on_step)
    show("training", training(lines, time.perf_counter() - started))
    with screen.working("translating, by flat beam search"):
        show("translations", translations(job, mesh, state["params"]))
    if as_json:
        print(json.dumps(out))
    return 0 if out["proof"]["holds"] else 1


# -- facts -------------------------------------------------------------------------------------------


def setting(job: Job, run: Training) -> facts.Facts:
    """The model, the mesh and the data."""
    c = job.config
    return {
        "mesh": dict(run.mesh.shape),
        "strategy": job.options.strategy,
        "layers": [c.encoder_layers, c.decoder_layers],
        "model": c.model,
        "hidden": c.hidden,
        "heads": c.heads,
        "experts": c.experts,
        "vocabularies": [c.source_vocab, c.target_vocab],
        "parameters": model.parameter_count(c),
        "languages": list(job.corpus.languages),
        "pairs": len(job.corpus.train),
        "batches": [list(s) for s in job.batches.shapes],
        "data": job.corpus.licences.splitlines(),
    }


def annotated(job: Job, run: Training) -> facts.Facts:
    """Every tensor that is annotated, and how few they are among the values of the step."""
    seen: dict[tuple[Any, ...], int] = {}

    def annotate(x: jax.Array, spec: Any) -> jax.Array:
        key = tuple(x.shape), tuple(spec)
        seen[key] = seen.get(key, 0) + 1
        return x

    step = make_step(run.options.step, annotate, run.axes)
    jaxpr = jax.make_jaxpr(step)(run.state, run.batch).jaxpr
    total = facts.count_values(jaxpr)
    count = sum(seen.values())
    tables = model.STRATEGIES[job.options.strategy], moe.STRATEGIES[job.options.strategy]
    return {
        "names": [*tables[0], *(tables[1] if job.config.experts else ())],
        "tensors": [
            {"shape": list(shape), "annotation": list(spec), "places": n}
            for (shape, spec), n in seen.items()
        ],
        "annotated": count,
        "values": total,
        "share": count / total,
    }


def prove(
    run: Training, mesh: Mesh, screen: Screen, memory: Callable[[facts.Facts], None]
) -> facts.Facts:
    """Some steps partitioned, on one device, and by jax.jit with the same annotations, compared."""
    options, steps = run.options.step, min(PROOF_STEPS, run.options.steps)

    def constrain(x: jax.Array, spec: Any) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    fresh = run.initial()
    start = whole_arrays(fresh)
    batch = {k: np.asarray(v) for k, v in run.data.on_devices(0, run.rows).items()}
    ways = {
        "one": jax.jit(make_step(options), donate_argnums=0),
        "shardwise": run.step,
        "jax.jit": jax.jit(make_step(options, constrain, run.axes), donate_argnums=0),
    }
    built: dict[str, Any] = {}
    ran: dict[str, Ran] = {}
    refused = ""
    for name, f in ways.items():
        try:
            with screen.working(f"compiling and running {steps} steps: {_TITLES[name]}"):
                abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
                built[name] = f.lower(run.state, abstract).compile()
                ran[name] = _run(f, fresh if name == "shardwise" else start, run, steps)
        except ValueError as e:  # what jax.jit says to sizes that do not divide
            if name != "jax.jit":
                raise
            refused = str(e).splitlines()[0]
    memory(facts.memory(run.plan, start, built["shardwise"], built["one"]))
    sides = {
        name: facts.Side(ran[name], hlo.wire_report(built[name].as_text()))
        if name in ran
        else facts.Side(None, None, refused)
        for name in ("shardwise", "jax.jit")
    }
    return facts.proof(ran["one"], sides)


_TITLES = {"one": "one device", "shardwise": "partitioned", "jax.jit": "jax.jit"}


def _run(f: Any, state: Any, run: Training, steps: int) -> Ran:
    losses, started = [], time.perf_counter()
    for number in range(steps):
        batch = run.data.on_devices(number, run.rows)
        if f is not run.step:
            batch = {k: np.asarray(v) for k, v in batch.items()}
        state, metrics = f(state, batch)
        losses.append(float(metrics["total"]))
    return Ran(losses, whole_arrays(state["params"]), time.perf_counter() - started)


def training(lines: Sequence[dict[str, Any]], seconds: float) -> facts.Facts:
    """Losses and overflow over the steps, and by language at the end."""
    tables = [line["languages"] for line in lines if "languages" in line]
    languages = {
        name: {
            "loss": row["nats"] / max(row["tokens"], 1),
            "overflow": row["overflow"] / row["routed"] if row["routed"] else None,
            "tokens": row["tokens"],
        }
        for name, row in (tables[-1] if tables else {}).items()
    }
    return {
        "losses": [line["loss"] for line in lines],
        "overflow": [line.get("overflow") for line in lines],
        "tokens per second": lines[-1]["tokens_per_second"] if lines else None,
        "waiting": lines[-1]["waiting"] if lines else None,
        "seconds": seconds,
        "languages": languages,
    }


def translations(job: Job, mesh: Mesh, params: Any) -> facts.Facts:
    """Some sentences of the test set: no target of it was ever trained on."""
    longest = max(job.options.lengths)[0] - 2
    short = [p for p in job.corpus.test if len(p.source.split()) * 3 <= longest]
    chosen = short[:: max(1, len(short) // SENTENCES)][:SENTENCES]
    found = job.translations(mesh, params, [p.source for p in chosen]) if chosen else []
    return {
        "beams": 4,
        "sentences": [
            {"language": p.language, "source": p.source, "translation": t, "reference": p.target}
            for p, t in zip(chosen, found, strict=True)
        ],
    }


# -- the screen --------------------------------------------------------------------------------------


class _Screen(Screen):
    def _setting(self, fact: facts.Facts) -> None:
        self.heading("A program for one device, on a mesh")
        mesh = " ".join(f"{k}={v}" for k, v in fact["mesh"].items())
        encoder, decoder = fact["layers"]
        experts = f"{fact['experts']} experts in every other layer" if fact["experts"] else "dense"
        self.console.print(
            f"Encoder-decoder Transformer: {encoder} + {decoder} layers, M {fact['model']}, "
            f"H {fact['hidden']}, {fact['heads']} heads, {experts}: "
            f"{fact['parameters']:,} parameters\n"
            f"mesh {mesh} ({math.prod(fact['mesh'].values())} virtual CPU devices), "
            f"strategy {fact['strategy']}\n"
            f"data: {fact['pairs']:,} pairs, {len(fact['languages'])} languages to English, "
            f"{fact['vocabularies'][0]} and {fact['vocabularies'][1]} subwords"
        )
        for line in fact["data"]:
            self.console.print(f"  {escape(line)}")

    def _annotations(self, fact: facts.Facts) -> None:
        self.heading("What was annotated")
        table = self.table("shape", "annotation", "places", right=("places",))
        for r in fact["tensors"]:
            add_row(table, dims(r["shape"]), dims(r["annotation"]), str(r["places"]))
        self.console.print(table)
        self.console.print(
            f"{fact['annotated']} annotations ({', '.join(fact['names'])}), "
            f"{fact['values']} values in the training step: {fact['share']:.1%}. "
            "All the others are completed."
        )

    def _training(self, fact: facts.Facts) -> None:
        self.heading("Training")
        if not fact["losses"]:
            self.console.print(
                "Nothing was left to train: the last checkpoint is of the last step."
            )
            return
        first, last = fact["losses"][0], fact["losses"][-1]
        speed = fact["tokens per second"]
        self.console.print(
            f"loss {first:.3f} → {last:.3f} nats a token, {fact['seconds']:.0f} s, "
            f"{speed or 0:,.0f} target tokens/s, {fact['waiting']:.1%} of the time waiting for data"
        )
        if fact["overflow"][-1] is not None:
            ends = [np.mean(fact["overflow"][s]) for s in (slice(0, 20), slice(-20, None))]
            self.console.print(
                f"overflow (tokens that no expert had room for): {ends[0]:.1%} at first, "
                f"{ends[1]:.1%} at last"
            )
        right = ("loss", "overflow", "tokens")
        table = self.table("language", *right, right=right)
        ranked = sorted(fact["languages"].items(), key=lambda item: -item[1]["tokens"])
        for name, r in ranked[:12]:
            lost = "-" if r["overflow"] is None else f"{r['overflow']:.1%}"
            add_row(table, name, f"{r['loss']:.2f}", lost, f"{r['tokens']:,.0f}")
        self.console.print(table)

    def _translations(self, fact: facts.Facts) -> None:
        self.heading(f"Translations of messages it has not seen ({fact['beams']} beams)")
        table = self.table("", "source", "translation", "reference")
        for r in fact["sentences"]:
            add_row(table, r["language"], r["source"], r["translation"], r["reference"])
        self.console.print(table)
