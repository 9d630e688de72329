"""Programs that random testing found wrong or refused, each for the rule it showed to be at fault."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.testing import check
from shardwise.testing.programs import values


def test_an_all_to_all_of_a_padded_dim_compiles():
    """XLA made constants of the padding's slices, in another layout than the rest."""

    def f(x):
        y = sw.annotate(x + jax.random.uniform(jax.random.key(0), (10, 8, 1)), P(None, "y", None))
        step = lambda a, c: (a[0] * c[0], a[1] * c[0] + c[1])
        z = lax.associative_scan(step, (lax.logistic(y), y), axis=1)[1] / 2
        z = sw.annotate(z, P("y", P.UNCONSTRAINED, None))
        return sw.annotate(jnp.transpose(z, (2, 1, 0)), P(None, None, "y")), z

    x = values((10, 8, 1), "float32", 0)
    check(f, (x,), {"x": 1, "y": 4}, (None,), (P("y", "x", None), P("x")), together=True)


def test_where_the_compiler_is_wrong_for_one_device_too():
    """`jnp.roll` is a slice, and XLA merges it with the next as if both were in range."""

    def f(x, i, at):
        _, ids = lax.top_k(x, 3)
        ids = jax.random.permutation(jax.random.key(1), ids)
        return lax.dynamic_slice(jnp.roll(lax.top_k(ids, 2)[0], i), (at,), (1,))

    args = (values((6,), "float32", 0), np.int32(1), np.int32(3))
    check(f, args, {"x": 8}, (None, P(), P()), grad=False)
    assert sw.spmd(f, mesh=sw.device_mesh({"x": 8}))(*args) == f(*args)


def test_an_elementwise_op_leaves_to_the_next_what_it_need_not_move():
    """All experts on all tokens: one gather of tokens and one exchange of results, no more."""

    def experts(x, wi, wo, p):
        h = jax.nn.relu(jnp.einsum("gsm,emh->gseh", x, wi))
        return jnp.einsum("gseh,ehm,gse->gsm", h, wo, p)

    shapes = (8, 16, 32), (8, 32, 64), (8, 64, 32), (8, 16, 8)
    args = [values(s, "float32", i) for i, s in enumerate(shapes)]
    sent = 2 * 8 * 16 * 32 * 4 * 7 / 8
    check(experts, args, {"e": 8}, (P("e"),) * 4, P("e"), bytes=sent, wire=True, grad=False)


def test_an_all_to_all_from_one_dim_to_another_is_right():
    """XLA's CPU compiler read memory nobody wrote, where dims are of size 1 and layouts differ.

    All values are NaN, and constants.  (No exponential of them: of a constant NaN XLA makes nothing, on one
    device too.)
    """

    def f(x):
        x = jnp.var(x, 1)
        x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 0.1)
        x = sw.annotate(x, P(("y", "z"), None))
        return sw.annotate(jnp.max(x, 0) + jnp.sum(x, 0), P(("z", "x")))

    x = np.zeros((3, 0, 10), np.float32)
    check(f, (x,), {"x": 2, "y": 2, "z": 2}, P("y", "x", "z"), grad=False)


def test_groups_of_a_convolution_padded_for_another_axis():
    """Four channels are stored as six where y splits them: a device on x convolves three, not two."""

    def f(x, w):
        y = lax.conv_general_dilated(x, w, (1,), "VALID", feature_group_count=4)
        y = jnp.tanh(sw.annotate(y, P(None, "x", None)))
        return sw.annotate(y.transpose(1, 0, 2), P("y"))

    args = (values((2, 4, 8), "float32", 0), values((4, 1, 3), "float32", 1))
    check(f, args, {"x": 2, "y": 3}, (None, P("x")))


@pytest.mark.parametrize("spec", [None, P("x"), P(None, None, "x")])
def test_a_convolution_cut_at_one_end_and_padded_at_the_other(spec):
    """XLA's CPU compiler of jax 0.10.2 reads beyond the operand, for one device too: not so here."""

    def f(x, w):
        return lax.conv_general_dilated(x, w, (3,), [(-1, 2)])

    x, w = values((2, 8, 8), "float32", 0), values((4, 8, 2), "float32", 1)
    cut = np.pad(x[:, :, 1:], ((0, 0), (0, 0), (0, 2)))
    want = np.stack([np.einsum("bct,oct->bo", cut[:, :, i : i + 2], w) for i in (0, 3, 6)], -1)
    got = sw.spmd(f, mesh=sw.device_mesh({"x": 2}), in_shardings=(spec, None))(x, w)
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-5)
    check(f, (x, w), {"x": 2}, (spec, None))


def test_a_reshape_of_a_dim_that_is_padded_for_a_finer_split():
    """6 over eight is stored as 8: over two of the eight, after a gather, in blocks of 4, not of 3."""

    def f(x):
        y = jnp.reshape(sw.annotate(x, P("x")), (2, 7, 6))
        return sw.annotate(y, P(None, None, "x"))

    check(f, (values((6, 7, 2), "float32", 0),), {"x": 8})
