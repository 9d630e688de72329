"""Where arrays enter and leave the per-device program.

Outside, a split dim of size D over P shards has blocks of ceil(D/P).  Inside, dims tied to each other
share one padded size, which may be larger: blocks are realigned on the way in and out when they
differ (`halo.window`), and only then.

Inside, blocks lie in the mesh's order of devices.  A result asked for on another order (GShard's
`shard` with a device assignment) is sent there last, by one collective-permute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwise.device_tensor import DeviceOrder
from shardwise.halo import window
from shardwise.notes import Note
from shardwise.partition import Partitioner
from shardwise.program import Body, Var
from shardwise.sharding import Layout
from shardwise.value import Value


def realign(p: Partitioner, x: Any, layout: Layout, padded: tuple[int, ...], note: Note) -> Any:
    """Blocks of `layout` as blocks of the same split under other padded sizes."""
    for dim, (axes, old, new) in enumerate(
        zip(layout.sharding.axes, layout.padded, padded, strict=True)
    ):
        if not axes or old == new:
            continue
        shards = p.mesh.size(axes)
        with p.noted(note):
            x = window(
                x, dim, axes, p.mesh, block=old // shards, size=layout.shape[dim],
                start=(new // shards, 0), length=new // shards,
            )  # fmt: skip
    return x


def enter(p: Partitioner, v: Var, x: Any, layout: Layout) -> Value:
    """An argument's block as a value of the program."""
    padded = p.padded(v)
    x = realign(p, x, layout, padded, Note(None, "argument", value=v.name, var=v))
    return Value(v, padded, {layout.sharding: x})


def leave(
    p: Partitioner,
    body: Body,
    values: list[Value],
    layouts: list[Layout],
    orders: Sequence[DeviceOrder | None],
) -> list[Any]:
    """The program's results, in the shardings completed for them, as blocks of ceil(D/P), each on the
    device its order names."""
    blocks = p.results(body, values)
    out = []
    for stand_in, x, layout, order in zip(
        p.completion.results, blocks, layouts, orders, strict=True
    ):
        inside = Layout(layout.shape, p.padded(stand_in), layout.sharding)
        note = Note(None, "result", value=stand_in.name)
        x = realign(p, x, inside, layout.padded, note)
        if order is not None:
            with p.noted(Note(None, "device order", value=stand_in.name)):
                x = reordered(x, order, p.mesh.atoms)
        out.append(x)
    return out


def reordered(x: Any, order: DeviceOrder, atoms: Sequence[str]) -> Any:
    """The block that device i has, on device `order[i]`."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = reordered(jax.random.key_data(x), order, atoms)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return lax.ppermute(x, tuple(atoms), list(enumerate(order)))
