"""GShard's Algorithm 1 against a loop over tokens, one by one."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.nn import gating
from shardwise.nn.gating import GatingConfig

KEY = jax.random.key(7)
gate = jax.jit(gating.gate, static_argnums=0, static_argnames="train")
combine_weights = jax.jit(gating.combine_weights)
dispatch_mask = jax.jit(gating.dispatch_mask)


def softmax(row):
    top = np.exp(row - row.max(), dtype=np.float32)
    return top / top.sum(dtype=np.float32)


def algorithm_1(logits, capacity, lots):
    """GShard's Algorithm 1 for one group, line by line: (weights {(s, e): g}, slots, aux loss)."""
    tokens, experts = logits.shape
    c = np.zeros(experts, int)  # line 1
    g = np.stack([softmax(row) for row in logits])  # 2
    m = g.mean(axis=0)  # 3
    out, slots = {}, {}
    for s in range(tokens):  # 4
        e1, e2 = np.argsort(-g[s], kind="stable")[:2]  # 5
        g1 = g[s, e1] / (g[s, e1] + g[s, e2])  # 6
        before = c[e1]  # 7
        if before < capacity:  # 8
            out[s, e1], slots[s, e1] = g1, before  # 9
        c[e1] = before + 1  # 11
    aux = np.mean(c / tokens * m)  # 13
    for s in range(tokens):  # 14
        e1, e2 = np.argsort(-g[s], kind="stable")[:2]  # 15
        g2 = g[s, e2] / (g[s, e1] + g[s, e2])  # 16
        before = c[e2]  # 18
        if before < capacity and 2 * g2 > lots[s]:  # 17, 19
            out[s, e2], slots[s, e2] = g2, before  # 20
        c[e2] = before + 1  # 22
    return out, slots, aux


def walk(config, logits, lots, valid, train):
    """Any number of choices, every switch, padding: one group, token by token."""
    tokens, experts = logits.shape
    capacity = config.capacity(tokens, train)
    real = [s for s in range(tokens) if valid[s]]
    gates = [softmax(row) for row in logits]
    ranked = [np.argsort(-g, kind="stable")[: config.k] for g in gates]
    counter, first = [0] * experts, [0] * experts
    taken, asked = {}, 0
    for j in range(config.k):
        for s in real:
            e = ranked[s][j]
            total = sum(gates[s][i] for i in ranked[s]) if config.normalized else 1
            weight = gates[s][e] / total
            first[e] += j == 0
            draws = train and config.random_routing and j > 0
            wants = not draws or config.k * weight > lots[s][j - 1]
            asked += wants
            if wants and counter[e] < capacity:
                taken[s, j] = e, counter[e], weight
            if wants or not config.reuse_slots:
                counter[e] += 1
    n = max(len(real), 1)
    mean = np.sum([gates[s] for s in real], axis=0) / n if real else np.zeros(experts)
    aux = np.mean(np.array(first) / n * mean) if config.aux_loss else 0.0
    return {
        "taken": taken,
        "aux": aux * (experts**2 if config.aux_scaled else 1),
        "asked": asked,
        "lost": sum(all((s, j) not in taken for j in range(config.k)) for s in real),
        "entropy": -sum(float(np.sum(gates[s] * np.log(gates[s]))) for s in real),
        "real": len(real),
    }


def draws(config, groups, tokens):
    return np.asarray(jax.random.uniform(KEY, (groups, tokens, config.k - 1)))


def agrees(config, logits, valid=None, train=True):
    """`gate` does what the loop does: routing, matrices and statistics."""
    groups, tokens, experts = logits.shape
    real = np.ones((groups, tokens), bool) if valid is None else valid
    got = gate(config, jnp.asarray(logits), key=KEY, train=train, valid=valid)
    lots = draws(config, groups, tokens)
    walks = [walk(config, logits[g], lots[g], real[g], train) for g in range(groups)]
    capacity = config.capacity(tokens, train)
    combine = np.zeros((groups, tokens, experts, capacity), np.float32)
    load, second, dropped = np.zeros(experts), 0, 0
    for g, w in enumerate(walks):
        kept = np.array([[(s, j) in w["taken"] for j in range(config.k)] for s in range(tokens)])
        np.testing.assert_array_equal(got.kept[g], kept)
        for (s, j), (e, slot, weight) in w["taken"].items():
            assert (got.expert[g, s, j], got.slot[g, s, j]) == (e, slot)
            combine[g, s, e, slot] = weight
            load[e] += 1
            second += j == 1
        dropped += w["asked"] - len(w["taken"])
    made = combine_weights(got)
    np.testing.assert_allclose(made, combine, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(dispatch_mask(got), combine > 0)
    assert (np.count_nonzero(combine, axis=1) <= 1).all()  # a slot has one token
    n = max(sum(w["real"] for w in walks), 1)
    want = {
        "aux_loss": np.mean([w["aux"] for w in walks]),
        "overflow": sum(w["lost"] for w in walks) / n,
        "dropped": dropped / max(sum(w["asked"] for w in walks), 1),
        "load": load / n,
        "second": second / n,
        "entropy": sum(w["entropy"] for w in walks) / n,
    }
    for name, value in want.items():
        np.testing.assert_allclose(
            getattr(got.stats, name), value, rtol=1e-4, atol=1e-6, err_msg=name
        )
    return got


def logits_of(groups, tokens, experts, seed=0, ties=False, skew=0.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(groups, tokens, experts)) + skew * np.arange(experts)[::-1]
    return (np.round(x) if ties else x).astype(np.float32)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("experts", [2, 3, 8])
def test_algorithm_1_line_by_line(experts, ties):
    config = GatingConfig(experts, min_capacity=1)
    logits = logits_of(3, 16, experts, experts, ties, skew=0.3)
    got = gate(config, jnp.asarray(logits), key=KEY)
    lots = draws(config, 3, 16)
    combine, aux, overflowing = np.zeros((3, 16, experts, got.capacity)), [], 0
    for g in range(3):
        weights, slots, loss = algorithm_1(logits[g], got.capacity, lots[g, :, 0])
        for s, e in weights:
            combine[g, s, e, slots[s, e]] = weights[s, e]
        aux.append(loss)
        overflowing += 32 - len(weights)
    assert overflowing  # there is something to drop
    np.testing.assert_allclose(combine_weights(got), combine, rtol=1e-5)
    assert float(got.stats.aux_loss) == pytest.approx(np.mean(aux), rel=1e-5)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("ties", [False, True])
def test_any_number_of_choices(k, ties):
    config = GatingConfig(5, k=k, min_capacity=2)
    got = agrees(config, logits_of(2, 20, 5, k, ties, skew=0.5))
    assert (got.stats.dropped > 0) == (k < 5)  # all experts: nobody takes too many


SWITCHES = {
    "no capacity": {"capacity_factor": None},
    "no random routing": {"random_routing": False},
    "no auxiliary loss": {"aux_loss": False},
    "scaled loss": {"aux_scaled": True},
    "slots used again": {"reuse_slots": True},
    "not normalized": {"normalize": False},
    "small": {"capacity_factor": 0.3, "min_capacity": 1},
    "roomy": {"capacity_factor": 1.7},
}


@pytest.mark.parametrize("change", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize(("k", "train"), [(2, True), (2, False), (3, True)])
def test_each_mechanism_can_be_switched_off(k, change, train):
    config = dataclasses.replace(GatingConfig(6, k=k, min_capacity=2), **change)
    got = agrees(config, logits_of(2, 12, 6, 3, skew=0.5), train=train)
    if config.capacity_factor is None and train:
        assert got.capacity == 12 and got.stats.dropped == 0 and got.stats.overflow == 0
    if not config.aux_loss:
        assert got.stats.aux_loss == 0


@given(
    tokens=st.integers(1, 17),
    experts=st.integers(1, 9),
    k=st.integers(1, 4),
    factor=st.sampled_from([0.25, 0.5, 1.0, 1.25, None]),
    least=st.integers(1, 4),
    ties=st.booleans(),
    reuse=st.booleans(),
    train=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=6)  # each compiles; eight groups are eight cases
def test_all_together(tokens, experts, k, factor, least, ties, reuse, train, seed):
    config = GatingConfig(
        experts, min(k, experts), factor, factor, min_capacity=least, reuse_slots=reuse
    )
    share = np.linspace(0, 1, 8)[:, None]  # of tokens that are no padding: none to all
    valid = np.random.default_rng(seed).random((8, tokens)) < share
    agrees(config, logits_of(8, tokens, experts, seed, ties, skew=0.2), valid, train)


def test_equal_gates_go_to_the_lowest_experts():
    got = gate(GatingConfig(4, random_routing=False), jnp.zeros((1, 8, 4)))
    np.testing.assert_array_equal(got.expert, np.broadcast_to([0, 1], (1, 8, 2)))
    assert got.stats.entropy == pytest.approx(math.log(4))


def test_the_counter_goes_on_for_choices_that_are_not_taken():
    """Algorithm 1, line 22: random routing leaves token 0's second choice out, and token 1's gets the
    slot after it; with `reuse_slots` the same one."""
    logits = jnp.array([[[9.0, 0.0, -9.0], [3.0, 3.0, -9.0]]])
    for reuse, slots in ((False, [0, 1]), (True, [0, 0])):
        config = GatingConfig(3, min_capacity=2, reuse_slots=reuse)
        got = gate(config, logits, key=KEY)
        np.testing.assert_array_equal(got.kept[0], [[True, False], [True, True]])
        assert [int(got.slot[0, 0, 0]), int(got.slot[0, 1, 1])] == slots


@pytest.mark.parametrize(
    ("config", "tokens", "train", "want"),
    [
        (GatingConfig(8), 64, True, 16),  # 2 * 64 / 8, GShard's C = 2N/(GE)
        (GatingConfig(8), 64, False, 32),
        (GatingConfig(8, k=1, capacity_factor=1.25), 64, True, 10),
        (GatingConfig(8, capacity_factor=1.1), 12, True, 4),  # 3.3, up; not below the least
        (GatingConfig(10, capacity_factor=1.1, min_capacity=1), 50, True, 11),  # 11.000000000000002
        (GatingConfig(2048), 1024, True, 4),
        (GatingConfig(2048, min_capacity=1), 1024, True, 1),
        (GatingConfig(2048), 3, True, 3),  # never more than tokens
        (GatingConfig(8, capacity_factor=None), 64, True, 64),
        (GatingConfig(8, eval_capacity_factor=None), 64, False, 64),
    ],
)
def test_capacity(config, tokens, train, want):
    assert config.capacity(tokens, train) == want


def test_in_evaluation_nothing_is_drawn():
    config = GatingConfig(4, jitter=0.1)
    logits = jnp.asarray(logits_of(1, 8, 4))
    got = gate(config, logits, train=False)
    assert got.capacity == config.capacity(8, train=False) and got.stats.second == 1
    np.testing.assert_array_equal(gating.jittered(config, logits, None, train=False), logits)
    assert config.needs_key(train=True) and not config.needs_key(train=False)


def test_jitter_is_noise_near_one():
    x = jnp.full((4, 50, 8), 2.0, jnp.bfloat16)
    y = gating.jittered(GatingConfig(4, jitter=0.1), x, KEY)
    assert y.dtype == jnp.float32
    assert 1.8 <= float(y.min()) < 1.82 and 2.18 < float(y.max()) <= 2.2
    assert float(y.mean()) == pytest.approx(2, abs=0.01)


def test_gradients_are_those_of_the_weights_and_the_mean_gate():
    """Choices, slots and counts are constants: the gradient is that of the softmax at the chosen."""
    config = GatingConfig(5, min_capacity=2)
    logits = jnp.asarray(logits_of(2, 12, 5, 1, skew=0.4))
    routing = gate(config, logits, key=KEY)
    cotangent = jax.random.normal(jax.random.key(3), routing.weight.shape)
    counts = np.zeros((2, 5))
    for g, s in np.ndindex(2, 12):
        counts[g, int(routing.expert[g, s, 0])] += 1

    def written_out(logits):
        gates = jax.nn.softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(gates, routing.expert, axis=-1)
        weight = routing.kept * chosen / chosen.sum(-1, keepdims=True)
        aux = jnp.mean(counts / 12 * gates.mean(axis=1))
        return jnp.sum(weight * cotangent) + 3 * aux

    def gated(logits):
        r = gate(config, logits, key=KEY)
        return jnp.sum(r.weight * cotangent) + 3 * r.stats.aux_loss

    got, want = (jax.jit(jax.grad(f))(logits) for f in (gated, written_out))
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_everything_is_computed_in_float32():
    """Of bfloat16 logits nothing but their conversion is in bfloat16."""
    logits = jnp.asarray(logits_of(1, 8, 4)).astype(jnp.bfloat16)
    program = jax.make_jaxpr(lambda x: gate(GatingConfig(4), x, key=KEY))(logits)
    kinds = {str(v.aval.dtype) for e in program.jaxpr.eqns for v in e.outvars}
    assert "bfloat16" not in kinds and "float32" in kinds
    routing = gate(GatingConfig(4), logits, key=KEY)
    wide = gate(GatingConfig(4), logits.astype(jnp.float32), key=KEY)
    np.testing.assert_array_equal(routing.weight, wide.weight)


def test_gshards_own_name():
    config, logits = GatingConfig(4), jnp.asarray(logits_of(2, 8, 4))
    top2 = jax.jit(gating.top2_gating, static_argnums=1, static_argnames="dtype")
    combine, mask, aux, stats = top2(logits, config, key=KEY, dtype=jnp.bfloat16)
    routing = gate(config, logits, key=KEY)
    wide = combine_weights(routing)
    np.testing.assert_array_equal(combine, wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(mask, wide > 0)
    assert combine.dtype == mask.dtype == jnp.bfloat16
    assert aux == stats.aux_loss == pytest.approx(float(routing.stats.aux_loss), rel=1e-5)


@pytest.mark.parametrize(("groups", "size"), [(1, 15), (3, 5), (5, 3), (4, 4), (7, 3)])
def test_groups_and_back(groups, size):
    x = jnp.arange(30.0).reshape(3, 5, 2)
    y, valid = gating.regroup(x, groups)
    assert y.shape == (groups, size, 2)
    assert (valid is None) == (groups * size == 15)
    if valid is not None:
        assert valid.sum() == 15 and (y[~valid] == 0).all()
    np.testing.assert_array_equal(gating.ungroup(y, 3, 5), x)


def test_padding_stays_padding_in_groups():
    valid = jnp.array([[True, False, True], [False, True, True]])
    _, cut = gating.regroup(jnp.ones((2, 3, 1)), 4, valid)
    np.testing.assert_array_equal(cut, [[True, False], [True, False], [True, True], [False, False]])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experts": 0}, "experts must be at least 1, not 0"),
        ({"experts": 4, "k": 5}, "k must be 1 to 4 (experts), not 5"),
        (
            {"experts": 4, "capacity_factor": 0},
            "capacity_factor must be above 0, or None for no limit, not 0",
        ),
        (
            {"experts": 4, "eval_capacity_factor": -1},
            "eval_capacity_factor must be above 0, or None for no limit, not -1",
        ),
        ({"experts": 4, "min_capacity": 0}, "min_capacity must be at least 1, not 0"),
        ({"experts": 4, "jitter": 1.0}, "jitter must be in [0, 1), not 1.0"),
    ],
)
def test_settings_out_of_range(wrong, message):
    with pytest.raises(ValueError) as e:
        GatingConfig(**wrong)
    assert str(e.value) == message


def test_a_key_is_asked_for_where_one_is_needed():
    logits = jnp.zeros((1, 4, 4))
    with pytest.raises(ValueError, match="random routing needs a key"):
        gate(GatingConfig(4), logits)
    with pytest.raises(ValueError, match="jitter needs a key"):
        gating.jittered(GatingConfig(4, jitter=0.1), logits, None)
    with pytest.raises(ValueError, match=r"logits are \[G, S, 4\], not \[4, 4\]"):
        gate(GatingConfig(4), logits[0])
    with pytest.raises(ValueError, match="groups must be at least 1"):
        gating.regroup(logits, 0)
    gate(GatingConfig(4, k=1), logits)  # nothing to draw
