"""The brain example's data: what is held out stays held out, and the marks are what they say."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parent.parent.parent / "examples" / "brain"


@pytest.fixture(scope="module")
def data():
    sys.path.insert(0, str(FOLDER))
    try:
        import data

        yield data
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("data", None)


@pytest.fixture
def brain(data):
    """A ball whose core is white matter; the value of a voxel is its distance to the back."""
    d, h, w = np.mgrid[0:20, 0:24, 0:18]
    radius = np.sqrt((d - 10) ** 2 + (h - 12) ** 2 + (w - 9) ** 2)
    labels = (radius < 9).astype(int) + (radius < 5)
    image = np.where(radius < 9, (h + 1) / 25 * 0.5 + 0.25 * labels, 0).astype(np.float32)
    return data.Brain(image, np.eye(3, dtype=np.float32)[labels], 16)


def test_no_cube_holds_a_voxel_of_the_slab(data, brain) -> None:
    behind = brain.image.copy()
    behind[:, brain.first :] = np.nan
    cubes = list(data.patches(data.Brain(behind, brain.target, 16), 8, 3, 40, noise=0.0))
    assert len(cubes) == 40
    assert all(c["image"].shape == (3, 8, 8, 8, 1) for c in cubes)
    assert all(c["target"].shape == (3, 8, 8, 8, 3) for c in cubes)
    assert all(np.isfinite(c["image"]).all() for c in cubes)
    furthest = max(c["image"].max() for c in cubes)
    assert furthest == brain.image[:, :16].max()  # right up to the slab


def test_every_other_cube_is_noisy_inside_of_the_brain(data, brain) -> None:
    plain, noisy = (next(data.patches(brain, 8, 4, 1, noise=n))["image"] for n in (0.0, 0.5))
    assert np.array_equal(plain[0], noisy[0]) and not np.array_equal(plain[1], noisy[1])
    assert (noisy[1][plain[1] == 0] == 0).all()


def test_dice_by_region(data, brain) -> None:
    labels = brain.labels
    wrong = np.where(brain.held_out & (labels == 2), 1, labels)
    right = data.dice(wrong, labels, ~brain.held_out)
    assert right == {"grey matter": 1.0, "white matter": 1.0}
    held = data.dice(wrong, labels, brain.held_out)
    a, b = ((labels[:, 16:] == k).sum() for k in (1, 2))
    assert held == {"grey matter": pytest.approx(2 * a / (2 * a + b)), "white matter": 0.0}


def test_intensity_learns_behind_the_slab_only(data) -> None:
    """A level is given the class it has most often there, whatever it has in the slab."""
    labels = np.array([[[1], [1], [2], [2], [2], [2]]])
    image = np.full((1, 6, 1), 0.5, np.float32)
    image[0, 1:3] = 0.6
    brain = data.Brain(image, np.eye(3, dtype=np.float32)[labels], 3)
    assert data.by_intensity(brain).ravel().tolist() == [1, 1, 1, 1, 1, 1]
    image[0, 1] = 0.5
    assert data.by_intensity(brain).ravel().tolist() == [1, 1, 2, 1, 1, 1]
