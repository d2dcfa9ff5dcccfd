"""Graph passes of the compiler: the chosen kernel is written into the graph, and linears with one input are fused."""

from .fuse_linears import Fused as Fused, fuse_linears as fuse_linears
