"""CUDA graphs of whole steps, split at calls that may not be captured: `piecewise` with a compiler,
`breakable` without."""

from .buckets import Bucket as Bucket, Buckets as Buckets
from .cuda_graphs import CudaGraphs as CudaGraphs, Device as Device, Graph as Graph
from .eager_capture import outside as outside
from .graphed import Graphed as Graphed, breakable as breakable
from .report import Report as Report, bar as bar
from .traced import piecewise as piecewise
