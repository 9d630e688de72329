"""Random programs, and the operations they are made of, a function each.

An operation takes the builder and the latest value and emits one line.  What cannot be done to a value
of that shape or dtype raises ValueError, and is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shardwise.testing.programs import DIMS, MESHES, Builder, Choose, Program, Value

Operation = Callable[[Builder, Value], Value]


def _need(condition: bool) -> None:
    if not condition:
        raise ValueError("not for this value")


def _dim(b: Builder, v: Value) -> int:
    _need(v.rank > 0)
    return b.choose(range(v.rank))


# -- elementwise -------------------------------------------------------------------------------------


def unary(b: Builder, v: Value) -> Value:
    _need(v.is_float)
    f = b.choose(["jnp.tanh({})", "jnp.sin({})", "0.5 * {} + 1", "jax.nn.gelu({})",
                  "jnp.exp(-{0} * {0})", "jnp.sqrt(1 + {0} * {0})", "-{}", "jnp.abs({})"])  # fmt: skip
    return b.emit(f.format(v.name), [v])


def binary(b: Builder, v: Value) -> Value:
    _need(v.is_float)
    u = b.choose([b.values[0], None])
    if u is None or u.shape != v.shape or not u.is_float:
        u = b.new(v.shape)
    f = b.choose(["{} + {}", "{} * {}", "{} - {}"])
    return b.emit(f.format(v.name, u.name), [v, u] if u != v else [v])


def bias(b: Builder, v: Value) -> Value:
    """A value broadcast over some dims, added."""
    _need(v.is_float)
    u = b.new([n if b.choose([True, False]) else 1 for n in v.shape[b.choose([-1, 0]) :]])
    return b.emit(f"{v.name} + {u.name}", [v, u])


def select(b: Builder, v: Value) -> Value:
    m = b.new(v.shape, "bool")
    return b.emit(f"jnp.where({m.name}, {v.name}, 0)", [m, v], exact=True)


def causal_mask(b: Builder, v: Value) -> Value:
    _need(v.rank >= 2)
    n, m = v.shape[-2:]
    mask = f"jnp.arange({n})[:, None] >= jnp.arange({m})"
    return b.emit(f"jnp.where({mask}, {v.name}, 0)", [v], exact=True)


def positions(b: Builder, v: Value) -> Value:
    d = _dim(b, v)
    scale = f" / {max(v.shape[d], 1)}" if v.is_float else ""
    return b.emit(f"{v.name} + lax.broadcasted_iota({v.dtype!r}, {v.shape}, {d}){scale}", [v])


def clamp(b: Builder, v: Value) -> Value:
    _need(v.exact and v.dtype != "bool")
    return b.emit(f"jnp.clip({v.name}, -0.5, 0.5)", [v])


# -- dots --------------------------------------------------------------------------------------------


def dot(b: Builder, v: Value) -> Value:
    """An einsum: each dim of the value is batch, contracted or free; the other operand is new."""
    _need(v.is_float and v.rank > 0)
    letters = "abcd"[: v.rank]
    kinds = [b.choose(["free", "contracted", "batch"]) for _ in letters]
    if "contracted" not in kinds:
        kinds[-1] = "contracted"
    shared = [x for x, k in zip(letters, kinds, strict=True) if k != "free"]
    new = ["z"] if b.choose([True, False]) else []
    right = b.choose([shared + new, new + shared, shared[::-1] + new])
    result = [x for x, k in zip(letters, kinds, strict=True) if k != "contracted"] + new
    size = {**dict(zip(letters, v.shape, strict=True)), "z": b.choose((4, 6, 5, 1))}
    u = b.new([size[x] for x in right])
    text = f"jnp.einsum('{letters},{''.join(right)}->{''.join(result)}', {v.name}, {u.name})"
    contracted = math.prod(n for n, k in zip(v.shape, kinds, strict=True) if k == "contracted")
    return b.emit(f"{text} / {max(1.0, math.sqrt(contracted)):.3g}", [v, u])


# -- reductions --------------------------------------------------------------------------------------


def reduce(b: Builder, v: Value) -> Value:
    _need(v.is_float)
    dims = b.choose([(_dim(b, v),), tuple(range(v.rank))])
    keep = ", keepdims=True" if b.choose([False, True]) else ""
    return b.emit(f"jnp.mean({v.name}, {dims}{keep})" if b.choose([True, False]) else
                  f"jnp.sum({v.name}, {dims}{keep}) / 4", [v])  # fmt: skip


def reduce_exact(b: Builder, v: Value) -> Value:
    """Max, min, argmax and argmin: exact values, so that ties are the same everywhere."""
    _need(v.exact)
    f = b.choose(["jnp.max", "jnp.min", "jnp.argmax", "jnp.argmin"])
    return b.emit(f"{f}({v.name}, {_dim(b, v)})", [v], exact=True)


def reduce_bool(b: Builder, v: Value) -> Value:
    _need(v.exact)
    f = b.choose(["jnp.any", "jnp.all", "jnp.count_nonzero"])
    return b.emit(f"{f}({v.name} > 0, {_dim(b, v)})", [v], exact=True)


def product(b: Builder, v: Value) -> Value:
    _need(v.is_float)
    return b.emit(f"jnp.prod(1 + {v.name} / 4, {_dim(b, v)})", [v])


def cumulative(b: Builder, v: Value) -> Value:
    _need(v.is_float)
    d = _dim(b, v)
    reverse = b.choose([False, True])
    f = b.choose(["lax.cumsum({}, {}, {}) / 4", "lax.cumlogsumexp({}, {}, {})"])
    return b.emit(f.format(v.name, d, reverse), [v])


def cumulative_exact(b: Builder, v: Value) -> Value:
    _need(v.exact)
    return b.emit(f"lax.cummax({v.name}, {_dim(b, v)}, {b.choose([False, True])})", [v])


def softmax(b: Builder, v: Value) -> Value:
    _need(v.is_float)
    f = b.choose(["jax.nn.softmax", "jax.nn.log_softmax", "jax.nn.logsumexp"])
    return b.emit(f"{f}({v.name}, {_dim(b, v)})", [v])


def layernorm(b: Builder, v: Value) -> Value:
    _need(v.is_float and v.rank > 0)
    n = v.name
    text = f"({n} - {n}.mean(-1, keepdims=True)) * lax.rsqrt({n}.var(-1, keepdims=True) + 0.1)"
    return b.emit(text, [v])


# -- moving data -------------------------------------------------------------------------------------


def transpose(b: Builder, v: Value) -> Value:
    dims = list(range(v.rank))
    order = b.choose([dims[::-1], dims[1:] + dims[:1]])
    return b.emit(f"jnp.transpose({v.name}, {tuple(order)})", [v], exact=True)


def reshape(b: Builder, v: Value) -> Value:
    """Merge two dims, split one, or lay all out in one row."""
    d = _dim(b, v)
    n = v.shape[d]
    ways = [[*v.shape[:d], f, n // f, *v.shape[d + 1 :]] for f in (2, 3, 4) if n and n % f == 0]
    if d + 1 < v.rank:
        ways.append([*v.shape[:d], n * v.shape[d + 1], *v.shape[d + 2 :]])
    ways.append([v_size(v)])
    ways.append([*v.shape[::-1]])
    return b.emit(f"jnp.reshape({v.name}, {tuple(b.choose(ways))})", [v], exact=True)


def v_size(v: Value) -> int:
    return math.prod(v.shape)


def broadcast(b: Builder, v: Value) -> Value:
    at = b.choose(range(v.rank + 1))
    shape = (*v.shape[:at], b.choose((2, 3, 8)), *v.shape[at:])
    text = f"jnp.broadcast_to(jnp.expand_dims({v.name}, {at}), {shape})"
    return b.emit(text, [v], exact=True)


def squeeze(b: Builder, v: Value) -> Value:
    d = _dim(b, v)
    return b.emit(f"lax.index_in_dim({v.name}, {v.shape[d] - 1}, {d}, keepdims=False)", [v], True)


def slice_(b: Builder, v: Value) -> Value:
    d = _dim(b, v)
    n = v.shape[d]
    start, stop = b.choose(range(n)), n - b.choose(range(n))
    step = b.choose((1, 2, 3))
    _need(start < stop)
    return b.emit(f"lax.slice_in_dim({v.name}, {start}, {stop}, {step}, {d})", [v], exact=True)


def reverse(b: Builder, v: Value) -> Value:
    return b.emit(f"lax.rev({v.name}, ({_dim(b, v)},))", [v], exact=True)


def roll(b: Builder, v: Value) -> Value:
    return b.emit(f"jnp.roll({v.name}, {b.choose((1, -2, 3))}, {_dim(b, v)})", [v], exact=True)


def pad(b: Builder, v: Value) -> Value:
    d = _dim(b, v)
    config = [(0, 0, 0)] * v.rank
    config[d] = (b.choose((0, 1, 3, -1)), b.choose((1, 0, 2, -1)), b.choose((0, 0, 1)))
    zero = "False" if v.dtype == "bool" else f"jnp.zeros((), {v.dtype!r})"
    return b.emit(f"lax.pad({v.name}, {zero}, {config})", [v], exact=True)


def concatenate(b: Builder, v: Value) -> Value:
    d = _dim(b, v)
    if b.choose([True, False]):
        return b.emit(f"jnp.concatenate([{v.name}, {v.name}], {d})", [v], exact=True)
    u = b.new([*v.shape[:d], b.choose((2, 3, 8)), *v.shape[d + 1 :]], v.dtype)
    order = b.choose([f"{v.name}, {u.name}", f"{u.name}, {v.name}"])
    return b.emit(f"jnp.concatenate([{order}], {d})", [v, u], exact=True)


# -- indices -----------------------------------------------------------------------------------------


def take_rows(b: Builder, v: Value) -> Value:
    d = _dim(b, v)
    ids = b.new(b.choose([(5,), (8,), (2, 3), (1,)]), "int32")
    mode = b.choose(["clip", "wrap", "fill"])
    return b.emit(f"jnp.take({v.name}, {ids.name}, {d}, mode={mode!r})", [v, ids], mode != "fill")


def take_along(b: Builder, v: Value) -> Value:
    d = _dim(b, v)
    ids = b.new([*v.shape[:d], b.choose((2, 5, 1)), *v.shape[d + 1 :]], "int32")
    text = f"jnp.take_along_axis({v.name}, {ids.name} % {max(v.shape[d], 1)}, {d})"
    return b.emit(text, [v, ids], exact=True)


def dynamic_slice(b: Builder, v: Value) -> Value:
    d = _dim(b, v)
    i = b.new((), "int32")
    n = b.choose(range(1, v.shape[d] + 1))
    return b.emit(f"lax.dynamic_slice_in_dim({v.name}, {i.name}, {n}, {d})", [v, i], exact=True)


def dynamic_update(b: Builder, v: Value) -> Value:
    d = _dim(b, v)
    i = b.new((), "int32")
    u = b.new([*v.shape[:d], b.choose(range(1, v.shape[d] + 1)), *v.shape[d + 1 :]], v.dtype)
    text = f"lax.dynamic_update_slice_in_dim({v.name}, {u.name}, {i.name}, {d})"
    return b.emit(text, [v, u, i], exact=True)


def scatter_add(b: Builder, v: Value) -> Value:
    _need(v.is_float and v.rank > 0 and 0 not in v.shape)  # JAX has no gradient of an empty scatter
    ids = b.new((b.choose((4, 5, 1)),), "int32")
    u = b.new((*ids.shape, *v.shape[1:]))
    return b.emit(f"{v.name}.at[{ids.name}].add({u.name}, mode='drop')", [v, ids, u])


# -- control flow ------------------------------------------------------------------------------------


def scan(b: Builder, v: Value) -> Value:
    """Over the leading dim: running values out, or the last one."""
    _need(v.is_float and v.rank > 0)
    which = b.choose([0, 1])
    reverse = b.choose([False, True])
    step = "lambda c, x: (0.5 * c + x, jnp.sin(c) * x)"
    return b.emit(
        f"lax.scan({step}, jnp.zeros({v.shape[1:]}), {v.name}, reverse={reverse})[{which}]", [v]
    )


def scan_weights(b: Builder, v: Value) -> Value:
    """A stack of layers."""
    _need(v.is_float and v.rank == 2)
    w = b.new((3, v.shape[1], v.shape[1]))
    step = "lambda h, w: (jnp.tanh(h @ w), None)"
    return b.emit(f"lax.scan({step}, {v.name}, {w.name})[0]", [v, w])


def accumulate(b: Builder, v: Value) -> Value:
    """Sums of outer products, as gradients of weights are."""
    _need(v.is_float and v.rank == 3)
    step = "lambda g, x: (g + x.T @ jnp.cos(x) / 4, None)"
    return b.emit(f"lax.scan({step}, jnp.zeros(({v.shape[2]}, {v.shape[2]})), {v.name})[0]", [v])


def loop(b: Builder, v: Value) -> Value:
    _need(v.is_float)
    return b.emit(f"lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) + i * 0.1, {v.name})", [v])


def cond(b: Builder, v: Value) -> Value:
    _need(v.is_float)
    p = b.new((), "bool")
    branches = "lambda x: jnp.sin(x) * 2, lambda x: x - x.mean()"
    return b.emit(f"lax.cond({p.name}, {branches}, {v.name})", [p, v])


def checkpoint(b: Builder, v: Value) -> Value:
    _need(v.is_float)
    return b.emit(f"jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x)) * x)({v.name})", [v])


def mapped(b: Builder, v: Value) -> Value:
    _need(v.is_float and v.rank > 0)
    return b.emit(f"jax.vmap(lambda x: x - jnp.mean(x) + jnp.mean(x * x))({v.name})", [v])


def convert(b: Builder, v: Value) -> Value:
    _need(not v.is_float)
    return b.emit(f"{v.name}.astype('float32') / 4", [v])


def noise(b: Builder, v: Value) -> Value:
    _need(v.is_float)
    return b.emit(f"{v.name} + jax.random.uniform(jax.random.key(0), {v.shape})", [v])


OPERATIONS: tuple[Operation, ...] = (
    unary, binary, dot, reduce, transpose, reshape, broadcast, bias, slice_, pad, concatenate,
    select, causal_mask, positions, clamp, reduce_exact, reduce_bool, product, cumulative,
    cumulative_exact, softmax, layernorm, squeeze, reverse, roll, take_rows, take_along,
    dynamic_slice, dynamic_update, scatter_add, scan, scan_weights, accumulate, loop, cond,
    checkpoint, mapped, convert, noise,
)  # fmt: skip


def random_program(choose: Choose, steps: int = 6) -> Program:
    """A program of up to `steps` operations."""
    b = Builder(choose, choose(MESHES))
    dtype = choose(("float32",) * 5 + ("int32",))
    v = b.new([choose(DIMS) for _ in range(choose((2, 1, 3)))], dtype)
    b.values.append(v)
    for _ in range(choose(range(1, steps + 1))):
        operation = choose(OPERATIONS)
        before = len(b.program.args), len(b.program.lines)
        try:
            v = operation(b, v)
        except (TypeError, ValueError, ZeroDivisionError, IndexError):
            # Not possible for this shape or dtype: as if it had not been drawn.
            del b.program.args[before[0] :], b.program.in_specs[before[0] :]
            del b.program.lines[before[1] :]
            continue
        b.values.append(v)
        if b.chance(3):
            v = b.emit(f"sw.annotate({v.name}, {b.spec(v.rank, open_dims=True)})", [v], exact=True)
            b.values.append(v)
    kept = [v]
    if b.chance(3):
        kept.append(choose(b.values))
    b.program.results = [k.name for k in kept]
    b.program.out_specs = [b.spec(k.rank) if b.chance(2) else "None" for k in kept]
    return b.program
