"""transformers' caches over pages."""
