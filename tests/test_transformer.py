"""The Transformer: what it computes, what it annotates, and that partitioning changes no number."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.errors import ShardingError
from shardwise.mesh import device_mesh
from shardwise.nn import transformer
from shardwise.nn.transformer import TransformerConfig

SMALL = TransformerConfig(layers=2, model=16, hidden=32, heads=4, vocab=24)
STRATEGIES = sorted(transformer.STRATEGIES)


def params_of(config, seed=0):
    return transformer.init(config, jax.random.key(seed))


def some_tokens(batch=4, seq=8, vocab=24):
    return jax.random.randint(jax.random.key(1), (batch, seq), 0, vocab)


def close(a, b, tolerance=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance), a, b)


def recorded_annotations(config, strategy="final"):
    """(shape, spec) of every annotation made while the loss is traced."""
    seen = []

    def annotate(x, spec):
        seen.append((x.shape, spec))
        return x

    objective = functools.partial(
        transformer.loss, config, annotate=annotate, strategy=strategy, axes=("x", "y")
    )
    tokens = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    jax.eval_shape(objective, transformer.abstract_params(config), tokens)
    return seen


# ---------------------------------------------------------------- the model


def test_stacked_and_listed_layers_hold_the_same_values():
    stacked = params_of(SMALL)["layers"]
    listed = params_of(dataclasses.replace(SMALL, scan=False))["layers"]
    close(stacked, jax.tree.map(lambda *w: jnp.stack(w), *listed), 0)


def test_the_loss_is_the_mean_of_minus_log_probability():
    params, tokens = params_of(SMALL), np.asarray(some_tokens())
    scores = np.asarray(transformer.logits(SMALL, params, tokens), np.float64)
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    b, s = np.indices((4, 7))
    want = -np.log(p[b, s, tokens[:, 1:]]).mean()
    np.testing.assert_allclose(transformer.loss(SMALL, params, tokens), want, rtol=1e-5)


def test_a_position_sees_nothing_after_it():
    params, tokens = params_of(SMALL), some_tokens()
    changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % 24)
    a = transformer.logits(SMALL, params, tokens)
    b = transformer.logits(SMALL, params, changed)
    close(a[:, :5], b[:, :5], 0)
    assert float(jnp.max(jnp.abs(a[:, 5:] - b[:, 5:]))) > 1e-3


@pytest.mark.parametrize("remat", [None, "full", "dots"])
@pytest.mark.parametrize("scan", [True, False])
def test_scan_and_remat_change_no_number(scan, remat):
    config = dataclasses.replace(SMALL, scan=scan, remat=remat)
    tokens = some_tokens()
    params, value = jax.jit(functools.partial(transformer.sgd_step, config))(
        params_of(config), tokens
    )
    plain = dataclasses.replace(SMALL, scan=False)
    want, want_value = transformer.sgd_step(plain, params_of(plain), tokens)
    if scan:
        want["layers"] = jax.tree.map(lambda *w: jnp.stack(w), *want["layers"])
    close((params, value), (want, want_value))


def products(jaxpr):
    """dot_general equations of a jaxpr, its bodies included."""
    here = sum(e.primitive.name == "dot_general" for e in jaxpr.eqns)
    return here + sum(products(inner) for e in jaxpr.eqns for inner in subjaxprs(e))


def subjaxprs(eqn):
    for value in eqn.params.values():
        for v in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(v, "jaxpr", v)
            if hasattr(inner, "eqns"):
                yield inner


@pytest.mark.parametrize(("remat", "again"), [("full", 5), ("dots", 2)])
def test_remat_computes_products_again(remat, again):
    """`dots` keeps the products of a weight; `full` all but the last, whose result none needs."""

    def count(remat):
        config = dataclasses.replace(SMALL, scan=False, remat=remat)
        step = functools.partial(transformer.sgd_step, config)
        jaxpr = jax.make_jaxpr(step)(transformer.abstract_params(config), some_tokens())
        return products(jaxpr.jaxpr)

    assert count(remat) - count(None) == SMALL.layers * again


def test_untied_logits_use_a_matrix_of_their_own():
    config = dataclasses.replace(SMALL, tied=False)
    params = params_of(config)
    assert params["unembedding"].shape == (24, 16)
    params["unembedding"] = jnp.zeros((24, 16))
    np.testing.assert_allclose(
        transformer.loss(config, params, some_tokens()), np.log(24), rtol=1e-6
    )


def test_bfloat16_activations_keep_float32_logits_and_gradients():
    config = dataclasses.replace(SMALL, dtype="bfloat16", activation="relu")
    params = params_of(config)
    value, grads = jax.value_and_grad(functools.partial(transformer.loss, config))(
        params, some_tokens()
    )
    assert transformer.logits(config, params, some_tokens()).dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert abs(float(value) - np.log(24)) < 1


def test_training_lowers_the_loss():
    step = jax.jit(functools.partial(transformer.sgd_step, SMALL, rate=0.5))
    params, tokens = params_of(SMALL), some_tokens()
    losses = []
    for _ in range(20):
        params, value = step(params, tokens)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"heads": 3}, "3 heads do not divide a model of 16: give head_dim"),
        ({"remat": "some"}, "remat is None, 'full' or 'dots', not 'some'"),
        ({"activation": "tanh"}, "activation is 'gelu' or 'relu', not 'tanh'"),
    ],
)
def test_settings_that_cannot_be(change, message):
    with pytest.raises(ValueError) as e:
        dataclasses.replace(SMALL, **change)
    assert str(e.value) == message


# ---------------------------------------------------------------- its annotations


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seven_annotations_a_layer(strategy):
    config = dataclasses.replace(SMALL, layers=3, scan=False)
    outside = 3  # the embedding, its output, the logits
    assert len(recorded_annotations(config, strategy)) == 3 * 7 + outside
    assert len(recorded_annotations(SMALL, strategy)) == 7 + outside  # a scan's body, once


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_spec_names_each_axis_once_and_every_dim(strategy):
    for shape, spec in recorded_annotations(SMALL, strategy):
        assert len(shape) == len(spec)
        named = [axis for axis in spec if axis]
        assert len(set(named)) == len(named)


def test_the_final_strategy_is_table_1s(shared):
    tables = json.loads((shared / "reference" / "paper_tables.json").read_text())
    table = tables["gspmd"]["table1_dims_mapping"]["authors_code_defaults"]
    names = {
        "w_qkv": "W_q/W_k/W_v [M,N,D]",
        "w_o": "W_o [N,D,M] (stored hdm)",
        "w_in": "W_in [M,H]",
        "w_out": "W_out [H,M]",
        "bsm": "BSM finalized",
        "bsnd": "BSND",
        "bsh": "BSH",
        "embedding": "embedding [V,M]",
        "logits": "logits [B,S,V]",
    }
    final = transformer.STRATEGIES["final"]
    assert {k: list(v) for k, v in final.items()} == {k: table[v] for k, v in names.items()}
    assert list(transformer.STRATEGIES["attempt2"]["bsm"]) == table["BSM attempt 2"]


def test_specs_use_the_meshs_own_names():
    assert transformer.spec("final", "w_o", ("data", "model")) == P("model", None, "data")
    assert transformer.spec("final", "bsnd") == P(None, "x", None, "y", None)


def test_an_unknown_strategy_is_named():
    with pytest.raises(ShardingError) as e:
        transformer.spec("attempt3", "bsm")
    assert str(e.value) == (
        "unknown strategy 'attempt3'\n"
        "  facts strategies are attempt1, attempt2, final\n"
        "  hint  see STRATEGIES for what each one splits"
    )


# ---------------------------------------------------------------- partitioned


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scan", [True, False])
def test_partitioned_equals_one_device(strategy, scan):
    config = dataclasses.replace(SMALL, scan=scan, remat="full" if scan else None)
    mesh = device_mesh({"x": 2, "y": 4})
    params, tokens = params_of(config), some_tokens()
    want = transformer.sgd_step(config, params, tokens)

    def step(annotate):
        return functools.partial(transformer.sgd_step, config, annotate=annotate, strategy=strategy)

    got = sw.spmd(step(sw.annotate), mesh=mesh)(params, tokens)
    close(jax.tree.map(np.asarray, got), want)
    # The second opinion: the same annotations as constraints of jax.jit.
    constrain = step(lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, spec)))
    close(jax.jit(constrain)(params, tokens), want)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_weights_lie_as_the_weights(strategy):
    mesh = device_mesh({"x": 2, "y": 4})
    step = functools.partial(transformer.sgd_step, SMALL, annotate=sw.annotate, strategy=strategy)
    plan = sw.spmd(step, mesh=mesh).plan(transformer.abstract_params(SMALL), some_tokens())
    new_params, _ = plan.out_shardings
    for name in ("w_qkv", "w_o", "w_in", "w_out"):
        want = P(None, *transformer.spec(strategy, name))
        assert plan.in_shardings[0]["layers"][name] == want
        assert new_params["layers"][name] == want
    assert plan.fallbacks == []
