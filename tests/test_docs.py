"""The tour runs: every python block of docs/tour.md, in order, prints what the page says."""

import contextlib
import io
import pathlib
import re

TOUR = pathlib.Path(__file__).parent.parent / "docs" / "tour.md"


def blocks(text):
    """(python, printed) pairs: a python block and the plain block right after it, if any."""
    pattern = r"```python\n(.*?)```\n(?:```\n(.*?)```)?"
    return [(m.group(1), m.group(2) or "") for m in re.finditer(pattern, text, re.S)]


def test_the_tour_prints_what_it_says():
    scope = {}
    for code, want in blocks(TOUR.read_text()):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "tour.md", "exec"), scope)
        assert out.getvalue() == want, code
