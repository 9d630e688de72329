"""A schedule as text and as SVG: stages down, ticks across; the backward pass is its mirror image."""

from __future__ import annotations

from shardwise.pipeline.schedule import Schedule

_COLOURS = ("#3b6ea5", "#5aa08f", "#c9a227", "#c46a4a", "#8a6db1", "#5f7f95")  # of rounds, in turn
_PAPER, _INK, _FAINT, _BUBBLE = "#ffffff", "#22303c", "#6b7a86", "#eceff1"
_FONT = "font-family='system-ui, Helvetica, Arial, sans-serif'"
_LEFT, _TOP, _ROW = 64, 44, 26  # pixels: of stage names, of the title, of a row


def headline(s: Schedule) -> str:
    """`GPipe: 4 stages, 16 microbatches; 19 ticks, 15.8 % bubbles`."""
    name = "GPipe" if s.rounds == 1 else "circular"
    rounds = "" if s.rounds == 1 else f", {s.rounds} rounds"
    return (
        f"{name}: {s.stages} stages, {s.microbatches} microbatches{rounds}; "
        f"{s.ticks} ticks, {100 * s.bubble_ratio:.1f} % bubbles"
    )


def text(s: Schedule) -> str:
    """One line a stage: the microbatch of each tick, `.` in a bubble; rounds after the first are
    told by a letter (b is the second)."""

    def cell(work: tuple[int, int] | None) -> str:
        if work is None:
            return "."
        round, microbatch = work
        return (chr(ord("a") + round) if s.rounds > 1 else "") + str(microbatch)

    rows = [[cell(s.work(t, k)) for t in range(s.ticks)] for k in range(s.stages)]
    wide = max(len(c) for row in rows for c in row)
    names = [f"stage {k}" for k in range(s.stages)]
    lines = [
        " ".join([name.ljust(max(map(len, names))), *(c.rjust(wide) for c in row)])
        for name, row in zip(names, rows, strict=True)
    ]
    return "\n".join([headline(s), *lines])


def svg(s: Schedule) -> str:
    """A drawing: a box for every tick of every stage, coloured by round, grey where there is a bubble."""
    cell = 26 if s.ticks <= 48 else max(6, 1248 // s.ticks)
    grid, title, legend = s.ticks * cell, 8 * len(headline(s)) - _LEFT, 84 * (min(s.rounds, 6) + 1)
    wide, high = _LEFT + max(grid, title, legend) + 16, _TOP + s.stages * _ROW + 40
    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide} {high}' width='{wide}' "
        f"height='{high}' role='img' aria-label='{headline(s)}' {_FONT}>",
        f"<rect width='{wide}' height='{high}' fill='{_PAPER}'/>",
        f"<text x='16' y='26' font-size='14' font-weight='600' fill='{_INK}'>{headline(s)}</text>",
    ]
    for k in range(s.stages):
        y = _TOP + k * _ROW
        out.append(
            f"<text x='{_LEFT - 8}' y='{y + 17}' font-size='11' text-anchor='end' "
            f"fill='{_FAINT}'>stage {k}</text>"
        )
        out += [_box(s, t, k, _LEFT + t * cell, y, cell) for t in range(s.ticks)]
    base = _TOP + s.stages * _ROW
    every = 1 if s.ticks <= 24 else 5 if s.ticks <= 120 else 20
    out += [
        f"<text x='{_LEFT + t * cell + (cell - 2) / 2:g}' y='{base + 13}' font-size='9' "
        f"text-anchor='middle' fill='{_FAINT}'>{t}</text>"
        for t in range(0, s.ticks, every)
    ]
    out += _legend(s, base + 32)
    return "\n".join([*out, "</svg>\n"])


def _box(s: Schedule, tick: int, stage: int, x: int, y: int, cell: int) -> str:
    work = s.work(tick, stage)
    size = f"x='{x}' y='{y}' width='{cell - 2}' height='{_ROW - 2}' rx='{3 if cell > 12 else 1}'"
    if work is None:
        return f"<rect {size} fill='{_BUBBLE}'/>"
    round, microbatch = work
    box = f"<rect {size} fill='{_COLOURS[round % len(_COLOURS)]}'/>"
    if cell < 18:
        return box
    return box + (
        f"<text x='{x + (cell - 2) / 2:g}' y='{y + 16}' font-size='10' text-anchor='middle' "
        f"fill='{_PAPER}'>{microbatch}</text>"
    )


def _legend(s: Schedule, y: int) -> list[str]:
    """What colours and numbers mean."""
    names = [f"round {r}" for r in range(s.rounds)] if s.rounds > 1 else ["microbatch"]
    shown = [*zip(_COLOURS, names, strict=False), (_BUBBLE, "bubble")]
    out = []
    for i, (colour, name) in enumerate(shown):
        x = _LEFT + 84 * i
        out.append(f"<rect x='{x}' y='{y - 9}' width='10' height='10' rx='2' fill='{colour}'/>")
        out.append(f"<text x='{x + 15}' y='{y}' font-size='10' fill='{_FAINT}'>{name}</text>")
    return out
