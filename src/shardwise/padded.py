"""`PaddedArray`: an array whose dims need not divide by the number of devices they are split over.

JAX refuses to place a dim of 5 on 4 devices.  Here it is stored as 4 blocks of ceil(5 / 4) = 2, so
as an array of 8 of which the last 3 are padding; the devices hold 2, 2, 1 and 0 of its rows.  What
the padding holds is unspecified, and nothing that is computed depends on it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardwise.errors import ShardingError
from shardwise.sharding import padded_size


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["shape", "sharding"]
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PaddedArray:
    """A sharded array with its logical shape; a pytree whose one leaf is the padded array.

    `np.asarray(p)` and `jnp.asarray(p)` give the logical array; `jax.numpy` functions take it as an
    array of the logical shape.

    Attributes:
      array: the padded `jax.Array`; each dim is a multiple of its number of shards.
      shape: the logical shape.
      sharding: how `array` is split.

    Example:
      >>> from jax.sharding import AbstractMesh, PartitionSpec
      >>> rows = NamedSharding(AbstractMesh((4,), ("x",)), PartitionSpec("x"))
      >>> PaddedArray(jax.ShapeDtypeStruct((8,), "int32"), (5,), rows).shard_sizes(0)
      (2, 2, 1, 0)
    """

    array: jax.Array
    shape: tuple[int, ...]
    sharding: NamedSharding

    @staticmethod
    def from_logical(x: Any, sharding: NamedSharding, fill: Any = 0) -> PaddedArray:
        """Pad each dim of `x` to a multiple of its shards and place it.

        Args:
          x: an array of the logical shape.
          sharding: how to split it; its spec may be shorter than x's rank.
          fill: what the padding holds; no result may depend on it.

        Raises:
          ShardingError: the spec has more entries than x has dims.
        """
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        counts = shard_counts(sharding, x.ndim)
        pad = [(0, padded_size(n, (c,)) - n) for n, c in zip(x.shape, counts, strict=True)]
        padded = _pad(x, pad, fill) if any(p for _, p in pad) else x
        return PaddedArray(jax.device_put(padded, sharding), x.shape, sharding)

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def logical(self) -> jax.Array:
        """The array of the logical shape, the padding cut off."""
        if self.array.shape == self.shape:
            return self.array
        return self.array[tuple(slice(n) for n in self.shape)]

    def __jax_array__(self) -> jax.Array:
        return self.logical()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.asarray(self.array)[tuple(slice(n) for n in self.shape)]
        return np.array(whole, dtype, copy=copy)

    def shard_sizes(self, dim: int) -> tuple[int, ...]:
        """How many logical rows of `dim` each of its shards holds: 5 over 4 gives (2, 2, 1, 0)."""
        count = shard_counts(self.sharding, self.ndim)[dim]
        block = self.array.shape[dim] // count
        return tuple(min(max(self.shape[dim] - i * block, 0), block) for i in range(count))

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.shape))
        split = [d for d, c in enumerate(shard_counts(self.sharding, self.ndim)) if c > 1]
        held = "".join(f", dim {d}: {self._held(d)}" for d in split) or ", whole on every device"
        return f"PaddedArray({self.dtype}[{dims}], {self.sharding.spec}{held})"

    def _held(self, dim: int) -> str:
        """`2 on devices 0-1; 1 on device 2; 0 on device 3`: rows of `dim` by device id."""
        sizes = self.shard_sizes(dim)
        if not isinstance(self.sharding.mesh, Mesh):
            return ", ".join(map(str, sizes))
        block = self.array.shape[dim] // len(sizes)
        holders: dict[int, list[int]] = {}
        for device, index in self.sharding.devices_indices_map(self.array.shape).items():
            shard = (index[dim].start or 0) // block if block else 0
            holders.setdefault(sizes[shard], []).append(device.id)
        parts = [f"{n} on {_ids(sorted(holders[n]))}" for n in sorted(holders, reverse=True)]
        return "; ".join(parts)


def _pad(x: Any, pad: list[tuple[int, int]], fill: Any) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # Random keys have no arithmetic: pad the numbers they are made of.
        raw = jax.random.key_data(x)
        raw = jnp.pad(raw, [*pad, *[(0, 0)] * (raw.ndim - x.ndim)])
        return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(x))
    numpy = jnp if isinstance(x, jax.Array) else np
    return numpy.pad(x, pad, constant_values=fill)


def shard_counts(sharding: NamedSharding, rank: int) -> tuple[int, ...]:
    """The number of shards of each dim of an array of `rank` dims.

    Raises:
      ShardingError: the spec has more entries than there are dims.
    """
    spec = sharding.spec
    if len(spec) > rank:
        raise ShardingError(
            f"{spec} has {len(spec)} entries for an array of {rank} dims",
            hint="give one entry per dim; trailing dims that are not split may be left out",
        )
    counts = []
    for entry in (*spec, *[None] * (rank - len(spec))):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        counts.append(math.prod(sharding.mesh.shape[n] for n in names))
    return tuple(counts)


def _ids(ids: list[int]) -> str:
    """`device 2`, `devices 0-3, 8`: sorted ids, runs shortened."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    text = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"device {text}" if len(ids) == 1 else f"devices {text}"
