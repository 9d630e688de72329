"""The measuring of benchmarks/: comparisons, pairing, child processes, specs."""

import argparse
import json
import math

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import __main__ as commands
from benchmarks import cases, measure, micro, shared, table


@pytest.mark.parametrize(
    ("got", "want", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),  # relative to the largest value
        ([0.1, 0.3], [0.1, 0.2], 0.1),  # but absolute below 1
        ([1, 7], [1, 4], 3),
        ([True], [False], 1),
        ([1.0], [1.0, 2.0], math.inf),
        ([math.nan, 1.0], [math.nan, 1.0], 0),
        ([math.nan, 1.0], [0.0, 1.0], math.inf),
        ([0.0, 1.0], [math.nan, 1.0], math.inf),
        ([math.inf], [-math.inf], math.inf),
        ([], [], 0),
    ],
)
def test_differences(got, want, difference):
    assert shared.difference(np.array(got), np.array(want)) == pytest.approx(difference)


def test_pairs_alternate_and_flip():
    order = []
    runs = [lambda: order.append("a"), lambda: order.append("b")]
    a, b = measure.paired_times(runs, pairs=3, warmup=1)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert len(a) == len(b) == 3


def test_the_ratio_is_of_pairs():
    assert measure.median_ratio([1, 20, 3], [1, 10, 6]) == 1


def test_a_child_that_dies_says_what_it_last_said():
    with pytest.raises(measure.WorkerFailed) as e:
        measure.in_a_process("json.tool", "/no/such/file")
    assert "exit status" in str(e.value) and "/no/such/file" in str(e.value)


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ((None,), P(None)),
        (("x", None), P("x", None)),
        ((("y", "x"), None), P(("y", "x"), None)),
        (((None, None), ("x", None)), (P(None, None), P("x", None))),
    ],
)
def test_specs_of_one_result_and_of_several(spec, want):
    assert micro.out_specs(spec) == want


def test_a_program_that_cannot_run_is_a_row_not_a_crash():
    program = argparse.Namespace(fn=lambda pin, x: 1 / 0, args=(1.0,), ref=None)
    result = cases.run_program(program, "shardwise")
    status = "refused: ZeroDivisionError: division by zero"
    assert result == {"status": status, "wire": None, "seconds": None}


COMMANDS = (
    "transformer moe moe-scale moe-tpu pipeline unet cases micro compile tpu placement case-studies"
)


@pytest.mark.parametrize("name", COMMANDS.split())
def test_every_command_is_there(name, capsys):
    with pytest.raises(SystemExit) as done:
        commands.main([name, "--help"])
    assert done.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_tables_and_json_show_the_same(capsys):
    rows = [{"what": "a [y]", "bytes": 1234.5, "ok": False, "none": None}]
    table.show("title", rows, as_json=False)
    text = capsys.readouterr().out
    assert all(part in text for part in ("title", "a [y]", "1,234", "NO", "-"))
    table.show("title", rows, as_json=True)
    assert json.loads(capsys.readouterr().out)["rows"] == rows
