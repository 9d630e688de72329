"""Functions of single numbers, and masks."""

from __future__ import annotations

from shardwise.testing.operations.base import a_dim, need
from shardwise.testing.programs import Builder, Value


def unary(b: Builder, v: Value) -> Value:
    need(v.is_float)
    f = b.choose(["jnp.tanh({})", "jnp.sin({})", "0.5 * {} + 1", "jax.nn.gelu({})",
                  "jnp.exp(-{0} * {0})", "jnp.sqrt(1 + {0} * {0})", "-{}", "jnp.abs({})"])  # fmt: skip
    return b.emit(f.format(v.name), [v])


def binary(b: Builder, v: Value) -> Value:
    need(v.is_float)
    u = b.choose([b.values[0], None])
    if u is None or u.shape != v.shape or not u.is_float:
        u = b.new(v.shape)
    f = b.choose(["{} + {}", "{} * {}", "{} - {}"])
    return b.emit(f.format(v.name, u.name), [v, u] if u != v else [v])


def bias(b: Builder, v: Value) -> Value:
    """A value broadcast over some dims, added."""
    need(v.is_float)
    u = b.new([n if b.choose([True, False]) else 1 for n in v.shape[b.choose([-1, 0]) :]])
    return b.emit(f"{v.name} + {u.name}", [v, u])


def select(b: Builder, v: Value) -> Value:
    m = b.new(v.shape, "bool")
    return b.emit(f"jnp.where({m.name}, {v.name}, 0)", [m, v], exact=True)


def causal_mask(b: Builder, v: Value) -> Value:
    need(v.rank >= 2)
    n, m = v.shape[-2:]
    mask = f"jnp.arange({n})[:, None] >= jnp.arange({m})"
    return b.emit(f"jnp.where({mask}, {v.name}, 0)", [v], exact=True)


def positions(b: Builder, v: Value) -> Value:
    d = a_dim(b, v)
    scale = f" / {max(v.shape[d], 1)}" if v.is_float else ""
    return b.emit(f"{v.name} + lax.broadcasted_iota({v.dtype!r}, {v.shape}, {d}){scale}", [v])


def clamp(b: Builder, v: Value) -> Value:
    need(v.exact and v.dtype != "bool")
    return b.emit(f"jnp.clip({v.name}, -0.5, 0.5)", [v])


def convert(b: Builder, v: Value) -> Value:
    need(not v.is_float)
    return b.emit(f"{v.name}.astype('float32') / 4", [v])


def smooth(b: Builder, v: Value) -> Value:
    """Every smooth function of one number, inside its domain."""
    need(v.is_float)
    f = b.choose(
        ["jnp.tan({} / 4)", "jnp.arctan({})", "jnp.arcsinh({})", "jnp.cosh({} / 4)", "jnp.sinh({} / 4)",
         "lax.erf({})", "lax.erfc({})", "lax.erf_inv(jnp.tanh({}) / 2)", "lax.expm1({} / 4)",
         "jnp.log1p({0} * {0})", "lax.logistic({})", "lax.cbrt(1 + {0} * {0})", "lax.exp2({} / 4)",
         "lax.lgamma(1.5 + {0} * {0})", "lax.digamma(1.5 + {0} * {0})", "lax.bessel_i0e({})",
         "lax.bessel_i1e({})", "lax.square({}) / 4", "jnp.log(1.5 + {0} * {0})", "jnp.cos({})",
         "jnp.arccos(jnp.tanh({}) / 2)", "jnp.arcsin(jnp.tanh({}) / 2)", "jnp.arccosh(2 + {0} * {0})",
         "jnp.arctanh(jnp.tanh({}) / 2)", "lax.integer_pow({}, 3) / 8", "jax.nn.silu({})",
         "lax.polygamma(1.0, 1.5 + {0} * {0})", "lax.zeta(3.0, 1.5 + {0} * {0})"])  # fmt: skip
    return b.emit(f.format(v.name), [v])


def two_numbers(b: Builder, v: Value) -> Value:
    need(v.is_float)
    u = b.new(v.shape)
    f = b.choose(
        ["jnp.arctan2({0}, 1.5 + {1})", "(1.5 + {1}) ** jnp.sin({0})", "{0} / (1.5 + {1})",
         "lax.igamma(1.5 + {1}, 1 + {0} * {0})", "lax.igammac(1.5 + {1}, 1 + {0} * {0})",
         "lax.betainc(1.5 + {1}, 2.0 + jnp.zeros_like({1}), lax.logistic({0}))",
         "jnp.logaddexp({0}, {1})", "jnp.hypot({0}, 2 + {1})"])  # fmt: skip
    return b.emit(f.format(v.name, u.name), [v, u])


def complex_numbers(b: Builder, v: Value) -> Value:
    need(v.is_float)
    f = b.choose(
        ["jnp.real(jnp.exp(1j * {0}) * (1 + {0}))", "jnp.imag(jnp.conj(1 + 1j * {0}) ** 2)",
         "jnp.abs(lax.complex({0}, 1 + {0} * {0}))", "jnp.angle(lax.complex(2 + {0} * {0}, {0}))"]
    )  # fmt: skip
    return b.emit(f.format(v.name), [v])


def steps(b: Builder, v: Value) -> Value:
    """Functions that jump: of exact values."""
    need(v.exact and v.is_float)
    f = b.choose(
        ["jnp.floor({} * 4)", "jnp.ceil({} * 4)", "lax.round({} * 4)", "jnp.sign({})",
         "lax.reduce_precision({}, 5, 7)", "{}.astype('bfloat16').astype('float32')",
         "lax.nextafter({0}, 2 * {0})", "jnp.maximum({}, 0.1)", "lax.rem({}, jnp.float32(0.3))",
         "lax.bitcast_convert_type(lax.bitcast_convert_type({}, 'int32') & -16, 'float32')"]
    )  # fmt: skip
    return b.emit(f.format(v.name), [v], exact=True)


def integers(b: Builder, v: Value) -> Value:
    need(v.dtype == "int32")
    f = b.choose(
        ["{} // 2", "{} % 3", "{} << 1", "{} >> 1", "~{}", "{} & 3", "{} ^ 5", "lax.clz({})",
         "lax.population_count({})", "lax.mulhi({0}, {0} << 20)", "jnp.abs({})", "{0} * {0} % 7",
         "lax.bitcast_convert_type({}, 'uint8').astype('int32')[..., 0] % 5",
         "{}.astype('int4').astype('int32')", "{}.astype('uint8').astype('int32') % 11"])  # fmt: skip
    return b.emit(f.format(v.name), [v], exact=True)


def to_integers(b: Builder, v: Value) -> Value:
    need(v.exact and v.dtype != "int32")
    return b.emit(f"({v.name} * 4).astype('int32')", [v], exact=True)


def barrier(b: Builder, v: Value) -> Value:
    return b.emit(f"lax.optimization_barrier(({v.name}, {v.name}[..., None]))[0]", [v], exact=True)


OPERATIONS = (
    unary,
    binary,
    bias,
    select,
    causal_mask,
    positions,
    clamp,
    convert,
    smooth,
    two_numbers,
    complex_numbers,
    steps,
    integers,
    to_integers,
    barrier,
)
