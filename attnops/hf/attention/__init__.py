"""Attention and its masks, as transformers calls them."""
