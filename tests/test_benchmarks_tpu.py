"""The TPU benchmark's reading of HLO, and its specs; no libtpu is needed."""

import types

import jax
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import tpu, tpu_hlo
from shardwise.nn import transformer

HLO = """HloModule m, num_partitions=2

%inside (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %n = f32[8] negate(%p), backend_config={"window_config":{"estimated_cycles":"1000000"}}
}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[8] fusion(%x), kind=kLoop, calls=%inside, backend_config={"estimated_cycles":"7"}
  ROOT %t = (s32[], f32[8]) tuple(%next, %y)
}

%cond (s: (s32[], f32[8])) -> pred[] {
  %s = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %limit = s32[] constant(LIMIT)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %c = f32[8] copy(%x), backend_config={"estimated_cycles":"100"}
  %t = (s32[], f32[8]) tuple(%zero, %c)
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body
  ROOT %r = f32[8] get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize(("trips", "cycles"), [(0, 100), (1, 107), (32, 324)])
def test_cycles_of_loops_are_multiplied_and_those_inside_fusions_left_out(trips, cycles):
    core = tpu_hlo.Core(hertz=2.0, ring_bytes_per_second=1.0)
    assert tpu_hlo.compute_seconds(HLO.replace("LIMIT", str(trips)), core) == cycles / 2


def test_every_parameter_has_a_spec_of_its_rank_that_divides():
    settings = tpu.Settings("shardwise", "full", "vocab")
    params = transformer.abstract_params(settings.config)
    specs = tpu.parameter_specs(tpu.EMBEDDINGS["vocab"])
    is_spec = lambda s: isinstance(s, P)
    assert jax.tree.structure(params) == jax.tree.structure(specs, is_leaf=is_spec)
    sizes = {"x": settings.x, "y": settings.y, None: 1}
    for p, s in zip(jax.tree.leaves(params), jax.tree.leaves(specs, is_leaf=is_spec), strict=True):
        assert all(dim % sizes[axis] == 0 for dim, axis in zip(p.shape, s, strict=False))


def test_memory_counts_what_is_aliased_once():
    m = types.SimpleNamespace(
        argument_size_in_bytes=4 << 30,
        output_size_in_bytes=4 << 30,
        alias_size_in_bytes=3 << 30,
        temp_size_in_bytes=2 << 30,
        generated_code_size_in_bytes=1 << 29,
        peak_memory_in_bytes=1 << 30,
    )
    assert tpu.memory(m) == {"HBM GiB": 7.5, "  alive at once GiB": 1.0}


def test_a_figure_of_one_side_only_has_no_ratio():
    rows = tpu.compared({"wire GB": 2.0, "plan.comm_bytes GB": 1.0}, {"wire GB": 4.0})
    assert [r["ratio"] for r in rows] == [0.5, None]
    assert rows[1]["jax.jit"] is None
