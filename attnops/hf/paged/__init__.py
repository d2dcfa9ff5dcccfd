"""Models over pages: caches, the attention of their layers, and decode steps."""
