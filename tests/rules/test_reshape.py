"""`reshape`, every split of every factor, even and not."""

import numpy as np
import pytest

from shardwise.ops.reshape import common_factors, units
from shardwise.testing.rules import check_rule

SHAPES = [
    ((6, 4), (24,)),
    ((3, 2), (6,)),  # GSPMD Figure 5c
    ((12, 8), (16, 6)),
    ((2, 5, 3), (2, 15)),
    ((24,), (4, 6)),
    ((5, 3, 2), (5, 6)),
    ((1, 7, 3), (21,)),
    ((8, 4), (4, 2, 2, 2)),
]


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"x": 8}, {"x": 3}], ids=str)
@pytest.mark.parametrize(("src", "dst"), SHAPES, ids=str)
def test_every_split(src, dst, mesh):
    x = np.arange(np.prod(src), dtype=np.float32).reshape(src)
    got = check_rule(lambda a: a.reshape(dst), [x], mesh=mesh, primitive="reshape", limit=12)
    assert got["wrong"] == []
    assert len(got["splits"]) > 1


@pytest.mark.parametrize(
    ("src", "dst"), [((12, 8), (16, 6)), ((6, 4), (24,)), ((24,), (4, 6))], ids=str
)
def test_dims_that_are_padded_for_a_finer_split(src, dst):
    """Blocks are as long as the padding makes them: `6@2` of 8 is not two blocks of 3."""
    x = np.arange(np.prod(src), dtype=np.float32).reshape(src)
    got = check_rule(lambda a: a.reshape(dst), [x], {"x": 2, "y": 2}, "reshape", limit=12, spare=8)
    assert got["wrong"] == []


def test_common_factors():
    assert common_factors((6, 8), (48,)) == ([[0], [1]], [[0, 1]], [6, 8])
    assert common_factors((1, 4, 1), (4,)) == ([[], [0], []], [[0]], [4])
    assert common_factors((12, 8), (16, 6)) == ([[0, 1], [3]], [[0, 2], [4]], [4, 3, 4, 8, 6])


def test_units():
    assert units((2, 6, 4), (2, 24)) == [([0], [0]), ([1, 2], [1])]
    assert units((4, 6, 5, 2), (24, 10)) == [([0, 1], [0]), ([2, 3], [1])]
