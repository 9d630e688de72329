"""Brute force for one primitive: every split of every factor, against the primitive run whole.

For an equation and each of its rules, every way of giving the mesh's atoms to factors is tried: the
operands are cut into blocks (padding filled with NaN or junk), the local code runs on every device,
and every device's block of every result must be what the unsplit primitive gives.  A rule that
claims too much fails here; `splits` in the answer says what it does claim, so that a rule that
claims too little shows as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardwise.capture import capture
from shardwise.factors import Assignment, FactorRule, assignment_fits
from shardwise.mesh import MeshAxes, device_mesh
from shardwise.ops.registry import LocalContext, layouts_for, rules_of, run_local
from shardwise.program import Body, Eqn, Lit, Var
from shardwise.sharding import Layout, device_coordinates, padded_size

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
    return np.iinfo(dtype).max // 3


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
    outs = run(*(np.stack(b) for b in blocks))
    return [[np.asarray(o[d]) for d in range(mesh.device_count)] for o in outs]


def _pads(rule: FactorRule, eqn: Eqn, assignment: Assignment, mesh: MeshAxes) -> Any:
    def shapes(values: Sequence[Var], dims: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        out = []
        for v, ds in zip(values, dims, strict=True):
            padded = tuple(
                padded_size(s, [mesh.size(a for f in fs for a in assignment.get(f, ()))])
                for s, fs in zip(v.shape, ds, strict=True)
            )
            out.append((v.shape, padded))
        return out

    return shapes(eqn.invars, rule.operands), shapes(eqn.outvars, rule.results)


def check_assignment(
    eqn: Eqn,
    rule: FactorRule,
    assignment: Assignment,
    args: Sequence[np.ndarray],
    want: Sequence[np.ndarray],
    mesh: MeshAxes,
    tol: float = 1e-5,
) -> str:
    """'' when every device's block is right under this assignment, else what is wrong."""
    ins, outs = _pads(rule, eqn, assignment, mesh)
    ctx = LocalContext(
        mesh, rule, assignment,
        layouts_for(rule, assignment, ins, "operands", mesh),
        layouts_for(rule, assignment, outs, "results", mesh),
    )  # fmt: skip
    blocks = [
        [block(a, lay, d, mesh, junk(a.dtype)) for d in range(mesh.device_count)]
        for a, lay in zip(args, ctx.ins, strict=True)
    ]
    got = run_blocks(lambda *xs: run_local(ctx, eqn, xs), blocks, mesh)
    for i, (lay, w) in enumerate(zip(ctx.outs, want, strict=True)):
        if error := _compare(got[i], w, lay, mesh, tol):
            return f"result {i} {lay.sharding.text(mesh)}: {error}"
    return ""


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
) -> dict[str, list[str]]:
    """Brute-force one equation of `fn(*args)`.

    `fn` must apply the primitive (the last equation, or the last one called `primitive`) to its
    arguments in order; literals inside the equation stay literals.

    Args:
      mesh: axes and sizes; the devices must exist.
      limit: try at most so many assignments per rule, spread evenly.

    Returns:
      {"wrong": [...], "splits": [...]}: what failed, and which splits the rules allow.
    """
    axes = MeshAxes.of(device_mesh(mesh or {"x": 2, "y": 2}))
    np_args = [np.asarray(a) for a in args]
    body, _ = capture(fn, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in np_args])
    eqn, _ = find_eqn(body, primitive)
    values = _operand_values(eqn, body, np_args)
    want = eqn.primitive.bind(*(jnp.asarray(v) for v in values), **eqn.params)
    want = [np.asarray(w) for w in (want if eqn.primitive.multiple_results else [want])]
    wrong, splits = [], []
    for r in rules_of(eqn):
        todo = list(assignments(r, axes))
        if limit and len(todo) > limit:
            todo = todo[:: -(-len(todo) // limit)]
        for a in todo:
            name = f"{eqn.name} {r} {r.variant} {a}"
            splits.append(name)
            try:
                error = check_assignment(eqn, r, a, values, want, axes, tol)
            except Exception as e:
                error = f"{type(e).__name__}: {e}"
            if error:
                wrong.append(f"{name}: {error}")
    return {"wrong": wrong, "splits": splits}


def _operand_values(eqn: Eqn, body: Body, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Values of the equation's operands, by running what comes before it on one device."""
    env: dict[Var, Any] = dict(zip(body.invars, args, strict=True))
    env.update(dict(body.consts))

    def read(v: Var) -> Any:
        return np.asarray(v.value, v.dtype) if isinstance(v, Lit) else env[v]

    for e in body.eqns:
        if e is eqn:
            break
        out = e.primitive.bind(*(jnp.asarray(read(v)) for v in e.invars), **e.params)
        outs = out if e.primitive.multiple_results else [out]
        env.update(zip(e.outvars, outs, strict=True))
    return [np.asarray(read(v)) for v in eqn.invars]
