"""Prompts, decode steps and the sampler of `generate()`, in CUDA graphs."""
