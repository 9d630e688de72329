"""The MNI152 template (T1, 1 mm) that nilearn ships, with its maps of grey and white matter.

There is one volume, an average of 152 brains, and it is mirror-symmetric: its left half is its right
half.  So what is held out is no hemisphere but a slab, the front of the brain, both sides of it: no
patch for training contains a voxel of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

CLASSES = ("rest", "grey matter", "white matter")
HELD_OUT = 0.25
"""Share of the brain's voxels in the slab that is held out."""


@dataclasses.dataclass(frozen=True)
class Brain:
    """One volume.

    Attributes:
      image: [D, H, W] float32 in [0, 1]; D left to right, H back to front, W bottom to top; 0 outside
        of the brain.
      target: [D, H, W, 3] float32, what each voxel is made of: CLASSES, adding up to 1.
      first: the index along H with which the held-out slab begins.
    """

    image: np.ndarray
    target: np.ndarray
    first: int

    @property
    def labels(self) -> np.ndarray:
        """[D, H, W] int32: the largest part of each voxel."""
        return np.argmax(self.target, axis=-1).astype(np.int32)

    @property
    def held_out(self) -> np.ndarray:
        """[1, H, 1] bool: the slab."""
        return (np.arange(self.image.shape[1]) >= self.first)[None, :, None]

    def noisy(self, sigma: float, seed: int = 0) -> Brain:
        """The same with noise on the image, inside of the brain."""
        noise = np.random.default_rng(seed).normal(0, sigma, self.image.shape).astype(np.float32)
        image = np.where(self.image > 0, np.clip(self.image + noise, 0, 1), 0)
        return dataclasses.replace(self, image=image)


def load() -> Brain:
    """The template, from the installed package: nothing is downloaded.

    Raises:
      SystemExit: nilearn is not installed; the message says what to install.
    """
    try:
        from nilearn import datasets
    except ImportError as e:
        raise SystemExit("nilearn is needed: pip install 'shardwise[brain]'") from e
    loaders = (
        datasets.load_mni152_template,
        datasets.load_mni152_gm_template,
        datasets.load_mni152_wm_template,
    )
    image, grey, white = (np.asarray(f(resolution=1).dataobj, np.float32) for f in loaders)
    both = np.clip(np.stack([grey, white], -1), 0, 1)
    rest = np.clip(1 - both.sum(-1, keepdims=True), 0, None)
    target = np.concatenate([rest, both], -1)
    target /= target.sum(-1, keepdims=True)
    along = (image > 0).sum(axis=(0, 2))
    first = int(np.searchsorted(np.cumsum(along), (1 - HELD_OUT) * along.sum()))
    return Brain(image, target, first)


def patches(
    brain: Brain, size: int, batch: int, steps: int, seed: int = 0, noise: float = 0.1
) -> Iterator[dict[str, np.ndarray]]:
    """Random cubes of `size` that lie behind the held-out slab, at least a tenth of each in the brain.

    Every other one has noise on it, of a deviation of up to `noise`, in the brain.

    Yields:
      {"image": [batch, size, size, size, 1], "target": [batch, size, size, size, 3]}, `steps` times.
    """
    rng = np.random.default_rng(seed)
    d, _, w = brain.image.shape
    ends = np.array([d, brain.first, w]) - size

    def cube() -> tuple[slice, ...]:
        while True:
            corner = rng.integers(0, ends + 1)
            at = tuple(slice(c, c + size) for c in corner)
            if (brain.image[at] > 0).mean() >= 0.1:
                return at

    def image(i: int, at: tuple[slice, ...]) -> np.ndarray:
        x = brain.image[at]
        if i % 2:
            added = rng.normal(0, rng.uniform(0, noise), x.shape)
            x = np.where(x > 0, np.clip(x + added, 0, 1), 0).astype(np.float32)
        return x[..., None]

    for _ in range(steps):
        cubes = [cube() for _ in range(batch)]
        yield {
            "image": np.stack([image(i, at) for i, at in enumerate(cubes)]),
            "target": np.stack([brain.target[at] for at in cubes]),
        }


def dice(predicted: np.ndarray, labels: np.ndarray, where: np.ndarray) -> dict[str, float]:
    """Dice coefficients of grey and white matter over the voxels `where` (broadcast to the volume)."""
    out = {}
    for k, name in enumerate(CLASSES[1:], start=1):
        a, b = (predicted == k) & where, (labels == k) & where
        out[name] = 2.0 * float((a & b).sum()) / max(1.0, float(a.sum() + b.sum()))
    return out


def by_intensity(brain: Brain) -> np.ndarray:
    """What intensity alone tells: [D, H, W] labels by the class most common at each of 256 levels.

    The levels' classes are learnt where the network learns, behind the slab: the mark to beat.
    """
    level = np.round(brain.image * 255).astype(np.int64)
    counts = np.zeros((256, len(CLASSES)))
    known = np.broadcast_to(~brain.held_out, level.shape)
    np.add.at(counts, (level[known], brain.labels[known]), 1)
    return np.argmax(counts, axis=1)[level].astype(np.int32)
