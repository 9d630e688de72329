"""The command `shardwise`.

`shardwise demo` trains a small language model, written for one device, on virtual CPU devices;
`shardwise demo --job translation` a translation model with mixture-of-experts layers.
Bad input ends with exit status 2 and one message; a demo whose proof fails ends with 1.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from typing import Any

from shardwise.demo.devices import parse_axes
from shardwise.errors import ShardingError

_CHILD = "SHARDWISE_CHILD"  # set in a child process, so that it never starts another one


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    translation = _job(argv) == "translation"
    parser = _translation_parser() if translation else _parser()
    args = parser.parse_args(argv)
    try:
        options, axes = translation_options(args) if translation else (demo_options(args), {})
    except ValueError as e:  # ShardingError included
        parser.exit(2, f"shardwise: error: {e}\n")
    from shardwise.demo import devices

    if not devices.start(args.devices):
        return _in_a_child(argv, args.devices)
    try:
        # Imported only now: these build arrays, and that would start JAX with one device.
        if translation:
            from shardwise.translation import demo
            from shardwise.translation.__main__ import keep_compiled

            keep_compiled(args.cache)
            return demo.demo(options, axes, args.directory, args.cache, as_json=args.json)
        from shardwise.demo import run

        return run.demo(options, as_json=args.json)
    except (ShardingError, ValueError, FileNotFoundError, ImportError) as e:
        print(f"shardwise: error: {e}", file=sys.stderr)
        return 2


def _job(argv: list[str]) -> str:
    """Which demo is asked for: their options differ."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--job", default="language")
    return first.parse_known_args(argv)[0].job


def _in_a_child(argv: list[str], count: int) -> int:
    """JAX had started in this process with other devices: do the same in a process of its own."""
    if os.environ.get(_CHILD):
        print(f"shardwise: error: JAX gave fewer than {count} CPU devices", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "shardwise.cli", *argv]
    return subprocess.call(command, env={**os.environ, _CHILD: "1"})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardwise", description="SPMD partitioning of JAX programs, every decision explained."
    )
    sub = parser.add_subparsers(dest="command", required=True)
    text = (
        "Train a byte-level Transformer on the standard library's sources on virtual CPU devices, "
        "show every sharding and collective, and prove the result equal to the one-device run."
    )
    demo = sub.add_parser("demo", help="train a language model on 8 virtual devices",
                          description=text)  # fmt: skip
    add = demo.add_argument
    add(
        "--job",
        choices=("language", "translation"),
        default="language",
        help="what to train (default language); --job translation --help shows that one's options",
    )
    add("--mesh", default=None, metavar="x=2,y=4", help="the two axes: batch first, then model")
    add("--devices", type=int, default=8, help="virtual CPU devices (default 8)")
    add("--strategy", choices=("final", "attempt1", "attempt2"), default="final",
        help="which of GSPMD Table 1's shardings (default final)")  # fmt: skip
    add("--steps", type=int, default=40, help="training steps (default 40)")
    add("--layers", type=int, default=2)
    add("--model", type=int, default=128, help="size of a token's vector (default 128)")
    add("--hidden", type=int, default=512, help="hidden size of the FFN (default 512)")
    add("--heads", type=int, default=4)
    add("--batch", type=int, default=16)
    add("--seq", type=int, default=128, help="bytes in a sequence (default 128)")
    add("--rate", type=float, default=3e-3, help="Adam's learning rate (default 0.003)")
    add("--remat", choices=("none", "full", "dots"), default="none",
        help="what the backward pass computes again (default none)")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="one JSON object on stdout, nothing else")
    return parser


def _translation_parser() -> argparse.ArgumentParser:
    from shardwise.translation.__main__ import CACHE, add_job_options
    from shardwise.translation.demo import DEFAULTS

    parser = argparse.ArgumentParser(prog="shardwise")
    sub = parser.add_subparsers(dest="command", required=True)
    text = (
        "Train GShard's mixture-of-experts Transformer on message catalogues of many languages, on "
        "virtual CPU devices, show every sharding and collective, prove the result equal to the "
        "one-device run, and translate some sentences."
    )
    demo = sub.add_parser("demo", help="train a translation model", description=text)
    add = demo.add_argument
    add("--job", choices=("language", "translation"), default="translation")
    add("--devices", type=int, default=8, help="virtual CPU devices (default 8)")
    add("--mesh", default=None, metavar="x=2,y=4", help="default: all devices on x")
    add("--directory", default=None, help="keep checkpoints and metrics there, and go on from them")
    add("--cache", default=CACHE, help=f"of vocabularies (default {CACHE})")
    add("--json", action="store_true", help="one JSON object on stdout, nothing else")
    add_job_options(demo, **DEFAULTS)
    return parser


def translation_options(args: argparse.Namespace) -> tuple[Any, dict[str, int]]:
    """The translation job's options and mesh from the command line.

    Raises:
      ValueError: for sizes that cannot be.
    """
    from shardwise.translation.__main__ import job_options, mesh_of

    axes = mesh_of(args)
    if (need := math.prod(axes.values())) > args.devices or args.devices < 1:
        raise ValueError(f"a mesh of {need} devices needs --devices {need}, not {args.devices}")
    return job_options(args), axes


def demo_options(args: argparse.Namespace) -> Any:
    """The demo's options from the command line.

    Raises:
      ValueError: for sizes that cannot be, with what is wrong and what to do.
    """
    from shardwise.demo.options import DemoOptions
    from shardwise.nn.transformer import TransformerConfig

    for name in ("devices", "steps", "batch", "layers", "model", "hidden", "heads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.seq < 2:
        raise ValueError(f"--seq must be at least 2, not {args.seq}")
    if not (math.isfinite(args.rate) and args.rate > 0):
        raise ValueError(f"--rate must be a positive number, not {args.rate}")
    if args.seed < 0:
        raise ValueError(f"--seed must not be negative: {args.seed}")
    model = TransformerConfig(
        layers=args.layers,
        model=args.model,
        hidden=args.hidden,
        heads=args.heads,
        remat=None if args.remat == "none" else args.remat,
    )
    mesh = parse_mesh(args.mesh, args.devices)
    return DemoOptions(
        model, mesh, args.strategy, args.steps, args.batch, args.seq, args.rate, args.seed
    )


def parse_mesh(text: str | None, devices: int) -> dict[str, int]:
    """`"x=2,y=4"` -> {"x": 2, "y": 4}; without a text the squarest mesh of all devices.

    Raises:
      ValueError: when it is not two named axes whose product is at most `devices`.
    """
    if text is None:
        rows = max(d for d in range(1, math.isqrt(devices) + 1) if devices % d == 0)
        return {"x": rows, "y": devices // rows}
    axes = parse_axes(text)
    if len(axes) != 2:
        raise ValueError(f"--mesh {text!r}: the strategies need two axes, as in x=2,y=4")
    if (need := math.prod(axes.values())) > devices:
        raise ValueError(
            f"--mesh {text!r} needs {need} devices and there are {devices}: add --devices {need}"
        )
    return axes


if __name__ == "__main__":
    sys.exit(main())
