"""Control flow, and functions of functions."""

from __future__ import annotations

from shardwise.testing.operations.base import need, size_of
from shardwise.testing.programs import Builder, Value


def scan(b: Builder, v: Value) -> Value:
    """Over the leading dim: running values out, or the last one."""
    need(v.is_float and v.rank > 0)
    which = b.choose([0, 1])
    reverse = b.choose([False, True])
    step = "lambda c, x: (0.5 * c + x, jnp.sin(c) * x)"
    return b.emit(
        f"lax.scan({step}, jnp.zeros({v.shape[1:]}), {v.name}, reverse={reverse})[{which}]", [v]
    )


def scan_weights(b: Builder, v: Value) -> Value:
    """A stack of layers."""
    need(v.is_float and v.rank == 2)
    w = b.new((3, v.shape[1], v.shape[1]))
    step = "lambda h, w: (jnp.tanh(h @ w), None)"
    return b.emit(f"lax.scan({step}, {v.name}, {w.name})[0]", [v, w])


def scan_constant(b: Builder, v: Value) -> Value:
    """A weight from outside, the same in every iteration, as it is or in a checkpoint."""
    need(v.is_float and v.rank == 2)
    w = b.new((v.shape[1], v.shape[1]))
    step = f"lambda h, {w.name}: jnp.tanh(h @ (jnp.cos({w.name}) / 4))"
    step = f"jax.checkpoint({step})" if b.chance(2) else f"({step})"
    return b.emit(
        f"lax.scan(lambda h, _: ({step}(h, {w.name}), None), {v.name}, None, length=3)[0]", [v, w]
    )


def scan_outputs(b: Builder, v: Value) -> Value:
    """Layers with results of their own, one for each layer."""
    need(v.is_float and v.rank == 3)
    h = b.new((b.choose((4, 5)), v.shape[1]))
    which = b.choose([0, 1])
    step = "lambda h, w: (jnp.tanh(h @ w @ w.T / 4), (h.T @ (h @ w) + w, h.sum(0)))"
    return b.emit(f"lax.scan({step}, {h.name}, {v.name})[1][{which}]", [h, v])


def while_constant(b: Builder, v: Value) -> Value:
    """A number of trips that is known at run time only (no gradient through it)."""
    need(v.is_float and v.rank == 2)
    w, n = b.new((v.shape[1], v.shape[1])), b.new((), "int32")
    step = f"lambda i, h: jnp.tanh(h @ {w.name} / 4) + i"
    loop = f"lax.fori_loop(0, {n.name} % 4, {step}, lax.stop_gradient({v.name}))"
    return b.emit(
        f"lax.stop_gradient({loop.replace(w.name, f'lax.stop_gradient({w.name})')})", [v, w, n]
    )


def accumulate(b: Builder, v: Value) -> Value:
    """Sums of outer products, as gradients of weights are."""
    need(v.is_float and v.rank == 3)
    step = "lambda g, x: (g + x.T @ jnp.cos(x) / 4, None)"
    return b.emit(f"lax.scan({step}, jnp.zeros(({v.shape[2]}, {v.shape[2]})), {v.name})[0]", [v])


def loop(b: Builder, v: Value) -> Value:
    need(v.is_float)
    return b.emit(f"lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) + i * 0.1, {v.name})", [v])


def cond(b: Builder, v: Value) -> Value:
    need(v.is_float)
    p = b.new((), "bool")
    branches = "lambda x: jnp.sin(x) * 2, lambda x: x - x.mean()"
    return b.emit(f"lax.cond({p.name}, {branches}, {v.name})", [p, v])


def checkpoint(b: Builder, v: Value) -> Value:
    need(v.is_float)
    return b.emit(f"jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x)) * x)({v.name})", [v])


def mapped(b: Builder, v: Value) -> Value:
    need(v.is_float and v.rank > 0)
    return b.emit(f"jax.vmap(lambda x: x - jnp.mean(x) + jnp.mean(x * x))({v.name})", [v])


def switch(b: Builder, v: Value) -> Value:
    need(v.is_float)
    i = b.new((), "int32")
    branches = (
        "[jnp.sin, lambda x: x - x.mean(), lambda x: jnp.cumsum(x, -1) / 4 if x.ndim else -x]"
    )
    return b.emit(f"lax.switch({i.name}, {branches}, {v.name})", [i, v])


def loop_until(b: Builder, v: Value) -> Value:
    """A while loop whose end depends on data."""
    need(v.is_float and v.exact and size_of(v) > 0)
    go = "lambda c: (c[0] < 5) & (jnp.max(jnp.abs(c[1])) < 4)"
    step = "lambda c: (c[0] + 1, 2 * c[1])"
    return b.emit(
        f"lax.while_loop({go}, {step}, (0, lax.stop_gradient({v.name})))[1] / 4", [v], True
    )


def nested_scan(b: Builder, v: Value) -> Value:
    need(v.is_float and v.rank > 0)
    inner = "lax.fori_loop(0, 2, lambda i, h: jnp.cos(h + c), x)"
    step = f"lambda c, x: (c + x.mean(), {inner})"
    return b.emit(f"lax.scan({step}, 0.0, {v.name})[1]", [v])


def scan_slices(b: Builder, v: Value) -> Value:
    """A scan that reads rows of a value from outside by number."""
    need(v.is_float and v.rank > 0 and v.shape[0] > 0)
    step = f"lambda c, i: (jnp.tanh(c + lax.dynamic_index_in_dim({v.name}, i, 0, False)), c.sum())"
    start = f"jnp.zeros({v.shape[1:]})"
    which = b.choose((0, 1))
    return b.emit(f"lax.scan({step}, {start}, jnp.arange({v.shape[0]}))[{which}]", [v])


def mapped_rows(b: Builder, v: Value) -> Value:
    need(v.is_float and v.rank > 0)
    return b.emit(f"lax.map(lambda x: jnp.sin(x) * x.sum(), {v.name})", [v])


def own_gradient(b: Builder, v: Value) -> Value:
    """A function with a derivative of its own, and one that is a gradient itself."""
    need(v.is_float)
    f = b.choose(["jax.nn.relu6({} + 0.5)" if v.exact else "jax.nn.softplus({})",
                  "jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2))({})",
                  "jax.jvp(jnp.tanh, ({0},), ({0},))[1]",
                  "jax.checkpoint(lambda x: jnp.sin(x) * x, policy="
                  "jax.checkpoint_policies.everything_saveable)({})"])  # fmt: skip
    return b.emit(f.format(v.name), [v])


OPERATIONS = (
    scan,
    scan_weights,
    scan_constant,
    scan_outputs,
    while_constant,
    accumulate,
    loop,
    cond,
    checkpoint,
    mapped,
    switch,
    loop_until,
    nested_scan,
    scan_slices,
    mapped_rows,
    own_gradient,
)
