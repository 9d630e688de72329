"""`python -m shardwise.translation train | evaluate`: the translation job on virtual CPU devices.

`train` goes on from the last checkpoint of its directory; with `--processes` it is a job of several
processes.  Bad input ends with exit status 2 and one message.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from shardwise.demo import devices
from shardwise.errors import ShardingError

if TYPE_CHECKING:
    from shardwise.translation.job import JobOptions

CACHE = "~/.cache/shardwise"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if args.processes < 1 or args.devices < 1 or args.devices % args.processes:
            raise ValueError(
                f"--processes {args.processes} must divide --devices {args.devices}, "
                "both at least 1"
            )
        return _run(args, argv)
    except (ValueError, ShardingError, FileNotFoundError, ImportError) as e:
        print(f"shardwise: error: {e}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, argv: list[str]) -> int:
    from shardwise.translation import distributed

    if args.processes > 1 and not distributed.named():
        command = [sys.executable, "-m", "shardwise.translation", *argv]
        each = args.devices // args.processes
        return distributed.launch(command, args.processes, each, lambda: _hint(args.directory))
    if not distributed.joined() and not devices.start(args.devices):
        raise ValueError(f"JAX had started with fewer than {args.devices} CPU devices")
    keep_compiled(args.cache)
    return _train(args) if args.command == "train" else _evaluate(args)


def keep_compiled(cache: str) -> None:
    """JAX keeps compiled programs in the cache: a run that goes on need not compile again."""
    import jax

    option = "jax_compilation_cache_dir"
    if getattr(jax.config, option, None) is None:
        jax.config.update(option, str(pathlib.Path(cache).expanduser() / "compiled"))


def _train(args: argparse.Namespace) -> int:
    import jax

    from shardwise.mesh import device_mesh
    from shardwise.translation.job import Job

    options = job_options(args)
    job = Job.load(options, args.cache)
    training = job.training(device_mesh(mesh_of(args)))
    quiet = args.quiet or jax.process_index() > 0
    with progress(options.steps, quiet) as on_step:
        training.train(args.directory, on_step)
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from shardwise.mesh import device_mesh
    from shardwise.translation.evaluate import evaluate
    from shardwise.translation.job import Job, JobOptions

    options = JobOptions.read(args.directory)
    job = Job.load(options, args.cache)
    mesh = device_mesh(mesh_of(args))
    step, params = job.trained(mesh, args.directory)
    decode = job.decoder(mesh, params, args.beams, args.alpha)
    report = evaluate(
        job.corpus, decode, job.vocabularies, job.options.batch_options(job.multiple),
        part=args.part, limit=args.limit, likelihood=job.likelihood(mesh, params),
    )  # fmt: skip
    out = pathlib.Path(args.directory).expanduser() / f"{args.part}-{step}.json"
    report.save(out)
    if args.json:
        print(json.dumps(report.json()))
    elif not args.quiet:
        from rich.console import Console

        Console().print(report.table())
        print(f"step {step}; written to {out}")
    return 0


@contextlib.contextmanager
def progress(steps: int, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar with loss, tokens a second and overflow; yields `on_step(metrics)`."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True, quiet=quiet)) as bar:
        task = bar.add_task("training", total=steps, note="compiling")

        def on_step(line: dict[str, Any]) -> None:
            bar.update(task, completed=line["step"], note=note(line))

        yield on_step


def note(line: dict[str, Any]) -> str:
    """`loss 4.1234  12,345 tokens/s  overflow 1.2%`, of a line of metrics."""
    parts = [f"loss {line['loss']:.4f}"]
    if line["tokens_per_second"]:
        parts.append(f"{line['tokens_per_second']:,.0f} tokens/s")
    if "overflow" in line:
        parts.append(f"overflow {line['overflow']:.1%}")
    return "  ".join(parts)


def _hint(directory: str) -> str:
    """What to do after a process died."""
    steps = [
        int(p.name)
        for p in (pathlib.Path(directory).expanduser() / "checkpoints").glob("*")
        if p.name.isdecimal()
    ]
    if not steps:
        return "There is no checkpoint yet: the same command starts again."
    return f"The same command goes on from step {max(steps)}, the last checkpoint."


# -- options -----------------------------------------------------------------------------------------

_OFF = ("local_groups", "aux_loss", "random_routing")  # mechanisms: --no-random-routing
_CHOICES = {
    "dispatch": ("einsum", "gather"),
    "dtype": ("float32", "bfloat16"),
    "remat": ("full", "dots"),
    "strategy": ("gshard", "weights", "hybrid"),
}
_HELP = {
    "experts": "of each MoE layer; 0 for the dense model of equal computation",
    "layers": "of each stack; every other one has experts",
    "groups": "of tokens, each with its own capacity; a multiple of the devices",
    "capacity_factor": "slots of an expert over those of an even load; 'none' for no limit",
    "tokens": "of a batch, padding included",
    "lengths": "of source and target: 24x16, or several as 16x12,32x24",
    "languages": "only these, as de,fr; all if not given",
    "steps": "in all; a run that is there goes on to so many",
    "rate": "learning rate, over sqrt(max(step, warmup))",
}


def job_options(args: argparse.Namespace) -> JobOptions:
    """The options of a job from a command line."""
    from shardwise.translation.job import JobOptions

    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(JobOptions)}
    return JobOptions(**values)


def add_job_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """An option for each field of `JobOptions`."""
    from shardwise.translation.job import JobOptions

    for field in dataclasses.fields(JobOptions):
        name, default = field.name, defaults.get(field.name, field.default)
        flag = "--" + name.replace("_", "-")
        text = f"{_HELP.get(name, '')} (default {default})".strip()
        if name in _OFF:
            text = "leave out this mechanism of the gating"
            parser.add_argument(f"--no-{flag[2:]}", dest=name, action="store_false", help=text)
        elif name in _CHOICES:
            parser.add_argument(flag, choices=_CHOICES[name], default=default, help=text)
        else:
            parser.add_argument(
                flag, type=_TYPES.get(name, type(default)), default=default, help=text
            )


def _lengths(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [tuple(map(int, part.split("x"))) for part in text.split(",")]
    if any(len(p) != 2 for p in pairs):
        raise ValueError
    return tuple((a, b) for a, b in pairs)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _factor(text: str) -> float | None:
    return None if text == "none" else float(text)


_TYPES: dict[str, Callable[[str], Any]] = {
    "lengths": _lengths, "languages": _names, "capacity_factor": _factor,
}  # fmt: skip


def mesh_of(args: argparse.Namespace) -> dict[str, int]:
    """--mesh, or all devices on one axis."""
    return devices.parse_axes(args.mesh) if args.mesh else {"x": args.devices}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardwise.translation",
        description="GShard's mixture-of-experts Transformer on a hundred languages to English.",
    )
    sub = parser.add_subparsers(dest="command", required=True)
    train = sub.add_parser("train", help="train, or go on training")
    evaluate = sub.add_parser("evaluate", help="translate a held-out part and score it")
    for p in (train, evaluate):
        add = p.add_argument
        add("directory", help="of the run: checkpoints, metrics.jsonl, scores")
        add("--devices", type=int, default=8, help="virtual CPU devices (default 8)")
        add("--processes", type=int, default=1, help="that share the devices (default 1)")
        add("--mesh", default=None, metavar="x=2,y=4", help="default: all devices on x")
        add("--cache", default=CACHE, help=f"of vocabularies (default {CACHE})")
        add("--quiet", action="store_true", help="no progress")
    add_job_options(train)
    add = evaluate.add_argument
    add("--beams", type=int, default=4)
    add("--alpha", type=float, default=0.6, help="of the length penalty (default 0.6)")
    add("--part", choices=("test", "validation"), default="test")
    add("--limit", type=int, default=None, help="at most so many pairs of each language")
    add("--json", action="store_true", help="the scores as JSON on stdout")
    return parser


if __name__ == "__main__":
    sys.exit(main())
