"""Brute force for one primitive: every split of every factor, against the primitive run whole.

For an equation and each of its rules, every way of giving the mesh's atoms to factors is tried: the
operands are cut into blocks (padding filled with NaN or junk), the local code runs on every device,
and every device's block of every result must be what the unsplit primitive gives.  A rule that
claims too much fails here; `splits` in the answer says what it does claim, so that a rule that
claims too little shows as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardwise.candidates import Operand, Result, fits
from shardwise.capture import capture
from shardwise.factors import Assignment, FactorRule, assignment_fits
from shardwise.mesh import MeshAxes, device_mesh
from shardwise.ops.registry import LocalContext, comm_bytes, layouts_for, rules_of, run_local
from shardwise.program import Body, Eqn, Lit, Var
from shardwise.sharding import Layout, Sharding, device_coordinates, padded_size

_REDUCE = {
    "sum": lambda xs: sum(xs[1:], start=xs[0]),
    "max": lambda xs: np.maximum.reduce(xs),
    "min": lambda xs: np.minimum.reduce(xs),
    "prod": lambda xs: np.multiply.reduce(xs, dtype=xs[0].dtype),
    "and": lambda xs: np.bitwise_and.reduce(xs),
    "or": lambda xs: np.bitwise_or.reduce(xs),
    "xor": lambda xs: np.bitwise_xor.reduce(xs),
}


def assignments(rule: FactorRule, mesh: MeshAxes) -> Iterator[Assignment]:
    """Every way of giving each atom to one factor or to none, in mesh order and in the reverse."""
    choices = [None, *(f for f in range(len(rule.sizes)) if f not in rule.whole)]
    for picks in itertools.product(choices, repeat=len(mesh.atoms)):
        out: Assignment = {}
        for atom, f in zip(mesh.atoms, picks, strict=True):
            if f is not None:
                out[f] = (*out.get(f, ()), atom)
        if assignment_fits(rule, out, mesh):
            yield out
            turned = {f: atoms[::-1] for f, atoms in out.items()}
            if turned != out and assignment_fits(rule, turned, mesh):
                yield turned


def find_eqn(body: Body, primitive: str | None) -> tuple[Eqn, Body]:
    """The equation under test: the last one of the named primitive (or simply the last)."""
    for eqn in reversed(body.eqns):
        if primitive is None or eqn.name == primitive:
            return eqn, body
    raise ValueError(f"no {primitive} in the program: {[e.name for e in body.eqns]}")


def junk(dtype: Any) -> Any:
    """What padding is filled with, so that a leak shows."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if dtype == np.dtype(bool):
        return True
    return jnp.iinfo(dtype).max // 3


def block(x: np.ndarray, layout: Layout, device: int, mesh: MeshAxes, fill: Any) -> np.ndarray:
    """Device `device`'s block of a global array, padding filled."""
    coord = device_coordinates(device, mesh)
    for dim, (axes, padded) in enumerate(zip(layout.sharding.axes, layout.padded, strict=True)):
        if not axes:
            continue
        pad = [(0, 0)] * x.ndim
        pad[dim] = (0, padded - layout.shape[dim])
        x = np.pad(x, pad, constant_values=fill)
        index = 0
        for a in axes:
            index = index * mesh.size_of[a] + coord[a]
        n = padded // mesh.size(axes)
        x = np.take(x, range(index * n, (index + 1) * n), axis=dim)
    return x


def valid_part(x: np.ndarray, layout: Layout, device: int, mesh: MeshAxes) -> np.ndarray:
    """A device's block without its padding."""
    coord = device_coordinates(device, mesh)
    for dim, axes in enumerate(layout.sharding.axes):
        if not axes:
            continue
        index = 0
        for a in axes:
            index = index * mesh.size_of[a] + coord[a]
        n = layout.padded[dim] // mesh.size(axes)
        x = np.take(x, range(max(0, min(n, layout.shape[dim] - index * n))), axis=dim)
    return x


def run_blocks(
    f: Callable[..., Sequence[Any]], blocks: Sequence[Sequence[np.ndarray]], mesh: MeshAxes
) -> list[list[np.ndarray]]:
    """Run `f` on every device's blocks: `blocks[i][d]` is device d's block of operand i."""
    devices = mesh.atom_mesh(device_mesh(dict(zip(mesh.names, mesh.sizes, strict=True))))
    spec = P(mesh.atoms) if mesh.atoms else P()

    def body(*xs: Any) -> list[Any]:
        return [y[None] for y in f(*(x[0] for x in xs))]

    run = jax.jit(jax.shard_map(body, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False))
    # Whole, then cut here: JAX cuts an array that is split with a sum, in which -0.0 becomes 0.0.
    outs = [np.asarray(o) for o in run(*(np.stack(b) for b in blocks))]
    return [[o[d] for d in range(mesh.device_count)] for o in outs]


def _pads(
    rule: FactorRule, eqn: Eqn, assignment: Assignment, mesh: MeshAxes, spare: int = 1
) -> Any:
    def shapes(values: Sequence[Var], dims: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        out = []
        for v, ds in zip(values, dims, strict=True):
            padded = tuple(
                padded_size(s, [mesh.size(a for f in fs for a in assignment.get(f, ())), spare])
                for s, fs in zip(v.shape, ds, strict=True)
            )
            out.append((v.shape, padded))
        return out

    return shapes(eqn.invars, rule.operands), shapes(eqn.outvars, rule.results)


def context_of(
    eqn: Eqn, rule: FactorRule, assignment: Assignment, mesh: MeshAxes, spare: int = 1
) -> LocalContext:
    """What local code knows of an equation under an assignment."""
    ins, outs = _pads(rule, eqn, assignment, mesh, spare)
    return LocalContext(
        mesh, rule, assignment,
        layouts_for(rule, assignment, ins, "operands", mesh),
        layouts_for(rule, assignment, outs, "results", mesh),
    )  # fmt: skip


def check_assignment(
    eqn: Eqn,
    rule: FactorRule,
    assignment: Assignment,
    args: Sequence[np.ndarray],
    want: Sequence[np.ndarray],
    mesh: MeshAxes,
    tol: float = 1e-5,
    spare: int = 1,
) -> str:
    """'' when every device's block is right under this assignment, else what is wrong."""
    ctx = context_of(eqn, rule, assignment, mesh, spare)
    words = [plain(a) for a in args]
    blocks = [
        [block(w, _of_words(lay, a), d, mesh, junk(w.dtype)) for d in range(mesh.device_count)]
        for w, a, lay in zip(words, args, ctx.ins, strict=True)
    ]

    def run(*xs: Any) -> list[Any]:
        ins = [
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(a)) if is_key(a) else x
            for x, a in zip(xs, args, strict=True)
        ]
        outs = run_local(ctx, eqn, ins)
        return [jax.random.key_data(y) if is_key(y) else y for y in outs]

    got = run_blocks(run, blocks, mesh)
    for i, (lay, w) in enumerate(zip(ctx.outs, want, strict=True)):
        if error := _compare(got[i], plain(w), _of_words(lay, w), mesh, tol):
            return f"result {i} {lay.sharding.text(mesh)}: {error}"
    return ""


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def plain(x: Any) -> np.ndarray:
    """An array's numbers: keys reach the devices as their words, one more dim."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def _of_words(layout: Layout, x: Any) -> Layout:
    """The layout of an array's numbers."""
    if not is_key(x):
        return layout
    more = plain(x).shape[x.ndim :]
    sharding = Sharding((*layout.sharding.axes, *((),) * len(more)))
    return Layout((*layout.shape, *more), (*layout.padded, *more), sharding)


def _compare(
    got: list[np.ndarray], want: np.ndarray, layout: Layout, mesh: MeshAxes, tol: float
) -> str:
    coords = [device_coordinates(d, mesh) for d in range(mesh.device_count)]
    for d, coord in enumerate(coords):
        if got[d].shape != layout.local_shape(mesh):
            return f"local shape {got[d].shape}, the layout says {layout.local_shape(mesh)}"
        others = [a for a in mesh.atoms if a not in layout.sharding.partial]
        terms = [got[e] for e, c in enumerate(coords) if all(c[a] == coord[a] for a in others)]
        value = _REDUCE[layout.sharding.op](terms) if layout.sharding.partial else got[d]
        a = valid_part(value, layout, d, mesh)
        b = valid_part(block(want, layout, d, mesh, 0), layout, d, mesh)
        if a.dtype != b.dtype:
            return f"dtype {a.dtype}, should be {b.dtype}"
        exact = not jnp.issubdtype(a.dtype, jnp.inexact)
        same = (
            np.array_equal(a, b) if exact else np.allclose(a, b, rtol=tol, atol=tol, equal_nan=True)
        )
        if not same:
            return f"device {d} has {a.tolist()}, should have {b.tolist()}"
    return ""


def check_rule(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: dict[str, int] | None = None,
    primitive: str | None = None,
    tol: float = 1e-5,
    limit: int | None = None,
    merged: bool = False,
    spare: int = 1,
) -> dict[str, list[str]]:
    """Brute-force one equation of `fn(*args)`.

    `fn` must apply the primitive (the last equation, or the last one called `primitive`) to its
    arguments in order; literals inside the equation stay literals.

    Args:
      mesh: axes and sizes; the devices must exist.
      limit: try at most so many assignments per rule, spread evenly, the most split one among them.
      merged: for primitives that are not JAX's own: moves are merged first.
      spare: dims are padded to a multiple of this too, as where the program splits them so elsewhere;
        what no layout with such padding is chosen for is left out.

    Returns:
      {"wrong": [...], "splits": [...]}: what failed, and which splits the rules allow.
    """
    axes = MeshAxes.of(device_mesh(mesh or {"x": 2, "y": 2}))
    np_args = [a if hasattr(a, "dtype") else np.asarray(a) for a in args]
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in np_args]
    body, _ = capture(fn, avals, merged=merged)
    eqn, _ = find_eqn(body, primitive)
    values = _operand_values(eqn, body, np_args)
    want = eqn.primitive.bind(*map(_array, values), **eqn.params)
    want = list(want) if eqn.primitive.multiple_results else [want]
    wrong, splits = [], []
    for r in rules_of(eqn):
        todo = list(assignments(r, axes))
        if limit and len(todo) > limit:
            todo = todo[::-1][:: -(-len(todo) // limit)]
        for a in todo if spare == 1 else (a for a in todo if _chosen(eqn, r, a, axes, spare)):
            name = f"{eqn.name} {r} {r.variant} {a}"
            splits.append(name)
            try:
                error = check_assignment(eqn, r, a, values, want, axes, tol, spare)
            except Exception as e:
                error = f"{type(e).__name__}: {e}"
            if error:
                wrong.append(f"{name}: {error}")
    return {"wrong": wrong, "splits": splits}


def _chosen(eqn: Eqn, rule: FactorRule, a: Assignment, mesh: MeshAxes, spare: int) -> bool:
    """Whether a layout could be chosen where dims have so much padding."""
    ins, outs = _pads(rule, eqn, a, mesh, spare)
    operands = [Operand(shape, padded, 1, ()) for shape, padded in ins]
    results = [Result(shape, padded, 1, Sharding.replicated(len(shape))) for shape, padded in outs]
    ctx = context_of(eqn, rule, a, mesh, spare)
    return fits(rule, a, operands, results, mesh) and comm_bytes(ctx, eqn) < math.inf


def _operand_values(eqn: Eqn, body: Body, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Values of the equation's operands, by running what comes before it on one device."""
    env: dict[Var, Any] = dict(zip(body.invars, args, strict=True))
    env.update(dict(body.consts))

    def read(v: Var) -> Any:
        return np.asarray(v.value, v.dtype) if isinstance(v, Lit) else env[v]

    for e in body.eqns:
        if e is eqn:
            break
        out = e.primitive.bind(*(_array(read(v)) for v in e.invars), **e.params)
        outs = out if e.primitive.multiple_results else [out]
        env.update(zip(e.outvars, outs, strict=True))
    return [_numbers(read(v)) for v in eqn.invars]


def _array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _numbers(x: Any) -> Any:
    return x if is_key(x) else np.asarray(x)
