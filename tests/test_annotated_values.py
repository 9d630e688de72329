"""A value that was annotated: which of its blocks its readers take."""

from __future__ import annotations

import numpy as np
from jax.sharding import PartitionSpec as P

import shardwise as sw


def test_what_was_cut_is_not_cut_again_from_what_was_gathered():
    """x, gathered by an annotation for a dot, goes on to a sum as it lay before, not as a slice of the
    gathered block; and a gather that nobody reads is neither in the plan nor in the program."""
    mesh = sw.device_mesh({"x": 2, "y": 4})

    def f(x, w):
        whole = sw.annotate(sw.annotate(x, P("x", "y")), P("x", None))
        return sw.annotate(whole @ w, P("x", "y")) + sw.annotate(whole, P("x", "y"))

    def unread(x):
        return sw.annotate(sw.annotate(sw.annotate(x, P("x", "y")), P("x", None)), P("x", "y")) * 2

    x, w = np.arange(64.0, dtype=np.float32).reshape(8, 8), np.eye(8, dtype=np.float32)
    step = sw.spmd(f, mesh=mesh, in_shardings=(P("x", "y"), P(None, "y")))
    np.testing.assert_array_equal(step(x, w), 2 * x)
    plan = step.plan(x, w)
    assert [c.kind for c in plan.collectives] == ["all-gather"]
    assert "dynamic_slice" not in str(plan.jaxpr)
    assert sw.spmd(unread, mesh=mesh).plan(x).collectives == []
    np.testing.assert_array_equal(sw.spmd(unread, mesh=mesh)(x), 2 * x)
