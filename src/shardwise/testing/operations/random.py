"""Random numbers: the same however they lie."""

from __future__ import annotations

from shardwise.testing.operations.base import a_dim, need
from shardwise.testing.programs import Builder, Value


def noise(b: Builder, v: Value) -> Value:
    need(v.is_float)
    return b.emit(f"{v.name} + jax.random.uniform(jax.random.key(0), {v.shape})", [v])


def draws(b: Builder, v: Value) -> Value:
    """Numbers drawn from a key that is an argument."""
    need(v.is_float)
    seed = b.new((), "int32")
    f = b.choose(
        ["jax.random.normal(k, {0})", "jax.random.uniform(k, {0}, minval=-1)",
         "jax.random.bernoulli(k, 0.7, {0})", "jax.random.randint(k, {0}, 0, 5)",
         "jax.random.truncated_normal(k, -1, 1, {0})", "jax.random.exponential(k, {0})",
         "jax.random.uniform(jax.random.split(k, 3)[1], {0})", "jax.random.bits(k, {0}) % 5",
         "jax.random.normal(jax.random.fold_in(k, 7), {0})"]).format(v.shape)  # fmt: skip
    impl = b.choose(("threefry2x32", "threefry2x32", "rbg", "philox2x32"))
    text = f"(lambda k: {f})(jax.random.key({seed.name}, impl={impl!r}))"
    return b.emit(f"{v.name} * {text}", [v, seed])


def shuffle(b: Builder, v: Value) -> Value:
    need(v.rank > 0 and 0 not in v.shape)
    text = f"jax.random.permutation(jax.random.key(1), {v.name}, {a_dim(b, v)})"
    return b.emit(text, [v], exact=True)


def gamma(b: Builder, v: Value) -> Value:
    need(v.is_float and v.exact)
    return b.emit(
        f"lax.stop_gradient(jax.random.gamma(jax.random.key(2), 1.5 + jnp.abs({v.name})) / 4)", [v]
    )


OPERATIONS = (
    noise,
    draws,
    shuffle,
    gamma,
)
