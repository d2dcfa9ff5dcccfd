"""Kernels made of PyTorch's own ops."""
