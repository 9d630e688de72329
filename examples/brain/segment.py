"""The whole volume through the U-Net in one piece, split in space over eight devices, and on one.

    python examples/brain/segment.py brain-run      # with the parameters that train.py left there

Says whether both give the same, what each device holds, what it sends and for what, and how good the
segmentation is; draws it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import data
import numpy as np
import picture

from shardwise.demo import devices

DEVICES = 8
NOISE = 0.1
"""Standard deviation of the noise that makes the template, an average, more like one scan."""
MIB = 2.0**20


def start() -> None:
    """Start JAX with eight CPU devices, which may wait long for each other where cores are few."""
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=3600"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {patience}"
    devices.start(DEVICES)


def network(config: Any, mesh: Any | None) -> Any:
    """(parameters, image [1, D, H, W, 1]) -> logits [1, D, H, W, K], compiled for one device or a mesh.

    Split along W, bottom to top: of the three, 189 voxels need the least padding over eight devices.
    """
    import jax

    import shardwise as sw
    from shardwise.models import unet

    if mesh is None:
        return jax.jit(functools.partial(unet.logits, config))
    shard = unet.sharder(sw.annotate, "last", ("", "y"))
    return sw.spmd(functools.partial(unet.logits, config, shard=shard), mesh=mesh)


def memory(f: Any, params: Any, image: Any) -> dict[str, float]:
    """MiB of one device: arguments, results, and temporaries as the compiler allocates them."""
    m = f.lower(params, image).compile().memory_analysis()
    return {
        "arguments MiB": m.argument_size_in_bytes / MIB,
        "result MiB": m.output_size_in_bytes / MIB,
        "temporaries MiB": m.temp_size_in_bytes / MIB,
    }


def sent(plan: Any) -> dict[str, Any]:
    """What the plan says is sent: by kind, the rows of halos, and the largest piece."""
    kinds: dict[str, float] = {}
    for c in plan.collectives:
        kinds[c.kind] = kinds.get(c.kind, 0) + c.total_bytes
    largest = max(plan.collectives, key=lambda c: c.bytes, default=None)
    return {
        "MiB sent, by kind": {k: round(v / MIB, 3) for k, v in kinds.items()},
        "messages": sum(c.count for c in plan.collectives),
        "largest piece": f"{largest.dtype}{list(largest.shape)}" if largest else "nothing",
        "fallbacks": [str(f) for f in plan.fallbacks],
    }


def timed(f: Any, *args: Any) -> tuple[np.ndarray, float]:
    start = time.perf_counter()
    out = np.asarray(f(*args))
    return out, time.perf_counter() - start


def run(brain: data.Brain, config: Any, params: Any, out: Path) -> dict[str, Any]:
    """Segment the volume both ways; prints a report and leaves it, and a picture, in `out`."""
    from shardwise.mesh import device_mesh

    image = brain.image[None, ..., None]
    whole, split = network(config, None), network(config, device_mesh({"y": DEVICES}))
    report: dict[str, Any] = {}

    def found(**facts: Any) -> None:
        """Shown and kept as soon as they are known: the rest takes minutes."""
        named = {k.replace("_", " "): v for k, v in facts.items()}
        print(json.dumps(named, indent=1), flush=True)
        report.update(named)
        (out / "report.json").write_text(json.dumps(report, indent=1))

    found(volume=list(brain.image.shape), plan=sent(split.plan(params, image)))
    found(
        memory_of_one_device=memory(whole, params, image),
        memory_of_each_of_eight=memory(split, params, image),
    )
    eight, seconds = timed(split, params, image)
    predicted = np.argmax(eight[0], -1)
    found(seconds_on_eight=seconds, Dice=quality(brain, predicted))
    picture.draw(brain, predicted, out / "segmentation.png")
    one, seconds = timed(whole, params, image)
    found(
        seconds_on_one=seconds,
        largest_logit=float(np.abs(one).max()),
        largest_difference=float(np.abs(one - eight).max()),
        voxels_labelled_otherwise=int((predicted != np.argmax(one[0], -1)).sum()),
    )
    noisy = brain.noisy(NOISE)
    of_noisy, _ = timed(split, params, noisy.image[None, ..., None])
    found(noise=NOISE, Dice_with_noise=quality(noisy, np.argmax(of_noisy[0], -1)))
    return report


def quality(brain: data.Brain, predicted: np.ndarray) -> dict[str, Any]:
    """Dice of the network, and of intensity alone, in the held-out slab and behind it."""
    labels, held_out, simple = brain.labels, brain.held_out, data.by_intensity(brain)
    return {
        who: {
            "held out": data.dice(p, labels, held_out),
            "where it was trained": data.dice(p, labels, ~held_out),
        }
        for who, p in (("network", predicted), ("intensity alone", simple))
    }


def load(folder: Path) -> tuple[Any, Any]:
    """The configuration and parameters that `train.py` left in a folder."""
    from shardwise.models import unet

    setting = json.loads((folder / "train.json").read_text())
    config = unet.UNetConfig(
        classes=len(data.CLASSES), width=setting["width"], levels=setting["levels"], norm=None
    )
    params: Any = {}
    with np.load(folder / "params.npz") as file:
        for name in file.files:
            block, leaf = name.split(".")
            params.setdefault(block, {})[leaf] = file[name]
    return config, params


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/brain/segment.py FOLDER  (that train.py wrote)")
    folder = Path(sys.argv[1])
    start()
    config, params = load(folder)
    run(data.load(), config, params, folder)


if __name__ == "__main__":
    main()
