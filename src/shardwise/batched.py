"""`batched`: the user's word that a function maps over a dim of its arguments.

    def norm(x):                                  # any size of x's first dim
        return jax.pure_callback(host_norm, jax.ShapeDtypeStruct(x.shape[:1], x.dtype), x)

    y = sw.batched(norm)(x)

Of a callback, a foreign function or a Pallas kernel nothing is known; it would get its operands whole.
Under `batched` each device calls the function on its own rows.  Outside `sw.spmd` it is the function
itself.  Its gradient is that of the function, computed on each device's rows; arguments that have no batch
dim get the sum of all rows' gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from shardwise import _jax
from shardwise.errors import ShardingError

Dim = int | None
Place = Dim | str  # how a value goes with a batch: the dim that holds it, None, or
SUM = "sum"  # of a result: rows' terms are added up
ONCE = "once"  # of an operand: it counts once, not with every row
Places = tuple[Place, ...]  # of one value, for each batch: one, and one more for each vmap


def batched(
    fn: Callable[..., Any],
    in_dims: Dim | Sequence[Dim] = 0,
    out_dims: Dim | Sequence[Dim] = 0,
) -> Callable[..., Any]:
    """A function that treats the rows of a dim each by itself, so that each device may take some.

    Args:
      fn: takes arrays or trees of them.  It is called again with fewer rows: it must take shapes from its
        arguments.  Row i of its results must depend on row i of the arguments only.  It must have no
        side effects.
      in_dims: the batch dim of the arguments; None for those without, of which every device gets all;
        or a sequence of such, one per argument.
      out_dims: likewise of the results; None for results that no argument with a batch dim is used for.

    Returns:
      A function to call like `fn`, with positional arguments.

    Raises:
      ShardingError: a dim an argument or a result does not have, batch dims of different sizes, or
        results of other shapes than those of the whole.

    Example:
      >>> import jax.numpy as jnp
      >>> batched(lambda x: x / x.sum(1, keepdims=True))(jnp.ones((4, 2))).shape
      (4, 2)
    """
    where = _jax.current_source()

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if _jax.program_mesh() is None:
            return fn(*args)
        leaves, tree = jax.tree.flatten(args)
        ins = _per_leaf("in_dims", in_dims, args, leaves, where)
        shape = jax.eval_shape(fn, *args)
        outs_flat, out_tree = jax.tree.flatten(shape)
        outs = _per_leaf("out_dims", out_dims, shape, outs_flat, where)
        _check_rows(leaves, ins, outs_flat, outs, where)

        def flat(*xs: Any) -> list[Any]:
            return jax.tree.leaves(fn(*jax.tree.unflatten(tree, xs)))

        run = _differentiable(flat, [(d,) for d in ins], [(d,) for d in outs], where)
        return jax.tree.unflatten(out_tree, run(*leaves))

    return call


def _per_leaf(
    what: str, dims: Any, tree: Any, leaves: Sequence[Any], where: str
) -> tuple[Dim, ...]:
    """The batch dim of each leaf."""
    if dims is None or isinstance(dims, int):
        out: list[Dim] = [dims] * len(leaves)
    else:
        parts = tree if isinstance(tree, (tuple, list)) else (tree,)
        if len(parts) != len(dims):
            raise ShardingError(f"batched: {len(dims)} {what} for {len(parts)} values", where=where)
        out = [d for d, part in zip(dims, parts, strict=True) for _ in jax.tree.leaves(part)]
    sizes = {}
    for i, (d, x) in enumerate(zip(out, leaves, strict=True)):
        shape = x.shape if hasattr(x, "shape") else np.shape(x)
        rank = len(shape)
        if d is None:
            continue
        if not -rank <= d < rank:
            raise ShardingError(
                f"batched: {what} says dim {d} of a value of {rank} dims", where=where,
                facts=f"value {i} has shape {list(shape)}",
                hint="None is for values without a batch dim",
            )  # fmt: skip
        out[i] = d % rank
        sizes[i] = shape[d % rank]
    if len(set(sizes.values())) > 1:
        raise ShardingError(
            f"batched: {what} names dims of different sizes", where=where,
            facts=", ".join(f"value {i} has {n} rows" for i, n in sizes.items()),
        )  # fmt: skip
    return tuple(out)


def _check_rows(
    leaves: Sequence[Any],
    ins: Sequence[Dim],
    results: Sequence[Any],
    outs: Sequence[Dim],
    where: str,
) -> None:
    rows = next((np.shape(x)[d] for x, d in zip(leaves, ins, strict=True) if d is not None), None)
    made = next((x.shape[d] for x, d in zip(results, outs, strict=True) if d is not None), rows)
    if made != rows:
        raise ShardingError(
            "batched: the function does not map over the dims it was said to", where=where,
            facts=f"it makes {made} rows of {rows or 'arguments without a batch dim'}",
            hint="a result without a batch dim has out_dims None",
        )  # fmt: skip


def _differentiable(
    fn: Callable[..., list[Any]], ins: Sequence[Places], outs: Sequence[Places], where: str
) -> Callable[..., list[Any]]:
    @jax.custom_vjp
    def run(*xs: Any) -> list[Any]:
        return _bind(fn, xs, ins, outs, where)

    def forward(*xs: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return run(*xs), xs

    def backward(xs: tuple[Any, ...], cts: list[Any]) -> tuple[Any, ...]:
        floats = [i for i, x in enumerate(xs) if jnp.issubdtype(jax.typeof(x).dtype, np.inexact)]
        real = [i for i, c in enumerate(cts) if c.dtype != jax.dtypes.float0]

        def pull(*operands: Any) -> list[Any]:
            values, given = operands[: len(xs)], operands[len(xs) :]

            def of_floats(*moved: Any) -> list[Any]:
                new = list(values)
                for i, x in zip(floats, moved, strict=True):
                    new[i] = x
                results = fn(*new)
                return [results[i] for i in real]

            return list(jax.vjp(of_floats, *(values[i] for i in floats))[1](list(given)))

        given = [cts[i] for i in real]
        once = [tuple(ONCE if d is None else d for d in outs[i]) for i in real]
        dims = (*ins, *once)
        back = [tuple(SUM if d is None else d for d in ins[i]) for i in floats]
        found = dict(zip(floats, _bind(pull, (*xs, *given), dims, back, where), strict=True))
        return tuple(found.get(i) for i in range(len(xs)))

    run.defvjp(forward, backward)
    return run


def _bind(
    fn: Any, xs: Sequence[Any], ins: Sequence[Places], outs: Sequence[Places], where: str
) -> list[Any]:
    return batched_p.bind(*xs, fn=fn, ins=tuple(ins), outs=tuple(outs), source=where)


batched_p = jex.Primitive("batched")
batched_p.multiple_results = True
batched_p.def_impl(lambda *xs, fn, **_: fn(*xs))


def _avals(*avals: Any, fn: Any, **_: Any) -> list[Any]:
    return [_jax.plain_aval(a) for a in jax.eval_shape(fn, *avals)]


def _vmapped(args: Any, dims: Any, *, fn: Any, ins: Any, outs: Any, source: str) -> Any:
    """The function maps over the new dim as well."""

    def moved(places: Places, new: Dim) -> Places:
        return tuple(
            d + (d >= new) if isinstance(d, int) and new is not None else d for d in places
        )

    new_ins = [(*moved(d, b), b) for d, b in zip(ins, dims, strict=True)]
    new_outs = [(*moved(d, 0), 0) for d in outs]
    results = _bind(jax.vmap(fn, dims, 0), args, new_ins, new_outs, source)
    return results, [0] * len(results)


batched_p.def_abstract_eval(_avals)
batching.primitive_batchers[batched_p] = _vmapped
mlir.register_lowering(
    batched_p,
    lambda ctx, *xs, fn, **_: mlir.lower_fun(fn, multiple_results=True)(ctx, *xs),
)
