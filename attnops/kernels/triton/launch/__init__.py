"""The host side of the kernels: `grids` and `tiles` choose sizes in plain Python, the other modules
launch device functions."""
