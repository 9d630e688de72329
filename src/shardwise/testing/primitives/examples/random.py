"""Random keys, bits and draws."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax

from shardwise.ops.elementwise import find
from shardwise.testing.primitives.examples.table import example, floats, ints, keys

_R = "Random"
example("random_seed", _R, jax.vmap(jax.random.key), ints(5))
example("random_wrap", _R, jax.random.wrap_key_data, ints(5, 2, dtype=np.uint32))
example("random_unwrap", _R, jax.random.key_data, keys(5))
example("random_clone", _R, jax.random.clone, keys(5))
example("random_fold_in", _R, jax.vmap(jax.random.fold_in), keys(5), ints(5, dtype=np.uint32),
        mesh={"x": 3})  # fmt: skip
example("random_split", _R, jax.vmap(lambda k: jax.random.split(k, 3)), keys(5), limit=4)
example("random_bits", _R,
        lambda w: jax.vmap(lambda k: jax.random.bits(k, (3,)))(
            jax.random.wrap_key_data(w, impl="rbg")),
        ints(5, 4, dtype=np.uint32))  # fmt: skip
example("random_gamma", _R, jax.vmap(jax.random.gamma), keys(3), floats(3, 5), limit=3)
example("iota_2x32_shape", _R, lambda: jax.random.bits(jax.random.key(0), (5, 3)))
for _name, _count in (("threefry2x32", 4), ("threefry4x32", 8)):
    example(_name, _R, find(_name)[0].bind, *(ints(5, dtype=np.uint32) for _ in range(_count)),
            mesh={"x": 3})  # fmt: skip
example(
    "rng_uniform", _R, lambda a, b: lax.rng_uniform(a, b, (5, 3)), np.float32(0.5), np.float32(0.5)
)
example("rng_bit_generator", _R, lambda k: lax.rng_bit_generator(k, (5, 3)),
        ints(4, dtype=np.uint32))  # fmt: skip
