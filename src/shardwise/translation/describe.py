"""Describes the data of the installed packages, as Markdown.

    python -m shardwise.translation.describe > examples/translation/DATA.md

Figures depend on the packages' versions, which the text names; `--cache` keeps what was read.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from shardwise.translation import balance, score, vocabulary
from shardwise.translation.batches import LENGTHS, Batches, BatchOptions
from shardwise.translation.catalogues import LEVELS, Corpus, Pair, load
from shardwise.translation.evaluate import limited
from shardwise.translation.vocabulary import Vocabularies

_ABOUT = """\
# The data: message catalogues of 170 locales

Written by `python -m shardwise.translation.describe > examples/translation/DATA.md`.

Names of countries and their parts, languages, scripts and currencies (pycountry, which carries Debian's
iso-codes) and the messages of a web framework (Django), translated by volunteers into some 170
locales.  Both packages come with `pip install 'shardwise[translation]'`; nothing is downloaded besides. The
task is to give the English message for a translated one. It is small and odd as corpora go: short, most of
it proper names, and what little prose there is speaks of forms and URLs. But it is real, covers a
hundred and fifty languages in nearly thirty scripts, and its sizes fall off as those of web corpora do.

Sources and licences of the text, as `Corpus.licences` reports them:
"""

_SEEN = """\
## What the text is like

- Three of four English messages are a word or two. Names dominate: where the script is Latin, a
  translation is often the English name with another spelling, and a model that copies is right in part;
  where it is not, the model must transliterate, or know. The last table says what copying the
  source scores.
- Many translations that equal their message are names that a translator confirmed, or never looked
  at; there is no telling which. More than a quarter of all entries is of this kind, and left out.
- Long texts are few and all Django's: help texts with HTML and placeholders. The longest names a
  `<meta>` tag and an HTTP header. Since BLEU counts n-grams over the whole test set, these weigh far more
  than names there; chrF and exact matches are fairer to names.
- Levels differ in content, not in size only: low-resource languages have countries and languages'
  names, high-resource ones thousands of districts and small languages too. Compare models within a level,
  not levels with each other.
- The split is by English message (its words, in any order), so what is held out is held out in all
  languages. A translation whose words were never seen cannot be found by transfer from another
  language, only by transliteration: scores stay low by construction, and tell of generalisation, not of
  memory.
- Some sources have two English messages in a language ("redirect" and "redirects"; ISO 639 has "Papantla
  Totonac" and "Totonac, Papantla"): in training both stay; held-out pairs of that kind are dropped.
- Oddities left as they are: abbreviated months and weekdays; "a.m."; ordinals ("{}ste" for both "{}st"
  and "{}th"); a few names that are not in the catalogue's language at all ("French Guyana" in Kikuyu).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardwise.translation.describe")
    parser.add_argument("--cache", help="a folder to keep the corpus and the vocabularies in")
    folder = parser.parse_args(arguments).cache
    corpus = load(folder=folder)
    sys.stdout.write(describe(corpus, vocabulary.train(corpus, folder=folder)))
    return 0


def describe(corpus: Corpus, vocabularies: Vocabularies) -> str:
    """The whole page."""
    parts = [
        _ABOUT,
        "\n",
        *(f"- {line}\n" for line in corpus.licences.splitlines()),
        f"\nFingerprint of the corpus: `{corpus.fingerprint}`.\n\n",
        *_sizes(corpus),
        *_languages(corpus),
        *_samples(corpus),
        _SEEN,
        "\n",
        *_overlap(corpus),
        *_tokens(corpus, vocabularies),
        *_padding(corpus, vocabularies),
        *_temperatures(corpus),
        *_copying(corpus),
    ]
    return "".join(parts).rstrip("\n") + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |\n"
    yield "|---|" + "---:|" * (len(head) - 1) + "\n"
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |\n"
    yield "\n"


def _everything(corpus: Corpus) -> list[Pair]:
    return [*corpus.train, *corpus.validation, *corpus.test]


def _sizes(corpus: Corpus) -> Iterator[str]:
    pairs = _everything(corpus)
    of = Counter(p.language for p in pairs)
    locales = corpus.locales
    yield "## Sizes\n\n"
    yield (
        f"{len(locales)} locales have {sum(locales.values()):,} pairs in all, and "
        f"{sum(n > 500 for n in locales.values())} of them more than 500. With regions counted as "
        f"their languages that makes {len(corpus.languages)} languages with {len(pairs):,} pairs, "
        f"{sum(n > 500 for n in of.values())} with more than 500.\n\n"
    )
    rows = [
        (name, f"{len(part):,}", f"{len({p.target for p in part}):,}")
        for name, part in (
            ("training", corpus.train),
            ("validation", corpus.validation),
            ("test", corpus.test),
        )
    ]
    yield from _table(("part", "pairs", "English messages"), rows)
    yield "Entries of the catalogues that are not in it:\n\n"
    rows = sorted(corpus.dropped.items(), key=lambda item: (-item[1], item[0]))
    yield from _table(("reason", "entries"), [(reason, f"{n:,}") for reason, n in rows])
    domains = Counter(p.domain.split(".")[0] for p in corpus.train)
    yield "Training pairs by catalogue:\n\n"
    yield from _table(("catalogue", "pairs"), [(d, f"{n:,}") for d, n in domains.most_common()])


def _languages(corpus: Corpus) -> Iterator[str]:
    level = corpus.levels()
    yield "## Languages by resource level\n\n"
    yield "Training pairs of each; a level is a number of them, as the heading of its line says.\n\n"
    for name, fewest in LEVELS.items():
        own = sorted((-n, l) for l, n in corpus.sizes.items() if level[l] == name)
        total = -sum(n for n, _ in own)
        yield f"**{name}** (at least {fewest:,}): {len(own)} languages, {total:,} pairs: "
        yield ", ".join(f"{l} {-n:,}" for n, l in own) + ".\n\n"


def _samples(corpus: Corpus) -> Iterator[str]:
    """Test pairs of as many languages, chosen by their hash."""
    yield "## Samples\n\nOne test pair of every seventh language:\n\n"
    chosen = limited(corpus.test, 1)[::7]
    rows = [(p.language, _cell(p.source), _cell(p.target), p.domain) for p in chosen]
    yield "| language | source | target | catalogue |\n|---|---|---|---|\n"
    for row in rows:
        yield "| " + " | ".join(row) + " |\n"
    yield "\n"


def _cell(text: str) -> str:
    short = text if len(text) <= 60 else text[:59] + "…"
    return short.replace("|", "\\|").replace("<", "&lt;")


def _overlap(corpus: Corpus) -> Iterator[str]:
    trained = {p.target for p in corpus.train}
    words = {w for target in trained for w in target.casefold().split()}
    known = [[w in words for w in p.target.casefold().split()] for p in corpus.test]
    yield (
        f"Of the test targets, {_percent(sum(map(all, known)) / len(known))} have only words that some "
        f"training target has, and {_percent(sum(not any(k) for k in known) / len(known))} have none "
        "such. "
    )
    common = Counter(t for _, t in {(p.language, p.target) for p in corpus.test})
    for target, times in sorted(common.items(), key=lambda item: (-item[1], item[0]))[:40]:
        longer = sorted(t for t in trained if target in t)
        if longer:
            yield (
                f'"{target}", for one, is held out in {times} languages, and "{longer[0]}" is trained '
                "on.\n"
            )
            break
    yield "\n"


def _tokens(corpus: Corpus, vocabularies: Vocabularies) -> Iterator[str]:
    level = corpus.levels()
    yield "## Tokens\n\n"
    yield (
        f"Vocabularies of {len(vocabularies.source):,} and {len(vocabularies.target):,} tokens; lengths "
        "with BOS and EOS, of the training pairs. Bytes are tokens of characters that are not in the "
        "vocabulary.\n\n"
    )
    rows = []
    for side in ("source", "target"):
        model = getattr(vocabularies, side)
        for name in LEVELS:
            texts = [getattr(p, side) for p in corpus.train if level[p.language] == name]
            if not texts:
                continue
            ids = model.encode_all(texts)
            n = np.array([len(i) for i in ids])
            first = vocabulary.UNKNOWN + 1
            spelt = sum(first <= t < first + 256 for i in ids for t in i)
            rows.append(
                (
                    f"{side}, {name}",
                    f"{(n - 2).sum() / sum(map(len, texts)):.2f}",
                    _percent(spelt / n.sum(), 2),
                    *(int(q) for q in np.quantile(n, (0.5, 0.9, 0.99))),
                    int(n.max()),
                )
            )
    head = ("side, level", "tokens a character", "bytes", "median", "90 %", "99 %", "longest")
    yield from _table(head, rows)


def _padding(corpus: Corpus, vocabularies: Vocabularies) -> Iterator[str]:
    yield "## Padding\n\n"
    yield "Share of a batch's tokens that is padding, by its shapes (source, target):\n\n"
    sets = {
        "one": ((64, 48),),
        "four": ((8, 6), (16, 10), (32, 20), (64, 48)),
        "the default": LENGTHS,
        "twelve": (
            *((6, 5), (8, 6), (10, 7), (12, 8), (14, 10), (16, 12)),
            *((20, 14), (24, 16), (32, 24), (48, 32), (64, 48), (96, 64)),
        ),
    }
    rows = []
    for name, lengths in sets.items():
        options = BatchOptions(lengths=lengths)
        batches = Batches(corpus.train, corpus.languages, vocabularies, options)
        padding = batches.padding()
        shares = (_percent(padding[side]) for side in ("source", "target", "both"))
        rows.append((f"{name} ({len(lengths)})", *shares, f"{batches.left_out:,}"))
    yield from _table(("shapes", "source", "target", "both", "pairs left out"), rows)


def _temperatures(corpus: Corpus) -> Iterator[str]:
    level = corpus.levels()
    yield "## Sampling temperature\n\n"
    yield (
        "Share of the draws, and how often a pair is drawn while as many pairs are drawn as there "
        "are, by level; and of the smallest language's.\n\n"
    )
    rows = []
    for temperature in (1.0, 2.0, 5.0):
        shares = balance.shares(corpus.sizes, temperature)
        row: list[str] = [f"{temperature:g}"]
        for name in LEVELS:
            own = [l for l in corpus.languages if level[l] == name]
            share, size = sum(shares[l] for l in own), sum(corpus.sizes[l] for l in own)
            times = share * len(corpus.train) / size if size else 0.0
            row.append(f"{_percent(share)}, {times:.2f} times")
        most = max(shares[l] * len(corpus.train) / n for l, n in corpus.sizes.items() if n)
        rows.append((*row, f"{most:.0f} times"))
    yield from _table(("T", *LEVELS, "smallest"), rows)


def _copying(corpus: Corpus) -> Iterator[str]:
    yield "## What copying the source scores\n\n"
    yield "On the whole test set; a model that learned nothing else is at these.\n\n"
    found = score.report(
        [p.language for p in corpus.test],
        [p.source for p in corpus.test],
        [p.target for p in corpus.test],
        corpus.sizes,
        corpus.levels(),
    )
    rows = [
        (name, f"{s.bleu:.1f}", f"{s.chrf:.1f}", f"{s.exact:.1f}", f"{s.pairs:,}")
        for name, s in found.levels.items()
    ]
    yield from _table(("level", "BLEU", "chrF", "exact %", "pairs"), rows)
    yield f"Signatures: `{found.metrics['bleu']}`, `{found.metrics['chrf']}`. "
    yield f"Means over languages with at least {found.fewest} test pairs.\n"


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


if __name__ == "__main__":
    sys.exit(main())
