"""A Conformer learns to spell telephone prompts, its layers pipelined over virtual devices.

    python examples/speech/train.py --data speech/usr/share

The same step runs on one device and, partitioned by `sw.spmd`, on a mesh of stages x data; the first steps
are done by both, and their losses printed side by side.  Then comes the plan (what is sent, how often),
the training, and what the model makes of prompts it has not heard.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import pathlib
import time
from typing import Any

from shardwise.demo import devices


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--data", default="/usr/share", help="where the packages' files lie")
    p.add_argument("--steps", type=int, default=1500)
    p.add_argument("--minutes", type=float, default=0, help="stop training after so many")
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--seconds", type=float, default=2.4, help="of an utterance, at most")
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--model", type=int, default=64)
    p.add_argument("--rate", type=float, default=2e-3)
    p.add_argument("--stages", type=int, default=4, help="devices along the mesh's axis 'stage'")
    p.add_argument("--rounds", type=int, default=2, help="of the circular schedule; 1: GPipe")
    p.add_argument("--microbatches", type=int, default=4)
    p.add_argument("--devices", type=int, default=8, help="virtual devices: stages x data")
    p.add_argument("--prove", type=int, default=3, help="steps done on one device as well")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--log", type=pathlib.Path, help="losses and results, a JSON object a line")
    p.add_argument("--save", type=pathlib.Path, help="the parameters, .npz")
    return p.parse_args()


EVERY = 25


def main() -> None:
    args = arguments()
    devices.start(args.devices)  # before JAX: the virtual devices
    import jax
    import numpy as np
    import prompts

    import shardwise as sw
    from shardwise.models import conformer
    from shardwise.pipeline import Schedule

    def say(**record: Any) -> None:
        print(json.dumps(record), flush=True)
        if args.log:
            with args.log.open("a") as f:
                f.write(json.dumps(record) + "\n")

    frames, width = round(100 * args.seconds), round(20 * args.seconds)
    training, held_out = prompts.split(prompts.read(args.data, args.seconds))
    seconds = sum(len(p.frames) for p in training) / 100
    say(prompts=len(training), seconds=round(seconds), held_out=len(held_out))
    schedule = "circular" if args.rounds > 1 else "gpipe"
    pipelined = conformer.Pipelined(
        "stage", args.stages, args.microbatches, schedule, args.rounds, args.rounds > 1
    )
    config = conformer.ConformerConfig(
        layers=args.layers, model=args.model, heads=4, kernel=15, features=prompts.BANDS,
        vocab=1 + len(prompts.CHARACTERS), channels=32, dropout=0.1, pipelined=pipelined,
    )  # fmt: skip
    mesh = sw.device_mesh({"stage": args.stages, "data": args.devices // args.stages})
    optimizer = adam(args.rate, args.steps)
    params = conformer.init(config, jax.random.key(args.seed))
    state = {"params": params, "optimizer": optimizer.init(params)}
    shard = conformer.sharder(sw.annotate, "data", ("data",))
    step = functools.partial(training_step, config, optimizer, shard)
    feed = prompts.batches(training, args.batch, frames, width, args.seed)
    how = Schedule(args.stages, args.microbatches, args.rounds)
    say(
        parameters=conformer.parameter_count(config), mesh=dict(mesh.shape), schedule=schedule,
        ticks=how.ticks, bubbles=round(float(how.bubble_ratio), 3),
    )  # fmt: skip

    partitioned = sw.spmd(step, mesh=mesh, donate_argnums=(0,))
    key = jax.random.key(args.seed + 1)
    first = [next(feed) for _ in range(args.prove)]
    say(plan=plan_of(partitioned, state, first[0] if first else next(feed), key))
    alone, single = jax.jit(step), state
    proof = []
    for i, batch in enumerate(first):
        single, value = alone(single, batch, jax.random.fold_in(key, i))
        proof.append(float(value))
    del alone, single
    begin = time.perf_counter()
    for i in range(args.steps):
        batch = first[i] if i < len(first) else next(feed)
        state, value = partitioned(state, batch, jax.random.fold_in(key, i))
        if i < len(proof):
            say(step=i, loss=float(value), on_one_device=proof[i],
                difference=abs(float(value) - proof[i]) / proof[i])  # fmt: skip
        elif (i + 1) % EVERY == 0:
            say(step=i + 1, loss=round(float(value), 4), seconds=round(time.perf_counter() - begin))
        if args.minutes and time.perf_counter() - begin > 60 * args.minutes:
            say(stopped_after=i + 1)
            break
    params = jax.tree.map(np.asarray, state["params"])
    if args.save:
        paths = jax.tree_util.tree_leaves_with_path(params)
        np.savez(args.save, **{jax.tree_util.keystr(path): x for path, x in paths})
    params = conformer.model_order(config, params)
    for name, part in (("training", training[::10]), ("held out", held_out)):
        say(on=name, **score(config, params, part, frames, width))


def adam(rate: float, steps: int) -> Any:
    """Adam with weight decay; a tenth of the steps up to the rate, then down to zero on a cosine."""
    import optax

    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(steps // 10, 1), steps)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=1e-2)
    )


def training_step(config: Any, optimizer: Any, shard: Any, state: Any, batch: Any, key: Any) -> Any:
    """One step: the new state, and the loss in nats a character."""
    import jax
    import optax

    from shardwise.models import conformer

    def loss(params: Any) -> Any:
        return conformer.loss(config, params, batch, shard=shard, key=key)[0]

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, rest = optimizer.update(grads, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": rest}, value


def plan_of(step: Any, *args: Any) -> dict[str, Any]:
    """What a step sends: kind over axes -> how often, how many kB in all."""
    plan = step.plan(*args)
    sent: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for c in plan.collectives:
        entry = sent[f"{c.kind} over {', '.join(c.axes)}"]
        entry[0] += c.count or 1
        entry[1] += c.bytes * (c.count or 1) / 1e3
    table = {k: {"times": n, "kB": round(kb)} for k, (n, kb) in sorted(sent.items())}
    return {**table, "fallbacks": len(plan.fallbacks)}


def score(config: Any, params: Any, held: Any, frames: int, width: int) -> dict[str, Any]:
    """Share of wrong characters, and what the model spells: greedy, on one device, unpipelined."""
    import dataclasses

    import jax
    import numpy as np
    import prompts

    from shardwise.models import conformer

    plain = dataclasses.replace(config, pipelined=None)
    encode = jax.jit(lambda p, f, n: conformer.encode(plain, p, f, n, train=False)[:2])
    wrong = total = 0
    examples = []
    for at in range(0, len(held), 16):
        some = held[at : at + 16]
        nothing = [(np.zeros((1, prompts.BANDS), np.float32), "")] * (16 - len(some))
        batch = prompts.padded([(p.frames, p.text) for p in some] + nothing, frames, width)
        scores, valid = encode(params, batch["features"], batch["frames"])
        for p, best, v in zip(some, np.argmax(scores, -1), np.asarray(valid), strict=False):
            said = prompts.spell(collapsed(best[v]))
            wrong, total = wrong + prompts.edits(p.text, said), total + len(p.text)
            examples.append([p.text, said])
    return {
        "prompts": len(held),
        "wrong characters": round(wrong / total, 3),
        "examples": examples[:8],
    }


def collapsed(ids: Any) -> list[int]:
    """CTC's path without repetitions and blanks."""
    return [int(b) for a, b in zip([0, *ids], ids, strict=False) if b != a and b != 0]


if __name__ == "__main__":
    main()
