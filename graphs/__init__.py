"""CUDA graphs over one boundary, the calls whose kernel may not be captured: `piecewise` with a compiler, `breakable` without."""

if __name__ != "attnops.graphs":
    raise ImportError("import attnops.graphs, not graphs (the folder is a part of attnops)")

from attnops.graphs.breaks import outside as outside
from attnops.graphs.buckets import Bucket as Bucket
from attnops.graphs.buckets import Buckets as Buckets
from attnops.graphs.device import CudaGraphs as CudaGraphs
from attnops.graphs.device import Device as Device
from attnops.graphs.device import Graph as Graph
from attnops.graphs.graphed import Graphed as Graphed
from attnops.graphs.modes import breakable as breakable
from attnops.graphs.modes import piecewise as piecewise
from attnops.graphs.progress import bar as bar
from attnops.graphs.report import Report as Report
