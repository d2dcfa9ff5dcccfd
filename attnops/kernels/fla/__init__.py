"""Kernels of flash-linear-attention."""
