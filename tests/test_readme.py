"""README.md: its example runs, and its commands are the ones CI runs."""

import pathlib
import re

REPO = pathlib.Path(__file__).resolve().parent.parent
README = (REPO / "README.md").read_text()


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "dot_general" in printed
    assert float(printed.splitlines()[-1]) > 0


def test_ci_installs_and_tests_as_the_readme_says():
    ci = (REPO / ".ci" / "run").read_text()
    for part in ("-m venv", "install", "-e '.[test]'", "-m pytest -n 2"):
        assert part in README and part in ci


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (REPO / target).exists(), f"README.md links to {target}, which is missing"
