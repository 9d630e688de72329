"""The page about the data: it can be written, and the one in the repository is of this form."""

from __future__ import annotations

import pathlib
import re

from shardwise.translation.catalogues import Corpus
from shardwise.translation.describe import describe
from shardwise.translation.vocabulary import Vocabularies

PAGE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "translation" / "DATA.md"


def headings(text: str) -> list[str]:
    return re.findall("^#+ .*$", text, re.MULTILINE)


def test_the_page(corpus: Corpus, vocabularies: Vocabularies):
    text, page = describe(corpus, vocabularies), PAGE.read_text()
    assert headings(text) == headings(page)
    assert f"| training | {len(corpus.train):,} |" in text
    assert f"cs {corpus.sizes['cs']:,}" in text
    assert corpus.fingerprint in text
    for line in corpus.licences.splitlines():
        assert f"- {line}\n" in text
    for name in ("LGPL-2.1-only", "BSD-3-Clause"):
        assert name in page
    # Every table's rows have as many cells as its head.
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1
