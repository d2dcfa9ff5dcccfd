"""Passes over the graphs of the compiler.

On a graph that Dynamo has traced, before Inductor, in this order:

1. `merge_linears_pass`: linears of one input, over adjacent weights, become one matrix product.
2. `fuse_rotation_pass`: norms and rotation become arguments of the `decode_attention` they feed.
3. `fuse_rotated_write_pass`: they become one op with the write of packed tokens' keys and values.
4. `fuse_norm_linear_pass`: a linear with its norm, activation and residual becomes one call.
5. `fuse_norm_pass`: a norm that no linear takes in becomes one call with its residual.

Decode steps of a patched model run them (`attnops.hf.steps.graphed_steps.passes_of`). Other graphs
run those that are given to `attnops.graphs.piecewise` or to Inductor's `pre_grad_custom_pass`.

While Inductor lowers a graph, `choose.py` puts the chosen kernel in place of every call of an op.
If the kernel's torch ops take the place of the call, one pass runs on the graph of these ops:

6. `remove_output_copies_pass`: a kernel's result becomes the output without a copy.
"""

from .fuse_norm_linear_pass import (
    Product as Product,
    fuse_norm_linear_pass as fuse_norm_linear_pass,
)
from .fuse_norm_pass import NormCall as NormCall, fuse_norm_pass as fuse_norm_pass
from .fuse_rotated_write_pass import fuse_rotated_write_pass as fuse_rotated_write_pass
from .fuse_rotation_pass import Rotated as Rotated, fuse_rotation_pass as fuse_rotation_pass
from .merge_linears_pass import Merged as Merged, merge_linears_pass as merge_linears_pass
