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

    with screen.working("compiling, for the mesh and for one device"):
        whole = train.one_device(options)
        built, built_whole = (f.lower(*arguments).compile() for f in (step, whole))
    state = train.initial_state(options)
    show("memory", facts.memory(plan, state, built, built_whole))

    def trained(what: str, f: Any) -> train.Training:
        batches = corpus.batches(options.batch, options.seq, options.seed)
        with screen.progress(options.steps, what) as on_step:
            return train.train(f, options, batches, on_step)

    ours = trained("training on the mesh", step)
    show("training", facts.training(ours, options))
    one = trained("the same on one device", whole)
    sides = {"shardwise": facts.Side(ours, hlo.wire_report(built.as_text()))}
    try:
        by_jax = train.by_jax(options, mesh)
        wire = hlo.wire_report(by_jax.lower(*arguments).compile().as_text())
        sides["jax.jit"] = facts.Side(trained("the same by jax.jit", by_jax), wire)
    except ValueError as e:  # what jax.jit says to sizes that do not divide
        sides["jax.jit"] = facts.Side(None, None, str(e).splitlines()[0])
    show("proof", facts.proof(one, sides))
    if as_json:
        print(json.dumps(out))
    return 0 if out["proof"]["holds"] else 1
