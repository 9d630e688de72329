"""The spoken prompts of the Asterisk telephone exchange, as log-mel frames and characters.

Debian's `asterisk-core-sounds-en-wav` has 568 recordings of one speaker (Allison Smith; CC BY-SA 3.0), 25
minutes at 8 kHz, and `asterisk-core-sounds-en` what is said in each.  They are read where the packages
put them, and nothing else is needed: the features are a page of NumPy.
"""

from __future__ import annotations

import dataclasses
import gzip
import pathlib
import re
import wave
import zlib
from collections.abc import Iterator

import numpy as np

RECORDINGS = "asterisk/sounds/en_US_f_Allison"
TRANSCRIPTS = "doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
MISSING = """no recordings in {folder}
  facts {found}
  hint  sudo apt-get install asterisk-core-sounds-en asterisk-core-sounds-en-wav
        or, without root or on another system than Debian:
        apt-get download asterisk-core-sounds-en asterisk-core-sounds-en-wav
        for f in asterisk-core-sounds-en*.deb; do dpkg -x "$f" speech; done
        and then --data speech/usr/share"""

RATE, WINDOW, HOP, BANDS = 8000, 200, 80, 40  # 25 ms every 10 ms
CHARACTERS = " abcdefghijklmnopqrstuvwxyz'"  # labels 1 ..., 0 is CTC's blank
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A recording: its name, what is said, and its frames, float32 [T, BANDS]."""

    name: str
    text: str
    frames: np.ndarray


def read(folder: str | pathlib.Path = "/usr/share", longest: float = 4.8) -> list[Prompt]:
    """The prompts of at most `longest` seconds that say something, by name.

    Raises:
      SystemExit: the packages' files are not there; the message says how to get them.
    """
    folder = pathlib.Path(folder)
    sounds, texts = folder / RECORDINGS, folder / TRANSCRIPTS
    found = sorted(sounds.rglob("*.wav"))
    if not found or not texts.is_file():
        known = f"{len(found)} .wav files in {sounds}, {'a' if texts.is_file() else 'no'} {texts}"
        raise SystemExit(MISSING.format(folder=folder, found=known))
    spoken = transcripts(gzip.decompress(texts.read_bytes()).decode())
    prompts = []
    for file in found:
        name = file.relative_to(sounds).with_suffix("").as_posix()
        text, samples = spoken.get(name, ""), samples_of(file)
        if text and WINDOW <= len(samples) <= longest * RATE:
            prompts.append(Prompt(name, text, log_mel(samples)))
    return prompts


def transcripts(lines: str) -> dict[str, str]:
    """Name -> what is said, in CHARACTERS; sounds, silences and what has no spelling are left out."""
    spoken = {}
    for line in lines.splitlines():
        name, colon, text = line.partition(":")
        if not colon or line.startswith(";"):
            continue
        text = re.sub(r"\[.*?\]|\(.*?\)|<.*?>", " ", text.lower())
        if re.search(r"\d\d|\d[a-z]", text):
            continue
        text = re.sub(r"\d", lambda d: f" {DIGITS[int(d[0])]} ", text)
        text = " ".join(re.sub(r"[^a-z']", " ", text.replace(".m", " m")).split())
        if text:
            spoken[name.strip()] = text
    return spoken


def samples_of(file: pathlib.Path) -> np.ndarray:
    """float32 [T] in [-1, 1] of a recording of one channel, 16 bits, 8 kHz."""
    with wave.open(str(file)) as w:
        kind = w.getnchannels(), w.getsampwidth(), w.getframerate()
        if kind != (1, 2, RATE):
            raise SystemExit(f"{file} is not of one channel, 2 bytes, {RATE} Hz, but {kind}")
        return np.frombuffer(w.readframes(w.getnframes()), "<i2").astype(np.float32) / 32768


def mel_filters() -> np.ndarray:
    """float32 [WINDOW/2 + 1, BANDS]: triangles, evenly spaced in mel from 60 Hz to 3800 Hz."""
    mel = lambda hertz: 2595 * np.log10(1 + np.asarray(hertz) / 700)  # noqa: E731
    bins = mel(np.linspace(0, RATE / 2, WINDOW // 2 + 1))[:, None]
    edges = np.linspace(mel(60), mel(3800), BANDS + 2)
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (bins - low) / (centre - low), (high - bins) / (high - centre)
    return np.maximum(np.minimum(rising, falling), 0).astype(np.float32)


def log_mel(samples: np.ndarray) -> np.ndarray:
    """Samples [T] as log-mel frames [1 + (T - WINDOW) / HOP, BANDS], of mean 0 and variance 1."""
    windows = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP]
    power = np.abs(np.fft.rfft(windows * np.hanning(WINDOW))) ** 2
    frames = np.log(power @ mel_filters() + 1e-6)
    return ((frames - frames.mean()) / (frames.std() + 1e-6)).astype(np.float32)


def split(prompts: list[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """For training, and held out: a tenth, chosen by what is said, so that no sentence is in both."""
    held = [zlib.crc32(p.text.encode()) % 10 == 0 for p in prompts]
    return (
        [p for p, h in zip(prompts, held, strict=True) if not h],
        [p for p, h in zip(prompts, held, strict=True) if h],
    )


def labels(text: str) -> list[int]:
    return [1 + CHARACTERS.index(c) for c in text]


def spell(ids: list[int]) -> str:
    return "".join(CHARACTERS[i - 1] for i in ids)


def padded(items: list[tuple[np.ndarray, str]], time: int, width: int) -> dict[str, np.ndarray]:
    """Utterances as the model's batch: features, frames, labels, characters."""
    n = len(items)
    batch = {
        "features": np.zeros((n, time, BANDS), np.float32),
        "frames": np.array([len(f) for f, _ in items], np.int32),
        "labels": np.zeros((n, width), np.int32),
        "characters": np.array([len(t) for _, t in items], np.int32),
    }
    for i, (frames, text) in enumerate(items):
        batch["features"][i, : len(frames)] = frames
        batch["labels"][i, : len(text)] = labels(text)
    return batch


def batches(
    prompts: list[Prompt], size: int, time: int, width: int, seed: int
) -> Iterator[dict[str, np.ndarray]]:
    """Training batches without end: prompts in random order, one after the other until `time` is full.

    Bands and frames are masked at random (SpecAugment, arXiv 1904.08779).
    """
    rng = np.random.default_rng(seed)
    queue: list[Prompt] = []
    while True:
        items = []
        for _ in range(size):
            frames, text = [], ""
            while True:
                queue = queue or [prompts[i] for i in rng.permutation(len(prompts))]
                more = f"{text} {queue[-1].text}".strip()
                if sum(map(len, frames)) + len(queue[-1].frames) > time or len(more) > width:
                    break
                frames, text = [*frames, queue.pop().frames], more
            items.append((masked(np.concatenate(frames), rng), text))
        yield padded(items, time, width)


def masked(frames: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Up to 6 bands, and up to a tenth of the frames, set to the mean, twice each."""
    frames = frames.copy()
    for _ in range(2):
        band, wide = rng.integers(0, BANDS), rng.integers(0, 7)
        frames[:, band : band + wide] = 0
        at, long = rng.integers(0, len(frames)), rng.integers(0, len(frames) // 10 + 1)
        frames[at : at + long] = 0
    return frames


def edits(a: str, b: str) -> int:
    """Characters to insert, delete or replace to make b of a (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]
