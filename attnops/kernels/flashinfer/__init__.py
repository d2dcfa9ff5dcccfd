"""Kernels of FlashInfer, TensorRT-LLM's among them."""
