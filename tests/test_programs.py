"""Random programs, one device against many; and that `check`, their oracle, sees what is wrong.

A longer run: `python -m shardwise.testing.fuzz --seconds 600 --seed 1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.testing import CheckFailed, check, fuzz
from shardwise.testing.check import Reference
from shardwise.testing.operations import OPERATIONS, random_program
from shardwise.testing.programs import Program

AXES = {"x": 2, "y": 2}
X = np.arange(24, dtype=np.float32).reshape(4, 6) / 24


@st.composite
def programs(draw: Callable[..., Any]) -> Program:
    return random_program(lambda options: draw(st.sampled_from(list(options))))


@hypothesis.settings(max_examples=30)
@hypothesis.given(programs())
def test_random_programs(program: Program):
    hypothesis.note(program.text())
    program.run()


def test_every_operation_is_drawn():
    """None is dead: each makes a line in one of the first few hundred programs."""
    drawn = {name for seed in range(800) for name in fuzz.program_of(seed).used}
    assert {f.__name__.strip("_") for f in OPERATIONS} - drawn == set()


def test_a_program_is_its_text():
    """The text alone reproduces it: it runs as it stands."""
    program = fuzz.program_of(3)
    assert program.text() == fuzz.program_of(3).text()
    exec(compile(program.text(), "<program>", "exec"), {})


def test_fuzz_reports(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A failure is printed with its seed and a smaller script that reproduces it."""
    assert fuzz.report(fuzz.fuzz(60, seed=0, steps=2, count=2)) == 0
    assert re.fullmatch(
        r"2 programs \(0 skipped\), \d+ s: 0 wrong, 0 copies, 0 bytes, 0 crash\n",
        capsys.readouterr().out,
    )

    def fail(self: Program) -> None:
        if any("fft" in line for line in self.lines):
            raise CheckFailed("result: wrong")
        raise Reference("no program")

    seed = next(s for s in range(500) if "fft" in fuzz.program_of(s).used)
    monkeypatch.setattr(Program, "run", fail)
    assert fuzz.report(fuzz.fuzz(60, seed=seed, count=1)) == 1
    out = capsys.readouterr().out
    assert out.startswith(
        f"seed {seed}: wrong: result: wrong\n\n# seed {seed}, wrong\n# result: wrong\nimport jax"
    )
    lines = [line for line in out.splitlines() if line.startswith("    v")]
    assert "fft" in lines[-1] and "grad=False" in out
    assert re.search(r"1 programs \(0 skipped\), \d+ s: 1 wrong, 0 copies, 0 bytes, 0 crash\n", out)


def test_outcomes_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    """What one device refuses is no program; what only the partitioned one raises is a crash."""
    raised: list[Exception] = []

    def fail(self: Program) -> None:
        raise raised[-1]

    monkeypatch.setattr(Program, "run", fail)
    for error, kind in (
        (CheckFailed("result: differs"), "wrong"),
        (CheckFailed("x\n  devices 0 and 1 hold different copies of one block"), "copies"),
        (CheckFailed("the compiled program sends 3 bytes"), "bytes"),
        (Reference("no gradient"), "skipped"),
        (KeyError("v1"), "crash"),
    ):
        raised.append(error)
        assert fuzz.outcome(fuzz.program_of(0))[0] == kind


def test_rounding_is_told_from_what_is_wrong(monkeypatch: pytest.MonkeyPatch):
    """What differs from one device in float32 is wrong only if it does so in float64 too."""
    wide_too = True

    def differ(self: Program, wide: bool = False) -> None:
        if not wide or wide_too:
            raise CheckFailed("result: float32[3] differs from the one-device run")

    monkeypatch.setattr(Program, "run", differ)
    assert fuzz.outcome(fuzz.program_of(0))[0] == "wrong"
    wide_too = False
    assert fuzz.outcome(fuzz.program_of(0))[0] == "rounding"


def test_a_program_in_float64():
    """The same text; arguments, and what is made of them, are wide."""
    plan = fuzz.program_of(3).run(wide=True)
    assert "float64" in plan.explain() and "float32" not in plan.explain()


# --- the oracle ---------------------------------------------------------------------------------


def message(f: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(CheckFailed) as e:
        check(f, args, AXES, **options)
    return str(e.value)


def wrong(x: Any, other: Any) -> Any:
    """`x` on one device, something else in a partitioned program."""
    return jax.tree.map(lambda x, y: jnp.where(_partitioned(x), y, x), x, other)


def _partitioned(x: Any) -> Any:
    """Whether this is traced by `spmd`: only there an argument's trace has no jit around it."""
    import inspect

    return any(frame.function == "_make_plan" for frame in inspect.stack())


def test_check_sees_wrong_values():
    f = lambda x: {"y": wrong(x, x.at[2, 1].set(7.0)), "n": x.sum()}
    assert message(f, X, in_shardings=P("x")) == (
        "result['y']: float32[4,6] differs from the one-device run\n"
        "  1 of 24 entries are wrong; first at [2, 1]: 7.0, should be 0.5416666865348816\n"
        "  it lies [x, -] on the mesh x=2 y=2\n"
        "  in_shardings (P('x', None),)\n"
        "  collectives 1 all-reduce"
    )


def test_check_sees_wrong_shapes_types_and_trees():
    assert "  shape [6]\n" in message(lambda x: x[0] if _partitioned(x) else x, X)
    assert "  dtype int32\n" in message(lambda x: x.astype(int) if _partitioned(x) else x, X)
    assert message(lambda x: (x,) if _partitioned(x) else x, X) == (
        "result: tree PyTreeDef((*,)), should be PyTreeDef(*)"
    )


def test_check_sees_nan():
    assert "should be 0.0" in message(lambda x: wrong(x, x.at[0, 0].set(np.nan)), X)


def test_check_sees_wrong_gradients():
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return x * 2

    f.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * (3 if _partitioned(ct) else 2),))
    check(f, (X,), AXES, grad=False)
    assert message(f, X).startswith("gradient[0]: float32[4,6] differs from the one-device run\n")
    check(lambda x, y: f(x) + y, (X, X), AXES, grad=[1])


def test_check_of_values_and_gradients_together():
    """One program, compiled once; what is wrong with either is seen."""
    f, specs = lambda x: {"y": jnp.sin(x).sum(0), "n": x.shape[0]}, P("x")
    plan = check(f, (X,), AXES, specs, {"y": P("y"), "n": None}, together=True, wire="at most")
    assert jax.tree.leaves(plan.out_shardings)[-1] == P("x", None)  # the gradient

    @jax.custom_vjp
    def g(x: Any) -> Any:
        return x * 2

    g.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * (3 if _partitioned(ct) else 2),))
    assert "result[1][0]" in message(g, X, together=True)
    assert "result[0]" in message(lambda x: wrong(x, x.at[0, 0].set(7)), X, together=True)


def test_what_one_device_refuses_is_told():
    with pytest.raises(Reference, match="TypeError"):
        check(lambda x: x @ "no", (X,), AXES)


def test_check_sees_copies_that_differ(monkeypatch: pytest.MonkeyPatch):
    """What is said to be replicated must be the same bits on every device."""
    from shardwise.plan import Plan

    honest = Plan.device_function

    def lying(plan: Plan, *args: Any) -> Callable[..., Any]:
        run = honest(plan, *args)
        return lambda *xs: [y + lax.axis_index("y") * 1e-9 for y in run(*xs)]

    monkeypatch.setattr(Plan, "device_function", lying)
    fault = message(lambda x: x.sum(0) * 1e-9, X, in_shardings=P("x"), grad=False)
    assert "  devices 0 and 1 hold different copies of one block\n" in fault


def test_check_pins_collectives():
    f, specs = lambda x: jnp.sin(x).sum(0), P("x")
    plan = check(f, (X,), AXES, specs, kinds={"all-reduce": 1}, bytes=24, wire=True)
    assert isinstance(plan, sw.Plan)
    fault = message(f, X, in_shardings=specs, kinds=["all-gather"])
    assert fault.startswith("collectives {'all-reduce': 1}, should be {'all-gather': 1}:\n  ")
    fault = message(f, X, in_shardings=specs, bytes=25)
    assert fault.startswith("24 bytes sent, should be 25:\n  ")


def test_check_compares_with_what_is_compiled(monkeypatch: pytest.MonkeyPatch):
    from shardwise import hlo

    monkeypatch.setattr(hlo, "wire_bytes", lambda text: 30.0)
    fault = message(lambda x: x.sum(0), X, in_shardings=P("x"), wire=True, grad=False)
    assert fault.startswith("the compiled program sends 30 bytes, the plan says 24:\n  ")
