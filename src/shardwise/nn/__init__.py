"""Models written for one device, with the papers' sharding strategies as data."""

from shardwise.nn import encoder_decoder as encoder_decoder
from shardwise.nn import gating as gating
from shardwise.nn import moe as moe
from shardwise.nn import transformer as transformer
