"""Shapes, pieces, indices: what moves data without computing."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from shardwise.testing.primitives.examples.table import example, floats, ints

# -- shapes ------------------------------------------------------------------------------------------

example("broadcast_in_dim", "Shapes", lambda x: lax.broadcast_in_dim(x, (5, 3), (0,)), floats(5))
example("reshape", "Shapes", lambda x: lax.reshape(x, (4, 3, 2)), floats(4, 6))
example("squeeze", "Shapes", lambda x: lax.squeeze(x, (1,)), floats(5, 1, 3))
example("transpose", "Shapes", lambda x: lax.transpose(x, (1, 0)), floats(5, 3))
example("iota", "Shapes", lambda: lax.broadcasted_iota(jnp.int32, (5, 3), 0))

# -- pieces ------------------------------------------------------------------------------------------

example("slice", "Pieces", lambda x: lax.slice(x, (2, 0), (7, 3)), floats(7, 3))
example("pad", "Pieces", lambda x: lax.pad(x, 0.0, [(2, 1, 0), (0, 0, 0)]), floats(5, 3))
example(
    "concatenate", "Pieces", lambda x, y: lax.concatenate([x, y], 0), floats(5, 3), floats(2, 3)
)
example("rev", "Pieces", lambda x: lax.rev(x, (0,)), floats(5, 3))
example("dynamic_slice", "Pieces", lambda x, i: lax.dynamic_slice(x, (i, i * 0), (2, 3)),
        floats(7, 3), ints())  # fmt: skip
example("dynamic_update_slice", "Pieces",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i * 0)),
        floats(7, 3), floats(2, 3), ints())  # fmt: skip
example("assemble", "Pieces", lambda x: jnp.concatenate([x[1:], x[:1]]), floats(5, 3))

# -- indices -----------------------------------------------------------------------------------------

example("gather", "Indices", lambda x, i: x[i], floats(7, 3), ints(4, high=7))
for _name, _op in {
    "scatter": "set", "scatter-add": "add", "scatter-mul": "multiply", "scatter-min": "min",
    "scatter-max": "max", "scatter-sub": "subtract",
}.items():  # fmt: skip
    example(_name, "Indices", lambda x, i, u, op=_op: getattr(x.at[i], op)(u), floats(7, 3),
            jnp.array([5, 0, 3]), floats(3, 3))  # fmt: skip
