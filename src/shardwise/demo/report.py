"""The demo's facts on the terminal."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from shardwise.demo.facts import Facts

_COLLECTIVES_SHOWN = 14
_PLAIN_WIDTH = 150  # of output that is not a terminal: wide enough that no column folds


def size(count: float | None) -> str:
    """`1.23 MB`: bytes for people, in powers of 1000."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def dims(values: list[Any]) -> str:
    """`[16, 128]` or, of a spec, `[x, -, y]`."""
    return "[" + ", ".join("-" if v is None else str(v) for v in values) + "]"


def add_row(table: Table, *cells: str) -> None:
    """A row of plain text: rich would read `[y, -, x]` as markup and drop it."""
    table.add_row(*map(escape, cells))


class Screen:
    """Prints each fact as it becomes known; `quiet` prints nothing."""

    def __init__(self, quiet: bool = False):
        console = Console(quiet=quiet, highlight=False)
        if not console.is_terminal:
            console = Console(quiet=quiet, highlight=False, width=_PLAIN_WIDTH)
        self.console = console

    def show(self, name: str, fact: Facts) -> None:
        getattr(self, f"_{name}")(fact)

    def heading(self, text: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{text}", align="left")

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        with self.console.status(f"{what} …"):
            yield

    @contextlib.contextmanager
    def progress(self, steps: int, what: str) -> Iterator[Callable[[int, float, float], None]]:
        """A bar with loss and speed; yields `on_step(number, loss, tokens per second)`."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(what, total=steps, note="compiling")

            def on_step(number: int, loss: float, rate: float) -> None:
                note = f"loss {loss:.4f}  {rate:,.0f} tokens/s"
                bar.update(task, completed=number, note=note)

            yield on_step

    def table(self, *columns: str, right: tuple[str, ...] = ()) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for c in columns:
            table.add_column(c, justify="right" if c in right else "left", overflow="fold")
        return table

    # -- one method a fact -------------------------------------------------------------------------

    def _setting(self, fact: Facts) -> None:
        self.heading("A program for one device, on a mesh")
        mesh = " ".join(f"{k}={v}" for k, v in fact["mesh"].items())
        corpus = fact["corpus"]
        folder = escape(corpus["folder"])
        self.console.print(
            f"Transformer: {fact['layers']} layers, M {fact['model']}, H {fact['hidden']}, "
            f"{fact['heads']} heads, {fact['vocab']} bytes: {fact['parameters']:,} parameters\n"
            f"mesh {mesh} ({math.prod(fact['mesh'].values())} virtual CPU devices), "
            f"strategy {fact['strategy']} of GSPMD Table 1\n"
            f"text: {corpus['bytes']:,} bytes of {corpus['files']} files in {folder}"
        )

    def _annotations(self, fact: Facts) -> None:
        self.heading("What was annotated")
        table = self.table("tensor", "shape", "annotation", "where")
        for r in fact["tensors"]:
            add_row(table, r["tensor"], dims(r["shape"]), dims(r["annotation"]), r["where"])
        self.console.print(table)
        self.console.print(
            f"{fact['annotated']} annotated of {fact['values']} values of the training step: "
            f"{fact['share']:.1%}. All the others are completed."
        )

    def _shardings(self, fact: Facts) -> None:
        self.heading("Completed shardings: the parameters, and one layer's forward pass")
        table = self.table("argument", "shape", "sharding")
        for r in fact["arguments"]:
            add_row(table, r["name"], dims(r["shape"]), r["sharding"])
        self.console.print(table, "")
        table = self.table("value", "shape", "sharding", "", "source")
        for r in fact["layer"]:
            add_row(table, r["op"], dims(r["shape"]), r["sharding"], r["from"], r["source"])
        self.console.print(table)
        self.console.print(f"{fact['split values']} values of the step are split.")

    def _collectives(self, fact: Facts) -> None:
        self.heading("Every collective, and why")
        right = ("bytes", "times", "total")
        table = self.table("kind", "axes", *right, "source", "reason", right=right)
        shown = fact["rows"][:_COLLECTIVES_SHOWN]
        for r in shown:
            source = Path(r["source"]).name
            sent = size(r["bytes"]), f"{r['times']:,}", size(r["total"])
            add_row(table, r["kind"], ", ".join(r["axes"]), *sent, source, r["reason"])
        self.console.print(table)
        rest = fact["rows"][len(shown) :]
        if rest:
            total = size(sum(r["total"] for r in rest))
            self.console.print(f"and {len(rest)} smaller kinds, {total} together (--json has all)")
        self.console.print(f"One device sends {size(fact['bytes'])} a step.")
        for text in fact["fallbacks"]:
            self.console.print(f"[yellow]replicated: {escape(text)}")

    def _memory(self, fact: Facts) -> None:
        self.heading("Memory of one device")
        right = ("partitioned", "on one device", "share")
        table = self.table("", *right, right=right)
        for what, r in fact.items():
            if what != "planned peak":
                share = f"{r['sharded'] / r['whole']:.0%}" if r["whole"] else "-"
                add_row(table, what, size(r["sharded"]), size(r["whole"]), share)
        self.console.print(table)
        self.console.print(f"The plan expected a peak of {size(fact['planned peak'])}.")

    def _training(self, fact: Facts) -> None:
        first, last = fact["losses"][0], fact["losses"][-1]
        self.console.print(
            f"loss {first:.4f} → {last:.4f} ({last / math.log(2):.2f} bits a byte), "
            f"{fact['tokens per second']:,.0f} tokens/s"
        )

    def _proof(self, fact: Facts) -> None:
        self.heading(f"The proof, after {fact['steps']} steps")
        sides = {name: side for name, side in fact["sides"].items() if "refused" not in side}
        table = self.table("", *sides, right=tuple(sides))
        for what in ("loss", "parameters"):
            name = f"{what}: largest relative difference to one device"
            add_row(table, name, *(f"{side[what]:.1e}" for side in sides.values()))
        total = "bytes on the wire a step, compiled"
        add_row(table, total, *(size(side["bytes"]) for side in sides.values()))
        for kind in sorted({k for side in sides.values() for k in side["by kind"]}):
            sent = (size(side["by kind"].get(kind, 0)) for side in sides.values())
            add_row(table, f"  {kind}", *sent)
        self.console.print(table)
        for name, side in fact["sides"].items():
            if "refused" in side:
                self.console.print(f"{name} refused: {escape(side['refused'])}")
        ratio = f"  {fact['ratio']:.2f} of jax.jit's bytes." if fact["ratio"] is not None else ""
        if fact["holds"]:
            self.console.print(f"[bold green]The same numbers as on one device.[/]{ratio}")
        else:
            self.console.print("[bold red]NOT the same numbers as on one device: a bug.")
