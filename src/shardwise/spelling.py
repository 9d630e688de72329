"""Primitives that are other primitives spelled shorter: written out, so that they need no rule.

`split`, `unstack` are slices; `stack`, `tile` are broadcasts and concatenations; random bits of a
counter-based generator are arithmetic on positions, which is what makes their values independent of
the sharding; a platform-dependent branch is the branch of the platform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax

from shardwise import _jax


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
    """Repeats as new dims, then merged: what is repeated stays local however it is split."""
    reps = [int(r) for r in eqn.params["reps"]]

    def tiled(x: Any) -> Any:
        shape = [n for r, s in zip(reps, x.shape, strict=True) for n in (r, s)]
        y = lax.broadcast_in_dim(x, shape, [2 * i + 1 for i in range(x.ndim)])
        return lax.reshape(y, [r * s for r, s in zip(reps, x.shape, strict=True)])

    return tiled if len(reps) == len(eqn.invars[0].aval.shape) else None  # type: ignore[return-value]


def _reshape(eqn: Any, _: str) -> Callable[..., Any] | None:
    """A reshape that reads its operand's dims in another order transposes first."""
    dimensions = eqn.params.get("dimensions")
    if dimensions is None:
        return None
    return lambda x: lax.reshape(lax.transpose(x, dimensions), eqn.params["new_sizes"])


def _random_bits(eqn: Any, _: str) -> Callable[..., Any] | None:
    aval = eqn.invars[0].aval
    impl = _jax.random_bits_impl(aval.dtype)
    if impl is None or "threefry" not in _jax.key_impl_name(aval.dtype):
        return None

    def bits(keys: Any) -> Any:
        one = lambda raw: impl(raw, eqn.params["bit_width"], eqn.params["shape"])  # noqa: E731
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


def _empty(eqn: Any, _: str) -> Callable[..., Any]:
    """`jnp.empty`, the same on every device and in every run: zeros, as it is on CPUs."""
    return lambda: lax.full(eqn.params["shape"], 0, eqn.params["dtype"])


_SPELLINGS: dict[str, Callable[[Any, str], Any]] = {
    "cond": _cond,
    "empty": _empty,
    "random_bits": _random_bits,
    "reshape": _reshape,
    "split": _split,
    "stack": _stack,
    "tile": _tile,
    "unstack": _unstack,
}
