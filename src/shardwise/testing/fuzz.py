"""`python -m shardwise.testing.fuzz --seconds 60 --seed 0`: random programs until the time is up.

Every program is checked on one device against many, values and gradients.  A failure is printed as a
script that reproduces it; the exit status is 1 when there was one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardwise.testing.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for how long (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program (default 0)")
    parser.add_argument("--steps", type=int, default=6, help="operations in a program, at most")
    parser.add_argument("--count", type=int, help="stop after so many programs")
    args = parser.parse_args(argv)
    from shardwise.demo import devices

    devices.start(8)
    return report(*fuzz(args.seconds, args.seed, args.steps, args.count))


def fuzz(
    seconds: float, seed: int, steps: int = 6, count: int | None = None
) -> tuple[int, list[tuple[int, str, str]]]:
    """Check programs from consecutive seeds.

    Returns:
      how many were checked; and of those that failed the seed, the text and what was wrong.
    """
    end = time.monotonic() + seconds
    failures, n = [], 0
    while time.monotonic() < end and (count is None or n < count):
        program = program_of(seed + n, steps)
        try:
            program.run()
        except Exception as e:  # whatever it is, it is what we look for
            failures.append((seed + n, program.text(), f"{type(e).__name__}: {e}"))
            print(f"seed {seed + n}: {type(e).__name__}: {str(e)[:300]}", flush=True)
        n += 1
    return n, failures


def program_of(seed: int, steps: int = 6) -> Any:
    """The program of a seed."""
    from shardwise.testing.operations import random_program

    rng = np.random.default_rng(seed)
    return random_program(lambda options: options[int(rng.integers(len(options)))], steps)


def report(count: int, failures: Sequence[tuple[int, str, str]]) -> int:
    for seed, text, fault in failures:
        print(f"\n# seed {seed}\n# " + fault.replace("\n", "\n# ") + "\n" + text)
    print(f"{count} programs, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
