"""Pages run: every python block of the pages below, in order, prints what the page says."""

import contextlib
import io
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"


def blocks(text):
    """(python, printed) pairs: a python block and the plain block right after it, if any."""
    pattern = r"```python\n(.*?)```\n(?:```\n(.*?)```)?"
    return [(m.group(1), m.group(2) or "") for m in re.finditer(pattern, text, re.S)]


@pytest.mark.parametrize("page", ["tour.md", "manual.md", "moe.md", "pipelining.md"])
def test_the_page_prints_what_it_says(page):
    scope = {}
    for code, want in blocks((DOCS / page).read_text()):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, page, "exec"), scope)
        assert out.getvalue() == want, code
