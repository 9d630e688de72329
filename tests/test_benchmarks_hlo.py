"""The HLO reader: programs written by hand with shard_map, whose bytes are known, and texts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardwise import hlo
from shardwise.hlo import text as hlo_text
from shardwise.hlo.loops import trip_count

N = 64 * 4  # bytes of one device's f32[64] block


SPLIT = P(("x", "y"))


def report(body, mesh_axes=(("x", 2), ("y", 4)), spec=SPLIT):
    """The wire report of `body` on 8 devices, each with a block f32[64] of a vector."""
    names, sizes = zip(*mesh_axes, strict=True)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(sizes), names)
    f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((512,), jnp.float32)
    return hlo.wire_report(jax.jit(f).lower(x).compile().as_text())


def shift(x, axis, n):
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


@pytest.mark.parametrize(
    ("body", "kind", "group", "sent"),
    [
        (lambda x: lax.psum(x, "y"), "all-reduce", 4, 2 * N * 3 / 4),
        (lambda x: lax.psum(x, "x"), "all-reduce", 2, 2 * N * 1 / 2),
        (lambda x: lax.psum(x, ("x", "y")), "all-reduce", 8, 2 * N * 7 / 8),
        (lambda x: lax.pmax(x, "y"), "all-reduce", 4, 2 * N * 3 / 4),
        (lambda x: lax.all_gather(x, "y", tiled=True)[:64], "all-gather", 4, 4 * N * 3 / 4),
        (lambda x: lax.all_gather(x, "x", tiled=True)[:64], "all-gather", 2, 2 * N * 1 / 2),
        (
            lambda x: jnp.tile(lax.psum_scatter(x, "y", tiled=True), 4),
            "reduce-scatter",
            4,
            N * 3 / 4,
        ),
        (lambda x: lax.all_to_all(x, "y", 0, 0, tiled=True), "all-to-all", 4, N * 3 / 4),
        (lambda x: shift(x, "y", 4), "collective-permute", None, N),
    ],
)
def test_one_collective(body, kind, group, sent):
    (op,) = report(body).collectives
    assert (op.kind, op.bytes, op.times) == (kind, sent, 1)
    assert group is None or op.group_size == group


def test_bfloat16_and_bool_sizes():
    assert hlo_text.type_bytes("bf16[8,4]{1,0}") == 64
    assert hlo_text.type_bytes("(f32[8,128]{1,0:T(8,128)}, pred[4]{0}, s32[])") == 4096 + 4 + 4
    assert hlo_text.type_bytes("c64[3]") == 24
    assert hlo_text.type_bytes("s4[6]{0}") == 3
    assert hlo_text.type_bytes("f8e4m3fn[<=5]{0}") == 5
    assert hlo_text.type_bytes("token[]") == 0


def test_scan_is_multiplied():
    def body(x):
        return lax.scan(lambda c, _: (lax.psum(c, "y") / 4, None), x, None, length=5)[0]

    (op,) = report(body).collectives
    assert (op.times, op.total_bytes) == (5, 5 * 2 * N * 3 / 4)


def test_nested_loops_multiply():
    def inner(c, _):
        return lax.psum(c, "y") / 4, None

    def outer(c, _):
        c, _ = lax.scan(inner, c, None, length=3)
        return shift(c, "x", 2), None

    r = report(lambda x: lax.scan(outer, x, None, length=5)[0])
    assert r.by_kind() == {"all-reduce": 15 * 2 * N * 3 / 4, "collective-permute": 5 * N}


def test_loop_count_from_the_condition_alone():
    """The count does not hang on XLA's annotation: without it start, step and limit give it."""

    def body(x):
        def step(state):
            i, c = state
            return i + 3, lax.psum(c, "y") / 4

        return lax.while_loop(lambda state: state[0] < 20, step, (2, x))[1]

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    f = jax.shard_map(body, mesh=mesh, in_specs=P("y"), out_specs=P("y"), check_vma=False)
    text = jax.jit(f).lower(jax.ShapeDtypeStruct((256,), jnp.float32)).compile().as_text()
    bare = text.replace("known_trip_count", "unused")
    assert hlo.wire_report(text).bytes == hlo.wire_report(bare).bytes == 6 * 2 * N * 3 / 4


def test_a_loop_that_depends_on_data_is_reported():
    def body(x):
        return lax.while_loop(lambda c: lax.pmax(c.sum(), "y") < 3, lambda c: c + 1, x)

    r = report(body, spec=P("y"))
    assert len(r.unknown_loops) == 1
    assert r.bytes == 2 * 4 * 3 / 4  # one trip of one float


def test_the_branch_that_sends_most():
    def body(x):
        return lax.cond(
            lax.pmax(x[0], ("x", "y")) > 0, lambda v: shift(v, "y", 4), lambda v: v * 2, x
        )

    kinds = report(body).by_kind()
    assert kinds["collective-permute"] == N


def test_tuple_all_to_all_and_async_pairs_and_called_computations():
    text = """\
HloModule m, is_scheduled=true, replica_count=1, num_partitions=8

%inner (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  ROOT %cp = f32[16]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}

%all-reduce-scatter.1 (q: f32[64]) -> f32[16] {
  %q = f32[64]{0} parameter(0)
  %ar = f32[64]{0} all-reduce(%q), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %ds = f32[16]{0} dynamic-slice(%ar), dynamic_slice_sizes={16}
}

ENTRY %main (a: f32[16], b: f32[64]) -> f32[16] {
  %a = f32[16]{0} parameter(0)
  %b = f32[64]{0} parameter(1)
  %a2a = (f32[16]{0}, f32[16]{0}) all-to-all(%a, %a), replica_groups={{0,4},{1,5},{2,6},{3,7}}
  %ags = (f32[16]{0}, f32[32]{0}) all-gather-start(%a), replica_groups=[4,2]<=[2,4]T(1,0)
  %agd = f32[32]{0} all-gather-done(%ags)
  %still = f32[16]{0} collective-permute(%a), source_target_pairs={{0,0},{1,1}}
  %call = f32[16]{0} call(%a), to_apply=%inner
  %rs = f32[16]{0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %all = f32[16]{0} all-reduce(%a), replica_groups={}, to_apply=%add
}
"""
    sent = {op.name: (op.kind, op.bytes) for op in hlo.wire_report(text).collectives}
    assert sent == {
        "a2a": ("all-to-all", 128 / 2),
        "ags": ("all-gather", 64),
        "still": ("collective-permute", 0),
        "cp": ("collective-permute", 64),
        "ar": ("reduce-scatter", 256 * 3 / 4),
        "all": ("all-reduce", 2 * 64 * 7 / 8),
    }


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2},{3,4,5}}", 3),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("[1,8]<=[8]", 8),
        ("{}", 8),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_2'}", 4),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("mesh['a'=8] {'a':(2)4}", 4),
    ],
)
def test_group_sizes(groups, size):
    inst = hlo_text.Instruction("r", "f32[]", "all-reduce", "%a", f", replica_groups={groups}")
    assert hlo_text.group_size(inst, 8) == size


@pytest.mark.parametrize(
    ("start", "step", "direction", "limit", "trips"),
    [
        (0, 1, "LT", 7, 7),
        (0, 2, "LT", 7, 4),
        (1, 2, "LE", 7, 4),
        (7, -1, "GT", 0, 7),
        (7, -2, "GE", 0, 4),
        (0, 1, "NE", 7, 7),
        (9, 1, "LT", 7, 0),
    ],
)
def test_trip_counts(start, step, direction, limit, trips):
    text = f"""\
HloModule m

%body (s: (s32[])) -> (s32[]) {{
  %s = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant({step})
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[]) tuple(%next)
}}

%cond (s: (s32[])) -> pred[] {{
  %s = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant({limit})
  ROOT %lt = pred[] compare(%i, %n), direction={direction}
}}

ENTRY %main () -> (s32[]) {{
  %zero = s32[] constant({start})
  %init = (s32[]) tuple(%zero)
  ROOT %w = (s32[]) while(%init), condition=%cond, body=%body
}}
"""
    module = hlo_text.parse_module(text)
    main = module.computations["main"]
    assert trip_count(module, main, main.instructions["w"]) == trips


def test_ring_bytes_of_one_device_alone_is_nothing():
    send = functools.partial(hlo.ring_bytes, operand_bytes=64, group=1)
    assert [send(k) for k in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")] == [
        0
    ] * 4
