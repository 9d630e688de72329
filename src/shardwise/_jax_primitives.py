"""Primitives that JAX has no public name for, and what they are lowered to (see `_jax`)."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

from jax._src import core


def lax_primitives(module: str) -> dict[str, Any]:
    """The primitives of a module of `lax` by name; not all have a public one."""
    found = vars(importlib.import_module(f"jax._src.lax.{module}")).values()
    return {p.name: p for p in found if isinstance(p, core.Primitive)}


def key_primitives() -> dict[str, Any]:
    """Primitives of random keys by name; only some of them have a public name."""
    from jax._src.random import core as random_core
    from jax._src.random import prng

    found = {}
    for module in (prng, random_core):
        for name, p in vars(module).items():
            if name.endswith("_p") and isinstance(p, core.Primitive):
                found[name.removesuffix("_p")] = p
    return found


def collective_primitives() -> dict[str, Any]:
    """Collective primitives by name; `jax.lax` has only functions that check and cast first."""
    from jax._src.lax import parallel

    found = (p for p in vars(parallel).values() if isinstance(p, core.Primitive))
    return {p.name: p for p in found}


def generator_primitives() -> dict[str, Any]:
    """Primitives of all of JAX's random generators, by name."""
    import jax._src.random as package

    found = {}
    for module in vars(package).values():
        if isinstance(module, types.ModuleType):
            found.update(
                {p.name: p for p in vars(module).values() if isinstance(p, core.Primitive)}
            )
    return found


def inner_primitives() -> dict[str, Any]:
    """Primitives without a public name that programs contain, by name."""
    from jax._src import xla_metadata
    from jax._src.lax.lax import dce_sink_p
    from jax._src.lax.scaled_dot import scaled_dot_p

    found = (xla_metadata.xla_metadata_value_p, scaled_dot_p, dce_sink_p)
    return {p.name: p for p in found}


def cudnn_primitives() -> dict[str, Any]:
    """The primitives of cuDNN's kernels that users' calls bind, by name."""
    from jax._src.cudnn import fused_attention_stablehlo, scaled_matmul_stablehlo

    modules = (fused_attention_stablehlo, scaled_matmul_stablehlo)
    found = [p for m in modules for p in vars(m).values() if isinstance(p, core.Primitive)]
    return {p.name: p for p in found}


def gamma_one(key: Any, alpha: Any, log_space: bool) -> Any:
    """One gamma variate from one key: what `random_gamma` does for each element."""
    from jax._src.random import core as random_core

    return random_core._gamma_one(key, alpha, log_space)


def implementation(primitive: Any) -> Callable[..., Any] | None:
    """The Python function a primitive of `jax.experimental.sparse` abbreviates."""
    name = f"_{primitive.name}_impl"
    for module in list(sys.modules):
        if module.startswith("jax.experimental.sparse") and hasattr(sys.modules[module], name):
            return getattr(sys.modules[module], name)
    return None


def philox_rounds(primitive: Any) -> Callable[..., Any]:
    """The arithmetic a philox primitive is lowered to."""
    module = importlib.import_module(f"jax._src.random.{primitive.name}")
    return getattr(module, f"_{primitive.name}_lowering")


def all_primitives() -> dict[str, Any]:
    """Every primitive of the JAX at hand, by name: those its public modules bring in."""
    for name in _PUBLIC.split():
        with contextlib.suppress(ImportError, AttributeError):
            importlib.import_module(f"jax.{name}")
    found = {}
    for name, module in sorted(sys.modules.items()):
        if module is not None and name.split(".")[0] == "jax":
            found.update(
                {p.name: p for p in vars(module).values() if isinstance(p, core.Primitive)}
            )
    return found


_PUBLIC = """
    ad_checkpoint custom_batching custom_derivatives debug dtypes export ffi image lax lax.linalg nn
    numpy ops random ref scipy scipy.linalg scipy.signal scipy.sparse.linalg scipy.special scipy.stats
    experimental.buffer_callback experimental.checkify experimental.compute_on
    experimental.custom_partitioning experimental.fused experimental.hijax experimental.jet
    experimental.layout experimental.multihost_utils experimental.ode experimental.pallas
    experimental.rnn experimental.scheduling_groups experimental.shard_map experimental.sparse
    experimental.sparse.linalg experimental.xla_metadata
    _src.cudnn.fusion _src.cudnn.scaled_matmul_stablehlo _src.cudnn.fused_attention_stablehlo
"""
