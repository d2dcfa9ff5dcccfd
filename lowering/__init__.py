"""Graph passes of the compiler: the chosen kernel is written into the graph; linears with one input, or with a norm, become one call."""

from .fuse_linears import Fused as Fused, fuse_linears as fuse_linears
from .fuse_rotation import Rotated as Rotated, fuse_rotation as fuse_rotation
from .use_linears import Product as Product, use_linears as use_linears
