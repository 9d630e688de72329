"""Training: the partitioned step in a loop, with metrics, checkpoints, and exact resumption.

    run = Training(TrainOptions(step), data, mesh)
    run.train(directory="runs/first")            # again, after a crash: goes on where it was

What a step computes depends on the options, the data and the mesh, on the number of the step and on the
state before it, and on nothing else: data is a function of the step, and so are random numbers.  A
checkpoint is the state after a step; every line of metrics up to it is on the disk before it is
written, and a run that resumes removes the later ones.  So a run that was killed, at any moment, leaves
the same metrics, to the last digit, as one that was not.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.convert import to_named
from shardwise.translation.batches import DeviceBatch, Shape
from shardwise.translation.checkpoint import Checkpoints, Lines, Place, write_whole
from shardwise.translation.prefetch import Prefetch
from shardwise.translation.step import (
    LANGUAGE_COLUMNS,
    State,
    StepOptions,
    initial_state,
    make_step,
)

TIMES = ("tokens_per_second", "waiting", "seconds")
"""The numbers of a metrics line that differ from run to run."""

OnStep = Callable[[dict[str, Any]], None]


class Data(Protocol):
    """What training needs of `batches.Batches`."""

    @property
    def shapes(self) -> list[Shape]: ...

    def on_devices(self, step: int, sharding: jax.sharding.Sharding) -> DeviceBatch: ...


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """A run.

    Attributes:
      step: what every number depends on.
      steps: in all, those before a resumption included.
      checkpoint_every, keep: steps from one checkpoint to the next, and how many stay.
      names: of the languages, for the metrics; numbers if there are none.
      data: what the data was made with, if it can be said: a run resumes with the same only.
    """

    step: StepOptions
    steps: int = 1000
    checkpoint_every: int = 200
    keep: int = 3
    names: tuple[str, ...] = ()
    data: Any = None

    def __post_init__(self) -> None:
        for name in ("steps", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


class Training:
    """A model, its data and a mesh: planned once, then trained.

    Attributes:
      mesh: of the devices.
      rows: how a batch's sequences are split over it.
      step: the partitioned training step, an `Spmd`.
      plan: its plan, for the largest shape of batches.
    """

    def __init__(self, options: TrainOptions, data: Data, mesh: Mesh) -> None:
        self.options, self.data, self.mesh = options, data, mesh
        self.axes = tuple(mesh.axis_names)
        self.rows = NamedSharding(mesh, P(self.axes[0]))
        self._check_rows()
        self._fn = make_step(options.step, sw.annotate, self.axes)
        self.state = jax.eval_shape(lambda: initial_state(options.step))
        shape = max(data.shapes, key=lambda s: s.rows * (s.source + s.target))
        batch = abstract_batch(shape)
        # Where parameters and moments lie is completion's choice, made once: batches of another
        # shape, and results fed back, must find them where they are.
        free = sw.spmd(self._fn, mesh=mesh, in_shardings=(None, self.rows.spec))
        self.layouts = free.plan(self.state, batch).in_shardings[0]
        self.step = sw.spmd(
            self._fn, mesh=mesh, in_shardings=(self.layouts, self.rows.spec),
            out_shardings=(self.layouts, P()), donate_argnums=0,
        )  # fmt: skip
        self.batch = batch

    @property
    def plan(self) -> Any:
        return self.step.plan(self.state, self.batch)

    def _check_rows(self) -> None:
        count = self.mesh.shape[self.axes[0]]
        for shape in self.data.shapes:
            if shape.rows % count:
                raise ValueError(
                    f"batches of {shape.rows} rows do not divide over {self.axes[0]}={count}: "
                    "set BatchOptions.multiple"
                )

    # -- the state -------------------------------------------------------------------------------

    def initial(self) -> State:
        """A fresh state, made where it lies."""
        init = sw.spmd(
            lambda: initial_state(self.options.step), mesh=self.mesh, out_shardings=self.layouts
        )
        return init()

    def places(self) -> Any:
        """How each array of the state lies, as `Checkpoints.restore` takes it."""
        plan = self.plan
        leaves, tree = jax.tree.flatten(self.state)
        columns = zip(leaves, plan.in_layouts, plan.padded_avals(), strict=False)
        return jax.tree.unflatten(
            tree,
            [
                Place(x.shape, a.shape, x.dtype, to_named(l.sharding, self.mesh))
                for x, l, a in columns
            ],
        )

    # -- the loop --------------------------------------------------------------------------------

    def train(
        self,
        directory: str | pathlib.Path | None = None,
        on_step: OnStep = lambda line: None,
        state: Any = None,
    ) -> State:
        """Trains to `options.steps`, from the last checkpoint in `directory` if there is one.

        Args:
          directory: of checkpoints/, metrics.jsonl and options.json; None keeps nothing.
          on_step: called with each line of metrics, in order, once its step is done.
          state: to start from where there is no checkpoint; None is a fresh one.

        Returns:
          The state after the last step.

        Raises:
          ValueError: the directory is of a run with other options.
        """
        if directory is None:
            state = self.initial() if state is None else state
            return self._loop(state, int(np.asarray(state["step"])), None, None, on_step)
        path = pathlib.Path(directory).expanduser().resolve()
        path.mkdir(parents=True, exist_ok=True)
        first = jax.process_index() == 0
        check_options(path / "options.json", self.options, write=first)
        with Checkpoints(path / "checkpoints", self.options.keep) as checkpoints:
            done = checkpoints.latest()
            if done is not None:
                state = checkpoints.restore(done, self.places())
            elif state is None:
                state = self.initial()
            lines = Lines(path / "metrics.jsonl", done or 0) if first else None
            try:
                return self._loop(state, done or 0, checkpoints, lines, on_step)
            finally:
                if lines:
                    lines.close()

    def _loop(
        self, state: State, done: int, checkpoints: Checkpoints | None, lines: Lines | None,
        on_step: OnStep,
    ) -> State:  # fmt: skip
        options = self.options
        clock = _Clock()

        def record(number: int, metrics: dict[str, Any]) -> None:
            """Waits for a step's numbers: called when the next step has been sent off."""
            line = self._line(number, jax.device_get(metrics))
            line |= clock.times(line["tokens"], ahead.waiting)
            if lines:
                lines.write(line)
            on_step(line)

        with Prefetch(
            lambda step: self.data.on_devices(step, self.rows), start=done, stop=options.steps
        ) as ahead:
            pending: tuple[int, dict[str, Any]] | None = None
            for number, batch in ahead:
                state, metrics = self.step(state, batch)
                if pending:
                    record(*pending)
                pending = number + 1, metrics
                if (number + 1) % options.checkpoint_every == 0 or number + 1 == options.steps:
                    record(*pending)
                    pending = None
                    if lines:
                        lines.sync()
                    if checkpoints:
                        checkpoints.save(number + 1, state)
        return state

    def _line(self, number: int, metrics: dict[str, Any]) -> dict[str, Any]:
        """Metrics after a step as JSON: float32 numbers in as many digits as tell them apart."""
        table = metrics.pop("languages")
        line: dict[str, Any] = {"step": number}
        line |= {k: _json(v) for k, v in sorted(metrics.items())}
        if number % self.options.step.languages_every == 0 or number == self.options.steps:
            line["languages"] = {
                self._name(i): dict(zip(LANGUAGE_COLUMNS, _json(row), strict=True))
                for i, row in enumerate(table)
                if row.any()
            }
        return line

    def _name(self, language: int) -> str:
        return self.options.names[language] if self.options.names else str(language)


def abstract_batch(shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch."""
    rows, source, target = shape
    shapes = {"source": (rows, source), "target": (rows, target), "language": (rows,)}
    return {name: jax.ShapeDtypeStruct(s, jnp.int32) for name, s in shapes.items()}


class _Clock:
    """Tokens a second: over the last steps, the first (which compiles) left out."""

    def __init__(self) -> None:
        self.started = self.last = time.perf_counter()
        self.speed: float | None = None
        self.steps = 0

    def times(self, tokens: float, waiting: float) -> dict[str, float | None]:
        now = time.perf_counter()
        self.steps += 1
        if self.steps > 1:
            speed = tokens / max(now - self.last, 1e-9)
            self.speed = speed if self.speed is None else 0.9 * self.speed + 0.1 * speed
        self.last = now
        return {
            "tokens_per_second": self.speed and round(self.speed, 1),
            "waiting": round(waiting, 4),
            "seconds": round(now - self.started, 3),
        }


def _json(x: Any) -> Any:
    """A float32 number, or lists of them, as Python's; the shortest text that is the same float32."""
    x = np.asarray(x)
    if x.ndim:
        return [_json(row) for row in x]
    return float(str(x)) if np.issubdtype(x.dtype, np.floating) else x.item()


def check_options(path: pathlib.Path, options: TrainOptions, write: bool) -> None:
    """Compares with the options of the run in a directory, or notes them there.

    Raises:
      ValueError: they differ in what a run's numbers depend on.
    """
    own = json.loads(json.dumps({"step": _plain(options.step), "data": _plain(options.data)}))
    if not path.exists():
        if write:
            write_whole(path, json.dumps(own, indent=1) + "\n")
        return
    there = json.loads(path.read_text())
    differing = sorted(_differences(there, own))
    if differing:
        raise ValueError(
            f"{path.parent} holds a run with other options ({'; '.join(differing[:4])}): "
            "give the same ones, or another directory"
        )


def _plain(x: Any) -> Any:
    return dataclasses.asdict(x) if dataclasses.is_dataclass(x) and not isinstance(x, type) else x


def _differences(a: Any, b: Any, name: str = "") -> Sequence[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys())
        return [
            d for k in keys for d in _differences(a.get(k), b.get(k), f"{name}.{k}" if name else k)
        ]
    return [] if a == b else [f"{name}: {a!r} there, {b!r} here"]
