"""Sorting and searching, of exact values."""

from __future__ import annotations

from shardwise.testing.operations.base import a_dim, need
from shardwise.testing.programs import Builder, Value


def sort(b: Builder, v: Value) -> Value:
    need(v.exact and v.rank > 0)
    d = a_dim(b, v)
    f = b.choose(["jnp.sort({}, {})", "jnp.argsort({}, {})", "jnp.sort({}, {}, descending=True)",
                  "jnp.median({}, {})" if v.is_float else "jnp.sort({}, {})"])  # fmt: skip
    need("median" not in f or v.shape[d] % 2 == 1)
    return b.emit(f.format(v.name, d), [v], exact=True)


def sort_pairs(b: Builder, v: Value) -> Value:
    """Several operands: by one key, or by two."""
    need(v.exact and v.rank > 0)
    u = b.new(v.shape, "int32")
    first, keys = b.choose([(v, 1), (u, 2), (u, 1)])
    second = u if first is v else v
    text = f"lax.sort(({first.name}, {second.name}), dimension={a_dim(b, v)}, num_keys={keys})"
    return b.emit(f"{text}[{b.choose((1, 0))}]", [v, u], exact=True)


def top_k(b: Builder, v: Value) -> Value:
    need(v.exact and v.rank > 0 and v.shape[-1] > 0 and v.dtype != "bool")
    k = b.choose(range(1, v.shape[-1] + 1))
    f = b.choose(("lax.top_k", "lax.approx_max_k" if v.is_float else "lax.top_k"))
    return b.emit(f"{f}({v.name}, {k})[{b.choose((0, 1))}]", [v], exact=True)


def search(b: Builder, v: Value) -> Value:
    need(v.exact and v.is_float and v.rank > 0)
    a = b.new((b.choose((8, 5, 1)),))
    return b.emit(f"jnp.searchsorted(jnp.sort({a.name}), {v.name})", [a, v], exact=True)


OPERATIONS = (
    sort,
    sort_pairs,
    top_k,
    search,
)
