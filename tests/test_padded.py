"""`PaddedArray`: arrays whose dims do not divide by the devices they are split over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise.errors import ShardingError
from shardwise.mesh import abstract_mesh, device_mesh
from shardwise.padded import PaddedArray, shard_counts


def on(spec: P, **sizes: int) -> NamedSharding:
    return NamedSharding(device_mesh(sizes or {"x": 2, "y": 4}), spec)


def test_five_rows_on_four_devices():
    x = np.arange(15.0, dtype=np.float32).reshape(5, 3)
    p = PaddedArray.from_logical(x, on(P("y")), fill=np.nan)
    assert (p.shape, p.ndim, p.size, p.dtype) == ((5, 3), 2, 15, jnp.float32)
    assert p.array.shape == (8, 3) and p.array.sharding == on(P("y"))
    assert np.isnan(np.asarray(p.array)[5:]).all()
    assert p.shard_sizes(0) == (2, 2, 1, 0) and p.shard_sizes(1) == (3,)
    np.testing.assert_array_equal(np.asarray(p), x)
    assert repr(p) == (
        "PaddedArray(float32[5,3], P('y',), "
        "dim 0: 2 on devices 0-1, 4-5; 1 on devices 2, 6; 0 on devices 3, 7)"
    )


@settings(max_examples=40)  # each new shape is compiled
@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from([P(), P("x", "y"), P(("y", "x")), P(None, "y"), P("y", "x")]),
    st.booleans(),
)
def test_any_shape_comes_back(shape, spec, from_jax):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    p = PaddedArray.from_logical(jnp.asarray(x) if from_jax else x, on(spec), fill=np.inf)
    np.testing.assert_array_equal(np.asarray(p), x)
    np.testing.assert_array_equal(np.asarray(p.logical()), x)
    for dim, count in enumerate(shard_counts(on(spec), 2)):
        block = -(-shape[dim] // count)  # ceil(D / P), GSPMD section 4.1
        assert p.array.shape[dim] == block * count
        sizes = p.shard_sizes(dim)
        assert sum(sizes) == shape[dim] and len(sizes) == count
        assert list(sizes) == [min(block, max(0, shape[dim] - i * block)) for i in range(count)]
    for shard in p.array.addressable_shards:  # what each device holds is what shard_sizes counts
        inside = np.isfinite(np.asarray(shard.data)).sum()
        at = [s.start or 0 for s in shard.index]
        dims = zip(shape, at, shard.data.shape, strict=True)
        assert inside == np.prod([min(max(n - a, 0), b) for n, a, b in dims])


def test_jax_functions_take_it_as_the_logical_array():
    x = np.arange(5.0, dtype=np.float32)
    p = PaddedArray.from_logical(x, on(P("y")), fill=np.nan)
    assert jnp.sum(p) == 10 and jnp.add(p, p).shape == (5,)
    assert jnp.asarray(p).shape == (5,)
    assert jax.jit(lambda q: jnp.sum(q))(p) == 10
    assert np.array(p, dtype=np.float64).dtype == np.float64


def test_it_is_a_pytree_of_its_padded_array():
    p = PaddedArray.from_logical(np.arange(5.0), on(P("y")))
    assert [a.shape for a in jax.tree.leaves(p)] == [(8,)]
    doubled = jax.jit(lambda q: jax.tree.map(lambda a: 2 * a, q))(p)
    assert isinstance(doubled, PaddedArray) and doubled.shape == (5,)
    np.testing.assert_array_equal(np.asarray(doubled), 2 * np.arange(5.0))
    grad = jax.grad(lambda q: jnp.sum(q.logical() ** 2))(p)
    np.testing.assert_array_equal(np.asarray(grad), 2 * np.arange(5.0))
    assert jax.eval_shape(lambda q: q, p).dtype == jnp.float32


def test_padding_chosen_for_several_counts_of_shards():
    """A dim split by 2 here and by 3 elsewhere is padded to a multiple of 6: blocks of 6, not 5."""
    p = PaddedArray(jax.device_put(jnp.arange(12.0), on(P("x"))), (10,), on(P("x")))
    assert p.shard_sizes(0) == (6, 4)
    assert repr(p) == "PaddedArray(float32[10], P('x',), dim 0: 6 on devices 0-3; 4 on devices 4-7)"


def test_scalars_keys_and_integers():
    assert repr(PaddedArray.from_logical(1.0, on(P()))) == (
        "PaddedArray(float32[], P(), whole on every device)"
    )
    keys = jax.random.split(jax.random.key(0), 5)
    p = PaddedArray.from_logical(keys, on(P("y")))
    assert p.array.shape == (8,)
    np.testing.assert_array_equal(jax.random.key_data(p.logical()), jax.random.key_data(keys))
    small = PaddedArray.from_logical(np.arange(3, dtype=np.int8), on(P(("x", "y"))))
    assert small.dtype == jnp.int8 and small.shard_sizes(0) == (1, 1, 1, 0, 0, 0, 0, 0)
    assert repr(small) == (
        "PaddedArray(int8[3], P(('x', 'y'),), dim 0: 1 on devices 0-2; 0 on devices 3-7)"
    )


def test_repr_without_devices():
    sharding = NamedSharding(abstract_mesh({"x": 4}), P("x"))
    p = PaddedArray(jax.ShapeDtypeStruct((8,), jnp.float32), (5,), sharding)
    assert repr(p) == "PaddedArray(float32[5], P('x',), dim 0: 2, 2, 1, 0)"


def test_error_when_the_spec_is_too_long():
    with pytest.raises(ShardingError) as e:
        PaddedArray.from_logical(np.arange(5.0), on(P("x", "y")))
    assert str(e.value) == (
        "P('x', 'y') has 2 entries for an array of 1 dims\n"
        "  hint  give one entry per dim; trailing dims that are not split may be left out"
    )
