"""Helpers that kernels of several backends use."""
