"""Oracles: brute force over a rule's layouts, and whole programs against one device."""

from shardwise.testing.check import CheckFailed, check

__all__ = ["CheckFailed", "check"]
