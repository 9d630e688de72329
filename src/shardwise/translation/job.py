"""The translation job as a whole: its options, its data, its model; to train, and to translate.

options = JobOptions(experts=8, steps=2000)
job = Job.load(options, cache="~/.cache/shardwise")
state = job.training(mesh).train("runs/first", on_step=print)
job.translations(mesh, state["params"], ["Guten Morgen"])
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.nn import encoder_decoder as model
from shardwise.nn.beam import flat_beam_search
from shardwise.nn.gating import GatingConfig
from shardwise.translation import balance, batches, catalogues, vocabulary
from shardwise.translation.batches import Batch, Batches, BatchOptions
from shardwise.translation.catalogues import CatalogueOptions, Corpus
from shardwise.translation.checkpoint import Checkpoints
from shardwise.translation.evaluate import Likelihood
from shardwise.translation.optimizer import OptimizerOptions
from shardwise.translation.step import StepOptions
from shardwise.translation.train import Training, TrainOptions
from shardwise.translation.vocabulary import Vocabularies, VocabularyOptions

Folder = str | pathlib.Path | None


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """Everything a run is made from, as plain values (`json()` and `read` keep them beside it).

    Attributes:
      experts, layers, hidden, heads, ...: of the model; `layers` is of each stack.
      groups: token groups of a batch; a multiple of the devices.
      capacity_factor: None for no limit.
      local_groups, aux_loss, random_routing: GShard's mechanisms; False switches one off (False for
        local groups makes one group of all tokens); the fourth is `capacity_factor=None`.
      tokens, lengths: of a batch, padding included, and its (source, target) lengths.
      languages: only these; None for all.
      source_vocab, target_vocab: sizes asked of the vocabularies.
      seed: of everything.
    """

    experts: int = 8
    layers: int = 2
    model: int = 128
    hidden: int = 512
    heads: int = 4
    groups: int = 8
    k: int = 2
    capacity_factor: float | None = 1.0
    local_groups: bool = True
    aux_loss: bool = True
    random_routing: bool = True
    jitter: float = 0.0
    aux_weight: float = 0.01
    dispatch: str = "einsum"
    dropout: float = 0.1
    label_smoothing: float = 0.1
    dtype: str = "float32"
    remat: str | None = None
    strategy: str = "gshard"
    tokens: int = 4096
    lengths: tuple[tuple[int, int], ...] = ((24, 16),)
    temperature: float = balance.TEMPERATURE
    languages: tuple[str, ...] | None = None
    source_vocab: int = 8000
    target_vocab: int = 4000
    steps: int = 2000
    rate: float = 1.0
    warmup: int = 1000
    checkpoint_every: int = 200
    keep: int = 3
    languages_every: int = 100
    seed: int = 0

    def json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def read(directory: str | pathlib.Path) -> JobOptions:
        """The options of the run in a directory.

        Raises:
          FileNotFoundError: there is none.
        """
        path = pathlib.Path(directory).expanduser() / "options.json"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: no job was trained in that directory")
        values = json.loads(path.read_text())["data"]["job"]
        values["lengths"] = tuple(map(tuple, values["lengths"]))
        values["languages"] = values["languages"] and tuple(values["languages"])
        known = {f.name for f in dataclasses.fields(JobOptions)}
        return JobOptions(**{k: v for k, v in values.items() if k in known})

    def model_config(self, vocabularies: Vocabularies) -> model.TranslationConfig:
        gating = None
        if self.experts:
            gating = GatingConfig(
                self.experts, k=self.k, capacity_factor=self.capacity_factor,
                aux_loss=self.aux_loss, random_routing=self.random_routing, jitter=self.jitter,
                aux_scaled=True,
            )  # fmt: skip
        return model.TranslationConfig(
            encoder_layers=self.layers, decoder_layers=self.layers, model=self.model,
            hidden=self.hidden, heads=self.heads, source_vocab=len(vocabularies.source),
            target_vocab=len(vocabularies.target), experts=self.experts, dense_width=self.k,
            groups=self.groups if self.local_groups else 1, gating=gating, dispatch=self.dispatch,
            aux_weight=self.aux_weight, dropout=self.dropout, dtype=self.dtype, remat=self.remat,
            label_smoothing=self.label_smoothing,
        )  # fmt: skip

    def batch_options(self, multiple: int) -> BatchOptions:
        return BatchOptions(
            tokens=self.tokens, lengths=self.lengths, multiple=multiple,
            temperature=self.temperature, seed=self.seed,
        )  # fmt: skip


# What may change when a run is resumed.
_FREE = ("steps", "checkpoint_every", "keep")


@dataclasses.dataclass(frozen=True)
class Job:
    """The data of a job, loaded, and its model's sizes."""

    options: JobOptions
    corpus: Corpus
    vocabularies: Vocabularies

    @staticmethod
    def load(options: JobOptions, cache: Folder = None) -> Job:
        """Reads the catalogues and trains the vocabularies, or takes both from a cache.

        Raises:
          ImportError: a package of the extra `translation` is missing.
        """
        corpus = catalogues.load(CatalogueOptions(languages=options.languages))
        wanted = VocabularyOptions(
            options.source_vocab, options.target_vocab, temperature=options.temperature
        )
        return Job(options, corpus, vocabulary.train(corpus, wanted, cache))

    @functools.cached_property
    def config(self) -> model.TranslationConfig:
        return self.options.model_config(self.vocabularies)

    @property
    def multiple(self) -> int:
        """Of a batch's rows: whole groups, on whole devices."""
        return self.options.groups

    @functools.cached_property
    def batches(self) -> Batches:
        """Of the training pairs."""
        return Batches(
            self.corpus.train, self.corpus.languages, self.vocabularies,
            self.options.batch_options(self.multiple),
        )  # fmt: skip

    def train_options(self) -> TrainOptions:
        o = self.options
        step = StepOptions(
            self.config, OptimizerOptions(rate=o.rate, warmup=o.warmup), o.strategy,
            len(self.corpus.languages), o.languages_every, o.seed,
        )  # fmt: skip
        fixed = {k: v for k, v in o.json().items() if k not in _FREE}
        data = {"job": fixed, "corpus": self.corpus.fingerprint}
        return TrainOptions(step, o.steps, o.checkpoint_every, o.keep, self.corpus.languages, data)

    def training(self, mesh: Mesh) -> Training:
        return Training(self.train_options(), self.batches, mesh)

    def trained(self, mesh: Mesh, directory: str | pathlib.Path) -> tuple[int, Any]:
        """(steps, parameters) of the last checkpoint in a directory.

        Raises:
          FileNotFoundError: there is none.
        """
        path = pathlib.Path(directory).expanduser() / "checkpoints"
        with Checkpoints(path, self.options.keep) as checkpoints:
            step = checkpoints.latest()
            if step is None:
                raise FileNotFoundError(f"{path} holds no checkpoint: train first")
            return step, checkpoints.restore(step, self.training(mesh).places())["params"]

    def decoder(
        self, mesh: Mesh, params: Any, beams: int = 4, alpha: float = 0.6
    ) -> Callable[[Batch], np.ndarray]:
        """Translates batches: {"source": [B, S]} -> hypotheses [B, K, T], the best first.

        Partitioned as in training: sentences and experts over the devices.  T is that of the batches'
        length with S.
        """
        axes = tuple(mesh.axis_names)
        targets = dict(self.options.lengths)
        shard = model.Hooks(sw.annotate, self.options.strategy, axes)

        def translate(params: Any, source: jax.Array) -> jax.Array:
            return search(
                self.config, params, source, targets[source.shape[1]], beams, alpha, shard
            )

        f = sw.spmd(translate, mesh=mesh, out_shardings=P())

        def decode(batch: Batch) -> np.ndarray:
            source = np.asarray(batch["source"])
            short = -len(source) % mesh.shape[axes[0]]
            full = np.concatenate([source, np.repeat(source[-1:], short, axis=0)])
            return np.asarray(f(params, _placed(mesh, full)))[: len(source)]

        return decode

    def likelihood(self, mesh: Mesh, params: Any) -> Likelihood:
        """Batches {"source": [B, S], "target": [B, T]} -> (nats [B], tokens [B]) of their targets.

        With the evaluation's capacity and no noise, without label smoothing.
        """
        axes = tuple(mesh.axis_names)

        def of_rows(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
            _, metrics = model.loss(
                self.config, params, batch, train=False, annotate=sw.annotate, axes=axes,
                strategy=self.options.strategy,
            )  # fmt: skip
            return metrics["sequence_nats"], metrics["sequence_tokens"]

        f = sw.spmd(of_rows, mesh=mesh, out_shardings=P())
        names = ("source", "target")
        return lambda batch: f(params, {name: _placed(mesh, batch[name]) for name in names})

    def translations(
        self, mesh: Mesh, params: Any, sentences: Sequence[str], beams: int = 4
    ) -> list[str]:
        """Some sentences in English; what does not fit in the largest length is cut."""
        length = max(self.options.lengths)[0]
        tokens = self.vocabularies.source.encode_all(sentences)
        source = batches.padded([t[:length] for t in tokens], length)
        found = self.decoder(mesh, params, beams)({"source": source})
        return [self.vocabularies.target.decode(row[0].tolist()) for row in found]


def _placed(mesh: Mesh, rows: np.ndarray) -> jax.Array:
    """An array whose rows are split over the mesh's first axis."""
    where = NamedSharding(mesh, P(mesh.axis_names[0]))
    return jax.make_array_from_callback(rows.shape, where, lambda i: rows[i])


def search(
    config: model.TranslationConfig, params: Any, source: jax.Array, length: int, beams: int,
    alpha: float, shard: model.Hooks = model.ONE_DEVICE,
) -> jax.Array:  # fmt: skip
    """Flat beam search for source [B, S]: hypotheses [B, K, T], the best first."""
    memory, _ = model.encode(config, params, source, shard=shard)
    projected = model.project_memory(config, params, memory, shard)
    seen = source != model.PAD
    cache = model.init_cache(config, source.shape[0], beams, length)

    def step(cache: Any, tokens: Any, t: Any, mask: Any) -> Any:
        return model.decode_step(
            config, params, cache, tokens, t, mask, projected, seen, shard=shard
        )

    start = jnp.full(source.shape[:1], vocabulary.BOS, jnp.int32)
    return flat_beam_search(
        step, cache, start, beams=beams, length=length, eos=vocabulary.EOS, alpha=alpha
    ).tokens
