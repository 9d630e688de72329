"""Gathers, scatters, offsets known at run time."""

from __future__ import annotations

from shardwise.testing.operations.base import a_dim, need, size_of
from shardwise.testing.programs import Builder, Value


def take_rows(b: Builder, v: Value) -> Value:
    d = a_dim(b, v)
    ids = b.new(b.choose([(5,), (8,), (2, 3), (1,)]), "int32")
    mode = b.choose(["clip", "wrap", "fill"])
    return b.emit(f"jnp.take({v.name}, {ids.name}, {d}, mode={mode!r})", [v, ids], mode != "fill")


def take_along(b: Builder, v: Value) -> Value:
    d = a_dim(b, v)
    ids = b.new([*v.shape[:d], b.choose((2, 5, 1)), *v.shape[d + 1 :]], "int32")
    text = f"jnp.take_along_axis({v.name}, {ids.name} % {max(v.shape[d], 1)}, {d})"
    return b.emit(text, [v, ids], exact=True)


def dynamic_slice(b: Builder, v: Value) -> Value:
    d = a_dim(b, v)
    i = b.new((), "int32")
    n = b.choose(range(1, v.shape[d] + 1))
    return b.emit(f"lax.dynamic_slice_in_dim({v.name}, {i.name}, {n}, {d})", [v, i], exact=True)


def dynamic_update(b: Builder, v: Value) -> Value:
    d = a_dim(b, v)
    i = b.new((), "int32")
    u = b.new([*v.shape[:d], b.choose(range(1, v.shape[d] + 1)), *v.shape[d + 1 :]], v.dtype)
    text = f"lax.dynamic_update_slice_in_dim({v.name}, {u.name}, {i.name}, {d})"
    return b.emit(text, [v, u, i], exact=True)


def scatter_add(b: Builder, v: Value) -> Value:
    need(v.is_float and v.rank > 0 and 0 not in v.shape)  # JAX has no gradient of an empty scatter
    ids = b.new((b.choose((4, 5, 1)),), "int32")
    u = b.new((*ids.shape, *v.shape[1:]))
    return b.emit(f"{v.name}.at[{ids.name}].add({u.name}, mode='drop')", [v, ids, u])


def roll_by(b: Builder, v: Value) -> Value:
    """A roll by a number known at run time."""
    need(v.rank > 0 and 0 not in v.shape)
    i = b.new((), "int32")
    return b.emit(f"jnp.roll({v.name}, {i.name}, {a_dim(b, v)})", [v, i], exact=True)


def dynamic_block(b: Builder, v: Value) -> Value:
    """A block at an offset along every dim."""
    need(v.rank > 0 and 0 not in v.shape)
    i = b.new((), "int32")
    sizes = tuple(b.choose(range(1, n + 1)) for n in v.shape)
    text = f"lax.dynamic_slice({v.name}, ({', '.join([i.name] * v.rank)},), {sizes})"
    return b.emit(text, [v, i], exact=True)


def take_points(b: Builder, v: Value) -> Value:
    """Indices of two dims at once."""
    need(v.rank >= 2 and 0 not in v.shape)
    i, j = (b.new((b.choose((4, 5, 1)),), "int32") for _ in range(2))
    need(i.shape == j.shape)
    return b.emit(f"{v.name}.at[{i.name}, {j.name}].get(mode='clip')", [v, i, j], exact=True)


def take_batched(b: Builder, v: Value) -> Value:
    """Each row with its own indices: batching dims of a gather."""
    need(v.rank >= 2 and 0 not in v.shape)
    ids = b.new((v.shape[0], b.choose((3, 1, 4))), "int32")
    text = f"jax.vmap(lambda x, i: x.at[i].get(mode='clip'))({v.name}, {ids.name})"
    return b.emit(text, [v, ids], exact=True)


def scatter_exact(b: Builder, v: Value) -> Value:
    """Distinct rows set, or the larger of what is there and what comes."""
    need(v.is_float and v.exact and v.rank > 0 and 0 not in v.shape)
    k = b.choose(range(1, v.shape[0] + 1))
    u = b.new((k, *v.shape[1:]))
    rows = f"jnp.arange({k}) * {b.choose((1, 2))} + {b.choose((0, 1))}"
    unique = ", unique_indices=True" if b.chance(3) else ""
    op = b.choose(("set", "max", "min"))
    return b.emit(f"{v.name}.at[{rows}].{op}({u.name}, mode='drop'{unique})", [v, u], exact=True)


def scatter_columns(b: Builder, v: Value) -> Value:
    need(v.is_float and v.rank >= 2 and 0 not in v.shape)
    ids = b.new((b.choose((4, 1, 3)),), "int32")
    u = b.new((v.shape[0], *ids.shape, *v.shape[2:]))
    op = b.choose(("add", "multiply"))
    return b.emit(
        f"{v.name}.at[:, jnp.unique({ids.name} % {v.shape[1]}, size={ids.shape[0]}, "
        f"fill_value={v.shape[1]})].{op}({u.name}, mode='drop')", [v, ids, u])  # fmt: skip


def segments(b: Builder, v: Value) -> Value:
    need(v.is_float and v.rank > 0 and 0 not in v.shape)
    ids = b.new((v.shape[0],), "int32")
    f = b.choose(("jax.ops.segment_sum({}, {}, 4) / 2", "jax.nn.one_hot({1}, 4).T @ {0}"))
    need("one_hot" not in f or v.rank == 2)
    return b.emit(f.format(v.name, ids.name), [v, ids])


def histogram(b: Builder, v: Value) -> Value:
    need(v.exact and v.is_float and size_of(v) > 0)
    return b.emit(f"jnp.histogram({v.name}, bins=6, range=(-1, 1))[0]", [v], exact=True)


def write_rows(b: Builder, v: Value) -> Value:
    """A loop that fills a buffer row by row."""
    need(v.is_float and v.rank > 0 and v.shape[0] > 0)
    step = "lambda i, c: c.at[i].set(jnp.sin(c[i - 1] + i))"
    return b.emit(f"lax.fori_loop(1, {v.shape[0]}, {step}, {v.name})", [v])


def scatter_set(b: Builder, v: Value) -> Value:
    """Rows overwritten, some more than once: the last one stays."""
    need(v.rank > 0 and 0 not in v.shape)
    ids = b.new((b.choose((4, 8, 5)),), "int32")
    u = b.new((*ids.shape, *v.shape[1:]), v.dtype)
    mode = b.choose(["drop", "clip"])
    return b.emit(f"{v.name}.at[{ids.name}].set({u.name}, mode={mode!r})", [v, ids, u], exact=True)


def update_known(b: Builder, v: Value) -> Value:
    """Rows at places written into the program."""
    need(v.is_float and v.rank > 0 and 0 not in v.shape)
    n = v.shape[0]
    start, step = b.choose(range(n)), b.choose((1, 2, -1))
    rows = range(n)[start::step]
    u = b.new((len(rows), *v.shape[1:]), v.dtype)
    how = b.choose(["set", "add"])
    return b.emit(f"{v.name}.at[{start}::{step}].{how}({u.name})", [v, u], exact=how == "set")


def roll_traced(b: Builder, v: Value) -> Value:
    i = b.new((), "int32")
    return b.emit(f"jnp.roll({v.name}, {i.name}, {a_dim(b, v)})", [v, i], exact=True)


OPERATIONS = (
    take_rows,
    take_along,
    dynamic_slice,
    dynamic_update,
    scatter_add,
    roll_by,
    dynamic_block,
    take_points,
    take_batched,
    scatter_exact,
    scatter_columns,
    segments,
    histogram,
    write_rows,
    scatter_set,
    update_known,
    roll_traced,
)
