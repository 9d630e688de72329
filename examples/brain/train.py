"""Grey and white matter in the MNI152 template by a 3D U-Net: trained on cubes, run on the volume whole.

    pip install 'shardwise[brain]'
    python examples/brain/train.py                  # some minutes on two cores; nothing is downloaded

Eight virtual CPU devices.  Training splits the batch over x=4 and the cubes' first dim over y=2; the
volume of 197 x 233 x 189 is then split over all eight (`segment.py`).  Both take one annotation, the
image's, of the same strategy, "spatial".
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import data
import numpy as np
import segment

TRAIN_MESH = {"x": 4, "y": 2}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=4, help="cubes of a step")
    parser.add_argument("--patch", type=int, default=32, help="size of a cube")
    parser.add_argument("--rate", type=float, default=3e-3, help="Adam's, at the start")
    parser.add_argument("--width", type=int, default=8, help="channels of the first level")
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("brain-run"), help="folder for results")
    parser.add_argument("--train-only", action="store_true", help="leave out the whole volume")
    return parser.parse_args()


def trained(brain: data.Brain, config: Any, args: argparse.Namespace) -> tuple[Any, list[float]]:
    """Parameters after `args.steps` steps on the mesh, and the loss of every step."""
    import jax
    import optax

    import shardwise as sw
    from shardwise.mesh import device_mesh
    from shardwise.models import unet

    optimizer = optax.adam(optax.cosine_decay_schedule(args.rate, args.steps))
    shard = unet.sharder(sw.annotate, "spatial", ("x", "y"))
    objective = functools.partial(unet.loss, config, shard=shard)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.value_and_grad(objective)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    step = sw.spmd(step, mesh=device_mesh(TRAIN_MESH), donate_argnums=(0, 1))
    params = jax.jit(unet.init, static_argnums=0)(config, jax.random.key(args.seed))
    state = optimizer.init(params)
    losses: list[float] = []
    start = time.perf_counter()
    cubes = data.patches(brain, args.patch, args.batch, args.steps, args.seed)
    for i, batch in enumerate(cubes, start=1):
        params, state, value = step(params, state, batch)
        losses.append(float(value))
        if i == 1 or i % 10 == 0:
            took = time.perf_counter() - start
            print(f"step {i:4}  loss {np.mean(losses[-10:]):.4f}  {took:.0f} s", flush=True)
    return jax.tree.map(np.asarray, params), losses


def main() -> None:
    args = arguments()
    segment.start()
    from shardwise.models import unet

    config = unet.UNetConfig(
        classes=len(data.CLASSES), width=args.width, levels=args.levels, norm=None
    )
    brain = data.load()
    params, losses = trained(brain, config, args)
    args.out.mkdir(parents=True, exist_ok=True)
    flat = {f"{block}.{name}": w for block, p in params.items() for name, w in p.items()}
    np.savez(args.out / "params.npz", **flat)
    setting = {"width": args.width, "levels": args.levels, "losses": losses}
    (args.out / "train.json").write_text(json.dumps(setting))
    if not args.train_only:
        segment.run(brain, config, params, args.out)


if __name__ == "__main__":
    main()
