"""Every primitive of JAX: how it is partitioned, an example of it, and docs/primitives.md.

    python -m shardwise.testing.primitives > docs/primitives.md

`classes` says what becomes of each; `examples/` holds one equation of each that has a rule, which
serves both the page and a brute-force test; `page` writes the page from the rules themselves.
"""
