"""Pipelining as tensor sharding (GSPMD 3.3): a stack of layers, its stage dim split over a mesh axis."""

from shardwise.pipeline.draw import svg, text
from shardwise.pipeline.layers import deal, undeal
from shardwise.pipeline.schedule import Schedule
from shardwise.pipeline.stages import Packed, pack, pipeline_stages
from shardwise.pipeline.tables import recomputation
from shardwise.pipeline.wrapper import pipeline

__all__ = [
    "Packed",
    "Schedule",
    "deal",
    "pack",
    "pipeline",
    "pipeline_stages",
    "recomputation",
    "svg",
    "text",
    "undeal",
]
