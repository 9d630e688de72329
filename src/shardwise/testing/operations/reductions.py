"""Reductions, running ones, windows."""

from __future__ import annotations

from shardwise.testing.operations.base import a_dim, need
from shardwise.testing.programs import Builder, Value


def reduce(b: Builder, v: Value) -> Value:
    need(v.is_float)
    dims = b.choose([(a_dim(b, v),), tuple(range(v.rank))])
    keep = ", keepdims=True" if b.choose([False, True]) else ""
    return b.emit(f"jnp.mean({v.name}, {dims}{keep})" if b.choose([True, False]) else
                  f"jnp.sum({v.name}, {dims}{keep}) / 4", [v])  # fmt: skip


def reduce_exact(b: Builder, v: Value) -> Value:
    """Max, min, argmax and argmin: exact values, so that ties are the same everywhere."""
    need(v.exact)
    f = b.choose(["jnp.max", "jnp.min", "jnp.argmax", "jnp.argmin"])
    return b.emit(f"{f}({v.name}, {a_dim(b, v)})", [v], exact=True)


def reduce_bool(b: Builder, v: Value) -> Value:
    need(v.exact)
    f = b.choose(["jnp.any", "jnp.all", "jnp.count_nonzero"])
    return b.emit(f"{f}({v.name} > 0, {a_dim(b, v)})", [v], exact=True)


def product(b: Builder, v: Value) -> Value:
    need(v.is_float)
    return b.emit(f"jnp.prod(1 + {v.name} / 4, {a_dim(b, v)})", [v])


def cumulative(b: Builder, v: Value) -> Value:
    need(v.is_float)
    d = a_dim(b, v)
    reverse = b.choose([False, True])
    f = b.choose(["lax.cumsum({}, {}, {}) / 4", "lax.cumlogsumexp({}, {}, {})"])
    return b.emit(f.format(v.name, d, reverse), [v])


def cumulative_exact(b: Builder, v: Value) -> Value:
    need(v.exact)
    return b.emit(f"lax.cummax({v.name}, {a_dim(b, v)}, {b.choose([False, True])})", [v])


def softmax(b: Builder, v: Value) -> Value:
    need(v.is_float)
    f = b.choose(["jax.nn.softmax", "jax.nn.log_softmax", "jax.nn.logsumexp"])
    return b.emit(f"{f}({v.name}, {a_dim(b, v)})", [v])


def layernorm(b: Builder, v: Value) -> Value:
    need(v.is_float and v.rank > 0)
    n = v.name
    text = f"({n} - {n}.mean(-1, keepdims=True)) * lax.rsqrt({n}.var(-1, keepdims=True) + 0.1)"
    return b.emit(text, [v])


def variance(b: Builder, v: Value) -> Value:
    need(v.is_float)
    f = b.choose(["jnp.var", "lambda x, d: jnp.sqrt(1 + (x * x).sum(d))"])
    return b.emit(f"({f})({v.name}, {a_dim(b, v)})", [v])


def reduce_any(b: Builder, v: Value) -> Value:
    """The generic reduce: its body is no one primitive."""
    need(v.is_float)
    d = a_dim(b, v)
    body = "lambda x, y: (x[0] + y[0], jnp.maximum(x[1], y[1]))"
    u = b.new(v.shape)
    text = f"lax.reduce(({v.name}, {u.name}), (0.0, -2.0), {body}, ({d},))"
    return b.emit(f"lax.stop_gradient({text}[0] / 4 + {text}[1])", [v, u])


def reduce_bits(b: Builder, v: Value) -> Value:
    need(v.dtype == "int32")
    f = b.choose(
        ["lax.reduce_xor({}, ({},))", "lax.reduce_and({}, ({},))", "lax.reduce_or({}, ({},))"]
    )
    return b.emit(f.format(v.name, a_dim(b, v)), [v], exact=True)


def cumulative_product(b: Builder, v: Value) -> Value:
    need(v.is_float)
    return b.emit(f"lax.cumprod(1 + {v.name} / 8, {a_dim(b, v)}, {b.choose([False, True])})", [v])


def prefix(b: Builder, v: Value) -> Value:
    """A linear recurrence by associative_scan."""
    need(v.is_float)
    d = a_dim(b, v)
    step = "lambda a, c: (a[0] * c[0], a[1] * c[0] + c[1])"
    pair = f"(lax.logistic({v.name}), {v.name})"
    return b.emit(f"lax.associative_scan({step}, {pair}, axis={d})[1] / 2", [v])


def _window(b: Builder, v: Value) -> str:
    """Window, strides, padding, along one or two dims."""
    need(v.rank > 0 and 0 not in v.shape)
    dims = b.choose([(a_dim(b, v),), tuple(range(v.rank))[-2:]])
    size = [b.choose((2, 3, 1)) if d in dims else 1 for d in range(v.rank)]
    stride = [b.choose((1, 2, 3)) if d in dims else 1 for d in range(v.rank)]
    pads = [b.choose(((0, 0), (1, 1), (0, 2))) if d in dims else (0, 0) for d in range(v.rank)]
    return f"{tuple(size)}, {tuple(stride)}, {tuple(pads)}"


def pool(b: Builder, v: Value) -> Value:
    need(v.is_float)
    return b.emit(f"lax.reduce_window({v.name}, 0.0, lax.add, {_window(b, v)}) / 4", [v])


def pool_exact(b: Builder, v: Value) -> Value:
    need(v.is_float and v.exact)
    op, start = b.choose([("max", "-jnp.inf"), ("min", "jnp.inf")])
    text = f"lax.reduce_window({v.name}, {start}, lax.{op}, {_window(b, v)})"
    return b.emit(f"jnp.clip({text}, -2, 2)", [v], exact=True)


OPERATIONS = (
    reduce,
    reduce_exact,
    reduce_bool,
    product,
    cumulative,
    cumulative_exact,
    softmax,
    layernorm,
    variance,
    reduce_any,
    reduce_bits,
    cumulative_product,
    prefix,
    pool,
    pool_exact,
)
