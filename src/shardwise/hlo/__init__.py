"""Optimised HLO text: what XLA made of a program, and what that program sends."""

from shardwise.hlo.wire import WireOp as WireOp
from shardwise.hlo.wire import WireReport as WireReport
from shardwise.hlo.wire import ring_bytes as ring_bytes
from shardwise.hlo.wire import wire_bytes as wire_bytes
from shardwise.hlo.wire import wire_report as wire_report
