"""Reshards for tests: the numpy reference, the program of a reshard, and shardings to try.

The reference knows nothing of steps: it places a global array's blocks on devices, and reads back
from every device the block the target says it has.  Padding is filled with NaN (or with large
numbers), so that any of it reaching a value shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardwise.mesh import MeshAxes
from shardwise.reshard import emit_reshard
from shardwise.sharding import Layout, Sharding, device_coordinates

REDUCE = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
Pair = tuple[Layout, Sharding]


# ---- the reference -------------------------------------------------------------------------------


def rows_of(layout: Layout, dim: int, at: dict[str, int], mesh: MeshAxes) -> tuple[int, int]:
    """First global row and number of rows of the block of a device at coordinates `at`."""
    index = 0
    for a in layout.sharding.axes[dim]:
        index = index * mesh.size_of[a] + at[a]
    length = layout.local_shape(mesh)[dim]
    return index * length, length


def term_key(s: Sharding, at: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((a, at[a]) for a in s.partial)


def place(terms: dict, layout: Layout, mesh: MeshAxes, junk: object) -> np.ndarray:
    """[devices, *block]: every device's block of its term, `junk` where the block is padding."""
    dtype = next(iter(terms.values())).dtype
    out = np.full((mesh.device_count, *layout.local_shape(mesh)), junk, dtype)
    for device in range(mesh.device_count):
        at = device_coordinates(device, mesh)
        theirs, mine = [], []
        for d, size in enumerate(layout.shape):
            lo, n = rows_of(layout, d, at, mesh)
            have = max(0, min(n, size - lo))
            theirs.append(slice(lo, lo + have))
            mine.append(slice(0, have))
        out[(device, *mine)] = terms[term_key(layout.sharding, at)][tuple(theirs)]
    return out


def finished(terms: dict, src: Sharding, dst: Sharding) -> dict:
    """The terms that are left when the reductions that `dst` does not keep are done."""
    out: dict = {}
    for key, term in terms.items():
        left = tuple((a, i) for a, i in key if a in dst.partial)
        out[left] = REDUCE[src.op](out[left], term) if left in out else term
    return out


def random_terms(layout: Layout, mesh: MeshAxes, dtype: object, rng: np.random.Generator) -> dict:
    """A random global array per term; small integers, so that sums and products are exact."""
    keys = itertools.product(*(range(mesh.size_of[a]) for a in layout.sharding.partial))
    draw = {True: (0, 2), False: (-2, 3)}[jnp.issubdtype(dtype, jnp.bool_)]
    return {
        tuple(zip(layout.sharding.partial, key, strict=True)): rng.integers(
            *draw, layout.shape
        ).astype(dtype)
        for key in keys
    }


def jax_mesh(mesh: MeshAxes) -> Mesh:
    sizes = [mesh.size_of[a] for a in mesh.atoms]
    return Mesh(np.array(jax.devices()[: mesh.device_count]).reshape(sizes), mesh.atoms)


def program(pairs: Sequence[Pair], mesh: MeshAxes):
    """One jitted program that does all reshards; operands and results are [devices, *block]."""

    def body(*xs: jax.Array) -> tuple[jax.Array, ...]:
        out = []
        for x, (src, dst) in zip(xs, pairs, strict=True):
            y = emit_reshard(x[0], src, dst, mesh)
            assert y.shape == src.with_sharding(dst).local_shape(mesh), (src, dst)
            assert y.dtype == x.dtype
            out.append(y[None])
        return tuple(out)

    spec = PartitionSpec(mesh.atoms)
    return jax.jit(
        jax.shard_map(body, mesh=jax_mesh(mesh), in_specs=spec, out_specs=spec, check_vma=False)
    )


def check(pairs: Sequence[Pair], mesh: MeshAxes, dtype: object = np.float32, seed: int = 0) -> None:
    """Run the reshards in one program and compare every device's block with the reference."""
    rng = np.random.default_rng(seed)
    junk = jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 1
    everything = [random_terms(src, mesh, dtype, rng) for src, _ in pairs]
    blocks = [place(t, src, mesh, junk) for t, (src, _) in zip(everything, pairs, strict=True)]
    results = program(pairs, mesh)(*map(jnp.asarray, blocks))
    for terms, (src, dst), got in zip(everything, pairs, results, strict=True):
        layout = src.with_sharding(dst)
        left = finished(terms, src.sharding, dst)
        real = place({k: np.ones(src.shape, bool) for k in left}, layout, mesh, False)
        want = place(left, layout, mesh, junk)
        text = f"{src.sharding.text(mesh)} -> {dst.text(mesh)}, {src.shape} padded {src.padded}"
        np.testing.assert_array_equal(np.asarray(got)[real], want[real], err_msg=text)


# ---- which shardings -----------------------------------------------------------------------------


def shardings(mesh: MeshAxes, padded: Sequence[int], partial: bool = True) -> list[Sharding]:
    """Every sharding of a value whose padded sizes divide, pending sums included."""
    rank, out = len(padded), []
    for n in range(len(mesh.atoms) + 1):
        for order in itertools.permutations(mesh.atoms, n):
            for cuts in itertools.combinations_with_replacement(range(n + 1), rank - 1):
                ends = (0, *cuts, n)
                axes = tuple(order[ends[d] : ends[d + 1]] for d in range(rank))
                if any(p % mesh.size(a) for p, a in zip(padded, axes, strict=True)):
                    continue
                rest = [a for a in mesh.atoms if a not in order]
                for k in range(len(rest) + 1 if partial else 1):
                    for pending in itertools.combinations(rest, k):
                        out.append(Sharding(axes, pending))
    return list(dict.fromkeys(out))


def all_pairs(mesh: MeshAxes, shape: Sequence[int], padded: Sequence[int]) -> list[Pair]:
    every = shardings(mesh, padded)
    return [
        (Layout(tuple(shape), tuple(padded), a), b)
        for a, b in itertools.product(every, every)
        if set(b.partial) <= set(a.partial) and a != b
    ]


def spread(mesh: MeshAxes, *dims: str, partial: str = "", op: str = "sum") -> Sharding:
    """`spread(mesh, "xy", "")`: dim 0 over x and y, dim 1 whole."""

    def atoms(names: str) -> tuple[str, ...]:
        return tuple(a for n in names for a in mesh.expand(n))

    return Sharding(tuple(map(atoms, dims))).with_partial(mesh.sort(atoms(partial)), op)


def even(shape: Sequence[int], sharding: Sharding) -> Layout:
    return Layout(tuple(shape), tuple(shape), sharding)


X4Y2 = MeshAxes(("x", "y"), (4, 2))
