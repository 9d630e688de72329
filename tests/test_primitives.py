"""Every primitive of JAX: in a class, right on every split its rules allow, and on the page.

After a change of rules: `python -m shardwise.testing.primitives > docs/primitives.md`.
"""

from __future__ import annotations

import pathlib

import jax
import pytest

from shardwise import _jax_primitives
from shardwise.testing.primitives import classes
from shardwise.testing.primitives.examples import EXAMPLES
from shardwise.testing.primitives.page import page
from shardwise.testing.rules import check_rule

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "primitives.md"
PRESENT = _jax_primitives.all_primitives()
OWN = classes.ruled()
# What the tables and the page speak of; newer JAX has other primitives.
RELEASE = jax.__version__ == "0.10.2"


@pytest.mark.skipif(not RELEASE, reason="the tables are those of jax 0.10.2")
def test_every_primitive_is_in_a_class():
    """One that the next JAX has more is noticed when the release is: it has no class yet."""
    assert [n for n in sorted(PRESENT) if not classes.classes_of(n)] == []


@pytest.mark.skipif(not RELEASE, reason="the tables are those of jax 0.10.2")
def test_no_line_of_the_tables_is_stale():
    """What has a rule, or is no primitive, is in no table; nothing is in two."""
    tables = ("lowered", "manual", "kernel", "internal", "fallback")
    listed = classes.names(
        " ".join((classes.LOWERED, classes.MANUAL, classes.KERNEL, classes.INTERNAL))
    ) | set(classes.FALLBACK)
    assert sorted(listed - set(PRESENT)) == []
    for name in listed:
        (only,) = classes.classes_of(name)
        assert only in tables


def test_few_fall_back():
    assert len(classes.FALLBACK) <= 12


@pytest.mark.skipif(not RELEASE, reason="the examples are those of jax 0.10.2")
def test_every_rule_has_an_example():
    """Its line of the page and its test come from it; our own primitives may have one too."""
    assert sorted((OWN & set(PRESENT)) - set(EXAMPLES)) == []
    assert [n for n in EXAMPLES if n not in PRESENT and n not in OWN] == []


@pytest.mark.skipif(not RELEASE, reason="the page is that of jax 0.10.2")
def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("name", sorted(n for n in OWN if n in EXAMPLES and EXAMPLES[n].runs))
def test_values_on_every_split(name: str):
    e = EXAMPLES[name]
    found = check_rule(e.fn, e.args, e.mesh, name, e.tol, e.limit, merged=name not in PRESENT)
    assert found["wrong"] == [] and found["splits"]
