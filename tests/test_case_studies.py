"""The case studies' registry and the page made of what was found."""

from __future__ import annotations

import pytest

from benchmarks import case_studies_text, studies
from benchmarks.case_studies import PODS
from shardwise.models.paper import FIGURES, Row

CASES = studies.cases()
PLAN = {
    "annotations": 10, "tensors": 400, "collectives": {"all-gather": 64}, "sent GB": 3.2,
    "TFLOP": 1.5, "memory GiB": 20.0, "fallbacks": 0,
}  # fmt: skip
SIDE = {"HBM GiB": 12.0, "  alive at once GiB": 9.0, "wire GB": 3.0, "compile s": 60.0}


def test_every_row_has_a_name_of_its_own_and_a_pod():
    names = [c.name for c in CASES]
    assert len(set(names)) == len(names)
    assert {"Table 2", "Table 3", "Table 4", "Table 6", "Table 7"} <= {c.table for c in CASES}
    for c in CASES:
        assert set(c.published) <= set(FIGURES)
        if c.model in ("transformer", "moe"):
            assert c.cores in PODS


def test_a_row_of_the_page_has_plan_compiled_and_published_figures():
    case = next(c for c in CASES if c.row == "64b_2048")
    found = {case.name: {"plan": PLAN, "shardwise": SIDE, "jit": {"refused": "23.3G of 15.5G"}}}
    page = case_studies_text.document([case], found)
    assert (
        "| 64b_2048 | x=32 y=64 | 10 (2.5 %) | 2.0 | 100 | 3.2 | 1.5 | 20.00 | 15.56 | 6.3 |"
        in page
    )
    assert "| 64b_2048 | 12.00 (9.00) | **refused**: 23.3G of 15.5G | 3.0 | - |" in page
    assert "Nowhere among these rows." in page


def test_where_it_loses_is_said():
    case = next(c for c in CASES if c.row == "64b_2048")
    worse = {"plan": PLAN, "shardwise": SIDE, "jit": {**SIDE, "HBM GiB": 8.0}}
    page = case_studies_text.document([case], {case.name: worse})
    assert "- 64b_2048: 12.00 GiB against jax.jit's 8.00" in page
    page = case_studies_text.document([case], {case.name: {"plan": PLAN}})
    assert "the plan estimates 20.0 GiB" in page


def test_a_refusal_for_memory_is_told_from_other_errors():
    text = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 23.27G of 15.48G hbm."
    assert case_studies_text.refused(text) == "23.27G of 15.48G"
    assert case_studies_text.refused("INTERNAL: a bug") is None


def test_figures_of_a_row_have_known_names():
    with pytest.raises(ValueError, match="no such figure: speed"):
        Row("Table 2", None, {"x": 2}, 1, {"speed": 1.0})
