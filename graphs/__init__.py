"""CUDA graphs of whole steps, split at calls that may not be captured: `piecewise` with a compiler, `breakable` without."""

from .buckets import Bucket as Bucket, Buckets as Buckets
from .device import CudaGraphs as CudaGraphs, Device as Device, Graph as Graph
from .eager_capture import outside as outside
from .graphed import Graphed as Graphed
from .modes import breakable as breakable, piecewise as piecewise
from .report import Report as Report, bar as bar
