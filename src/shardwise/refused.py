"""Primitives that cannot be part of a partitioned program: an error that says why, and what to do.

They hold what is no array (a token, a reference to memory outside, a proof obligation), or sizes that
are not known yet; jit itself takes none of them, or only where nothing is partitioned.
"""

from __future__ import annotations

from shardwise.errors import ShardingError

_TOKEN = ("it makes a token, which is no array", "leave it out: jit keeps effects in order itself")
_OUTSIDE = (
    "it reads or writes a reference from outside the program",
    "pass its value as an argument and return the new one; references made inside "
    "(`jax.new_ref`) are fine",
)
_CHECK = (
    "an assertion of checkify is not a computation yet",
    "partition what `checkify.checkify(fn)` returns",
)
_SIZES = (
    "it depends on a size that is not known",
    "plan with numbers for the sizes; symbolic ones belong to `jax.export`",
)
_HOSTS = (
    "it moves arrays between hosts",
    "call it outside, on the program's arguments or results",
)

REFUSED: dict[str, tuple[str, str]] = {
    "after_all": _TOKEN,
    "create_token": _TOKEN,
    "check": _CHECK,
    **dict.fromkeys(("get", "swap", "addupdate", "accum_grad_in_ref", "free_ref"), _OUTSIDE),
    **dict.fromkeys(("dim_as_value", "dimension_size", "shape_assertion"), _SIZES),
    **dict.fromkeys(
        ("global_array_to_host_local_array", "host_local_array_to_global_array"), _HOSTS
    ),
}


def refuse(name: str, where: str) -> None:
    """Raise when a primitive is one of those.

    Raises:
      ShardingError: with what to do instead.
    """
    if name in REFUSED:
        facts, hint = REFUSED[name]
        what = f"`{name}` cannot be part of a partitioned program"
        raise ShardingError(what, where=where, facts=facts, hint=hint)
