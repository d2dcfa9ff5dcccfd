"""Attention over pages of latents (MLA), and the writes into them."""
