"""Translation of many languages into English: the data, the vocabularies, the batches, the scores.

`catalogues` reads parallel text from installed packages, `vocabulary` trains subwords on it,
`batches` draws training batches that depend on (seed, step) alone and `prefetch` builds them ahead on a
thread; `evaluate` decodes a test set and `score` compares with its references.

What this package imports beyond jax and numpy comes with `pip install 'shardwise[translation]'`.
"""
