"""A transform of several split dims, dim by dim: as many all-to-alls as the dims' splits need.

An FFT over dims (i, j) is one over j, then one over i.  While one dim is transformed, the atoms that
split it lie on another, so no dim is ever gathered:

    fft2 of (x, -)             over j as it lies; all-to-all to (-, x), over i; all-to-all back
    fftn of (x, y, -), wanted so   over k; to (x, -, y), over j; to (-, x, y), over i; two back

Each pass is an equation of its own that chooses its layout like any other.  Transforms whose dims lie
whole, or whose atoms all fit on batch dims, stay one call of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.notes import Note
from shardwise.ops.fft import FFT, IFFT, IRFFT, RFFT, transformed
from shardwise.ops.registry import rules_of
from shardwise.partition import Handler, Partitioner
from shardwise.program import Eqn, Var
from shardwise.sharding import Sharding, padded_size
from shardwise.value import Value


def fft(p: Partitioner, eqn: Eqn, ins: list[Value]) -> list[Value]:
    """`fft` of any number of dims."""
    if len(transformed(eqn)) == 1 or _stays_whole(p, eqn, ins):
        return p.equation(eqn, ins)
    (x,), (out,) = ins, eqn.outvars
    wanted = p.asked(out)
    lies = wanted if x.free else x.first
    value = x
    for i, step in enumerate(passes := _passes(p, eqn, x, lies, wanted)):
        if i == 0:
            value = p.repadded(x, step.invars[0])
        (value,) = p.equation(step, [value])
    last = passes[-1].outvars[0]
    if p.padded(last) == p.padded(out):
        return [Value(out, p.padded(out), value.variants)]
    done = p.get(value, wanted, Note(eqn, "bring", var=last))
    return [p.value(out, done, wanted)]


def _stays_whole(p: Partitioner, eqn: Eqn, ins: list[Value]) -> bool:
    """Whether one call does: no transformed dim is split, or other dims take all the atoms."""
    (x,) = ins
    split = {
        a
        for s in (p.asked(eqn.outvars[0]), *x.variants)
        for d in transformed(eqn)
        for a in s.axes[d]
    }
    choice, _ = p.choice(eqn, rules_of(eqn), ins)
    return choice.ins[0].sharding.used >= split


def _passes(p: Partitioner, eqn: Eqn, x: Value, lies: Sharding, wanted: Sharding) -> list[Eqn]:
    """One equation a dim, dims that lie whole first; a real side's last dim is first, or last."""
    dims, kind = transformed(eqn), eqn.params["fft_type"]
    order = sorted(dims, key=lambda d: (len(lies.axes[d]) > 0, -d))
    if kind in (RFFT, IRFFT):
        order.remove(dims[-1])
        order = [dims[-1], *order] if kind == RFFT else [*order, dims[-1]]
    key = (eqn, tuple(order), lies, wanted)
    if key in p.passes:
        return p.passes[key]
    out = eqn.outvars[0]
    room = _room(p, dims, lies, wanted)
    shape, padded = list(x.shape), room(x.shape, x.padded)
    var, steps = _var(p, eqn.invars[0].dtype, shape, padded), []
    others = {RFFT: FFT, IRFFT: IFFT}.get(kind, kind)
    for d in order:
        shape[d] = out.shape[d]
        if shape[d] != x.shape[d]:
            padded[d] = room(out.shape, p.padded(out))[d]
        step = kind if d == dims[-1] else others
        length = eqn.params["fft_lengths"][dims.index(d)]
        dtype = out.dtype if d == dims[-1] or kind != IRFFT else eqn.invars[0].dtype
        new = _var(p, dtype, shape, padded)
        params = {"fft_type": step, "fft_lengths": (length,), "dims": (d,)}
        steps.append(Eqn(eqn.primitive, [var], [new], params, [], eqn.info, eqn.id, eqn.callers))
        var = new
    p.completion.axes[var] = list(wanted.axes)
    p.passes[key] = steps
    return steps


def _room(
    p: Partitioner, dims: tuple[int, ...], lies: Sharding, wanted: Sharding
) -> Callable[[Sequence[int], Sequence[int]], list[int]]:
    """Padded sizes with which a dim that lies whole can take another's atoms."""
    most = max(p.mesh.size(s.axes[d]) for s in (lies, wanted) for d in dims)
    whole = [d for d in dims if not lies.axes[d] and not wanted.axes[d]]

    def padded(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
        return [padded_size(shape[d], [most]) if d in whole else n for d, n in enumerate(sizes)]

    return padded


def _var(p: Partitioner, dtype: object, shape: list[int], padded: list[int]) -> Var:
    v = Var(-1, tuple(shape), dtype)
    p.completion.padded[v] = tuple(padded)
    return v


HANDLERS: dict[str, Handler] = {"fft": fft}
