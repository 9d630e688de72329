"""`python -m shardwise.pipeline tables|draw`: bubble ratios beside the paper's; a schedule drawn."""

from __future__ import annotations

import argparse
import pathlib
import sys

from shardwise.pipeline import draw, tables
from shardwise.pipeline.schedule import Schedule


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.pipeline", description=__doc__)
    sub = parser.add_subparsers(dest="command", required=True)
    sub.add_parser("tables", help="bubbles of GSPMD's Tables 4 and 5, beside the published figures")
    drawing = sub.add_parser("draw", help="a schedule as text, or as SVG")
    drawing.add_argument("--stages", type=int, default=4)
    drawing.add_argument("--microbatches", type=int, default=8)
    drawing.add_argument("--rounds", type=int, default=1, help="more than 1: a circular schedule")
    drawing.add_argument("--svg", metavar="FILE", help="write an SVG file instead")
    args = parser.parse_args(argv)
    if args.command == "tables":
        print(tables.report())
        return 0
    try:
        schedule = Schedule(args.stages, args.microbatches, args.rounds)
    except ValueError as e:
        parser.exit(2, f"{parser.prog}: error: {e}\n")
    if args.svg:
        pathlib.Path(args.svg).write_text(draw.svg(schedule))
    else:
        print(draw.text(schedule))
    return 0


if __name__ == "__main__":
    sys.exit(main())
