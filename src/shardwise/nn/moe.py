"""The position-wise mixture-of-experts layer: GShard's Algorithm 2, and the same by gathers.

Tokens [G, S, M] are routed (`nn.gating`), sent to their experts' slots [E, G, C, M], put through each
expert's feed-forward network, and brought back, weighted.  Written with one-hot matrices, all of it is
einsums; a split of the groups and a split of the experts over the same devices turn sending and
bringing back into one all-to-all each.

    config = MoeConfig(model=128, hidden=512, gating=GatingConfig(experts=8))
    params = init(config, jax.random.key(0))
    y, stats = layer(config, params, x, key=key, shard=sharder(sw.annotate, "gshard"))

The layer knows no devices, only where an annotation belongs: `shard(value, name)` on the tensors
of TENSORS, of which GShard's three are enough.
A strategy says which are annotated, and how.

Letters of shapes: G groups, S tokens of a group, E experts, C capacity, M model, H hidden, k choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from shardwise.manual import axis_names, blocks_along, manual
from shardwise.nn import gating
from shardwise.nn.gating import GatingConfig, GatingStats, Routing
from shardwise.nn.strategies import spec_of

Array = jax.Array
Params = dict[str, Array]
Shard = Callable[[Array, str], Array]

X, Y = 0, 1  # mesh axes: X is the groups' and the experts' axis, Y splits an expert (hybrid)

_GSHARD = {"groups": (X, -1, -1), "gate": (-1, -1), "dispatched": (X, -1, -1, -1)}
_WEIGHTS = {"w_in": (X, -1, -1), "w_out": (X, -1, -1)}

STRATEGIES: dict[str, dict[str, tuple[int, ...]]] = {
    # Nothing: what the arguments' shardings say is all there is.
    "none": {},
    # Algorithm 2's three annotations and no more.
    "gshard": _GSHARD,
    # The weights' only: where the experts lie.
    "weights": _WEIGHTS,
    # Every tensor that crosses from groups to experts or back, on both sides of its way.
    "all": {**_GSHARD, **_WEIGHTS, "outputs": (X, -1, -1, -1), "returned": (X, -1, -1, -1)},
    # Experts that are split themselves (GSPMD section 5.4): E on X, H on Y.
    "hybrid": {**_GSHARD, "w_in": (X, -1, Y), "w_out": (X, Y, -1)},
}
"""Strategy -> tensor -> dims mapping: which mesh axis a dim is split over, -1 for none."""

TENSORS = ("groups", "gate", "dispatched", "w_in", "w_out", "outputs", "returned")
"""The tensors that may carry an annotation: x [G, S, M], the gate [M, E], the experts' inputs
[E, G, C, M], their weights [E, M, H] and [E, H, M], and their outputs, as computed, [E, G, C, M], and as
the tokens get them, [G, E, C, M]."""

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Sizes and choices of the layer.

    Attributes:
      model, hidden: M and H.
      gating: E and how tokens choose.
      activation: "relu" (the paper's), "gelu" or "silu".
      dispatch: how tokens reach their slots and come back: "einsum" multiplies with one-hot matrices
        [G, S, E, C], as GShard does; "gather" moves rows: the same values, G S E C M multiplications
        less, and nothing of that size in memory.
      dtype: of activations and of the weights' use; weights are float32, and so is all gating.
    """

    model: int
    hidden: int
    gating: GatingConfig
    activation: str = "relu"
    dispatch: str = "einsum"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("model", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.activation not in _ACTIVATIONS:
            choices = ", ".join(map(repr, _ACTIVATIONS))
            raise ValueError(f"activation is one of {choices}, not {self.activation!r}")
        if self.dispatch not in ("einsum", "gather"):
            raise ValueError(f"dispatch is 'einsum' or 'gather', not {self.dispatch!r}")


def spec(strategy: str, tensor: str, axes: tuple[str, ...] = ("x", "y")) -> P | None:
    """The annotation of a tensor under a strategy, or None: it has none.

    Raises:
      ShardingError: no such strategy or tensor.
    """
    return spec_of(STRATEGIES, strategy, tensor, axes, TENSORS)


def identity(value: Array, name: str) -> Array:
    """The annotation hook of a one-device run."""
    return value


def sharder(
    annotate: Callable[[Array, P], Array], strategy: str, axes: tuple[str, ...] = ("x", "y")
) -> Shard:
    """The hook `layer` takes, from `sw.annotate` (or jax's constraint) and a strategy."""

    def shard(value: Array, name: str) -> Array:
        s = spec(strategy, name, axes)
        return value if s is None else annotate(value, s)

    return shard


def param_shapes(config: MoeConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the layer's parameters."""
    e, m, h = config.gating.experts, config.model, config.hidden
    return {"gate": (m, e), "w_in": (e, m, h), "w_out": (e, h, m)}


def init(config: MoeConfig, key: Array) -> Params:
    """Random float32 parameters: {"gate": [M, E], "w_in": [E, M, H], "w_out": [E, H, M]}."""
    shapes = param_shapes(config)
    keys = jax.random.split(key, len(shapes))
    return {
        name: shape[-2] ** -0.5 * jax.random.normal(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def layer(
    config: MoeConfig,
    params: Params,
    x: Array,
    *,
    key: Array | None = None,
    train: bool = True,
    valid: Array | None = None,
    shard: Shard = identity,
    axis: str | tuple[str, ...] | None = None,
) -> tuple[Array, GatingStats]:
    """x [G, S, M] -> (y [G, S, M] in `config.dtype`, statistics).

    A token that no expert took has y = 0: add y to x.

    Args:
      config, params: as of `init`.
      x: groups of tokens (`gating.regroup`).
      key: for jitter and random routing; needed if `config.gating.needs_key(train)`.
      train: False for evaluation: no noise, and the evaluation's capacity.
      valid [G, S] bool: False for padding, which goes nowhere.
      shard: `shard(value, name)` annotates the tensors of TENSORS.
      axis: for `dispatch="gather"`, the mesh axis (or axes) over which groups and experts are split: each
        device moves its own groups' rows, and sends them to the experts by an all-to-all of its
        own, in a manual subgraph.  None: the partitioner sees gathers, as anything else.

    Raises:
      ValueError: x or a parameter of another shape; a key is needed and not given; an axis for einsums.
    """
    _check(config, params, x, axis)
    k_noise, k_route = (None, None) if key is None else jax.random.split(key)
    x = shard(x.astype(config.dtype), "groups")
    w_gate = shard(params["gate"], "gate").astype(jnp.float32)
    read = gating.jittered(config.gating, x, k_noise, train)
    logits = jnp.einsum("gsm,me->gse", read, w_gate)
    routing = gating.gate(config.gating, logits, key=k_route, train=train, valid=valid)
    if config.dispatch == "einsum":
        mask = gating.dispatch_mask(routing, x.dtype)
        dispatched = shard(jnp.einsum("gsec,gsm->egcm", mask, x), "dispatched")
        out = shard(_experts(config, params, dispatched, shard), "returned")
        y = jnp.einsum("gsec,gecm->gsm", gating.combine_weights(routing, x.dtype), out)
    else:
        dispatched = shard(_send(x, routing, axis), "dispatched")
        out = _experts(config, params, dispatched, shard)
        y = _return(out, routing, axis)
    return y, routing.stats


def _check(config: MoeConfig, params: Params, x: Array, axis: Any) -> None:
    if x.ndim != 3 or x.shape[-1] != config.model:
        raise ValueError(f"x is groups of tokens [G, S, {config.model}], not {list(x.shape)}")
    for name, shape in param_shapes(config).items():
        if params[name].shape != shape:
            raise ValueError(f"{name} is {list(shape)}, not {list(params[name].shape)}")
    if axis is not None and config.dispatch != "gather":
        raise ValueError("axis is for dispatch='gather': einsums are annotated, by shard")


def _experts(config: MoeConfig, params: Params, dispatched: Array, shard: Shard) -> Array:
    """Each expert's feed-forward network: [E, G, C, M] -> [G, E, C, M]."""
    w_in = shard(params["w_in"], "w_in").astype(dispatched.dtype)
    w_out = shard(params["w_out"], "w_out").astype(dispatched.dtype)
    hidden = _ACTIVATIONS[config.activation](jnp.einsum("egcm,emh->egch", dispatched, w_in))
    return jnp.moveaxis(shard(jnp.einsum("egch,ehm->egcm", hidden, w_out), "outputs"), 0, 1)


# --- moving rows ------------------------------------------------------------------------------------


def _send(x: Array, routing: Routing, axis: Any) -> Array:
    """x [G, S, M] to the slots [E, G, C, M]; a slot that no token has holds 0."""
    place, experts, capacity = gating.places(routing), routing.experts, routing.capacity
    if axis is None:
        return jnp.moveaxis(to_slots(x, place, experts, capacity), 1, 0)
    names, count = axis_names(axis), blocks_along(axis)
    padded = -(-experts // count) * count

    def send(x: Array, place: Array) -> Array:
        rows = to_slots(x, place, padded, capacity)
        return lax.all_to_all(jnp.moveaxis(rows, 1, 0), names, 0, 1, tiled=True)

    f = manual(send, in_specs=(P(names), P(names)), out_specs=P(names), axes=names)
    out = f(_fill(x, count, 0), _fill(place, count, -1))
    return out[:experts, : x.shape[0]]


def _return(out: Array, routing: Routing, axis: Any) -> Array:
    """The experts' outputs [G, E, C, M] to the tokens [G, S, M], weighted."""
    place, weight, groups = gating.places(routing), routing.weight, out.shape[0]
    if axis is None:
        return to_tokens(out, place, weight)
    names, count = axis_names(axis), blocks_along(axis)

    def back(out: Array, place: Array, weight: Array) -> Array:
        rows = lax.all_to_all(out, names, 0, 1, tiled=True)
        return to_tokens(rows, place, weight)

    specs = (P(None, names), P(names), P(names))
    f = manual(back, in_specs=specs, out_specs=P(names), axes=names)
    out = jnp.moveaxis(_fill(jnp.moveaxis(out, 1, 0), count, 0), 0, 1)
    return f(_fill(out, count, 0), _fill(place, count, -1), _fill(weight, count, 0))[:groups]


def _fill(x: Array, count: int, value: int) -> Array:
    """x with rows added until `count` divides them."""
    more = -x.shape[0] % count
    if not more:
        return x
    return jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1), constant_values=value)


def to_slots(x: Array, place: Array, experts: int, capacity: int) -> Array:
    """[G, S, M] -> [G, E, C, M]: each slot has one token at most, so adding is placing."""

    def one(x: Array, place: Array) -> Array:
        # What goes nowhere is added as zeros to the first slot.
        rows = jnp.where(place[..., None] < 0, 0, x[:, None])
        slots = jnp.zeros((experts * capacity, x.shape[-1]), x.dtype)
        return slots.at[jnp.maximum(place, 0)].add(rows)

    return jax.vmap(one)(x, place).reshape(x.shape[0], experts, capacity, x.shape[-1])


def to_tokens(out: Array, place: Array, weight: Array) -> Array:
    """[G, E, C, M] -> [G, S, M]: the rows of a token's slots, weighted."""
    groups, experts, capacity, model = out.shape
    rows = out.reshape(groups, experts * capacity, model)
    picked = jax.vmap(lambda r, at: r[at])(rows, jnp.maximum(place, 0))  # [G, S, k, M]
    return jnp.einsum("gsk,gskm->gsm", weight.astype(out.dtype), picked)
