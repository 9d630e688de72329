"""`check`: one program on one device and partitioned, values, gradients and collectives compared.

    from shardwise.testing import check

    check(lambda a, w: jnp.tanh(a @ w), (a, w), {"x": 2, "y": 4},
          in_shardings=(P("x"), P(None, "y")), kinds=[], bytes=0)

It is the one oracle of whole programs.  What must hold: every result equals the one-device result;
what is replicated is the same, bit for bit, on every device that holds it; and so for the gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from shardwise import hlo
from shardwise.api import spmd
from shardwise.arguments import is_padded
from shardwise.mesh import device_mesh
from shardwise.ops.conv import padded
from shardwise.padded import PaddedArray
from shardwise.plan import Plan


class CheckFailed(AssertionError):
    """The partitioned program differs from the one-device program; the message says where."""


class Reference(Exception):
    """The program cannot run on one device: it is no program, and nothing is wrong."""


def check(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh | Mapping[str, int],
    in_shardings: Any = None,
    out_shardings: Any = None,
    *,
    grad: bool | Sequence[int] = True,
    kinds: Iterable[str] | Mapping[str, int] | None = None,
    bytes: float | None = None,
    wire: bool | str = False,
    together: bool = False,
    tol: float | None = None,
    seed: int = 0,
    **options: Any,
) -> Plan:
    """Run a program on one device and partitioned, and compare.

    Args:
      fn: the program, annotated as one likes.
      args: its positional arguments, arrays or pytrees of them.
      mesh: a mesh, or axes and sizes, `{"x": 2, "y": 4}`, for one over the first devices.
      in_shardings, out_shardings: as for `spmd`.
      grad: also compare the gradients of the results, against random cotangents, with respect to
        all arguments of floating type, or to those at the positions given.
      kinds: the collectives the program's plan must have, each named once: a list, or counts.
      bytes: what the plan's `comm_bytes` must be.
      wire: the compiled program must send what the plan says, within 2%; with "at most" it may send
        less: XLA drops what a random program does not need (a value times zero, of no elements).
      together: values and gradients as one program, compiled once: half the time.
      tol: allowed difference, relative to the largest entry of a result (default: by its dtype).
      seed: of the cotangents.
      options: of `spmd`, for the program and its gradient.

    Returns:
      The plan of the forward program.

    Raises:
      CheckFailed: what differs, where, and how the values concerned lie.
      Reference: what one device raised.
    """
    if not isinstance(mesh, Mesh):
        mesh = device_mesh(dict(mesh))
    if together and grad is not False:
        results = _reference(functools.partial(jax.eval_shape, fn), args, jit=False)
        fn, args, in_shardings, out_shardings = _with_gradients(
            fn, args, in_shardings, out_shardings, results, grad, seed
        )
        grad = False
    f = spmd(fn, mesh=mesh, in_shardings=in_shardings, out_shardings=out_shardings, **options)
    want, got, plan = _reference(fn, args), f(*args), f.plan(*args)
    try:
        _compare("result", got, want, plan, tol)
    except CheckFailed as wrong:
        want = _op_by_op(fn, args, wrong)
        _compare("result", got, want, plan, tol)
    _check_collectives(plan, kinds, bytes)
    if wire:
        _check_wire(plan, f.lower(*args).compile().as_text(), wire == "at most")
    if grad is not False:
        _check_gradients(fn, args, mesh, in_shardings, want, grad, tol, seed, options)
    return plan


def _op_by_op(fn: Callable[..., Any], args: Sequence[Any], wrong: CheckFailed) -> Any:
    """The reference again, not compiled: XLA merges nested dynamic slices wrongly for one device too."""
    try:
        with jax.disable_jit(), _convolutions_padded():
            return _reference(fn, jax.tree.map(jnp.asarray, args), jit=False)
    except Reference:
        raise wrong from None


@contextlib.contextmanager
def _convolutions_padded() -> Iterator[None]:
    """Where XLA's CPU compiler convolves wrongly even alone (see `ops.conv.padded`), pad first."""
    p = lax.conv_general_dilated_p
    impl = p.impl

    def convolve(lhs: Any, rhs: Any, **params: Any) -> Any:
        names = "dimension_numbers", "padding", "lhs_dilation"
        lhs, padding, dilation = padded(lhs, *(params[n] for n in names))
        return impl(lhs, rhs, **{**params, "padding": padding, "lhs_dilation": dilation})

    p.impl = convolve
    try:
        yield
    finally:
        p.impl = impl


def _reference(fn: Callable[..., Any], args: Sequence[Any], jit: bool = True) -> Any:
    try:
        return (jax.jit(fn) if jit else fn)(*args)
    except Exception as e:
        raise Reference(f"{type(e).__name__}: {e}") from e


# -- gradients ---------------------------------------------------------------------------------------


def _check_gradients(
    fn: Callable[..., Any], args: Sequence[Any], mesh: Mesh, in_shardings: Any, results: Any,
    grad: bool | Sequence[int], tol: float | None, seed: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    chosen = _chosen(args, grad)
    cotangents = _cotangents(results, seed)
    if not chosen or all(c is None for c in cotangents):
        return
    both = _backward(fn, args, chosen)

    def backward(args: tuple[Any, ...], cotangents: list[Any]) -> list[Any]:
        return both(args, cotangents)[1]

    f = spmd(backward, mesh=mesh, in_shardings=(in_shardings, None), **options)
    inputs = (tuple(args), cotangents)
    _compare("gradient", f(*inputs), jax.jit(backward)(*inputs), f.plan(*inputs), tol)


def _with_gradients(
    fn: Callable[..., Any], args: Sequence[Any], in_shardings: Any, out_shardings: Any, results: Any,
    grad: bool | Sequence[int], seed: int,
) -> tuple[Any, ...]:  # fmt: skip
    """The program that returns values and gradients, and what goes with it."""
    chosen, cotangents = _chosen(args, grad), _cotangents(results, seed)
    if not chosen or all(c is None for c in cotangents):
        return fn, args, in_shardings, out_shardings
    outs = None if out_shardings is None else (out_shardings, None)
    return _backward(fn, args, chosen), (tuple(args), cotangents), (in_shardings, None), outs


def _chosen(args: Sequence[Any], grad: bool | Sequence[int]) -> list[int]:
    positions = range(len(args)) if grad is True else grad or ()
    return _leaves_of(args, set(positions))


def _cotangents(results: Any, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [_cotangent(r, rng) for r in jax.tree.leaves(results)]


def _backward(fn: Callable[..., Any], args: Sequence[Any], chosen: Sequence[int]) -> Any:
    """(args, cotangents) -> results and gradients of the chosen leaves."""
    tree = jax.tree.structure(tuple(args))

    def run(args: tuple[Any, ...], cotangents: list[Any]) -> tuple[Any, list[Any]]:
        flat = jax.tree.leaves(args)

        def outputs(*xs: Any) -> Any:
            new = list(flat)
            for i, x in zip(chosen, xs, strict=True):
                new[i] = x
            result = fn(*jax.tree.unflatten(tree, new))
            outs = jax.tree.leaves(result)
            return [o for o, c in zip(outs, cotangents, strict=True) if c is not None], result

        _, pull, result = jax.vjp(outputs, *(flat[i] for i in chosen), has_aux=True)
        return result, list(pull([c for c in cotangents if c is not None]))

    return run


def _leaves_of(args: Sequence[Any], positions: set[int]) -> list[int]:
    """The flat positions of the arguments to differentiate: those of floating type."""
    out, at = [], 0
    for i, a in enumerate(args):
        for leaf in jax.tree.leaves(a):
            if i in positions and _is_float(leaf):
                out.append(at)
            at += 1
    return out


def _is_float(x: Any) -> bool:
    dtype = x.dtype if hasattr(x, "dtype") else jax.typeof(x).dtype
    return jnp.issubdtype(dtype, np.inexact)


def _cotangent(x: Any, rng: np.random.Generator) -> Any:
    """A random cotangent of a result, None where it has none."""
    if not _is_float(x):
        return None
    return np.asarray(rng.uniform(0.5, 1.5, x.shape), x.dtype)


# -- values ------------------------------------------------------------------------------------------

# Sums are added up in another order on many devices than on one.
_TOLERANCE = {2: 2e-2, 4: 2e-5, 8: 1e-10}  # by bytes of a real number


def _compare(what: str, got: Any, want: Any, plan: Plan, tol: float | None) -> None:
    got_paths, got_tree = jax.tree_util.tree_flatten_with_path(got, is_leaf=is_padded)
    want_leaves, want_tree = jax.tree.flatten(want)
    if got_tree != want_tree:
        raise CheckFailed(f"{what}: tree {got_tree}, should be {want_tree}")
    for (path, g), w, layout in zip(got_paths, want_leaves, plan.out_layouts, strict=True):
        fault = _difference(g, w, tol) or _copies_differ(g)
        if fault:
            name = what + jax.tree_util.keystr(path)
            raise CheckFailed(_message(name, w, layout.sharding.text(plan.axes), fault, plan))


def _message(name: str, w: Any, lies: str, fault: str, plan: Plan) -> str:
    found = Counter(c.kind for c in plan.collectives)
    lines = [
        f"{name}: {w.dtype}[{','.join(map(str, w.shape))}] differs from the one-device run",
        f"  {fault}",
        f"  it lies {lies} on the mesh {plan.axes}",
        f"  in_shardings {plan.in_shardings}",
        "  collectives " + (", ".join(f"{n} {k}" for k, n in sorted(found.items())) or "none"),
    ]
    return "\n".join(lines)


def _difference(got: Any, want: Any, tol: float | None) -> str:
    """What is wrong with a result, '' when nothing is."""
    if got.dtype != want.dtype:
        return f"dtype {got.dtype}"
    g, w = _plain(got), _plain(want)
    if g.shape != w.shape:
        return f"shape {list(g.shape)}"
    if not w.size:
        return ""
    if not np.issubdtype(w.dtype, np.inexact):
        wrong = g != w
    else:
        if tol is None:
            tol = _TOLERANCE[jnp.finfo(want.dtype).bits // 8]
        finite = np.abs(w[np.isfinite(w)])
        scale = max(1.0, finite.max()) if finite.size else 1.0
        wrong = ~np.isclose(g, w, rtol=0, atol=tol * scale, equal_nan=True)
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{int(wrong.sum())} of {w.size} entries are wrong; first at {list(at)}: "
        f"{g[at]}, should be {w[at]}"
    )


def _plain(x: Any) -> np.ndarray:
    """An array's values for comparison: keys as numbers, small floats as float32."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x.logical() if isinstance(x, PaddedArray) else x))
    a = np.asarray(x)
    return a.astype(np.float32) if a.dtype.itemsize <= 2 and _is_float(a) else a


def _copies_differ(x: Any) -> str:
    """'' when every device that holds a block of `x` holds the same bits, else what differs."""
    array = x.array if isinstance(x, PaddedArray) else x
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return ""
    first: dict[Any, tuple[Any, np.ndarray]] = {}
    for shard in array.addressable_shards:
        inside = tuple(
            slice(max(0, min(n, (i.start or 0) + m) - (i.start or 0)))
            for i, n, m in zip(shard.index, x.shape, shard.data.shape, strict=True)
        )
        block = np.ascontiguousarray(np.asarray(shard.data)[inside])
        bits = block.view(np.uint8) if block.ndim else block.reshape(1).view(np.uint8)
        other = first.setdefault(str(shard.index), (shard.device, bits))
        if not np.array_equal(other[1], bits):
            return f"devices {other[0].id} and {shard.device.id} hold different copies of one block"
    return ""


# -- collectives -------------------------------------------------------------------------------------


def _check_collectives(plan: Plan, kinds: Any, bytes: float | None) -> None:
    table = "".join(f"\n  {c}" for c in plan.collectives) or "\n  none"
    if kinds is not None:
        want, found = Counter(kinds), Counter(c.kind for c in plan.collectives)
        if want != found:
            raise CheckFailed(f"collectives {dict(found)}, should be {dict(want)}:{table}")
    if bytes is not None and not np.isclose(plan.comm_bytes, bytes):
        raise CheckFailed(f"{plan.comm_bytes:.0f} bytes sent, should be {bytes:.0f}:{table}")


def _check_wire(plan: Plan, text: str, may_be_less: bool) -> None:
    sent = hlo.wire_bytes(text)
    # The CPU backend's collectives of 16-bit floats are of 32 bits.
    half = [c for c in plan.collectives if c.dtype in ("bfloat16", "float16")]
    if may_be_less and sent <= plan.comm_bytes + sum(c.bytes * c.count for c in half):
        return
    if abs(sent - plan.comm_bytes) > 0.02 * max(sent, plan.comm_bytes):
        table = "".join(f"\n  {c}" for c in plan.collectives) or "\n  none"
        raise CheckFailed(
            f"the compiled program sends {sent:.0f} bytes, the plan says {plan.comm_bytes:.0f}:{table}"
        )
