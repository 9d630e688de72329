"""Parallel text out of gettext catalogues: what is read, what is dropped, how it is split."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import struct
import subprocess
import sys

import pytest

from shardwise.translation import mo
from shardwise.translation.catalogues import (
    PACKAGES,
    CatalogueOptions,
    Corpus,
    Pair,
    build,
    canonical,
    clean,
    load,
    normalised,
    part_of,
)
from shardwise.translation.mo import Entry


def compiled(entries: dict[str, str], order: str = "<") -> bytes:
    """A .mo file of these strings, as msgfmt writes it."""
    texts = [t.encode() for pair in sorted(entries.items()) for t in pair]
    start, tables = 28 + 16 * len(entries), []
    for text in texts:
        tables.append(struct.pack(order + "2I", len(text), start))
        start += len(text) + 1
    head = struct.pack(order + "7I", 0x950412DE, 0, len(entries), 28, 28 + 8 * len(entries), 0, 0)
    body = b"".join(text + b"\0" for text in texts)
    return head + b"".join(tables[::2]) + b"".join(tables[1::2]) + body


CZECH = (
    "Content-Type: text/plain; charset=UTF-8\n"
    "Plural-Forms: nplurals=3; plural=(n==1) ? 0 : (n>=2 && n<=4) ? 1 : 2;\n"
)


@pytest.mark.parametrize("order", ["<", ">"])
def test_every_message_with_its_context_and_plural_forms(order: str):
    data = compiled(
        {
            "": CZECH,
            "Monday": "pondělí",
            "month\4May": "kvě.",
            "%d day\0%d days": "%d den\0%d dny\0%d dní",
            "age\4year\0years": "rok\0roky\0let",
            "not translated": "",
        },
        order,
    )
    assert sorted(mo.read(data)) == sorted(
        [
            Entry("", "Monday", "pondělí"),
            Entry("month", "May", "kvě."),
            Entry("", "%d day", "%d den"),
            Entry("", "%d days", "%d dny"),
            Entry("", "%d days", "%d dní"),
            Entry("age", "year", "rok"),
            Entry("age", "years", "roky"),
            Entry("age", "years", "let"),
        ]
    )


def test_one_form_for_all_numbers_stands_for_the_plural():
    head = "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=1; plural=0;\n"
    data = compiled({"": head, "%d day\0%d days": "%d日"})
    assert list(mo.read(data)) == [Entry("", "%d days", "%d日")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\3\4 not a catalogue", "no magic number"),
        (compiled({"": CZECH, "a": "b"})[:30], "a table leaves the file"),
        (compiled({"": CZECH, "abc": "defghi"})[:-4], "a string leaves the file"),
        (compiled({"a": "xx"}).replace(b"xx", b"\xff\xfe"), "not UTF-8"),
    ],
)
def test_what_is_no_catalogue_is_said_to_be_none(data: bytes, message: str):
    with pytest.raises(mo.BadCatalogue, match=message):
        list(mo.read(data))


ENTRIES = [
    ("de", "a", Entry("", "Monday", "Montag")),
    ("de", "b", Entry("", "Monday", " Mon\u00adtag\n")),  # the same, after cleaning
    ("de_CH", "a", Entry("", "Monday", "Montag")),
    ("de", "a", Entry("", "Abau", "Abau")),
    ("de", "a", Entry("", "%(n)s days", "%(n)s Tage")),
    ("de", "a", Entry("", "a day ago", "vor %(n)s Tagen")),
    ("de", "a", Entry("", "<b>Bold</b> text", "<b>Fetter</b> Text")),
    ("de", "a", Entry("", "<b>Bold</b> face", "Fette Schrift")),
    ("de", "a", Entry("", "M", "Montag")),
    ("de", "a", Entry("", "%(a)s %(b)s", "%(b)s, %(a)s")),
    ("en_GB", "a", Entry("", "Color", "Colour")),
    ("fr", "a", Entry("", "Monday", "lundi")),
    ("zh_CN", "a", Entry("", "Monday", "星期一")),
    ("zh_Hans", "b", Entry("", "Monday", "星期一")),
]


def pairs_of(corpus: Corpus) -> list[tuple[str, str, str, str]]:
    return sorted(map(tuple, corpus.train + corpus.validation + corpus.test))


def test_what_is_kept_and_why_the_rest_is_not():
    corpus = build(ENTRIES, CatalogueOptions(test=0, validation=0), {})
    assert pairs_of(corpus) == [
        ("de", "%(n)s Tage", "%(n)s days", "a"),
        ("de", "<b>Fetter</b> Text", "<b>Bold</b> text", "a"),
        ("de", "Montag", "Monday", "a"),
        ("fr", "lundi", "Monday", "a"),
        ("zh_Hans", "星期一", "Monday", "a"),
    ]
    assert corpus.dropped == {
        "English to English": 1,
        "equal to the message": 1,
        "hardly any letters": 2,
        "other placeholders or tags": 2,
        "repeated": 3,
    }
    assert corpus.locales == {"de": 3, "de_CH": 1, "fr": 1, "zh_CN": 1, "zh_Hans": 1}


def test_options_keep_copies_and_regions():
    options = CatalogueOptions(test=0, validation=0, keep_copies=True, merge_regions=False)
    corpus = build(ENTRIES, options, {})
    assert ("de", "Abau", "Abau", "a") in pairs_of(corpus)
    assert corpus.languages == ("de", "de_CH", "fr", "zh_Hans")


def test_the_order_of_entries_does_not_matter():
    shuffled = ENTRIES[:]
    random.Random(0).shuffle(shuffled)
    one, other = (build(e, CatalogueOptions(test=0.4), {}) for e in (ENTRIES, shuffled))
    assert one == other and one.fingerprint == other.fingerprint


def test_names_of_locales():
    same = [("sr@latin", "sr_Latn"), ("nb_NO", "nb"), ("zh_TW", "zh_Hant"), ("ar_DZ", "ar")]
    assert [canonical(locale) for locale, _ in same] == [language for _, language in same]
    assert canonical("pt_BR", merge_regions=False) == "pt_BR"


def test_cleaning():
    assert clean(" a\u00a0\n b\u200b\u202ac ") == "a bc"
    assert clean("e\u0301") == "\u00e9"
    assert clean("می\u200cشود") == "می\u200cشود"  # the joiner is spelling, not layout


def test_messages_that_differ_in_case_punctuation_or_order_are_one_for_the_split():
    assert normalised("Hello,  World!") == normalised("hello world") != normalised("hello worlds")
    assert normalised("%") != normalised("…")
    options = CatalogueOptions(test=0.5)
    for a, b in (("Enter a number.", "enter a Number"), ("Nahuatl, Huasteca", "Huasteca Nahuatl")):
        assert part_of(a, options) == part_of(b, options)


def test_parts_have_the_shares_asked_for_and_a_salt_changes_them():
    options = CatalogueOptions(test=0.3, validation=0.1)
    parts = [part_of(f"message {i}", options) for i in range(4000)]
    assert abs(parts.count("test") / 4000 - 0.3) < 0.03
    assert abs(parts.count("validation") / 4000 - 0.1) < 0.02
    salted = CatalogueOptions(test=0.3, validation=0.1, salt="other")
    assert parts != [part_of(f"message {i}", salted) for i in range(4000)]


def test_no_held_out_target_or_source_was_trained_on(corpus: Corpus):
    parts = [corpus.train, corpus.validation, corpus.test]
    assert all(len(part) > 50 for part in parts)
    for one, other in itertools.combinations(parts, 2):
        assert not {normalised(p.target) for p in one} & {normalised(p.target) for p in other}
    trained = {(p.language, p.source) for p in corpus.train}
    for part in parts[1:]:
        sources = [(p.language, p.source) for p in part]
        assert not trained & set(sources)
        assert len(set(sources)) == len(sources)


def test_the_real_catalogues(corpus: Corpus):
    assert corpus.languages == ("af", "am", "cs", "ja", "so")
    assert corpus.sizes["ja"] > 3000 > corpus.sizes["cs"] > 1500 > corpus.sizes["so"] > 50
    assert list(corpus.train) == sorted(corpus.train)
    assert len(set(corpus.train)) == len(corpus.train)
    assert corpus.levels()["cs"] == "mid" and corpus.levels()["so"] == "low"
    assert corpus.levels({"big": 3000, "small": 0})["ja"] == "big"
    for p in corpus.train:
        assert p.source == clean(p.source) and p.target == clean(p.target)
        assert p.source != p.target
    domains = {p.domain for p in corpus.train}
    assert {"iso639-3", "iso3166-1", "django", "django.admin"} <= domains


def test_the_licences_are_named(corpus: Corpus):
    pycountry, django = corpus.licences.splitlines()
    assert pycountry.startswith(f"pycountry {corpus.versions['pycountry']}: LGPL-2.1-only, Debian")
    assert django.startswith(f"Django {corpus.versions['Django']}: BSD-3-Clause, Django")


def test_the_same_in_another_process_with_other_hashes_and_another_locale():
    program = (
        "from shardwise.translation.catalogues import *;"
        "print(load(CatalogueOptions(languages=('am', 'so', 'kv'))).fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": name},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, name in (("1", "C"), ("2", "C.UTF-8"))
    }
    assert len(prints) == 1 and len(prints.pop()) == 65


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PACKAGES, "no_such_package", ("NoSuch", "none", "nobody"))
    with pytest.raises(
        ImportError, match=r"NoSuch holds .* pip install 'shardwise\[translation\]'"
    ):
        load(CatalogueOptions(packages=("no_such_package",)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: load(CatalogueOptions(languages=("tlh",))),
            "no catalogue has tlh; languages are ab",
        ),
        (
            lambda: CatalogueOptions(packages=("gnome",)),
            "packages are pycountry, django, not gnome",
        ),
        (
            lambda: CatalogueOptions(test=0.9, validation=0.1),
            r"test \(0.9\) and validation \(0.1\)",
        ),
    ],
)
def test_wrong_options(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_cache_gives_the_same(tmp_path, monkeypatch: pytest.MonkeyPatch):
    options = CatalogueOptions(languages=("am", "so"))
    first = load(options, tmp_path)
    monkeypatch.setattr(mo, "read", lambda data: pytest.fail("read again"))
    again = load(options, tmp_path)
    assert again == first and again.fingerprint == first.fingerprint
    assert isinstance(again.train[0], Pair)
    with pytest.raises(pytest.fail.Exception, match="read again"):
        load(dataclasses.replace(options, salt="other"), tmp_path)
