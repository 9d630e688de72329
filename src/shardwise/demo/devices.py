"""Virtual CPU devices: one process that JAX sees as several devices."""

from __future__ import annotations

import os

_FLAG = "--xla_force_host_platform_device_count"


def ask_for(count: int) -> None:
    """Set the environment so that JAX starts with `count` CPU devices (and children of ours do)."""
    kept = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_FLAG}={count}"])
    os.environ["JAX_PLATFORMS"] = "cpu"


def start(count: int) -> bool:
    """Start JAX's CPU backend with `count` devices; False when it had started with others before.

    JAX reads the environment when its backend starts, which happens once in a process.
    """
    ask_for(count)
    import jax

    # The platforms were read when jax was imported, which may have been before this call.
    jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()
    return len(devices) >= count and devices[0].platform == "cpu"
