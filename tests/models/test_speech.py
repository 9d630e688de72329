"""examples/speech: transcripts, frames and batches, from recordings made here."""

from __future__ import annotations

import gzip
import importlib.util
import pathlib
import sys
import wave
from types import ModuleType

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "speech"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"speech_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


prompts, train = load("prompts"), load("train")

LINES = """; Core Asterisk Sounds in English

beep: [this is a simple beep tone]
silence/1: (1 second of silence)
digits/p-m: P.M.
dir-multi9: Press 9 for more entries.
letters/at: at [@]
demo: Dial 162 now
vm-isonphone: is on the phone, isn't it?
"""


@pytest.fixture
def packages(tmp_path: pathlib.Path) -> pathlib.Path:
    """The packages' files: tones of half a second and more."""
    texts = tmp_path / prompts.TRANSCRIPTS
    texts.parent.mkdir(parents=True)
    texts.write_bytes(gzip.compress(LINES.encode()))
    for i, name in enumerate(["beep", "digits/p-m", "dir-multi9", "letters/at", "vm-isonphone"]):
        file = tmp_path / prompts.RECORDINGS / f"{name}.wav"
        file.parent.mkdir(parents=True, exist_ok=True)
        samples = 8000 * np.sin(np.arange(4000 * (i + 1)) * 2 * np.pi * 440 / prompts.RATE)
        with wave.open(str(file), "wb") as w:
            w.setparams((1, 2, prompts.RATE, 0, "NONE", ""))
            w.writeframes(samples.astype("<i2").tobytes())
    return tmp_path


def test_what_is_said():
    assert prompts.transcripts(LINES) == {
        "digits/p-m": "p m",
        "dir-multi9": "press nine for more entries",
        "letters/at": "at",
        "vm-isonphone": "is on the phone isn't it",
    }


def test_recordings_as_frames(packages: pathlib.Path):
    found = prompts.read(packages, longest=2.0)
    assert [p.name for p in found] == ["digits/p-m", "dir-multi9", "letters/at"]
    frames = found[0].frames
    assert frames.shape == (1 + (8000 - 200) // 80, 40)
    np.testing.assert_allclose([frames.mean(), frames.std()], [0, 1], atol=1e-3)
    centre = np.linspace(*(2595 * np.log10(1 + np.array([60, 3800]) / 700)), 42)[1:-1]
    loudest = centre[np.bincount(frames.argmax(1)).argmax()]
    assert abs(700 * (10 ** (loudest / 2595) - 1) - 440) < 60  # hertz


def test_missing_recordings(tmp_path: pathlib.Path):
    with pytest.raises(SystemExit) as error:
        prompts.read(tmp_path)
    found = f"0 .wav files in {tmp_path}/{prompts.RECORDINGS}, no {tmp_path}/{prompts.TRANSCRIPTS}"
    assert str(error.value) == prompts.MISSING.format(folder=tmp_path, found=found)
    assert "apt-get install asterisk-core-sounds-en asterisk-core-sounds-en-wav" in str(error.value)


def test_batches_are_full_reproducible_and_spelled(packages: pathlib.Path):
    found = prompts.read(packages)
    a, b = (next(prompts.batches(found, 3, 480, 60, seed=1)) for _ in range(2))
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
    assert a["features"].shape == (3, 480, 40) and (a["frames"] <= 480).all()
    for features, frames, labels, n in zip(*a.values(), strict=True):
        assert not features[frames:].any() and not labels[n:].any()
        words = prompts.spell(labels[:n]).split()
        assert words and set(words) <= {w for p in found for w in p.text.split()}


def test_held_out_is_never_trained_on(packages: pathlib.Path):
    found = prompts.read(packages)
    training, held = prompts.split(found)
    assert len(training) + len(held) == len(found)
    assert not {p.text for p in training} & {p.text for p in held}


def test_edits_and_paths():
    assert [prompts.edits(a, b) for a, b in (("kitten", "sitting"), ("", "ab"), ("ab", ""))] == [
        3,
        2,
        2,
    ]
    assert train.collapsed(np.array([0, 3, 3, 0, 3, 5, 5, 0])) == [3, 3, 5]
