"""Which experts a token goes to: GShard's Algorithm 1 (section 2.2), for any number of choices.

Tokens come in groups of S, each routed by itself (*local groups*).  A token's gates are the softmax
of its logits; its choices are the k experts with the largest gates, equal ones lowest first.  All
first choices come before all second ones, each in the order of the tokens.  An expert has C slots a
group (*capacity*): a choice takes the slot that the expert's counter shows, and is dropped if there
are only fewer.  The counter goes on in any case: for a choice beyond capacity, and for a second one
that random routing leaves out (lines 11 and 22).

    routing = gate(GatingConfig(experts=8), logits, key=key)
    y = einsum("gsec,gecm->gsm", combine_weights(routing, x.dtype), expert_outputs)

Everything is computed in float32, whatever the activations are.  Each mechanism has its own switch:
capacity (`capacity_factor=None`), local groups (`regroup(x, 1)`), the auxiliary loss (`aux_loss`) and
random routing (`random_routing`).

Letters of shapes: G groups, S tokens of a group, E experts, C capacity, k choices, M model.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class GatingConfig:
    """How tokens choose experts.

    Attributes:
      experts: E.
      k: choices of a token: 1 is Switch's, 2 GShard's.
      capacity_factor: slots of an expert, for a group, over the k S / E that an even load takes.  1.0 is
        GShard's C = 2N/(GE).  (Lingvo's and praxis' factor is over S / E: theirs is k times ours.)
        None: no limit, C = S.
      eval_capacity_factor: the same where `train=False`.  Nothing evens the load of a batch that is
        evaluated, so it has room to spare (Mesh TensorFlow's default).
      min_capacity: slots at least, for small groups; never more than S.
      random_routing: in training, choice j > 1 is used with probability k times its weight only
        (twice, for GShard's second expert).
      reuse_slots: a choice that random routing leaves out takes no slot (Lingvo's way); False is
        Algorithm 1's, where the counter goes on.
      aux_loss: compute the auxiliary loss; else it is 0.
      aux_scaled: the auxiliary loss times E^2 (Lingvo's and Mesh TensorFlow's way): 1 where load is
        even, whatever E.  False is the paper's: 1 / E^2 where load is even.
      normalize: weights are gates over the sum of the token's k gates.  None: if k > 1 (one
        normalized gate would be 1, and teach the gate nothing).
      jitter: in training, the gate reads x times uniform noise in [1 - jitter, 1 + jitter].

    Raises:
      ValueError: a number out of range.
    """

    experts: int
    k: int = 2
    capacity_factor: float | None = 1.0
    eval_capacity_factor: float | None = 2.0
    min_capacity: int = 4
    random_routing: bool = True
    reuse_slots: bool = False
    aux_loss: bool = True
    aux_scaled: bool = False
    normalize: bool | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.experts < 1:
            raise ValueError(f"experts must be at least 1, not {self.experts}")
        if not 1 <= self.k <= self.experts:
            raise ValueError(f"k must be 1 to {self.experts} (experts), not {self.k}")
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            if factor is not None and not factor > 0:
                raise ValueError(f"{name} must be above 0, or None for no limit, not {factor}")
        if self.min_capacity < 1:
            raise ValueError(f"min_capacity must be at least 1, not {self.min_capacity}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), not {self.jitter}")

    @property
    def normalized(self) -> bool:
        return self.k > 1 if self.normalize is None else self.normalize

    def capacity(self, tokens: int, train: bool = True) -> int:
        """C: an expert's slots for a group of `tokens`."""
        factor = self.capacity_factor if train else self.eval_capacity_factor
        if factor is None:
            return tokens
        # Rounded first: 2 * 12 * 1.1 / 8 is 3.3000000000000003, and such must not cost a slot.
        wanted = math.ceil(round(self.k * tokens * factor / self.experts, 9))
        return min(tokens, max(self.min_capacity, wanted))

    def needs_key(self, train: bool) -> bool:
        """Whether `gate` or `jittered` draws anything."""
        return train and (self.jitter > 0 or (self.random_routing and self.k > 1))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["aux_loss", "overflow", "dropped", "load", "second", "entropy"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class GatingStats:
    """What the gating did, over all groups; float32.

    Attributes:
      aux_loss []: mean over groups of (1/E) sum_e (c_e / S) m_e, c_e first choices of e (those beyond
        capacity too), m_e the mean gate of e.  Differentiable through m_e.
      overflow []: share of tokens that no expert took.
      dropped []: share of the choices made (random routing's omissions apart) that found no slot.
      load [E]: share of tokens that an expert took; adds up to the experts of an average token.
      second []: share of tokens whose second choice was taken (0 if k is 1).
      entropy []: mean entropy of a token's gates, in nats: log(E) where they are even.
    """

    aux_loss: Array
    overflow: Array
    dropped: Array
    load: Array
    second: Array
    entropy: Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["expert", "slot", "weight", "kept", "stats"],
    meta_fields=["experts", "capacity"],
)
@dataclasses.dataclass(frozen=True)
class Routing:
    """Where each token goes.

    Attributes:
      expert [G, S, k] int32: its choices, the largest gate first.
      slot [G, S, k] int32: its place among the expert's C (0 where dropped).
      weight [G, S, k] float32: of the expert's output in the token's (0 where dropped).
      kept [G, S, k] bool: the choice has a slot.
      stats: of all groups.
      experts, capacity: E and C.
    """

    expert: Array
    slot: Array
    weight: Array
    kept: Array
    stats: GatingStats
    experts: int
    capacity: int


def gate(
    config: GatingConfig,
    logits: Array,
    *,
    key: Array | None = None,
    train: bool = True,
    valid: Array | None = None,
) -> Routing:
    """Route tokens by their logits [G, S, E].

    Args:
      config: the mechanisms.
      logits: of the gate; computed on in float32.
      key: for random routing; needed only if `config.random_routing`, k > 1 and `train`.
      train: False: no random routing, and `eval_capacity_factor`.
      valid [G, S] bool: False for padding: such a token goes nowhere, takes no slot and counts in no
        statistic.  None: all are tokens.

    Returns:
      The routing; its weights and its auxiliary loss are differentiable in `logits`.

    Raises:
      ValueError: logits of another shape, or a key is needed and not given.
    """
    if logits.ndim != 3 or logits.shape[-1] != config.experts:
        raise ValueError(f"logits are [G, S, {config.experts}], not {list(logits.shape)}")
    _, tokens, experts = logits.shape
    capacity = config.capacity(tokens, train)
    gates = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    chosen = _choose(gates, config.k)
    hot = [_one_hot(e, experts) for e in chosen]
    weight = jnp.stack([jnp.sum(jnp.where(h, gates, 0.0), axis=-1) for h in hot], axis=-1)
    if config.normalized:
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)

    wanted = jnp.broadcast_to(True if valid is None else valid[..., None], weight.shape)
    counted = wanted
    if train and config.random_routing and config.k > 1:
        if key is None:
            raise ValueError("random routing needs a key: give key=, or random_routing=False")
        wanted = wanted & _random_routing(lax.stop_gradient(weight), key)
        counted = wanted if config.reuse_slots else counted
    slot = _slots(hot, counted)
    kept = wanted & (slot < capacity)
    weight = jnp.where(kept, weight, 0.0)
    return Routing(
        expert=jnp.stack(chosen, axis=-1),
        slot=jnp.where(kept, slot, 0),
        weight=weight,
        kept=kept,
        stats=_stats(config, gates, hot, wanted, kept, valid),
        experts=experts,
        capacity=capacity,
    )


def _one_hot(index: Array, size: int) -> Array:
    """[...] -> [..., size] bool."""
    at = lax.broadcasted_iota(jnp.int32, (*index.shape, size), index.ndim)
    return at == index[..., None]


def _choose(gates: Array, k: int) -> list[Array]:
    """The k largest of each token, in order: k times the largest that is left (k is small)."""
    chosen, left = [], lax.stop_gradient(gates)
    for _ in range(k):
        chosen.append(jnp.argmax(left, axis=-1).astype(jnp.int32))
        left = jnp.where(_one_hot(chosen[-1], gates.shape[-1]), -1.0, left)
    return chosen


def _random_routing(weight: Array, key: Array) -> Array:
    """[G, S, k] bool: the first choice always, others with probability k times their weight."""
    k = weight.shape[-1]
    lot = jax.random.uniform(key, (*weight.shape[:-1], k - 1))
    rest = k * weight[..., 1:] > lot
    return jnp.concatenate([jnp.ones_like(rest[..., :1]), rest], axis=-1)


def _slots(hot: list[Array], counted: Array) -> Array:
    """[G, S, k] int32: what the expert's counter shows when a choice's turn comes."""
    before = jnp.zeros_like(hot[0][:, :1], jnp.int32)  # [G, 1, E]: of all earlier choices
    slots = []
    for j, h in enumerate(hot):
        ones = (h & counted[..., j : j + 1]).astype(jnp.int32)
        count = before + jnp.cumsum(ones, axis=1) - ones
        slots.append(jnp.sum(jnp.where(h, count, 0), axis=-1))
        before = before + jnp.sum(ones, axis=1, keepdims=True)
    return jnp.stack(slots, axis=-1)


def _stats(
    config: GatingConfig,
    gates: Array,
    hot: list[Array],
    wanted: Array,
    kept: Array,
    valid: Array | None,
) -> GatingStats:
    """Sums of each group, put side by side: over split groups they cost one all-reduce of E + 7."""
    groups, tokens, experts = gates.shape
    real = jnp.ones((groups, tokens)) if valid is None else valid.astype(jnp.float32)
    n = jnp.sum(real, axis=1)  # [G]
    aux = jnp.zeros((groups,))
    if config.aux_loss:
        share = jnp.sum(hot[0] * real[..., None], axis=1) / jnp.maximum(n, 1)[:, None]
        mean = jnp.sum(gates * real[..., None], axis=1) / jnp.maximum(n, 1)[:, None]
        aux = jnp.mean(share * mean, axis=-1) * (experts**2 if config.aux_scaled else 1)
    fixed = lax.stop_gradient(gates)
    entropy = -jnp.sum(fixed * jnp.log(jnp.maximum(fixed, jnp.finfo(jnp.float32).tiny)), axis=-1)
    taken = sum(jnp.sum(h & kept[..., j : j + 1], axis=1) for j, h in enumerate(hot))
    second = jnp.sum(kept[..., 1], axis=1) if config.k > 1 else jnp.zeros((groups,))
    columns = [
        aux,
        n,
        jnp.sum(real * ~jnp.any(kept, axis=-1), axis=1),
        jnp.sum(wanted & ~kept, axis=(1, 2)),
        jnp.sum(wanted, axis=(1, 2)),
        second,
        jnp.sum(entropy * real, axis=1),
    ]
    table = jnp.concatenate([jnp.stack(columns, axis=-1).astype(jnp.float32), taken], axis=-1)
    total = lax.optimization_barrier(jnp.sum(table, axis=0))  # one sum to finish, not its parts
    aux, n, lost, dropped, asked, second, entropy = total[:7]
    n = jnp.maximum(n, 1)
    return GatingStats(
        aux_loss=aux / groups,
        overflow=lost / n,
        dropped=dropped / jnp.maximum(asked, 1),
        load=total[7:] / n,
        second=second / n,
        entropy=entropy / n,
    )


def places(routing: Routing) -> Array:
    """[G, S, k] int32: e C + c, the slot among all experts' of a group; -1 where dropped."""
    place = routing.expert * routing.capacity + routing.slot
    return jnp.where(routing.kept, place, -1)


def _spread(routing: Routing) -> list[Array]:
    """For each choice, [G, S, E, C] bool: the token's slot."""
    shape = (*routing.expert.shape[:2], routing.experts, routing.capacity)
    number = lax.broadcasted_iota(jnp.int32, shape, 2) * routing.capacity
    number = number + lax.broadcasted_iota(jnp.int32, shape, 3)
    place = places(routing)
    return [place[..., j, None, None] == number for j in range(place.shape[-1])]


def combine_weights(routing: Routing, dtype: jax.typing.DTypeLike = jnp.float32) -> Array:
    """[G, S, E, C]: the weight of each slot in each token's output (Algorithm 2)."""
    out = jnp.zeros((), dtype)
    for j, here in enumerate(_spread(routing)):
        out = jnp.where(here, routing.weight[..., j, None, None].astype(dtype), out)
    return out


def dispatch_mask(routing: Routing, dtype: jax.typing.DTypeLike = jnp.float32) -> Array:
    """[G, S, E, C]: 1 where the token has the slot, else 0 (Algorithm 2)."""
    return functools.reduce(jnp.logical_or, _spread(routing)).astype(dtype)


def top2_gating(
    logits: Array,
    config: GatingConfig,
    *,
    key: Array | None = None,
    train: bool = True,
    valid: Array | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[Array, Array, Array, GatingStats]:
    """GShard's name for it: (combine weights, dispatch mask, auxiliary loss, statistics)."""
    routing = gate(config, logits, key=key, train=train, valid=valid)
    combine, mask = combine_weights(routing, dtype), dispatch_mask(routing, dtype)
    return combine, mask, routing.stats.aux_loss, routing.stats


def jittered(config: GatingConfig, x: Array, key: Array | None, train: bool = True) -> Array:
    """What the gate reads: x in float32, in training times uniform noise near 1 (Switch 2.2)."""
    x = x.astype(jnp.float32)
    if not train or not config.jitter:
        return x
    if key is None:
        raise ValueError("jitter needs a key: give key=, or jitter=0")
    noise = jax.random.uniform(key, x.shape, minval=1 - config.jitter, maxval=1 + config.jitter)
    return x * noise


def regroup(x: Array, groups: int, valid: Array | None = None) -> tuple[Array, Array | None]:
    """Tokens [B, T, ...] as groups [G, S, ...]; `groups=1` switches local groups off.

    Args:
      x: the tokens; B T of them.
      groups: G.  With B split over a mesh axis, a multiple of the axis keeps tokens where they are.
      valid [B, T] bool: False for padding.

    Returns:
      x [G, S, ...] with S = ceil(B T / G), and valid [G, S] (None if all are tokens): where G does not
      divide, the last group is filled up with padding.

    Raises:
      ValueError: no groups.
    """
    if groups < 1:
        raise ValueError(f"groups must be at least 1, not {groups}")
    tokens = x.shape[0] * x.shape[1]
    size = -(-tokens // groups)
    more = groups * size - tokens
    if more and valid is None:
        valid = jnp.ones(x.shape[:2], bool)

    def cut(y: Array) -> Array:
        y = y.reshape(tokens, *y.shape[2:])
        if more:
            y = jnp.pad(y, [(0, more)] + [(0, 0)] * (y.ndim - 1))
        return y.reshape(groups, size, *y.shape[1:])

    return cut(x), None if valid is None else cut(valid)


def ungroup(y: Array, batch: int, tokens: int) -> Array:
    """Groups [G, S, ...] as they came, [batch, tokens, ...]: undoes `regroup`."""
    flat = y.reshape(y.shape[0] * y.shape[1], *y.shape[2:])
    return flat[: batch * tokens].reshape(batch, tokens, *y.shape[2:])
