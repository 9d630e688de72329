"""A job small enough for a test: sentences of numbers, whose translation is each number plus one.

python tiny.py DIRECTORY STEPS CHECKPOINT_EVERY [SECONDS A BATCH]
"""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import numpy as np

from shardwise.mesh import device_mesh
from shardwise.nn.encoder_decoder import TranslationConfig
from shardwise.translation import distributed
from shardwise.translation.batches import Shape
from shardwise.translation.optimizer import OptimizerOptions
from shardwise.translation.step import StepOptions
from shardwise.translation.train import Training, TrainOptions

MODEL = TranslationConfig(
    encoder_layers=1, decoder_layers=1, moe_every=1, model=16, hidden=16, heads=2, source_vocab=24,
    target_vocab=24, experts=4, groups=4, dropout=0.1,
)  # fmt: skip
STEP = StepOptions(
    MODEL, OptimizerOptions(factor_from=8, warmup=50), languages=3, languages_every=5
)


class Numbers:
    """Batches that are a function of the step."""

    shapes = (Shape(8, 6, 6),)

    def __init__(self, seconds: float = 0.0, last: int | None = None) -> None:
        self.seconds, self.last = seconds, last

    def batch(self, step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(step)
        source = rng.integers(3, 20, (8, 6)).astype(np.int32)
        source[:, 4:] *= rng.integers(0, 2, (8, 1))
        target = np.where(source > 0, source + 1, 0)
        target[:, 0] = 1
        language = rng.integers(0, 3, 8).astype(np.int32)
        return {"source": source, "target": target, "language": language}

    def on_devices(self, step: int, sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
        time.sleep(self.seconds)
        if step == self.last and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return {
            k: jax.make_array_from_callback(v.shape, sharding, lambda i, v=v: v[i])
            for k, v in self.batch(step).items()
        }


def training(
    steps: int, every: int, mesh: dict[str, int] | None = None, data: Numbers | None = None
):
    options = TrainOptions(STEP, steps=steps, checkpoint_every=every, keep=2, names=("a", "b", "c"))
    return Training(options, data or Numbers(), device_mesh(mesh or {"x": 4}))


if __name__ == "__main__":
    distributed.joined()
    directory, steps, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    seconds = float((sys.argv[4:] or ["0"])[0])
    last = int(sys.argv[5]) if sys.argv[5:] else None
    training(steps, every, data=Numbers(seconds, last)).train(directory)
