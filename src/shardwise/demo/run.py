"""The demo, start to end: plan, show, train, prove."""

from __future__ import annotations

import json
from typing import Any

from shardwise import hlo
from shardwise.demo import data, facts, train
from shardwise.demo.options import DemoOptions
from shardwise.demo.report import Screen
from shardwise.mesh import device_mesh
from shardwise.nn import transformer


def demo(options: DemoOptions, as_json: bool = False) -> int:
    """Run the demo; returns the exit status: 0, or 1 when the numbers are not the same.

    Raises:
      ShardingError: when the mesh asks for more devices than there are.
      FileNotFoundError: when the interpreter has no standard library sources.
    """
    screen = Screen(quiet=as_json)
    out: dict[str, Any] = {}

    def show(name: str, fact: facts.Facts) -> None:
        out[name] = fact
        screen.show(name, fact)

    mesh = device_mesh(options.mesh)
    corpus = data.standard_library()
    arguments = train.abstract_arguments(options)
    show("setting", facts.setting(options, corpus, arguments[0]))
    as_written = train.make_step(options, transformer.identity)
    show("annotations", facts.annotated(options, as_written, arguments))

    with screen.working("completing and partitioning"):
        step = train.partitioned(options, mesh)
        plan = step.plan(*arguments)
    show("shardings", facts.shardings(plan))
    show("collectives", facts.collectives(plan))

    with screen.working("compiling: for the mesh, for one device, and jax.jit's way"):
        whole, by_jax = train.one_device(options), train.by_jax(options, mesh)
        built = {
            name: f.lower(*arguments).compile()
            for name, f in (("shardwise", step), ("one", whole), ("jax.jit", by_jax))
        }
    state = train.initial_state(options)
    show("memory", facts.memory(plan, state, built["shardwise"], built["one"]))

    def batches() -> Any:
        return corpus.batches(options.batch, options.seq, options.seed)

    with screen.progress(options.steps, "training on the mesh") as on_step:
        ours = train.train(step, options, batches(), on_step)
    show("training", facts.training(ours, options))
    with screen.progress(options.steps, "the same on one device") as on_step:
        one = train.train(whole, options, batches(), on_step)
    with screen.progress(options.steps, "the same by jax.jit") as on_step:
        jit = train.train(by_jax, options, batches(), on_step)
    wires = {s: hlo.wire_report(built[s].as_text()) for s in ("shardwise", "jax.jit")}
    show("proof", facts.proof(ours, one, jit, wires))
    if as_json:
        print(json.dumps(out))
    return 0 if out["proof"]["holds"] else 1
