"""attnops' own kernels in Triton."""
