"""CUDA graphs of whole steps, split at calls that may not be captured: `piecewise` with a compiler, `breakable` without."""

from .buckets import Bucket as Bucket
from .buckets import Buckets as Buckets
from .device import CudaGraphs as CudaGraphs
from .device import Device as Device
from .device import Graph as Graph
from .eager_capture import outside as outside
from .graphed import Graphed as Graphed
from .modes import breakable as breakable
from .modes import piecewise as piecewise
from .report import Report as Report
from .report import bar as bar
