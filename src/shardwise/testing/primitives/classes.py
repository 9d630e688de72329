"""What becomes of each primitive: every name JAX has is in exactly one class.

The classes `rule`, `handler`, `spelled`, `inlined` and `refused` are read off the code that does it.
The others are the tables below; a test fails when a primitive is in none, or a line is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from shardwise import capture, refused, spelling
from shardwise.ops.registry import registered

# Bound inside a user's `jax.shard_map` only: they name mesh axes.
MANUAL = """
    all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start
    all_gather_start all_to_all all_to_all_done all_to_all_start axis_index pbroadcast pbroadcast_done
    pbroadcast_start pmax pmin ppermute ppermute_done ppermute_start precv preduced psend psum psum_done
    psum_invariant psum_invariant_start psum_start pvary ragged_all_to_all reduce_scatter
    reduce_scatter_done reduce_scatter_start reduced_vary_cast_p unreduced_psum unreduced_psum_start
    unreduced_reduce_scatter unreduced_reduce_scatter_start vary_unreduced_cast_p
"""

# Bound inside Pallas kernels only.
KERNEL = """
    broadcast_to create_linear delay get_global jaxpr_call masked_load masked_swap multiple_of
    num_programs pin program_id reciprocal run_scoped semaphore_read semaphore_signal
    semaphore_wait unpin with_memory_space_constraint empty_ref
"""

# Made ordinary before rules see a program: references become values, high-level types their parts.
LOWERED = """
    new_ref freeze new_box box_get box_set new_log log_extend log_read call_hi_primitive
    call_hi_primitive_linearized platform_index
"""

# Never in a traced program: JAX binds them while it differentiates or lowers, or not at all.
INTERNAL = """
    coo_spmm coo_spmv csr_spmm csr_spmv custom_jvp_call_jaxpr dot_product_attention_bwd
    dot_product_attention_fp8_bwd dot_product_attention_fp8_fwd dot_product_attention_fwd empty2
    from_edtype scaled_matmul to_edtype unreachable zeros_like
"""

_CORES = "a Pallas kernel over the cores of one chip: nothing says which dims it maps over"
_CUDNN = "a cuDNN kernel: one GPU's call, opaque to rules"

# Run whole on every device, with a line in `plan.fallbacks`; each has its reason.
FALLBACK: dict[str, str] = {
    "buffer_callback": "host code on device buffers: nothing says which dims it maps over",
    "call_exported": "an exported program is compiled code: nothing says which dims it maps over",
    "core_map": _CORES,
    "dot_product_attention_fp8_bwd_wrapper": _CUDNN,
    "dot_product_attention_fp8_fwd_wrapper": _CUDNN,
    "mpmd_map": _CORES,
    "rnn_bwd": _CUDNN,
    "rnn_fwd": _CUDNN,
    "spsolve": "a sparse direct solver: one host's or one GPU's library call",
}


def names(table: str) -> frozenset[str]:
    return frozenset(table.split())


def handled() -> frozenset[str]:
    """Primitives with a handler: every module that handles some lists them in `HANDLERS`."""
    modules = [m for n, m in sys.modules.items() if n.startswith("shardwise.") and m is not None]
    return frozenset(name for m in modules for name in getattr(m, "HANDLERS", ()))


def ruled() -> frozenset[str]:
    """Primitives of programs that have a rule; rules of manual regions serve those alone."""
    return frozenset(p.name for p in registered()) - names(MANUAL)


def classes_of(name: str) -> list[str]:
    """The classes a primitive is in, the one that takes effect first."""
    members: dict[str, Iterable[str]] = {
        "inlined": {*capture._INLINED, "reshard"},
        "identity": capture._IDENTITIES - names(MANUAL),
        "rule": ruled(),
        "handler": handled(),
        "spelled": spelling._SPELLINGS.keys() - names(MANUAL),
        "refused": refused.REFUSED,
        "lowered": names(LOWERED),
        "manual": names(MANUAL),
        "kernel": names(KERNEL),
        "internal": names(INTERNAL),
        "fallback": FALLBACK,
    }
    return [c for c, found in members.items() if name in found]
