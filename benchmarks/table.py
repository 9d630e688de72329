"""Tables on the terminal; the same rows are what `--json` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


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
    table = Table(title=title, title_justify="left", caption=note or None)
    for key in rows[0] if rows else ():
        left = any(isinstance(r[key], str) for r in rows)
        table.add_column(key, justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(number(v)) for v in row.values()))
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=160)).print(table)
