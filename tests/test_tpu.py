"""The spellings of collectives for TPUs give the same numbers (run here on CPU devices)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise import tpu
from shardwise.capture import capture
from shardwise.testing import check


@pytest.fixture
def as_tpu(monkeypatch):
    monkeypatch.setattr(tpu, "tracing", lambda: True)


def bf16(*shape):
    return np.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)


def kinds(plan):
    return [c.kind for c in plan.collectives]


def test_narrow_scatter_goes_by_another_dim(as_tpu):
    plan = check(
        lambda a, b: jnp.einsum("sk,km->sm", a, b), (bf16(16, 512), bf16(512, 32)), {"x": 4},
        in_shardings=(P(None, "x"), P("x")), out_shardings=P(None, "x"), grad=False, tol=0.1,
    )  # fmt: skip
    assert kinds(plan) == ["reduce-scatter", "all-to-all"]


def test_ragged_rows_are_gathered_by_columns(as_tpu):
    plan = check(
        lambda a: a * 2, (bf16(12, 512),), {"x": 4},
        in_shardings=P("x"), out_shardings=P(), grad=False,
    )  # fmt: skip
    assert kinds(plan) == ["all-to-all", "all-gather"]


def test_a_plain_all_to_all(as_tpu):
    plan = check(
        lambda a: a * 2, (bf16(8, 16, 4),), {"x": 4},
        in_shardings=P("x"), out_shardings=P(None, "x"), grad=False,
    )  # fmt: skip
    assert kinds(plan) == ["all-to-all"]


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def scan_body(read):
    def f(ws, h):
        return lax.scan(lambda h, w: (h + read(w).sum(), None), h, ws)[0]

    body, _ = capture(f, [f32(3, 4, 4), f32()])
    (scan,) = [e for e in body.eqns if e.name == "scan"]
    inner = scan.bodies[0]
    return inner, next(v for v in inner.invars if v.rank == 2)


@pytest.mark.parametrize(
    ("read", "want"),
    [
        (lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), jnp.bfloat16),
        (lambda w: sw.annotate(w, P("x")).astype(jnp.bfloat16).astype(jnp.float32), jnp.bfloat16),
        (lambda w: w, None),
        (lambda w: w.astype(jnp.bfloat16).astype(jnp.float32) + w, None),
        (lambda w: w.astype(jnp.int32).astype(jnp.float32), None),
    ],
)
def test_read_as(read, want):
    assert tpu.read_as(*scan_body(read)) == (jnp.dtype(want) if want else None)


def test_rounding_the_slice_of_a_stack_changes_nothing(as_tpu):
    def f(ws, h):
        def step(h, w):
            return jnp.tanh(h @ w.astype(jnp.bfloat16)), None

        return lax.scan(step, h, ws)[0]

    ws = np.random.default_rng(1).standard_normal((3, 8, 8)).astype(np.float32)
    check(f, (ws, bf16(4, 8)), {"x": 2}, in_shardings=(P(None, None, "x"), P("x")), tol=0.05)
