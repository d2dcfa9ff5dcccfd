"""Device functions. Importing a module here imports triton; types and annotations are Triton's, not Python's."""
