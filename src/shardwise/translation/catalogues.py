"""Real translations from installed packages: the message catalogues of pycountry and Django.

Both packages carry gettext catalogues in some 170 locales: pycountry the names of countries and their
parts, languages, scripts and currencies (Debian's iso-codes), Django the messages of a web
framework.  A pair is a translated message (source) and the English message it translates (target).

    corpus = load()
    corpus.train[0]         # Pair(language="af", source="Abchasië", target="Abkhazia", ...)
    corpus.levels()         # {"af": "mid", "am": "low", ...}
    print(corpus.licences)

What becomes of what a catalogue holds:

- Empty and fuzzy entries do not count (a compiled catalogue has no fuzzy ones).
- Plural forms: the form for one thing with the English singular, each other with the plural.
- Contexts ("abbrev. month") are dropped: the pair stays.
- Text is NFC with single spaces, without control and direction marks; joiners, which Indic scripts and
  Persian need, stay.
- Placeholders and HTML tags stay as text, in pairs that have the same ones on both sides; others are
  dropped (a plural that left its number out, mostly).
- A translation equal to the message ("Abau" in Hungarian) says nothing but "copy": dropped.
- Pairs with no letters but the placeholders', and targets of one letter (weekday headers), are dropped.
- English catalogues are dropped, those of one language under several names (`sr@latin`, `sr_Latn`) are
  one, and so are a language's regions (`es_MX`), unless `merge_regions=False`: most of a region's
  messages are its language's, and it would count as a language of few resources, which it is not.

**The split is by English message**: all translations of a message are in one part, by a hash of its
words in any order, so no target of the validation or test set was trained on in any language, nor
its words in another order.  Sources seen in training (two English names of one thing) are dropped
from the other two, and so is what has two targets there.

The result depends on the packages' versions and the options alone, not on the order of files, the
hash seed or the locale; `Corpus.fingerprint` says whether two are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import pathlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardwise.translation import cache, mo

PACKAGES = {
    # import name -> (distribution, licence of its catalogues, who made them)
    "pycountry": (
        "pycountry",
        "LGPL-2.1-only",
        "Debian iso-codes team and translators (salsa.debian.org/iso-codes-team/iso-codes)",
    ),
    "django": ("Django", "BSD-3-Clause", "Django Software Foundation and individual contributors"),
}

LEVELS = {"high": 4000, "mid": 500, "low": 0}
"""Resource level -> the fewest training pairs a language of that level has."""

_SAME = {
    # Names of one language and script; what is not here is read by its parts (`canonical`).
    "zh_CN": "zh_Hans",
    "zh_HK": "zh_Hant",
    "zh_TW": "zh_Hant",
    "pa_PK": "pa_Arab",
    "sr@latin": "sr_Latn",
    "tt@iqtelif": "tt_Latn",
    "tl": "fil",
    "kmr": "ku",
}
_SAME_LOCALE = {"nb_NO": "nb", "sr@latin": "sr_Latn", "zh_CN": "zh_Hans", "zh_TW": "zh_Hant"}

_PLACEHOLDER = re.compile(
    r"%\(\w+\)[-+#0 ]*\d*(?:\.\d+)?[a-zA-Z]"  # %(name)s
    r"|%[-+#0]*\d*(?:\.\d+)?[sdifrxg](?![a-zA-Z])|%%"  # %d
    r"|\{\w*\}"  # {name}
)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_FORMAT = 1  # part of the cache's key: raise it when what is read or dropped changes
_PART = re.compile("[%{<]")
_MARKS = re.compile(  # soft hyphens, zero-width spaces, direction marks, controls
    r"[\xad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]"
    r"|[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]"
)


class Pair(NamedTuple):
    """A message and its translation; `domain` says where from ("iso639-3", "django.admin")."""

    language: str
    source: str
    target: str
    domain: str


@dataclasses.dataclass(frozen=True)
class CatalogueOptions:
    """What is read and how it is split.

    Attributes:
      languages: only these (names as in `Corpus.languages`); None for all.
      packages: import names of `PACKAGES`.
      test, validation: shares of the English messages.
      merge_regions: `es_MX` counts as `es`.
      keep_copies: keep translations equal to their message.
      salt: another one gives another split.
    """

    languages: tuple[str, ...] | None = None
    packages: tuple[str, ...] = ("pycountry", "django")
    test: float = 0.08
    validation: float = 0.02
    merge_regions: bool = True
    keep_copies: bool = False
    salt: str = ""

    def __post_init__(self) -> None:
        unknown = [p for p in self.packages if p not in PACKAGES]
        if unknown:
            raise ValueError(f"packages are {', '.join(PACKAGES)}, not {', '.join(unknown)}")
        if min(self.test, self.validation) < 0 or self.test + self.validation >= 1:
            raise ValueError(
                f"test ({self.test}) and validation ({self.validation}) are shares of one whole"
            )


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Pairs, sorted by language, source and target.

    Attributes:
      languages: of all pairs, sorted; the position of a language is its number in a batch.
      dropped: reason -> how many entries of the catalogues are not in the corpus because of it.
      locales: locale read -> pairs it had after cleaning, before regions are merged.
      versions: distribution -> version read.
    """

    languages: tuple[str, ...]
    train: tuple[Pair, ...]
    validation: tuple[Pair, ...]
    test: tuple[Pair, ...]
    dropped: dict[str, int]
    locales: dict[str, int]
    versions: dict[str, str]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Language -> training pairs, of every language."""
        count = Counter(p.language for p in self.train)
        return {language: count[language] for language in self.languages}

    def levels(self, bounds: dict[str, int] = LEVELS) -> dict[str, str]:
        """Language -> resource level, by its number of training pairs."""
        ordered = sorted(bounds.items(), key=lambda item: -item[1])
        return {
            language: next(level for level, fewest in ordered if size >= fewest)
            for language, size in self.sizes.items()
        }

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all pairs and of which part each is in."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation, self.test):
            for pair in part:
                digest.update("\0".join(pair).encode() + b"\n")
            digest.update(b"\n")
        return digest.hexdigest()

    @property
    def licences(self) -> str:
        """Where the data comes from and under what terms, a line each."""
        by_name = {name: (licence, by) for name, licence, by in PACKAGES.values()}
        return "\n".join(
            f"{name} {version}: {by_name[name][0]}, {by_name[name][1]}"
            for name, version in self.versions.items()
        )


def load(options: CatalogueOptions | None = None, folder: cache.Folder = None) -> Corpus:
    """Reads the catalogues of the installed packages.

    Args:
      folder: a cache (made if missing): reading all languages takes some 10 s, the cache 1 s.

    Raises:
      ImportError: a package is not installed; the message names the extra.
      ValueError: a language that no catalogue has.
    """
    options = options or CatalogueOptions()
    files = [file for package in options.packages for file in _files(package)]
    names = [PACKAGES[p][0] for p in options.packages]
    versions = {name: importlib.metadata.version(name) for name in names}
    what = [json.dumps([_FORMAT, dataclasses.asdict(options), versions])]
    what += [f"{locale} {domain} {path.stat().st_size}" for locale, domain, path in files]
    data = cache.stored(
        folder,
        f"catalogues-{cache.key(what)}.json",
        lambda: _written(build(_entries(files, options), options, versions)),
    )
    return _read(data)


def build(
    entries: Iterable[tuple[str, str, mo.Entry]],
    options: CatalogueOptions,
    versions: dict[str, str],
) -> Corpus:
    """The corpus of (locale, domain, entry) in any order."""
    kept: dict[tuple[str, str, str], str] = {}
    dropped: Counter[str] = Counter()
    locales: dict[str, set[tuple[str, str]]] = {}
    for locale, domain, entry in entries:
        language = canonical(locale, options.merge_regions)
        source, target = clean(entry.translation), clean(entry.message)
        reason = _reason(language, source, target, options)
        if reason:
            dropped[reason] += 1
            continue
        locales.setdefault(locale, set()).add((source, target))
        key = (language, source, target)
        dropped["repeated"] += key in kept
        kept[key] = min(domain, kept.get(key, domain))
    parts: dict[str, list[Pair]] = {"train": [], "validation": [], "test": []}
    for (language, source, target), domain in sorted(kept.items()):
        parts[part_of(target, options)].append(Pair(language, source, target, domain))
    _drop_seen(parts, dropped)
    return Corpus(
        languages=tuple(sorted({p.language for part in parts.values() for p in part})),
        train=tuple(parts["train"]),
        validation=tuple(parts["validation"]),
        test=tuple(parts["test"]),
        dropped=dict(sorted((k, v) for k, v in dropped.items() if v)),
        locales={name: len(pairs) for name, pairs in sorted(locales.items())},
        versions=versions,
    )


@functools.lru_cache
def canonical(locale: str, merge_regions: bool = True) -> str:
    """The language, and script where it is not the usual one, of a gettext locale's name.

    >>> canonical("sr@latin"), canonical("es_MX"), canonical("es_MX", merge_regions=False)
    ('sr_Latn', 'es', 'es_MX')
    """
    if not merge_regions:
        return _SAME_LOCALE.get(locale, locale)
    if locale in _SAME:
        return _SAME[locale]
    language, *rest = re.split("[_@]", locale)
    scripts = [part for part in rest if len(part) == 4]
    return "_".join([language, *scripts])


@functools.lru_cache(maxsize=1 << 16)  # an English message comes once for each language
def clean(text: str) -> str:
    """NFC, one space where any white space was, no control or direction marks."""
    return unicodedata.normalize("NFC", " ".join(_MARKS.sub("", text).split()))


def normalised(message: str) -> str:
    """What two messages must share to be one for the split: their words, casefolded, in any order.

    ISO 639 has many languages under two names, "Papantla Totonac" and "Totonac, Papantla".

    >>> normalised("Totonac, Papantla") == normalised("Papantla totonac")
    True
    """
    text = unicodedata.normalize("NFKC", message).casefold()
    return " ".join(sorted(re.findall(r"\w+", text))) or text


def part_of(message: str, options: CatalogueOptions) -> str:
    """ "train", "validation" or "test", by a hash of the English message."""
    share = _share(message, options.salt)
    if share < options.test:
        return "test"
    return "validation" if share < options.test + options.validation else "train"


@functools.lru_cache(maxsize=1 << 16)
def _share(message: str, salt: str) -> float:
    """A number in [0, 1), the same for messages that are one for the split."""
    digest = hashlib.sha256((salt + "\0" + normalised(message)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _files(package: str) -> Iterator[tuple[str, str, pathlib.Path]]:
    """(locale, domain, file) of every catalogue of a package."""
    spec = importlib.util.find_spec(package)  # the package itself need not be imported
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"{PACKAGES[package][0]} holds translations to train on and is not installed: "
            "pip install 'shardwise[translation]'"
        )
    root = pathlib.Path(next(iter(spec.submodule_search_locations)))
    for path in sorted(root.rglob("LC_MESSAGES/*.mo")):
        where = path.relative_to(root).parts  # contrib/admin/locale/de/LC_MESSAGES/django.mo
        folders = [p for p in where[:-3] if p not in ("contrib", "conf", "locale", "locales")]
        yield where[-3], ".".join([path.stem, *folders]), path


def _entries(
    files: list[tuple[str, str, pathlib.Path]], options: CatalogueOptions
) -> Iterator[tuple[str, str, mo.Entry]]:
    """What the files of the languages asked for hold."""
    language = {locale: canonical(locale, options.merge_regions) for locale, _, _ in files}
    wanted = set(language.values()) if options.languages is None else set(options.languages)
    missing = sorted(wanted - set(language.values()))
    if missing:
        raise ValueError(
            f"no catalogue has {', '.join(missing)}; languages are "
            f"{', '.join(sorted(set(language.values())))}"
        )
    for locale, domain, path in files:
        if language[locale] in wanted:
            for entry in mo.read(path.read_bytes()):
                yield locale, domain, entry


def _reason(language: str, source: str, target: str, options: CatalogueOptions) -> str:
    """Why a pair is not used; empty if it is."""
    if language == "en" or language.startswith("en_"):
        return "English to English"
    if source == target and not options.keep_copies:
        return "equal to the message"
    if _fixed(source) != _fixed(target):
        return "other placeholders or tags"
    if _letters(source) < 1 or _letters(target) < 2:
        return "hardly any letters"
    return ""


@functools.lru_cache(maxsize=1 << 16)
def _fixed(text: str) -> list[str]:
    """Placeholders and tags, sorted, each as often as it occurs."""
    return sorted(_PLACEHOLDER.findall(text) + _TAG.findall(text)) if _PART.search(text) else []


@functools.lru_cache(maxsize=1 << 16)
def _letters(text: str) -> int:
    """Letters outside placeholders and tags."""
    if _PART.search(text):
        text = _TAG.sub("", _PLACEHOLDER.sub("", text))
    return sum(map(str.isalpha, text))


def _written(corpus: Corpus) -> bytes:
    return json.dumps(dataclasses.asdict(corpus), ensure_ascii=False).encode()


def _read(data: bytes) -> Corpus:
    fields = json.loads(data)
    for part in ("train", "validation", "test"):
        fields[part] = tuple(itertools.starmap(Pair, fields[part]))
    return Corpus(**{**fields, "languages": tuple(fields["languages"])})


def _drop_seen(parts: dict[str, list[Pair]], dropped: Counter[str]) -> None:
    """Leaves sources in validation and test that training has not seen, each with one target."""
    trained = {(p.language, p.source) for p in parts["train"]}
    for name in ("validation", "test"):
        kept: dict[tuple[str, str], Pair] = {}
        for pair in parts[name]:
            key = (pair.language, pair.source)
            if key in trained:
                dropped["held out, but the source was trained on"] += 1
            elif key in kept:
                dropped["held out, with a second target"] += 1
            kept.setdefault(key, pair)
        parts[name] = [pair for key, pair in kept.items() if key not in trained]
