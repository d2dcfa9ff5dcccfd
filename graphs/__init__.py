"""CUDA graphs over one boundary, the calls whose kernel may not be captured: `piecewise` with a compiler, `breakable` without."""

from .breaks import outside as outside
from .buckets import Bucket as Bucket
from .buckets import Buckets as Buckets
from .device import CudaGraphs as CudaGraphs
from .device import Device as Device
from .device import Graph as Graph
from .graphed import Graphed as Graphed
from .modes import breakable as breakable
from .modes import piecewise as piecewise
from .progress import bar as bar
from .report import Report as Report
