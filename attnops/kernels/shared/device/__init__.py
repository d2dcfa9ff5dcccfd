"""Triton device functions that several backends launch."""
