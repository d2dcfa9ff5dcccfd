"""Kernels of sgl-kernel: FlashAttention-3, FlashMLA, CUTLASS MLA, sparse attention."""
