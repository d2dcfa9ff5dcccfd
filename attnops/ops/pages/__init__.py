"""Attention over pages of a cache, the writes into them, and their plans."""
