"""What changes a graph that is compiled, one pass a file: the chosen kernel is written into it, and linears of one input become one."""

from .fuse_linears import Fused as Fused
from .fuse_linears import fuse_linears as fuse_linears
