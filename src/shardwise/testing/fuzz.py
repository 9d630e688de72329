"""`python -m shardwise.testing.fuzz --seconds 60 --seed 0`: random programs until the time is up.

Every program is checked on one device against many, values and gradients as one program: that results
are equal, that what is replicated is the same bits on every device, and that the compiled program
sends what the plan says. A failure is made smaller and printed as a script that reproduces it; the
exit status is 1 when there was one. What one device refuses is no program, and not counted.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Compiling is most of the time, and how well is of no interest here.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@dataclasses.dataclass(frozen=True)
class Failure:
    """A program that failed.

    Attributes:
      seed: it is `program_of(seed)`; `text`: a smaller one that fails in the same way, as a script.
      kind: "wrong" (values), "copies", "bytes" or "crash"; `fault` what was said.
    """

    seed: int
    text: str
    kind: str
    fault: str


@dataclasses.dataclass
class Run:
    """What a run found: programs checked, those skipped, how often each operation was in one; the seeds of
    those that differ in float32 by rounding only."""

    count: int = 0
    skipped: int = 0
    seconds: float = 0.0
    used: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    fallbacks: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    rounding: list[int] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for how long (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program (default 0)")
    parser.add_argument("--steps", type=int, default=8, help="operations in a program, at most")
    parser.add_argument("--x64", action="store_true", help="with jax_enable_x64, in float64")
    parser.add_argument("--count", type=int, help="stop after so many programs")
    args = parser.parse_args(argv)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}".strip()
    from shardwise.demo import devices

    devices.start(8)
    return report(fuzz(args.seconds, args.seed, args.steps, args.count, args.x64))


def fuzz(
    seconds: float, seed: int, steps: int = 8, count: int | None = None, x64: bool = False
) -> Run:
    """Check programs from consecutive seeds; `x64`: in float64, with `jax_enable_x64`."""
    start = time.monotonic()
    run, at = Run(), seed
    while time.monotonic() < start + seconds and (count is None or at < seed + count):
        program = program_of(at, steps)
        kind, fault = outcome(program, run, x64)
        if kind == "skipped":
            run.skipped += 1
        else:
            run.count += 1
            run.used.update(set(program.used))
        if kind == "rounding":
            run.rounding.append(at)
        if kind in ("wrong", "copies", "bytes", "crash"):
            print(f"seed {at}: {kind}: {fault[:300]}", flush=True)
            run.failures.append(Failure(at, smaller(program, kind, x64).text(), kind, fault))
        if at % 50 == 49:
            _forget()
        at += 1
    run.seconds = time.monotonic() - start
    return run


def _forget() -> None:
    """Compiled programs are never met again: memory must not grow with the run."""
    import jax

    jax.clear_caches()


def program_of(seed: int, steps: int = 8) -> Any:
    """The program of a seed."""
    from shardwise.testing.operations import random_program

    rng = np.random.default_rng(seed)
    return random_program(lambda options: options[int(rng.integers(len(options)))], steps)


def outcome(program: Any, run: Run | None = None, x64: bool = False) -> tuple[str, str]:
    """(what became of it, what was said): "right", "wrong", "copies", "bytes", "crash", "skipped".

    "rounding": results differ in float32, as sums are added up in another order, and not in float64.
    """
    from shardwise.testing.check import CheckFailed, Reference

    try:
        plan = program.run(wide=True) if x64 else program.run()
    except CheckFailed as e:
        text = str(e)
        kind = "copies" if "hold different copies" in text else "wrong"
        differs = "differs from the one-device run" in text and not x64
        if kind == "wrong" and differs and _right_in_float64(program):
            kind = "rounding"
        return "bytes" if text.startswith("the compiled program sends") else kind, text
    except Reference as e:
        return "skipped", str(e)
    except Exception as e:  # whatever it is, it is what we look for
        return "crash", f"{type(e).__name__}: {e}"
    if run is not None:
        run.fallbacks.update({f.op for f in plan.fallbacks})
    return "right", ""


def _right_in_float64(program: Any) -> bool:
    try:
        program.run(wide=True)
    except Exception:  # wrong there too, or nothing for float64
        return False
    return True


def smaller(program: Any, kind: str, x64: bool = False, attempts: int = 30) -> Any:
    """A smaller program that fails in the same way: fewer lines, fewer specs."""
    best = program
    for change in _changes(program):
        if attempts == 0:
            break
        candidate = change(best)
        if candidate is None:
            continue
        attempts -= 1
        if outcome(candidate, x64=x64)[0] == kind:
            best = candidate
    return best


def _changes(program: Any) -> list[Callable[[Any], Any]]:
    """Ways to make a program smaller, the boldest first."""
    n = len(program.lines)
    cuts = [lambda p, k=k: _cut(p, k) for k in range(1, n)]
    specs = [lambda p, i=i: _without_spec(p, "in_specs", i) for i in range(len(program.args))]
    specs += [lambda p, i=i: _without_spec(p, "out_specs", i) for i in range(2)]
    return [*cuts, lambda p: dataclasses.replace(p, grad=False) if p.grad else None, *specs]


def _cut(p: Any, k: int) -> Any:
    """The first `k` lines."""
    if k >= len(p.lines):
        return None
    result = p.lines[k - 1].split(" = ")[0]
    return dataclasses.replace(p, lines=p.lines[:k], results=[result], out_specs=["None"])


def _without_spec(p: Any, which: str, i: int) -> Any:
    specs = list(getattr(p, which))
    if i >= len(specs) or specs[i] == "None":
        return None
    specs[i] = "None"
    return dataclasses.replace(p, **{which: specs})


def report(run: Run) -> int:
    """Print what a run found; the exit status."""
    for f in run.failures:
        print(f"\n# seed {f.seed}, {f.kind}\n# " + f.fault.replace("\n", "\n# ") + "\n" + f.text)
    kinds = collections.Counter(f.kind for f in run.failures)
    counts = ", ".join(f"{kinds[k]} {k}" for k in ("wrong", "copies", "bytes", "crash"))
    print(f"{run.count} programs ({run.skipped} skipped), {run.seconds:.0f} s: {counts}")
    if run.rounding:
        print(f"differ in float32, equal in float64: seeds {', '.join(map(str, run.rounding))}")
    if run.fallbacks:
        found = ", ".join(f"{op} {n}" for op, n in run.fallbacks.most_common())
        print(f"fell back, and said so: {found}")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
