"""Dots, convolutions, transforms, linear algebra."""

from __future__ import annotations

import math

from shardwise.testing.operations.base import a_dim, need
from shardwise.testing.programs import Builder, Value


def dot(b: Builder, v: Value) -> Value:
    """An einsum: each dim of the value is batch, contracted or free; the other operand is new."""
    need(v.is_float and v.rank > 0)
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


def ragged(b: Builder, v: Value) -> Value:
    """Groups of rows, each with its own matrix."""
    need(v.is_float and v.rank == 2 and v.shape[0] > 0)
    w = b.new((2, v.shape[1], b.choose((3, 4, 1))))
    first = b.choose(range(v.shape[0] + 1))
    sizes = f"jnp.array([{first}, {v.shape[0] - first}], 'int32')"
    return b.emit(f"lax.ragged_dot({v.name}, {w.name}, {sizes}) / 2", [v, w])


def narrow_dot(b: Builder, v: Value) -> Value:
    """A dot with a wider sum."""
    need(v.exact and v.is_float and v.rank == 2 and v.shape[1] > 0)
    w = b.new((v.shape[1], b.choose((4, 3, 1))))
    half = "{}.astype('bfloat16')"
    text = (
        f"jnp.dot({half.format(v.name)}, {half.format(w.name)}, preferred_element_type='float32')"
    )
    return b.emit(f"{text} / {v.shape[1]}", [v, w])


def convolution(b: Builder, v: Value) -> Value:
    """A value as batch, features and rows, or as an image, and a new kernel."""
    need(v.is_float and v.rank in (2, 3) and 0 not in v.shape)
    n, c, dims, x = (
        (*v.shape[:2], "W", v.name) if v.rank == 3 else (1, 1, "HW", f"{v.name}[None, None]")
    )
    by_feature, by_batch = b.choose([(1, 1), (c, 1), (1, n)])
    groups = max(by_feature, by_batch)
    taps = [b.choose((3, 1, 2, 5)) for _ in dims]
    u = b.new([groups * b.choose((2, 1)), c // by_feature, *taps])
    padding = b.choose(["'SAME'", "'VALID'", f"{[(2, -1)] * len(dims)}"])
    stride, base, dilation = ((b.choose((1, 2, 1, 3)),) * len(dims) for _ in range(3))
    scale = math.sqrt(math.prod(u.shape[1:]))
    return b.emit(
        f"lax.conv_general_dilated({x}, {u.name}, {stride}, {padding}, {base}, {dilation}, "
        f"('NC{dims}', 'OI{dims}', 'NC{dims}'), {by_feature}, {by_batch}) / {scale:.3g}", [v, u],
    )  # fmt: skip


def conv(b: Builder, v: Value) -> Value:
    """A convolution along the last dim, of images [batch, channels, positions]."""
    need(v.is_float and v.rank >= 2 and 0 not in v.shape)
    v3 = v.name if v.rank == 3 else f"{v.name}[None]"
    channels, n = v.shape[-2:]
    groups = b.choose([1] + [g for g in (2, 3) if channels % g == 0])
    out = groups * b.choose((1, 2, 3))
    k = b.new((out, channels // groups, b.choose((3, 1, 2, 4))))
    padding = b.choose([(1, 1), (0, 0), (2, 0), (0, 3), (-1, 2)])
    stride, dilated, base = b.choose((1, 2, 3)), b.choose((1, 1, 2)), b.choose((1, 1, 2))
    size = (n - 1) * base + 1 + sum(padding) - ((k.shape[2] - 1) * dilated + 1)
    need(size >= 0)
    text = (
        f"lax.conv_general_dilated({v3}, {k.name}, ({stride},), [{padding}], "
        f"lhs_dilation=({base},), rhs_dilation=({dilated},), feature_group_count={groups})"
    )
    return b.emit(f"{text} / {max(1, channels)}", [v, k])


def conv_images(b: Builder, v: Value) -> Value:
    """Two window dims: positions by positions."""
    need(v.is_float and v.rank == 3 and 0 not in v.shape)
    k = b.new((3, 3, 1, 2))
    stride, padding = b.choose(((1, 1), (2, 1), (1, 2))), b.choose(("SAME", "VALID"))
    numbers = "('NHWC', 'HWIO', 'NHWC')"
    text = (
        f"lax.conv_general_dilated({v.name}[..., None], {k.name}, {stride}, {padding!r}, "
        f"dimension_numbers={numbers})[..., 0]"
    )
    return b.emit(f"{text} / 2", [v, k])


def fft(b: Builder, v: Value) -> Value:
    need(v.is_float and 0 not in v.shape)
    d = a_dim(b, v)
    root = max(1.0, v.shape[d] ** 0.5)
    f = b.choose(
        ["jnp.real(jnp.fft.fft({0}, axis={1})) / {2:.3g}",
         "jnp.imag(jnp.fft.rfft({0}, axis={1})) / {2:.3g}",
         "jnp.fft.irfft(jnp.fft.rfft({0}, axis={1}) * 0.5, axis={1})",
         "jnp.real(jnp.fft.fftn({0})) / {2:.3g}", "jnp.real(jnp.fft.ifft({0}, axis={1})) * {2:.3g}"]
    )  # fmt: skip
    return b.emit(f.format(v.name, d, root), [v])


def decomposition(b: Builder, v: Value) -> Value:
    """Of a positive definite matrix made from the value, well conditioned."""
    need(v.is_float and v.rank >= 2 and 0 not in v.shape)
    n = v.shape[-2]
    x = f"jnp.tanh({v.name})"
    a = f"({x} @ jnp.swapaxes({x}, -1, -2) / {v.shape[-1]} + 2 * jnp.eye({n}))"
    f = b.choose(
        ["jnp.linalg.cholesky({})", "jnp.linalg.inv({})", "jnp.linalg.det({}) / {}",
         "jnp.linalg.slogdet({})[1]", "jnp.linalg.solve({}, {})", "jnp.linalg.qr({})[1]",
         "lax.stop_gradient(jnp.linalg.eigvalsh({}))",
         "lax.stop_gradient(jnp.linalg.svd({}, compute_uv=False))",
         "lax.linalg.triangular_solve({}, {}, left_side=True, lower=True)"])  # fmt: skip
    return b.emit(f.format(a, 2.0**n if "det" in f else v.name), [v])


OPERATIONS = (
    dot,
    ragged,
    narrow_dot,
    convolution,
    conv,
    conv_images,
    fft,
    decomposition,
)
