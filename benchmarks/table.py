"""Tables on the terminal; the same rows are what `--json` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_PLAIN_WIDTH = 150  # of output that is not a terminal


def number(value: Any) -> str:
    """`1.234`, `12,345`, or a dash for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show(title: str, rows: Sequence[dict[str, Any]], as_json: bool, note: str = "") -> None:
    """Print rows (dicts with the same keys, in the order of the columns)."""
    if as_json:
        print(json.dumps({"title": title, "rows": list(rows), "note": note}, default=str))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    console.print(f"[bold]{escape(title)}[/]")
    if rows:
        console.print(_table(rows))
    if note:
        console.print(f"[dim]{escape(note)}")


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key in rows[0]:
        left = any(isinstance(r[key], str) for r in rows)
        table.add_column(key, justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(number(v)) for v in row.values()))
    return table
