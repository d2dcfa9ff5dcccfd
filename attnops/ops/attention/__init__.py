"""Attention of dense and of packed tensors, and merges of partial results."""
