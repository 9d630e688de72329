"""`shardwise demo`: train a language model on 8 virtual devices and show every decision."""
