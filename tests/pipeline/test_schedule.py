"""Schedules: every item once, in order, one tick apart; bubbles as the papers count them."""

from __future__ import annotations

import pathlib
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.pipeline import Schedule, recomputation, svg, text
from shardwise.pipeline.__main__ import main
from shardwise.pipeline.tables import PUBLISHED

SIZES = [(1, 1, 1), (1, 3, 2), (4, 16, 1), (4, 3, 1), (3, 6, 2), (4, 6, 3), (4, 2, 2), (2, 5, 4)]


@pytest.mark.parametrize(("stages", "microbatches", "rounds"), SIZES)
def test_every_stage_has_every_item_once(stages: int, microbatches: int, rounds: int):
    s = Schedule(stages, microbatches, rounds)
    for stage in range(stages):
        work = [s.work(t, stage) for t in range(s.ticks)]
        done = [w for w in work if w is not None]
        assert sorted(done) == [(r, m) for r in range(rounds) for m in range(microbatches)]
        # a layer sees microbatches in order
        for r in range(rounds):
            assert [m for q, m in done if q == r] == list(range(microbatches))


@pytest.mark.parametrize(("stages", "microbatches", "rounds"), SIZES)
def test_an_item_comes_from_the_stage_before_one_tick_earlier(stages, microbatches, rounds):
    s = Schedule(stages, microbatches, rounds)
    for t in range(s.ticks):
        for stage in range(stages):
            item = s.work(t, stage)
            if item is None:
                continue
            r, m = item
            if stage:
                assert s.work(t - 1, stage - 1) == (r, m)
            elif r:
                assert s.work(t - 1, stages - 1) == (r - 1, m)


@pytest.mark.parametrize(("stages", "microbatches", "rounds"), SIZES)
def test_at_is_the_inverse_of_item(stages, microbatches, rounds):
    s = Schedule(stages, microbatches, rounds)
    items = np.arange(-stages, s.items + stages)
    r, m, exists = s.at(items)
    assert (r >= 0).all() and (r < rounds).all() and (m >= 0).all() and (m < microbatches).all()
    assert exists.sum() == rounds * microbatches
    for i, q, n, there in zip(items, r, m, exists, strict=True):
        assert not there or s.item(int(q), int(n)) == i


@pytest.mark.parametrize(("stages", "microbatches", "rounds"), SIZES)
def test_one_place_per_microbatch_is_enough(stages, microbatches, rounds):
    """What comes in lies in its place until the first stage has read it; what goes out stays there."""
    s = Schedule(stages, microbatches, rounds)
    places: list[object] = ["new"] * microbatches
    for t in range(s.ticks):
        round, coming, exists = s.at(t)
        assert not exists or round or places[coming] == "new"
        _, going, _ = s.at(t - (stages - 1))
        places[going] = s.work(t, stages - 1)
    assert places == [(rounds - 1, m) for m in range(microbatches)]


def test_the_bubble_ratio_is_the_papers():
    assert Schedule(4, 16).bubble_ratio == pytest.approx(3 / 19)
    assert Schedule(8, 16, 4).bubble_ratio == pytest.approx(7 / (4 * 16 + 7))


def test_bubbles_are_counted():
    for sizes in SIZES:
        s = Schedule(*sizes)
        idle = sum(s.work(t, k) is None for t in range(s.ticks) for k in range(s.stages))
        assert s.bubble_ratio == pytest.approx(idle / (s.ticks * s.stages))


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="rounds must be at least 1, not 0"):
        Schedule(2, 2, 0)


def test_drawings():
    s = Schedule(2, 3, 2)
    lines = [
        "circular: 2 stages, 3 microbatches, 2 rounds; 8 ticks, 25.0 % bubbles",
        "stage 0 a0 a1 b0 b1 a2  . b2  .",
        "stage 1  . a0 a1 b0 b1 a2  . b2",
    ]
    assert text(s) == "\n".join(lines)
    root = ElementTree.fromstring(svg(s))
    boxes = [e for e in root.iter() if e.tag.endswith("rect") and e.get("height") == "24"]
    assert len(boxes) == s.stages * s.ticks
    assert sum(b.get("fill") == "#eceff1" for b in boxes) == 4
    ElementTree.fromstring(svg(Schedule(16, 128)))


def test_the_pictures_of_the_page_are_these():
    images = pathlib.Path(__file__).parents[2] / "docs" / "images"
    for name, rounds in (("gpipe", 1), ("circular", 2)):
        assert (images / f"{name}.svg").read_text() == svg(Schedule(4, 8, rounds))


def test_the_command_prints_the_tables_of_the_page(capsys: pytest.CaptureFixture[str]):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "pipelining.md").read_text()
    assert main(["tables"]) == 0
    assert capsys.readouterr().out in page
    assert main(["draw", "--stages", "4", "--microbatches", "8", "--rounds", "2"]) == 0
    assert capsys.readouterr().out in page


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["draw", "--stages", "0"])
    assert "stages must be at least 1, not 0" in capsys.readouterr().err


def test_published_bubbles_are_near_the_formula():
    for row in PUBLISHED:
        assert row.bubbles <= row.schedule.bubble_ratio < row.bubbles + 0.02


def test_recomputation_is_a_quarter():
    layer = lambda w, x: x @ w
    w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")
    deep = lambda w, x: layer(w, jnp.tanh(layer(w, jnp.tanh(layer(w, x)))))
    assert 0.15 < recomputation(deep, w, x) < 0.25
    assert recomputation(deep, w, x, remat=False) == 0
    kept = recomputation(deep, w, x, jax.checkpoint_policies.everything_saveable)
    assert kept == pytest.approx(0, abs=0.01)
