"""What the demo shows, as plain data: the screen prints it, `--json` dumps it."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from shardwise import hlo
from shardwise.demo.data import Corpus
from shardwise.demo.options import DemoOptions
from shardwise.demo.train import State, Training, relative_difference
from shardwise.nn import transformer

Facts = dict[str, Any]

# What a float32 sum in another order may change.  Adam divides by the root of a second moment,
# which magnifies it where that is small: parameters agree less closely than losses.
LOSS_TOLERANCE, PARAMETER_TOLERANCE = 1e-4, 1e-2


def setting(options: DemoOptions, corpus: Corpus, params: Any) -> Facts:
    """The model, the mesh and the text."""
    model = options.model
    return {
        "mesh": options.mesh,
        "strategy": options.strategy,
        "layers": model.layers,
        "model": model.model,
        "hidden": model.hidden,
        "heads": model.heads,
        "vocab": model.vocab,
        "batch": options.batch,
        "seq": options.seq,
        "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(params)),
        "corpus": {"bytes": len(corpus.tokens), "files": corpus.files, "folder": corpus.source},
    }


def annotated(options: DemoOptions, step: Any, arguments: Any) -> Facts:
    """The annotated tensors, and how few they are among all values of the training step.

    The values are those of the step's jaxpr, the body of the loop over layers counted once, and so
    are its seven annotations.
    """
    model, batch, seq = options.model, options.batch, options.seq
    n, d = model.heads, model.depth_per_head
    shapes = transformer.layer_shapes(model) | {
        "bsm": (batch, seq, model.model),
        "bsnd": (3, batch, seq, n, d),
        "bsh": (batch, seq, model.hidden),
        "embedding": (model.vocab, model.model),
        "logits": (batch, seq, model.vocab),
    }
    per_layer = [(name, "each layer") for name in transformer.LAYER_TENSORS]
    once = [("embedding", "once"), ("bsm", "embedding's output"), ("logits", "once")]
    rows = [
        {
            "tensor": name,
            "shape": list(shapes[name]),
            "annotation": list(transformer.spec(options.strategy, name, options.axes)),
            "where": where,
        }
        for name, where in per_layer + once
    ]
    total = count_values(jax.make_jaxpr(step)(*arguments).jaxpr)
    return {"tensors": rows, "annotated": len(rows), "values": total, "share": len(rows) / total}


def count_values(jaxpr: Any) -> int:
    """Arguments and results of equations; a call counts as what it calls, a loop's body once."""

    def results(jaxpr: Any) -> int:
        count = 0
        for eqn in jaxpr.eqns:
            bodies = [b for p in eqn.params.values() for b in _bodies(p)]
            inlined = bool(bodies) and eqn.primitive.name not in ("scan", "while", "cond")
            count += (0 if inlined else len(eqn.outvars)) + sum(map(results, bodies))
        return count

    return len(jaxpr.invars) + results(jaxpr)


def _bodies(param: Any) -> list[Any]:
    params = param if isinstance(param, tuple | list) else (param,)
    inner = [getattr(p, "jaxpr", p) for p in params]
    return [b for b in inner if hasattr(b, "eqns")]


# Operations whose results are worth a line of the digest; the others follow their operands.
_DIGEST = ("dot_general", "annotation", "reduce_max", "reduce_sum", "exp")


def shardings(plan: Any, shown: tuple[str, ...] = ("params", "tokens")) -> Facts:
    """A digest of the completed shardings: the parameters, and the forward pass of one layer.

    Args:
      shown: what the names of the arguments that are shown begin with.
    """
    leaves = zip(plan.names, plan.in_layouts, strict=True)
    arguments = [
        {"name": name, "shape": list(l.shape), "sharding": l.sharding.text(plan.axes)}
        for name, l in leaves
        if name.startswith(shown)
    ]
    layer = next((e.bodies[0] for e in plan.body.eqns if e.name == "scan"), plan.body)
    values = [
        {
            "op": eqn.name,
            "shape": list(v.shape),
            "sharding": plan.completion.sharding(v).text(plan.axes),
            "from": "annotation" if v in plan.completion.annotated else "completed",
            "source": source_of(eqn),
        }
        for eqn in flat(layer)
        if eqn.name in _DIGEST
        for v in eqn.outvars
        if v.rank > 1
    ]
    split = sum(any(axes) for axes in plan.completion.axes.values())
    return {"arguments": arguments, "layer": values, "split values": split}


def flat(body: Any) -> Iterator[Any]:
    """Equations in program order, those of bodies in the place of what holds them."""
    for eqn in body.eqns:
        if eqn.bodies:
            for inner in eqn.bodies:
                yield from flat(inner)
        else:
            yield eqn


def source_of(eqn: Any) -> str:
    """`transformer.py:210`."""
    return Path(eqn.source).name


def collectives(plan: Any) -> Facts:
    """The plan's collectives, alike ones together, those that send most first."""
    groups: dict[tuple[Any, ...], list[Any]] = collections.defaultdict(list)
    for c in plan.collectives:
        groups[c.kind, tuple(c.axes), c.bytes, c.source, str(c.reason)].append(c)
    rows = [
        {
            "kind": kind,
            "axes": list(axes),
            "group": same[0].group_size,
            "bytes": size,
            "times": sum(c.count for c in same),
            "total": size * sum(c.count for c in same),
            "op": same[0].op,
            "source": source,
            "reason": reason,
        }
        for (kind, axes, size, source, reason), same in groups.items()
    ]
    rows.sort(key=lambda r: -r["total"])
    return {
        "rows": rows,
        "bytes": plan.comm_bytes,
        "fallbacks": [str(f) for f in plan.fallbacks],
    }


def memory(plan: Any, state: State, sharded: Any, whole: Any) -> Facts:
    """Bytes of one device, partitioned and not: the plan's figure and the compiler's.

    Args:
      sharded, whole: the compiled programs.
    """
    kept = sum(p.nbytes for p in jax.tree.leaves(state))
    ours, theirs = sharded.memory_analysis(), whole.memory_analysis()
    return {
        "parameters and optimizer": {"sharded": _kept(plan, state), "whole": kept},
        "temporary": {"sharded": ours.temp_size_in_bytes, "whole": theirs.temp_size_in_bytes},
        "all": {"sharded": _held(ours), "whole": _held(theirs)},
        "planned peak": plan.peak_memory,
    }


def _held(m: Any) -> int:
    arguments = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return arguments + m.temp_size_in_bytes


def _kept(plan: Any, state: State) -> int:
    """Bytes of one device's share of the state, from where the plan puts the arguments."""
    leaves = jax.tree.leaves(state)
    blocks = [layout.local_shape(plan.axes) for layout in plan.in_layouts[: len(leaves)]]
    return sum(math.prod(block) * x.dtype.itemsize for x, block in zip(leaves, blocks, strict=True))


def training(run: Training, options: DemoOptions) -> Facts:
    return {
        "losses": run.losses,
        "seconds": run.seconds,
        "tokens per second": run.tokens_per_second(options),
    }


@dataclasses.dataclass(frozen=True)
class Side:
    """One partitioner's run and compiled program, or why it refused."""

    run: Training | None
    wire: hlo.WireReport | None
    refused: str = ""


def proof(one: Training, sides: dict[str, Side]) -> Facts:
    """Equal to the one-device run `one`?  And what each partitioner's compiled program sends.

    Args:
      sides: "shardwise" and "jax.jit".
    """
    out = {name: _compared(side, one) for name, side in sides.items()}
    ours, theirs = out["shardwise"], out["jax.jit"]
    return {
        "steps": len(one.losses),
        "sides": out,
        "tolerance": {"loss": LOSS_TOLERANCE, "parameters": PARAMETER_TOLERANCE},
        "holds": ours["loss"] <= LOSS_TOLERANCE and ours["parameters"] <= PARAMETER_TOLERANCE,
        "ratio": ours["bytes"] / theirs["bytes"] if theirs.get("bytes") else None,
    }


def _compared(side: Side, one: Training) -> Facts:
    """Largest relative differences of a run to the one-device run, and bytes on the wire a step."""
    if side.run is None or side.wire is None:
        return {"refused": side.refused}
    return {
        "loss": relative_difference(side.run.losses, one.losses),
        "parameters": relative_difference(side.run.params, one.params),
        "bytes": side.wire.bytes,
        "by kind": side.wire.by_kind(),
    }
