"""Oracles: brute force over a rule's layouts, and whole programs against one device."""
