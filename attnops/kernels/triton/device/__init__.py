"""Device functions. Importing a module of this folder imports triton. Types and annotations are
Triton's, not Python's."""
