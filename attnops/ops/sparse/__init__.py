"""Attention over keys that an index picks."""
