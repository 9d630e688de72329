"""A job's decoder and likelihoods: partitioned, they say what the model says on one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from shardwise.mesh import device_mesh
from shardwise.nn import encoder_decoder as model
from shardwise.translation import evaluate
from shardwise.translation.batches import in_order
from shardwise.translation.catalogues import Corpus
from shardwise.translation.job import Job, JobOptions, search
from shardwise.translation.vocabulary import Vocabularies

OPTIONS = JobOptions(
    experts=4, model=16, hidden=16, heads=2, groups=4, tokens=256, lengths=((12, 8),), dropout=0.0
)


@pytest.fixture(scope="module")
def job(corpus: Corpus, vocabularies: Vocabularies) -> Job:
    return Job(OPTIONS, corpus, vocabularies)


@pytest.fixture(scope="module")
def params(job: Job):
    return model.init(job.config, jax.random.key(0))


def test_likelihoods_are_those_of_one_device(job: Job, params):
    pairs = evaluate.limited(job.corpus.test, 9)
    options = job.options.batch_options(job.multiple)
    likelihood = job.likelihood(device_mesh({"x": 4}), params)
    found = evaluate.likelihoods(pairs, job.corpus.languages, likelihood, job.vocabularies, options)
    loss = jax.jit(lambda batch: model.loss(job.config, params, batch, train=False)[1])
    seen = 0
    for numbers, batch in in_order(pairs, job.corpus.languages, job.vocabularies, options):
        want = loss(batch)
        real = numbers >= 0
        rows = np.stack([want["sequence_nats"], want["sequence_tokens"]], axis=1)[real]
        np.testing.assert_allclose(found[numbers[real]], rows, rtol=1e-5)
        seen += len(rows)
    assert seen == len(pairs) == len(found)


def test_a_report_has_nats_of_each_language(job: Job, params):
    mesh = device_mesh({"x": 4})
    found = evaluate.evaluate(
        job.corpus, lambda batch: np.zeros((len(batch["source"]), 8), np.int32), job.vocabularies,
        job.options.batch_options(job.multiple), limit=5, fewest=1,
        likelihood=job.likelihood(mesh, params),
    )  # fmt: skip
    each = [s.nats for s in found.languages.values()]
    # A fresh model knows nothing yet: about log of the vocabulary.
    assert np.allclose(each, np.log(len(job.vocabularies.target)), rtol=0.2) and len(set(each)) > 1
    assert found.levels["all"].nats == pytest.approx(np.mean(each))
    assert found.json()["languages"]["cs"]["nats"] == found.languages["cs"].nats


def test_the_decoder_is_the_search_of_one_device(job: Job, params):
    batch = {"source": np.array([[1, 5, 9, 7, 2] + [0] * 7] * 3 + [[1, 8, 2] + [0] * 9], np.int32)}
    decode = job.decoder(device_mesh({"x": 4}), params, beams=2)
    want = search(job.config, params, batch["source"], 8, 2, 0.6)
    np.testing.assert_array_equal(decode(batch), want)
    short = {"source": batch["source"][1:]}  # fewer sentences than fill the devices
    np.testing.assert_array_equal(decode(short), np.asarray(want)[1:])
