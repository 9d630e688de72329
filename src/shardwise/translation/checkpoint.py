"""Checkpoints of a training state by orbax: whole or not there at all, the last few kept.

A state is saved as its arrays lie on the devices, each process its own blocks, while the next steps
run; a directory gets its name only when all of it is written.  A dim that does not divide is saved with
its padding, and its true size beside it, so that another mesh can read it too.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwise.errors import ShardingError
from shardwise.padded import PaddedArray
from shardwise.translation.extras import need


class Checkpoints:
    """The checkpoints in a directory.

    Args:
      directory: made if it is not there.
      keep: how many of the last ones stay.

    Raises:
      ImportError: orbax is not installed; the message names the extra.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        self._orbax = need("orbax.checkpoint", "orbax-checkpoint")
        options = self._orbax.CheckpointManagerOptions(
            max_to_keep=keep, create=True, cleanup_tmp_directories=True
        )
        path = pathlib.Path(directory).expanduser().resolve()
        self._manager = self._orbax.CheckpointManager(path, options=options)

    def latest(self) -> int | None:
        """The number of steps of the last whole checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Saves a state after so many steps.  Returns when its arrays may be overwritten."""
        arrays, sizes = {}, {}
        for name, x in _named(state).items():
            padded = isinstance(x, PaddedArray)
            arrays[name] = x.array if padded else x
            sizes[name] = {"shape": list(x.shape), "stored": list(arrays[name].shape)}
        args = self._orbax.args
        self._manager.save(
            step,
            args=args.Composite(state=args.StandardSave(arrays), sizes=args.JsonSave(sizes)),
        )

    def restore(self, step: int, like: Any) -> Any:
        """The state of a checkpoint, as `like` lies: a tree of arrays or of `Place`s.

        Raises:
          ShardingError: the checkpoint is of another model.
        """
        args = self._orbax.args
        sizes = self._manager.restore(step, args=args.Composite(sizes=args.JsonRestore()))["sizes"]
        places = _named(like)
        _check_same(sizes, places)
        asked = {}
        for name, place in places.items():
            stored = tuple(sizes[name]["stored"])
            whole = NamedSharding(place.sharding.mesh, PartitionSpec())
            sharding = place.sharding if stored == place.stored else whole
            asked[name] = jax.ShapeDtypeStruct(stored, place.dtype, sharding=sharding)
        restored = self._manager.restore(
            step, args=args.Composite(state=args.StandardRestore(asked))
        )["state"]
        leaves = [place.put(restored[name]) for name, place in places.items()]
        return jax.tree.unflatten(jax.tree.structure(like, is_leaf=_is_leaf), leaves)

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class Place:
    """How an array of a state is to lie.

    Attributes:
      shape, dtype: its own.
      stored: its shape with padding.
      sharding: of the padded array.
    """

    def __init__(self, shape: tuple[int, ...], stored: tuple[int, ...], dtype: Any, sharding: Any):
        self.shape, self.stored, self.dtype, self.sharding = shape, stored, dtype, sharding

    def put(self, x: jax.Array) -> Any:
        """A restored array, with the padding of this mesh or of another, as it is to lie."""
        if x.shape == self.stored:
            return x if self.stored == self.shape else PaddedArray(x, self.shape, self.sharding)
        logical = np.asarray(x)[tuple(slice(n) for n in self.shape)]
        if self.stored == self.shape:
            return jax.device_put(logical, self.sharding)
        return PaddedArray.from_logical(logical, self.sharding)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, (PaddedArray, Place))


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by their path in the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _check_same(sizes: dict[str, Any], places: dict[str, Any]) -> None:
    saved = {name: tuple(s["shape"]) for name, s in sizes.items()}
    wanted = {name: tuple(p.shape) for name, p in places.items()}
    if saved == wanted:
        return
    name = next(n for n in sorted(saved | wanted) if saved.get(n) != wanted.get(n))
    raise ShardingError(
        "the checkpoint is of another model",
        facts=f"{name} is {saved.get(name, 'absent')} in it and {wanted.get(name, 'absent')} here",
        hint="give the options it was trained with, or another directory",
    )


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file so that it is there whole, or as it was before, whatever happens."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


class Lines:
    """A file of JSON lines, each with its "step", that goes on after a crash.

    Args:
      after: lines of later steps, and one that was not written to its end, are removed first: the run
        that wrote them died, and this one will write them again.
    """

    def __init__(self, path: pathlib.Path, after: int) -> None:
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= after]
        write_whole(path, "".join(line + "\n" for line in kept))
        self._file = open(path, "a")  # noqa: SIM115 - closed by close()

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Returns when all lines are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: pathlib.Path) -> list[str]:
    if not path.exists():
        return []
    return [line[:-1] for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
