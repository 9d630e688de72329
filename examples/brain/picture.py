"""Slices of the volume: the image, what the maps say, what the network says."""

from __future__ import annotations

from pathlib import Path

import data
import numpy as np

_GREY, _WHITE, _WRONG = (230, 159, 0), (86, 180, 233), (213, 0, 60)


def coloured(image: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """[h, w] image in grey with grey and white matter in colours: [h, w, 3] uint8."""
    base = np.repeat((image * 255)[..., None], 3, -1)
    for k, colour in ((1, _GREY), (2, _WHITE)):
        base[labels == k] = 0.4 * base[labels == k] + 0.6 * np.array(colour)
    return base.astype(np.uint8)


def draw(brain: data.Brain, predicted: np.ndarray, path: Path) -> None:
    """Two slices, each: image, maps, network, and where those differ.

    A horizontal slice shows the held-out slab at its top, beyond the line; the other lies in it.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    labels = brain.labels
    slices = (
        ("horizontal", (slice(None), slice(None), 90), brain.first),
        ("in the held-out slab", (slice(None), brain.first + 15, slice(None)), None),
    )
    figure, axes = pyplot.subplots(2, 4, figsize=(10, 5.6), facecolor="white")
    for row, (name, at, line) in zip(axes, slices, strict=True):
        image, want, got = (v[at].T[::-1] for v in (brain.image, labels, predicted))
        wrong = coloured(image, np.zeros_like(want))
        wrong[want != got] = _WRONG
        panels = (image, coloured(image, want), coloured(image, got), wrong)
        titles = (name, "tissue maps", "3D U-Net", "where they differ")
        for axis, panel, title in zip(row, panels, titles, strict=True):
            axis.imshow(panel, cmap="gray", interpolation="nearest")
            axis.set_title(title, fontsize=9)
            axis.axis("off")
            if line is not None:
                axis.axhline(image.shape[0] - 1 - line, color="lime", linewidth=0.8)
    figure.tight_layout(pad=0.4)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
