"""Tensors that say where tokens and pages are."""
