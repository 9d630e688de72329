"""Shapes and pieces: data moves, nothing is computed."""

from __future__ import annotations

from shardwise.testing.operations.base import a_dim, need, size_of
from shardwise.testing.programs import Builder, Value


def transpose(b: Builder, v: Value) -> Value:
    dims = list(range(v.rank))
    order = b.choose([dims[::-1], dims[1:] + dims[:1]])
    return b.emit(f"jnp.transpose({v.name}, {tuple(order)})", [v], exact=True)


def reshape(b: Builder, v: Value) -> Value:
    """Merge two dims, split one, or lay all out in one row."""
    d = a_dim(b, v)
    n = v.shape[d]
    ways = [[*v.shape[:d], f, n // f, *v.shape[d + 1 :]] for f in (2, 3, 4) if n and n % f == 0]
    if d + 1 < v.rank:
        ways.append([*v.shape[:d], n * v.shape[d + 1], *v.shape[d + 2 :]])
    ways.append([size_of(v)])
    ways.append([*v.shape[::-1]])
    return b.emit(f"jnp.reshape({v.name}, {tuple(b.choose(ways))})", [v], exact=True)


def broadcast(b: Builder, v: Value) -> Value:
    at = b.choose(range(v.rank + 1))
    shape = (*v.shape[:at], b.choose((2, 3, 8)), *v.shape[at:])
    text = f"jnp.broadcast_to(jnp.expand_dims({v.name}, {at}), {shape})"
    return b.emit(text, [v], exact=True)


def squeeze(b: Builder, v: Value) -> Value:
    d = a_dim(b, v)
    return b.emit(f"lax.index_in_dim({v.name}, {v.shape[d] - 1}, {d}, keepdims=False)", [v], True)


def slice_(b: Builder, v: Value) -> Value:
    d = a_dim(b, v)
    n = v.shape[d]
    start, stop = b.choose(range(n)), n - b.choose(range(n))
    step = b.choose((1, 2, 3))
    need(start < stop)
    return b.emit(f"lax.slice_in_dim({v.name}, {start}, {stop}, {step}, {d})", [v], exact=True)


def reverse(b: Builder, v: Value) -> Value:
    return b.emit(f"lax.rev({v.name}, ({a_dim(b, v)},))", [v], exact=True)


def roll(b: Builder, v: Value) -> Value:
    return b.emit(f"jnp.roll({v.name}, {b.choose((1, -2, 3))}, {a_dim(b, v)})", [v], exact=True)


def pad(b: Builder, v: Value) -> Value:
    d = a_dim(b, v)
    config = [(0, 0, 0)] * v.rank
    config[d] = (b.choose((0, 1, 3, -1)), b.choose((1, 0, 2, -1)), b.choose((0, 0, 1)))
    zero = "False" if v.dtype == "bool" else f"jnp.zeros((), {v.dtype!r})"
    return b.emit(f"lax.pad({v.name}, {zero}, {config})", [v], exact=True)


def concatenate(b: Builder, v: Value) -> Value:
    d = a_dim(b, v)
    if b.choose([True, False]):
        return b.emit(f"jnp.concatenate([{v.name}, {v.name}], {d})", [v], exact=True)
    u = b.new([*v.shape[:d], b.choose((2, 3, 8)), *v.shape[d + 1 :]], v.dtype)
    order = b.choose([f"{v.name}, {u.name}", f"{u.name}, {v.name}"])
    return b.emit(f"jnp.concatenate([{order}], {d})", [v, u], exact=True)


def pieces(b: Builder, v: Value) -> Value:
    """Cut up and put together again in another way."""
    d = a_dim(b, v)
    n = v.shape[d]
    f = b.choose(
        ["jnp.repeat({0}, 2, {1})", "jnp.tile({0}, {2})", "jnp.stack([{0}, {0}], {1})",
         "jnp.diff({0}, axis={1}, append=0)" if v.is_float else "jnp.flip({0}, {1})",
         "jnp.flip({0}, {1})", "jnp.moveaxis({0}, {1}, 0)",
         "jnp.concatenate(jnp.array_split({0}, 2, {1})[::-1], {1})", "jnp.unstack({0}, axis={1})[0]"]
    )  # fmt: skip
    need(n > 0 and size_of(v) <= 2048)
    reps = [1] * v.rank
    reps[d] = 2
    return b.emit(f.format(v.name, d, tuple(reps)), [v], exact="diff" not in f)


def triangle(b: Builder, v: Value) -> Value:
    need(v.rank >= 2 and v.dtype != "bool")
    k = b.choose((0, 1, -2))
    return b.emit(f"jnp.{b.choose(('tril', 'triu'))}({v.name}, {k})", [v], exact=True)


def rotate_halves(b: Builder, v: Value) -> Value:
    """As rotary embeddings do."""
    need(v.rank > 0 and v.shape[-1] % 2 == 0 and v.is_float)
    h = v.shape[-1] // 2
    return b.emit(
        f"jnp.concatenate([-{v.name}[..., {h}:], {v.name}[..., :{h}]], -1)", [v], exact=True
    )


OPERATIONS = (
    transpose,
    reshape,
    broadcast,
    squeeze,
    slice_,
    reverse,
    roll,
    pad,
    concatenate,
    pieces,
    triangle,
    rotate_halves,
)
