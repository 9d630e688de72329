"""The command line: options, bad input, and a whole demo in a process of its own."""

import json
import subprocess
import sys

import pytest

from shardwise import cli
from shardwise.demo import data
from shardwise.demo.report import Screen, dims, size

TINY = (
    *("--layers", "1", "--model", "16", "--hidden", "32", "--heads", "4"),
    *("--batch", "4", "--seq", "16", "--steps", "3"),
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--seq", "1"], "--seq must be at least 2, not 1"),
        (["--rate", "nan"], "--rate must be a positive number, not nan"),
        (["--seed", "-1"], "--seed must not be negative: -1"),
        (["--heads", "3"], "3 heads do not divide a model of 128: give head_dim"),
        (["--mesh", "x2,y4"], "--mesh 'x2,y4': 'x2' is not NAME=SIZE, as in x=2,y=4"),
        (["--mesh", "x=2,x=4"], "--mesh 'x=2,x=4': axis 'x' is given twice"),
        (["--mesh", "x=8"], "--mesh 'x=8': the strategies need two axes, as in x=2,y=4"),
        (
            ["--mesh", "x=4,y=4"],
            "--mesh 'x=4,y=4' needs 16 devices and there are 8: add --devices 16",
        ),
    ],
)
def test_bad_input_is_one_message_and_exit_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["demo", *arguments])
    assert e.value.code == 2
    assert capsys.readouterr().err == f"shardwise: error: {message}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["demo", "--strategy", "best"], ["demo", "--steps", "x"]]
)
def test_what_argparse_refuses_has_exit_status_2_too(arguments, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(arguments)
    assert e.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "devices", "axes"),
    [
        (None, 8, {"x": 2, "y": 4}),
        (None, 6, {"x": 2, "y": 3}),
        (None, 7, {"x": 1, "y": 7}),
        ("x=2,y=4", 8, {"x": 2, "y": 4}),
        ("data=3, model=2", 6, {"data": 3, "model": 2}),
    ],
)
def test_meshes(text, devices, axes):
    assert cli.parse_mesh(text, devices) == axes
    assert list(cli.parse_mesh(text, devices)) == list(axes)


def run_demo(*arguments):
    command = [sys.executable, "-m", "shardwise.cli", "demo", *TINY, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_json_demo_holds_its_proof():
    done = run_demo("--json")
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)  # nothing else on stdout
    assert out["proof"]["holds"]
    assert out["proof"]["sides"]["shardwise"]["loss"] < 1e-5
    assert len(out["training"]["losses"]) == 3
    assert out["annotations"]["annotated"] == 7 + 3
    assert out["collectives"]["fallbacks"] == []
    rows = out["collectives"]["rows"]
    assert sum(r["total"] for r in rows) == pytest.approx(out["collectives"]["bytes"])
    assert all(r["source"] != "<unknown>" and r["reason"] for r in rows)


def test_demo_on_the_terminal_with_another_mesh_and_strategy():
    done = run_demo("--devices", "6", "--mesh", "a=2,b=3", "--strategy", "attempt2")
    assert done.returncode == 0, done.stderr
    assert "[b, -, a]" in done.stdout  # w_o's annotation, on the mesh's own names
    assert "The same numbers as on one device." in done.stdout


def test_sizes_and_dims():
    assert [size(n) for n in (None, 12, 1200, 3.4e6, 5e12)] == [
        "-",
        "12 B",
        "1.20 kB",
        "3.40 MB",
        "5,000.00 GB",
    ]
    assert dims(["x", None, 3]) == "[x, -, 3]"


def test_a_quiet_screen_prints_nothing(capsys):
    screen = Screen(quiet=True)
    screen.heading("x")
    with screen.working("w"), screen.progress(2, "p") as on_step:
        on_step(1, 0.5, 10.0)
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- the text


def test_the_corpus_is_in_the_order_of_paths_and_cut(tmp_path):
    for name, text in (("b.py", "bb"), ("a/z.py", "az"), ("test/t.py", "no"), ("c.txt", "no")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    corpus = data.standard_library(folder=tmp_path)
    assert bytes(corpus.tokens) == b"azbb"
    assert corpus.files == 2
    assert bytes(data.standard_library(max_bytes=3, folder=tmp_path).tokens) == b"azb"


def test_no_sources_is_an_error_with_the_folder(tmp_path):
    with pytest.raises(FileNotFoundError) as e:
        data.standard_library(folder=tmp_path)
    assert str(e.value) == f"no Python source in {tmp_path}: the demo trains on them"


def test_batches_are_windows_of_the_text_and_depend_on_the_seed_only():
    corpus = data.standard_library(max_bytes=1000)
    a, b, c = (next(corpus.batches(4, 16, seed)) for seed in (1, 1, 2))
    assert (a == b).all() and not (a == c).all()
    assert a.shape == (4, 16) and a.dtype == "int32"
    assert all(bytes(row.astype("uint8")) in bytes(corpus.tokens) for row in a)
