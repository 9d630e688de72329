"""shardwise: a JAX program for one device, a few sharding annotations, one SPMD program for many."""

from shardwise import ops as _ops  # noqa: F401  (registers the rules)
from shardwise.annotate import annotate, mesh_split, replicate, shard, split
from shardwise.api import Spmd, spmd
from shardwise.batched import batched
from shardwise.blocks import auto_to_manual, manual_to_auto
from shardwise.cost.comm import Collective
from shardwise.errors import ShardingError
from shardwise.manual import manual
from shardwise.mesh import MeshAxes, abstract_mesh, device_mesh
from shardwise.notes import Fallback
from shardwise.padded import PaddedArray
from shardwise.pipeline import pipeline
from shardwise.plan import Plan
from shardwise.sharding import Layout, Sharding

__all__ = [
    "Collective",
    "Fallback",
    "Layout",
    "MeshAxes",
    "PaddedArray",
    "Plan",
    "Sharding",
    "ShardingError",
    "Spmd",
    "abstract_mesh",
    "annotate",
    "auto_to_manual",
    "batched",
    "device_mesh",
    "manual",
    "manual_to_auto",
    "mesh_split",
    "pipeline",
    "replicate",
    "shard",
    "split",
    "spmd",
]
