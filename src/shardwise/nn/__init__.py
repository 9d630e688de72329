"""Models written for one device, with the papers' sharding strategies as data."""

from shardwise.nn import transformer as transformer
