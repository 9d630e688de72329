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


def parse_axes(text: str) -> dict[str, int]:
    """`"x=2,y=4"` -> {"x": 2, "y": 4}.

    Raises:
      ValueError: not names and sizes, or a name twice.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (s.strip() for s in part.partition("="))
        if not (name.isidentifier() and equals and size.isdecimal() and int(size) > 0):
            raise ValueError(f"--mesh {text!r}: {part!r} is not NAME=SIZE, as in x=2,y=4")
        if name in axes:
            raise ValueError(f"--mesh {text!r}: axis {name!r} is given twice")
        axes[name] = int(size)
    return axes
