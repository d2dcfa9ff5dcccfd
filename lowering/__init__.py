"""What changes a graph that is compiled, one pass a file: the chosen kernel is written into it, and linears of one input become one."""

if __name__ != "attnops.lowering":
    raise ImportError("import attnops.lowering, not lowering (the folder is a part of attnops)")

from attnops.lowering.fuse_linears import Fused as Fused
from attnops.lowering.fuse_linears import fuse_linears as fuse_linears
