"""Subword vocabularies: one of all sources, one of English (GShard section 4.1 has 64k and 32k).

Both are sentencepiece models trained on the training pairs alone.  The choices, for this data:

- Byte-pair encoding, not the unigram model: its counts are whole numbers, so the result does not depend
  on the number of threads; it trains in seconds on one, and gives fewer tokens here.
- The languages use some 4,600 different characters, most of them Chinese, Japanese or Korean and seen
  a few times: a vocabulary of 8,000 should not spend half its pieces on them.  So the most frequent
  that make up `coverage` of the text are pieces, and any other is spelt in its UTF-8 bytes.
  Nothing is unknown, and decoding gives back the text, also of characters that training never saw.
- No normalisation beyond that of the catalogues (NFC): text comes back as it was.
- Sources are repeated so that a language has the share `balance` would draw it with: the pieces are
  those of the training batches, not those of the six largest languages.
- Nothing marks the language of a source: all are translated into one.

    vocabularies = train(corpus, VocabularyOptions(), folder="~/.cache/shardwise")
    ids = vocabularies.target.encode("Hello")       # with BOS and EOS
    vocabularies.target.decode(ids)                 # "Hello"
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

from shardwise.translation import balance, cache
from shardwise.translation.catalogues import Corpus, Pair

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
"""Tokens that are the same in every vocabulary; UNKNOWN is never produced."""

SPECIAL_AND_BYTES = 4 + 256
_FORMAT = 1  # part of the cache's key: raise it when training changes
_MOST_REPEATS = 20  # of a pair, however small its language: pieces should not be whole sentences


@dataclasses.dataclass(frozen=True)
class VocabularyOptions:
    """Sizes and choices.

    Attributes:
      source, target: tokens of the two vocabularies, the 4 special ones and 256 bytes included.
      source_coverage, target_coverage: share of the text whose characters are pieces.
      temperature: of the languages in the source vocabulary (`balance.shares`).
      kind: "bpe" or "unigram".
    """

    source: int = 8000
    target: int = 4000
    source_coverage: float = 0.998
    target_coverage: float = 0.9999
    temperature: float = balance.TEMPERATURE
    kind: str = "bpe"

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            if getattr(self, name) <= SPECIAL_AND_BYTES:
                raise ValueError(
                    f"a {name} vocabulary of {getattr(self, name)} has no room: "
                    f"{SPECIAL_AND_BYTES} tokens are special or bytes"
                )
        for name in ("source_coverage", "target_coverage"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share above 0, not {getattr(self, name)}")
        if self.kind not in ("bpe", "unigram"):
            raise ValueError(f"kind is 'bpe' or 'unigram', not {self.kind!r}")


class Vocabulary:
    """A sentencepiece model with tokens PAD, BOS, EOS.  Can be pickled."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._pieces: Any = _sentencepiece().SentencePieceProcessor(model_proto=model)

    def __len__(self) -> int:
        return self._pieces.vocab_size()

    def __reduce__(self) -> tuple[Any, ...]:
        return Vocabulary, (self.model,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and other.model == self.model

    def __hash__(self) -> int:
        return hash(self.model)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.model).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Tokens of a text: BOS, its pieces, EOS."""
        return [BOS, *self._pieces.encode(text), EOS]

    def encode_all(self, texts: Iterable[str]) -> list[list[int]]:
        return [[BOS, *ids, EOS] for ids in self._pieces.encode(list(texts))]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, up to the first EOS; PAD and BOS are skipped.

        Bytes that are not UTF-8 together, which a model may well produce, become U+FFFD.

        Raises:
          ValueError: a token outside the vocabulary.
        """
        ids: list[int] = []
        for token in map(int, tokens):
            if not 0 <= token < len(self):
                raise ValueError(f"token {token} is not in a vocabulary of {len(self)}")
            if token == EOS:
                break
            if token not in (PAD, BOS):
                ids.append(token)
        return self._pieces.decode(ids)

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text, to look at."""
        return self._pieces.encode(text, out_type=str)


@dataclasses.dataclass(frozen=True)
class Vocabularies:
    """`source` of all languages, `target` of English."""

    source: Vocabulary
    target: Vocabulary


def train(
    corpus: Corpus,
    options: VocabularyOptions | None = None,
    folder: cache.Folder = None,
) -> Vocabularies:
    """Trains both vocabularies on the training pairs, or takes them from the cache.

    Args:
      folder: a cache (made if missing); a model lies there under a hash of the text it was trained
        on, the options and sentencepiece's version.  Several processes may share it.

    Raises:
      ImportError: sentencepiece is not installed; the message names the extra.
      ValueError: a vocabulary larger than the text allows; the message says how large it may be.
    """
    options = options or VocabularyOptions()
    source = _weighted_sources(corpus, options.temperature)
    target = sorted({pair.target for pair in corpus.train})
    return Vocabularies(
        _cached(source, options.source, options.source_coverage, options.kind, folder),
        _cached(target, options.target, options.target_coverage, options.kind, folder),
    )


def _weighted_sources(corpus: Corpus, temperature: float) -> list[str]:
    """Sources, each repeated as often as its language's share asks for; sorted.

    A language that should be seen less often than once a pair gives every so many of its pairs.
    """
    pairs: dict[str, list[Pair]] = {}
    for pair in corpus.train:
        pairs.setdefault(pair.language, []).append(pair)
    wanted = balance.shares(corpus.sizes, temperature)
    texts: list[str] = []
    for language, some in pairs.items():
        draws = round(wanted[language] * len(corpus.train))
        count = max(1, min(draws, _MOST_REPEATS * len(some)))
        # The i-th of n evenly spaced places among the pairs: repeats, or leaves out, evenly.
        texts += [some[i * len(some) // count].source for i in range(count)]
    return sorted(texts)


def _cached(
    texts: Sequence[str], size: int, coverage: float, kind: str, folder: cache.Folder
) -> Vocabulary:
    how = json.dumps([_FORMAT, _sentencepiece().__version__, size, coverage, kind])
    name = f"vocabulary-{cache.key([how, *texts])}.model"
    return Vocabulary(cache.stored(folder, name, lambda: _train(texts, size, coverage, kind)))


def _train(texts: Sequence[str], size: int, coverage: float, kind: str) -> bytes:
    model = io.BytesIO()
    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=size,
            model_type=kind,
            character_coverage=coverage,
            byte_fallback=True,
            normalization_rule_name="identity",
            num_threads=1,  # the unigram model sums floats in the threads' order
            shuffle_input_sentence=False,
            max_sentence_length=1 << 16,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNKNOWN,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"no {kind} vocabulary of {size} tokens from {len(texts)} texts: {error}"
        ) from None
    return model.getvalue()


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise ImportError(
            "vocabularies need sentencepiece: pip install 'shardwise[translation]'"
        ) from None
    return sentencepiece
