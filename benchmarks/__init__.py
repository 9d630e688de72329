"""Measurements of shardwise beside jax.jit: `python -m benchmarks --help`.

Every figure is taken from the program that runs: bytes from the compiled HLO, memory from the
compiler, times from paired runs that alternate between the two sides.
"""
