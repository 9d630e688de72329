"""Convolution: every split of every dim, gradients, and what is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emitted import emitted
from jax import lax
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.capture import capture
from shardwise.ops.registry import rules_of
from shardwise.testing import check
from shardwise.testing.rules import check_rule

ONE = ("NWC", "WIO", "NWC")
TWO = ("NHWC", "HWIO", "NHWC")
PERMUTE, REDUCE = "collective-permute", "all-reduce"


def values(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (np.random.default_rng(len(shape)).normal(size=shape) * 3).astype(dtype)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def conv(
    numbers: tuple[str, str, str] = TWO,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    stride: int | tuple[int, ...] = 1,
    **more: Any,
) -> Callable[..., Any]:
    dims = len(numbers[0]) - 2
    strides = (stride,) * dims if isinstance(stride, int) else stride

    def f(x: Any, k: Any) -> Any:
        return lax.conv_general_dilated(x, k, strides, padding, dimension_numbers=numbers, **more)

    return f


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "same": (conv(ONE), (2, 13, 4), (3, 4, 6)),
    "valid-strided": (conv(ONE, "VALID", 2), (3, 12, 2), (3, 2, 4)),
    "uneven-pads": (conv(ONE, [(-2, 5)]), (1, 11, 3), (4, 3, 2)),
    "both-dilations": (
        conv(ONE, [(2, 1)], 3, lhs_dilation=(2,), rhs_dilation=(2,)), (2, 9, 2), (3, 2, 3),
    ),
    "features-first": (conv(("NCW", "OIW", "NCW")), (2, 4, 8), (6, 4, 3)),
    "any-order": (conv(("CWN", "IOW", "WCN")), (4, 8, 2), (4, 6, 3)),
    "feature-groups": (conv(ONE, feature_group_count=4), (2, 6, 8), (3, 2, 12)),
    "depthwise": (conv(ONE, feature_group_count=6), (2, 6, 6), (3, 1, 6)),
    "depthwise-twofold": (conv(ONE, feature_group_count=4), (2, 6, 4), (3, 1, 8)),
    "batch-groups": (conv(ONE, batch_group_count=4), (8, 6, 3), (3, 3, 8)),
    "batch-groups-of-1": (conv(ONE, batch_group_count=4), (4, 6, 3), (3, 3, 4)),
    "pointwise": (conv(), (2, 5, 4, 4), (1, 1, 4, 6)),
    "one-window": (conv(padding="VALID"), (2, 5, 4, 4), (5, 4, 4, 6)),
    "more-taps-than-windows": (conv(ONE, [(1, 1)]), (2, 12, 3), (11, 3, 4)),
    "one-tap-strided": (conv(ONE, "VALID", 3), (2, 13, 3), (1, 3, 4)),
    "no-spatial-dim": (conv(("NC", "IO", "NC")), (4, 6), (6, 5)),
    "2d": (
        conv(stride=(2, 1), padding=[(1, 3), (-1, 2)], lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
        (1, 7, 9, 2), (3, 3, 2, 2),
    ),
    "kernel-gradient": (
        conv(("CHWN", "IHWO", "HWNC"), [(1, 1), (1, 1)]), (1, 6, 7, 2), (1, 6, 7, 2),
    ),
    "3d": (conv(("NDHWC", "DHWIO", "NDHWC")), (1, 5, 4, 6, 1), (3, 2, 3, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_split(case: str) -> None:
    f, *shapes = CASES[case]
    few = 20 if case == "no-spatial-dim" else 2 if len(shapes[0]) > 3 else 4
    for mesh in ({"x": 2, "y": 2}, {"x": 3}):
        found = check_rule(
            f, [values(*s) for s in shapes], mesh, "conv_general_dilated", 1e-4, limit=few
        )
        assert found["wrong"] == []
        few = 1 if few == 2 else max(2, few // 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int8, np.complex64], ids=str)
def test_dtypes(dtype: Any) -> None:
    wide = {"preferred_element_type": jnp.float32} if dtype is jnp.bfloat16 else {}
    wide = {"preferred_element_type": jnp.int32} if dtype is np.int8 else wide
    args = [values(2, 7, 4, dtype=dtype), values(3, 4, 2, dtype=dtype)]
    found = check_rule(conv(ONE, **wide), args, {"x": 3}, "conv_general_dilated", 1e-4, limit=2)
    assert found["wrong"] == []


@pytest.mark.parametrize("size", [1, 2, 5])
def test_blocks_that_hold_nothing(size: int) -> None:
    args = [values(1, size, 2), values(3, 2, 2)]
    found = check_rule(conv(ONE), args, {"x": 8}, "conv_general_dilated", 1e-4, limit=3)
    assert found["wrong"] == []


def test_windows_that_read_only_holes() -> None:
    f = conv(ONE, [(2, 0)], 3, lhs_dilation=(3,))
    found = check_rule(
        f, [values(1, 8, 2), values(1, 2, 2)], {"x": 8}, "conv_general_dilated", limit=6
    )
    assert found["wrong"] == []


@pytest.mark.parametrize("shapes", [((2, 0, 3), (3, 3, 4)), ((2, 5, 0), (3, 0, 4))])
def test_nothing_to_add_up(shapes: tuple[tuple[int, ...], ...]) -> None:
    args = [values(*s) for s in shapes]
    found = check_rule(conv(ONE, [(2, 3)]), args, {"x": 2}, "conv_general_dilated", limit=3)
    assert found["wrong"] == []


def rules(f: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    (eqn,) = capture(f, [f32(*s) for s in shapes])[0].eqns
    return [str(r) for r in rules_of(eqn)]


def test_the_rules() -> None:
    """b batch, a the contracted features (or groups first), then rows, taps and windows."""
    assert rules(conv(ONE), (2, 13, 4), (3, 4, 6)) == [
        "a d b, e b c -> a d c  sum=b,e  special=d,e",
        "a e b, e b c -> a d c  sum=b,e  special=d,e",
        "a f b, e b c -> a d c  sum=b,e  special=d,e  whole=f",
    ]
    assert rules(conv(ONE), (2, 13, 4), (1, 4, 6)) == ["a d b, 1 b c -> a d c  sum=b"]
    assert rules(conv(ONE, "VALID"), (2, 13, 4), (13, 4, 6)) == ["a d b, d b c -> a 1 c  sum=b,d"]
    grouped = rules(conv(ONE, feature_group_count=2), (2, 13, 4), (1, 2, 6))
    assert grouped == ["b e (a c), 1 c (a d) -> b e (a d)  sum=c"]
    grouped = rules(conv(ONE, batch_group_count=2), (8, 13, 4), (1, 4, 6))
    assert grouped == ["(a b) e c, 1 c (a d) -> b e (a d)  sum=c"]


# ---- what is sent ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "taps", "halo"),
    [
        (conv(), 3, 2),  # a row from each side
        (conv(padding=[(4, 4), (1, 1)], rhs_dilation=(4, 1)), 3, 8),
        (conv(stride=2), 3, 1),
        (conv(padding="VALID", stride=2), 2, 0),
        (conv(padding=[(1, 2), (1, 1)], lhs_dilation=(2, 1)), 3, 1),
        (conv(), 65, 64),  # as far as the neighbours' whole blocks
        (conv(), 129, 128),  # further than the neighbours'
    ],
)
def test_bytes_of_halos(f: Callable[..., Any], taps: int, halo: int) -> None:
    shapes = [f32(8, 256, 32, 16), f32(taps, 3, 16, 16)]
    sent, price, _ = emitted(f, shapes, {"x": 8}, {1: "x"}, "conv_general_dilated")
    assert sent == price == halo * 8 * 32 * 16 * 4


def test_bytes_of_two_dims_and_a_batch() -> None:
    """Rows of the first dim, then of the second, which is longer by then."""
    shapes = [f32(8, 64, 32, 16), f32(3, 5, 16, 16)]
    split = {0: "z", 1: "x", 2: "y"}
    mesh = {"x": 4, "y": 2, "z": 2}
    sent, price, _ = emitted(conv(), shapes, mesh, split, "conv_general_dilated")
    assert sent == price == (2 * 16 + 18 * 2) * 4 * 16 * 4


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, k: jax.grad(lambda x, k: (f(x, k) ** 2).sum(), (0, 1))(x, k)


def planned(
    f: Callable[..., Any], shapes: Sequence[Any], mesh: dict[str, int], ins: Any, outs: Any = None
) -> sw.Plan:
    return sw.spmd(
        f, mesh=sw.abstract_mesh(mesh), in_shardings=ins, out_shardings=outs
    ).plan(*shapes)  # fmt: skip


def priced(plan: sw.Plan) -> float:
    """What the equations' layouts were thought to cost when they were chosen, in bytes sent."""
    return sum(choice.bytes for choice, _ in plan.partitioner.eqn_choices.values())


def test_gradients_send_halos() -> None:
    """Both gradients, rows split: halos, and the kernel's sum over devices.

    The halo of x serves the convolution and the gradient of its kernel.
    """
    x, k = f32(8, 256, 32, 16), f32(3, 3, 16, 16)
    rows = P(None, "x")
    plan = planned(gradients(conv()), (x, k), {"x": 8}, (rows, P()), (rows, P()))
    assert {c.kind for c in plan.collectives} == {PERMUTE, REDUCE}
    halo, kernel = 8 * 32 * 16 * 4, 9 * 16 * 16 * 4
    assert plan.comm_bytes == 2 * 2 * halo + 2 * kernel * 7 / 8 == priced(plan)
    assert not plan.fallbacks


def test_a_kernels_gradient_stays_a_sum_where_gathering_would_save_little() -> None:
    """Operands a tenth smaller than the kernel: gathering one to make the gradient in parts would send
    that tenth less, and then the parts have to be gathered as well."""

    def step(x: Any, k: Any) -> Any:
        return k - jax.grad(lambda k: (conv()(x, k) ** 2).sum())(k)

    kernel, kept = f32(3, 3, 256, 256), {}
    for batch in (8, 1):  # with the smaller one it does save
        args, ins = (f32(batch, 16, 16, 256), kernel), (P(None, "x"), P())
        kept[batch] = planned(step, args, {"x": 16}, ins, P())
    assert {c.kind for c in kept[8].collectives} == {PERMUTE, REDUCE}
    assert "all-gather" in {c.kind for c in kept[1].collectives}
    assert kept[1].comm_bytes < 2 * kernel.size * 4 * 15 / 16


def test_halos_of_two_dims_are_received_once() -> None:
    x, k = f32(8, 64, 32, 16), f32(3, 3, 16, 16)
    spec = P(None, "x", "y")
    plan = planned(gradients(conv()), (x, k), {"x": 4, "y": 4}, (spec, P()), (spec, P()))
    halo, kernel = (2 * 8 + 18 * 2) * 8 * 16 * 4, 9 * 16 * 16 * 4
    assert plan.comm_bytes == 2 * halo + 2 * kernel * 15 / 16 == priced(plan)


def test_halos_are_not_taken_for_those_of_another_block() -> None:
    """The same value with other padding or of another length, and another value, send their own."""

    def f(x: Any, y: Any, k: Any) -> Any:
        outs = [conv(ONE)(x, k), conv(ONE)(y, k), conv(ONE, [(2, 0)])(x, k)]
        return sum(outs), conv(ONE, [(2, 2)], rhs_dilation=(2,))(x, k)

    args = values(2, 12, 3), values(2, 12, 3) + 1, values(3, 3, 2)
    rows = P(None, "x")
    plan = check(f, args, {"x": 4}, (rows, rows, P()), grad=False)
    assert plan.comm_bytes == (2 + 2 + 2 + 4) * 2 * 3 * 4


def test_halos_of_a_second_dim_depend_on_those_of_the_first() -> None:
    def f(x: Any, tall: Any, wide: Any) -> Any:
        return conv()(x, tall) + conv()(x, wide)

    args = values(1, 8, 8, 2), values(3, 3, 2, 2), values(1, 3, 2, 2)
    spec = P(None, "x", "y")
    plan = check(f, args, {"x": 2, "y": 2}, (spec, P(), P()), spec, grad=False)
    assert plan.comm_bytes == (4 + 6 + 4) * 2 * 4


def test_gradients_of_an_up_convolution_send_halos() -> None:
    """Not whole shards, as where the kernel's gradient reverses a split dim."""

    def up(x: Any, k: Any) -> Any:
        return lax.conv_transpose(x, k, (2, 2), "SAME", dimension_numbers=TWO)

    rows = P(None, "x")
    for taps, halos in ((2, 0), (3, 3)):
        shapes = f32(8, 256, 32, 16), f32(taps, taps, 16, 16)
        plan = planned(gradients(up), shapes, {"x": 8}, (rows, P()), (rows, P()))
        halo, kernel = 8 * 32 * 16 * 4, taps * taps * 16 * 16 * 4
        assert plan.comm_bytes == halos * halo + 2 * kernel * 7 / 8


def test_gradients_of_each_example_are_local() -> None:
    x, k = f32(8, 64, 32, 16), f32(3, 3, 16, 16)

    def each(f: Callable[..., Any]) -> Callable[..., Any]:
        grad = jax.grad(lambda k, x: (f(x[None], k) ** 2).sum())
        return lambda k, x: jax.vmap(grad, (None, 0))(k, x)

    for f, kernel in ((conv(), k), (conv(feature_group_count=4, stride=2), f32(3, 3, 4, 16))):
        plan = planned(each(f), (kernel, x), {"x": 8}, (P(), P("x")), P("x"))
        assert (plan.comm_bytes, plan.fallbacks) == (0, [])


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_a_split_batch_is_local(groups: int) -> None:
    """With groups as well; the kernel's gradient is summed once."""
    x, k = f32(8, 32, 32, 16), f32(3, 3, 16 // groups, 16)
    f = conv(feature_group_count=groups)
    assert planned(f, (x, k), {"x": 8}, (P("x"), P()), P("x")).comm_bytes == 0
    plan = planned(gradients(f), (x, k), {"x": 8}, (P("x"), P()), (P("x"), P()))
    assert plan.comm_bytes == 2 * 9 * 16 // groups * 16 * 4 * 7 / 8


def test_features() -> None:
    x, k = f32(8, 32, 32, 64), f32(3, 3, 64, 64)
    out = P(None, None, None, "x")
    assert planned(conv(), (x, k), {"x": 8}, (P(), out), out).comm_bytes == 0
    plan = planned(conv(), (x, k), {"x": 8}, (out, P(None, None, "x")), P("x"))
    assert [c.kind for c in plan.collectives][-1] == "reduce-scatter" or plan.comm_bytes < x.size
    depthwise = conv(feature_group_count=64)
    args = (x, f32(3, 3, 1, 64))
    plan = planned(gradients(depthwise), args, {"x": 8}, (out, out), (out, out))
    assert plan.comm_bytes == 0


# ---- whole programs --------------------------------------------------------------------------

LAYOUTS: dict[str, Any] = {
    "rows": (conv(), {"x": 8}, P(None, "x"), P(), P(None, "x")),
    "uneven-rows": (conv(ONE, "VALID", 2), {"x": 4}, P(None, "x"), P(), P(None, "x")),
    "rows-and-columns": (conv(), {"x": 2, "y": 3}, P(None, "x", "y"), P(), P(None, "x", "y")),
    "all": (
        conv(stride=2), {"a": 2, "b": 2, "c": 2}, P("a", "b"), P(None, None, None, "c"),
        P("a", "b", None, "c"),
    ),
    "one-dim-over-two": (
        conv(padding=[(3, 2), (0, 0)], rhs_dilation=(2, 1)), {"x": 2, "y": 4},
        P(None, ("y", "x")), P(None, None, "x"), None,
    ),
    "taps": (conv(ONE, [(5, 3)]), {"x": 2, "y": 2}, P(None, "x"), P("y"), P(None, "x")),
    "features-in": (conv(), {"x": 2, "y": 2}, P(None, "x", None, "y"), P(None, None, "y"), None),
    "up": (
        lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME", dimension_numbers=TWO),
        {"x": 6}, P(None, "x"), P(), P(None, "x"),
    ),
    "groups": (
        conv(feature_group_count=2), {"x": 2, "y": 3}, P(None, "y", None, "x"), P(), P(None, "y"),
    ),
    "grouped-batch": (conv(ONE, batch_group_count=2), {"x": 4}, P("x"), P(), P("x")),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_programs_and_their_gradients(case: str) -> None:
    f, mesh, x, k, out = LAYOUTS[case]
    groups = {"groups": 2}.get(case, 1)
    if case in ("uneven-rows", "taps", "grouped-batch"):
        args = values(4, 13, 4), values(3, 4, 4)
    else:
        args = values(4, 13, 6, 4), values(3, 2, 4 // groups, 4)
    check(f, args, mesh, (x, k), out)


def second(f: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient, with respect to x, of a kernel's gradient: a convolution with a reversed one."""

    def g(x: Any, k: Any, v: Any) -> Any:
        grad = jax.grad(lambda k, x: (jnp.tanh(f(x, k)) ** 2).sum())
        return jax.grad(lambda x: (grad(k, x) * v).sum())(x)

    return g


@pytest.mark.parametrize(
    "f", [conv(ONE), conv(ONE, [(2, 1)], 2, lhs_dilation=(3,), rhs_dilation=(2,))]
)
def test_a_gradient_of_a_gradient(f: Callable[..., Any]) -> None:
    x, k = values(2, 13, 3) / 9, values(3, 3, 2)
    check(second(f), (x, k, k[::-1]), {"x": 4}, (P(None, "x"), P(), P()), grad=False, tol=1e-4)


def test_a_gradient_of_a_gradient_sends_halos() -> None:
    """Not whole shards to reverse the large operand, nor terms of the whole result."""
    x, k = f32(8, 256, 32, 16), f32(3, 3, 16, 16)
    rows = P(None, "x")
    plan = planned(second(conv()), (x, k, k), {"x": 8}, (rows, P(), P()), rows)
    assert {c.kind for c in plan.collectives} == {PERMUTE}
    assert plan.comm_bytes == 3 * 2 * 8 * 32 * 16 * 4


def test_operands_are_swapped_only_where_the_kernel_is_larger() -> None:
    def names(*shapes: tuple[int, ...]) -> list[str]:
        def f(x: Any, k: Any) -> Any:
            return conv(ONE, [(9, 9)])(x, lax.rev(k, (0,)))

        eqns = capture(f, [f32(*s) for s in shapes])[0].eqns
        return [f"{e.name} {e.invars[0].shape}" for e in eqns]

    assert names((2, 5, 3), (7, 3, 4)) == [
        "rev (2, 5, 3)", "conv_general_dilated (7, 3, 4)",
    ]  # fmt: skip
    assert names((2, 7, 3), (5, 3, 4)) == ["rev (5, 3, 4)", "conv_general_dilated (2, 7, 3)"]


def test_convolution_of_two_split_signals() -> None:
    x, k = values(40), values(17)
    for mode in ("full", "same", "valid"):
        check(
            lambda a, b, mode=mode: jnp.convolve(a, b, mode), (x, k), {"x": 4}, (P("x"), P("x")),
            grad=False,
        )  # fmt: skip


def unet(levels: Sequence[tuple[Any, Any, Any, Any]], x: Any) -> Any:
    """Down by strided convolutions, up by transposed ones, with skips."""
    kept = []
    for mix, down, _, _ in levels:
        x = jax.nn.relu(conv()(x, mix))
        kept.append(x)
        x = conv(padding="VALID", stride=2)(x, down)
    for (_, _, up, mix), skip in zip(levels[::-1], kept[::-1], strict=True):
        x = lax.conv_transpose(x, up, (2, 2), "SAME", dimension_numbers=TWO)
        x = jax.nn.relu(conv()(jnp.concatenate([x, skip], -1), mix))
    return x


def test_one_annotation_splits_a_whole_u_net() -> None:
    """On the input's rows: every activation and gradient follows, nothing is gathered."""
    shapes = [[(3, 3, c, c), (2, 2, c, 2 * c), (2, 2, 2 * c, c), (3, 3, 2 * c, c)] for c in (4, 8)]

    def loss(levels: Any, x: Any) -> Any:
        return (unet(levels, sw.annotate(x, P(None, "x"))) ** 2).mean()

    step = jax.value_and_grad(loss)
    big = jax.tree.map(lambda s: f32(*s), shapes, is_leaf=lambda s: isinstance(s, tuple))
    plan = planned(step, (big, f32(4, 256, 64, 4)), {"x": 8}, None)
    assert {c.kind for c in plan.collectives} == {PERMUTE, REDUCE}
    assert plan.fallbacks == []
    permuted = [c for c in plan.collectives if c.kind == PERMUTE]
    assert all(c.shape[1] == 1 for c in permuted)  # one row each
    small = jax.tree.map(lambda s: values(*s.shape) / 9, big)
    check(unet, (small, values(1, 16, 8, 4)), {"x": 4}, (P(), P(None, "x")), tol=1e-4)
