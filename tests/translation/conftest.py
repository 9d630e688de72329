"""A small part of the real data: a few languages of every size and of several scripts."""

from __future__ import annotations

import pytest

from shardwise.translation.catalogues import CatalogueOptions, Corpus, load
from shardwise.translation.vocabulary import Vocabularies, VocabularyOptions, train

LANGUAGES = ("af", "am", "cs", "ja", "so")


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return load(CatalogueOptions(languages=LANGUAGES))


@pytest.fixture(scope="session")
def small() -> VocabularyOptions:
    return VocabularyOptions(source=1500, target=800, source_coverage=0.98)


@pytest.fixture(scope="session")
def vocabularies(
    corpus: Corpus, small: VocabularyOptions, tmp_path_factory: pytest.TempPathFactory
) -> Vocabularies:
    return train(corpus, small, tmp_path_factory.getbasetemp() / "vocabularies")
