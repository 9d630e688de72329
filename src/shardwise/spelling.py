"""Primitives that are other primitives spelled shorter: written out, so that they need no rule.

`split`, `unstack` are slices; `stack`, `tile` are concatenations; random bits of a
counter-based generator are arithmetic on positions, which is what makes their values independent of
the sharding; a platform-dependent branch is the branch of the platform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from shardwise import _jax
from shardwise.spelling_long import LONG

MAX_COPIES = 16  # of a tile that are joined


def respell(eqn: Any, platform: str) -> Any | None:
    """A jaxpr that computes an equation by simpler primitives, or None where it is simple itself."""
    f = _SPELLINGS.get(eqn.primitive.name)
    written_out = f(eqn, platform) if f is not None else None
    if written_out is None or hasattr(written_out, "eqns"):
        return written_out
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(written_out)(*avals)


def _split(eqn: Any, _: str) -> Callable[..., Any]:
    axis = eqn.params["axis"]

    def slices(x: Any) -> list[Any]:
        out, at = [], 0
        for size in eqn.params["sizes"]:
            out.append(lax.slice_in_dim(x, at, at + int(size), axis=axis))
            at += int(size)
        return out

    return slices


def _unstack(eqn: Any, _: str) -> Callable[..., Any]:
    axis = eqn.params["axis"]

    def rows(x: Any) -> list[Any]:
        n = x.shape[axis]
        return [lax.squeeze(lax.slice_in_dim(x, i, i + 1, axis=axis), (axis,)) for i in range(n)]

    return rows


def _stack(eqn: Any, _: str) -> Callable[..., Any]:
    axis = eqn.params["axis"]
    return lambda *xs: lax.concatenate([lax.expand_dims(x, (axis,)) for x in xs], axis)


def _tile(eqn: Any, _: str) -> Callable[..., Any]:
    """Copies joined, which is one move of rows; many of them, or copies of one row, as a new dim."""
    reps = [int(r) for r in eqn.params["reps"]]

    def tiled(x: Any) -> Any:
        for d, (r, n) in enumerate(zip(reps, x.shape, strict=True)):
            if 1 < r <= MAX_COPIES and n > 1:
                x = lax.concatenate([x] * r, d)
            elif r != 1:
                shape = [*x.shape[:d], r, *x.shape[d:]]
                y = lax.broadcast_in_dim(x, shape, [i for i in range(x.ndim + 1) if i != d])
                x = lax.reshape(y, [*x.shape[:d], r * n, *x.shape[d + 1 :]])
        return x

    return tiled if len(reps) == len(eqn.invars[0].aval.shape) else None  # type: ignore[return-value]


def _reshape(eqn: Any, _: str) -> Callable[..., Any] | None:
    """A reshape that reads its operand's dims in another order transposes first."""
    dimensions = eqn.params.get("dimensions")
    if dimensions is None:
        return None
    return lambda x: lax.reshape(lax.transpose(x, dimensions), eqn.params["new_sizes"])


def _random_bits(eqn: Any, _: str) -> Callable[..., Any] | None:
    """Arithmetic on positions, or XLA's generator, which can be drawn from in blocks for one key."""
    aval = eqn.invars[0].aval
    impl, name = _jax.random_bits_impl(aval.dtype), _jax.key_impl_name(aval.dtype)
    known = name.startswith(("threefry", "philox"))
    known = known or (name in ("rbg", "unsafe_rbg") and not aval.shape)
    if impl is None or not known:
        return None

    def bits(keys: Any) -> Any:
        def one(raw: Any) -> Any:
            return impl(raw, eqn.params["bit_width"], eqn.params["shape"])

        for _ in aval.shape:
            one = jax.vmap(one)
        return one(jax.random.key_data(keys))

    return bits


def _cond(eqn: Any, platform: str) -> Any | None:
    """The branch of `lax.platform_dependent` for the platform; None for an ordinary cond."""
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return None
    for names, branch in zip(platforms, eqn.params["branches"], strict=True):
        if names is None or platform in names:
            return _without_index(branch, eqn)
    return None


def _without_index(branch: Any, eqn: Any) -> Any:
    """The branch as a function of the cond's operands, the branch index included and unread."""
    run = jex.jaxpr_as_fun(_jax.closed(branch))
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(lambda _, *xs: run(*xs))(*avals)


_CUMULATIVE = {
    "reduce_window_sum": lax.cumsum,
    "reduce_window_max": lax.cummax,
    "reduce_window_min": lax.cummin,
}


def _running(eqn: Any, _: str) -> Callable[..., Any] | None:
    """A window of all rows up to each one, or from each one on: a cumulative operation, by blocks."""
    p, shape = eqn.params, eqn.invars[0].aval.shape
    sizes = p["window_dimensions"]
    slid = [d for d, n in enumerate(sizes) if n > 1 or tuple(p["padding"][d]) != (0, 0)]
    steps = (*p["window_strides"], *p["base_dilation"], *p["window_dilation"])
    if len(slid) != 1 or any(s != 1 for s in steps) or sizes[slid[0]] != shape[slid[0]]:
        return None
    (d,) = slid
    reach = sizes[d] - 1
    reverse = {(reach, 0): False, (0, reach): True}.get(tuple(p["padding"][d]))
    if reverse is None or (reach == 0 and shape[d] == 0):
        return None
    return lambda x: _CUMULATIVE[eqn.primitive.name](x, axis=d, reverse=reverse)


def _empty(eqn: Any, _: str) -> Callable[..., Any]:
    """`jnp.empty`, the same on every device and in every run: zeros, as it is on CPUs."""
    return lambda: lax.full(eqn.params["shape"], 0, eqn.params["dtype"])


def _linear_solve(eqn: Any, _: str) -> Callable[..., Any]:
    """`lax.custom_linear_solve` as what it computes: its `solve` of the right-hand sides."""
    lengths, run = eqn.params["const_lengths"], jex.jaxpr_as_fun(eqn.params["jaxprs"].solve)
    first = lengths.matvec + lengths.vecmat
    after = first + lengths.solve + lengths.transpose_solve
    return lambda *args: run(*args[first : first + lengths.solve], *args[after:])


def _symmetric_product(eqn: Any, platform: str) -> Callable[..., Any] | None:
    """`alpha A A' + beta C`, as JAX lowers it but on GPUs, which have a routine for it."""
    if platform in ("gpu", "cuda", "rocm"):
        return None
    alpha, beta = eqn.params["alpha"], eqn.params["beta"]

    def product(a: Any, c: Any) -> Any:
        square = lax.batch_matmul(a, jnp.swapaxes(a, -1, -2), precision=lax.Precision.HIGHEST)
        return alpha * square + beta * c

    return product


_OVER_DIMS = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


def _reduced_dims(eqn: Any, _: str) -> Any | None:
    """A collective over a vmapped axis reduces a dim; what axes of the mesh are left stay its own."""
    dims = tuple(a for a in eqn.params["axes"] if isinstance(a, int))
    names = tuple(a for a in eqn.params["axes"] if not isinstance(a, int))
    if not dims and names:
        return None

    def reduced(x: Any) -> Any:
        y = _OVER_DIMS[eqn.primitive.name](x, dims) if dims else x
        return eqn.primitive.bind(y, **{**eqn.params, "axes": names}) if names else y

    aval = eqn.invars[0].aval
    env = [(n, 2) for n in names]  # sizes do not matter here
    return jax.make_jaxpr(reduced, axis_env=env)(jax.ShapeDtypeStruct(aval.shape, aval.dtype))


_SPELLINGS: dict[str, Callable[[Any, str], Any]] = {
    **LONG,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
    "empty": _empty,
    "pmax": _reduced_dims,
    "pmin": _reduced_dims,
    "psum": _reduced_dims,
    "random_bits": _random_bits,
    "reduce_window_max": _running,
    "reduce_window_min": _running,
    "reduce_window_sum": _running,
    "reshape": _reshape,
    "split": _split,
    "stack": _stack,
    "symmetric_product": _symmetric_product,
    "tile": _tile,
    "unstack": _unstack,
}
