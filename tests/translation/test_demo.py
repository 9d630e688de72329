"""The facts and the screen of `shardwise demo --job translation`, on a job of a moment."""

from __future__ import annotations

import dataclasses
import io

import pytest
import tiny
from rich.console import Console

from shardwise import cli
from shardwise.demo import facts
from shardwise.mesh import device_mesh
from shardwise.translation import demo
from shardwise.translation.train import Training, TrainOptions


def screen():
    out = demo._Screen()
    out.console = Console(file=io.StringIO(), width=150, highlight=False)
    return out


def test_the_proof():
    """Partitioned, on one device and by jax.jit: the same losses; bytes and memory of each."""
    step = dataclasses.replace(tiny.STEP, model=dataclasses.replace(tiny.MODEL, dropout=0.0))
    mesh = device_mesh({"x": 4})
    run = Training(TrainOptions(step, steps=3), tiny.Numbers(), mesh)
    shown, memory = screen(), []
    fact = demo.prove(run, mesh, shown, memory.append)
    assert fact["steps"] == 3 and fact["holds"]
    assert fact["sides"]["shardwise"]["by kind"]["all-to-all"] > 0
    assert fact["sides"]["jax.jit"]["loss"] < 1e-3
    (held,) = memory
    kept = held["parameters and optimizer"]
    assert 0 < kept["sharded"] < kept["whole"]
    shown.show("memory", held)
    shown.show("proof", fact)
    shown.show("collectives", facts.collectives(run.plan))
    shown.show("shardings", facts.shardings(run.plan, ("state['params']", "batch")))
    text = shown.console.file.getvalue()
    assert "The same numbers as on one device." in text
    assert "state['params']['encoder'][0]['moe']['w_in']" in text


def test_training_and_translations():
    lines = [
        {"step": 1, "loss": 3.0, "overflow": 0.2, "tokens_per_second": None, "waiting": 0.0},
        {"step": 2, "loss": 2.0, "overflow": 0.1, "tokens_per_second": 9.0, "waiting": 0.01,
         "languages": {
             "de": {"nats": 30.0, "tokens": 10.0, "overflow": 4.0, "routed": 16.0},
             "is": {"nats": 5.0, "tokens": 2.0, "overflow": 0.0, "routed": 0.0},
         }},
    ]  # fmt: skip
    fact = demo.training(lines, 1.5)
    assert fact["languages"]["de"] == {"loss": 3.0, "overflow": 0.25, "tokens": 10.0}
    assert fact["languages"]["is"]["overflow"] is None
    shown = screen()
    shown.show("training", fact)
    shown.show("training", demo.training([], 0.1))
    shown.show(
        "translations",
        {"beams": 4, "sentences": [
            {"language": "de", "source": "[b]Ja", "translation": "Yes", "reference": "Yes"}
        ]},
    )  # fmt: skip
    text = shown.console.file.getvalue()
    assert "loss 3.000 → 2.000 nats a token" in text and "25.0%" in text and "[b]Ja" in text
    assert "Nothing was left to train" in text


def test_options():
    parser = cli._translation_parser()
    words = (
        "demo --job translation --experts 4 --no-random-routing --lengths 8x6,12x8 "
        "--capacity-factor none --languages de,is --mesh x=4"
    )
    args = parser.parse_args(words.split(" "))
    options, axes = cli.translation_options(args)
    assert axes == {"x": 4}
    assert (options.experts, options.random_routing, options.aux_loss) == (4, False, True)
    assert options.lengths == ((8, 6), (12, 8)) and options.capacity_factor is None
    assert options.languages == ("de", "is") and options.dropout == 0.0
    assert cli._job(["demo", "--job", "translation"]) == "translation"
    assert cli._job(["demo", "--steps", "3"]) == "language"
    with pytest.raises(ValueError, match="a mesh of 16 devices needs --devices 16, not 8"):
        cli.translation_options(parser.parse_args(["demo", "--mesh", "x=16"]))
