"""`remove_output_copies_pass`: a kernel's result becomes the output without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..core.fx_effects import storages
from ..core.tensors import surely


def remove_output_copies_pass(graph: Graph, outer: Sequence[Any]) -> list[tuple[Any, Node]]:
    """Take each `output.copy_(result)` out of a traced graph whose output is empty memory.

    A kernel fills `call.output`, which the caller has allocated. A foreign op that returns its
    result makes a copy of this. Inductor of torch 2.13 gives the output the memory of the result;
    that of 2.15 copies, because another tensor may be written later that shares the result's
    memory. Here none is.

    Args:
        graph: of the kernel's torch ops. Changed in place.
        outer: the IR nodes of its placeholders.

    Returns:
        For each copy the IR node of the output, and the result, which `become` makes one.
    """
    found = []
    placeholders = graph.find_nodes(op="placeholder")
    for placed, box in zip(placeholders, outer, strict=True):
        [copy] = placed.users if len(placed.users) == 1 else [None]
        if copy is None or copy.target is not torch.ops.aten.copy_.default:
            continue
        if copy.args[0] is not placed:
            continue
        result = copy.args[1]
        if isinstance(result, Node) and _is_empty(box) and _may_be(placed, result, placeholders):
            graph.erase_node(copy)
            found.append((box, result))
    return found


def become(output: Any, result: Any) -> None:
    """Let an output of empty memory, an IR node, be the memory of the result."""
    from .inductor import StorageBox, mutate_to

    if isinstance(result.data, StorageBox):
        result.data.realize()
        output.data.data = result.data.data
    else:
        mutate_to(output, result)


def _is_empty(box: Any) -> bool:
    """Is an IR node memory of its own that nothing has written?"""
    from .inductor import ComputedBuffer, StorageBox, TensorBox, V

    if not isinstance(box, TensorBox) or not isinstance(box.data, StorageBox):
        return False
    buffer = box.data.data
    if not isinstance(buffer, ComputedBuffer) or not buffer.is_no_op():
        return False
    return buffer.get_name() not in V.graph.mutated_buffers


def _may_be(output: Node, result: Node, placeholders: Sequence[Node]) -> bool:
    """Is `result` made here, laid out as the output, and read and written by nothing else?"""
    made, wanted = result.meta.get("val"), output.meta.get("val")
    if result in placeholders or len(result.users) != 1:
        return False
    if not isinstance(made, Tensor) or not isinstance(wanted, Tensor):
        return False
    if made.dtype != wanted.dtype or made.device != wanted.device or not _same_layout(made, wanted):
        return False
    [memory] = storages(made)
    sharing = [n for n in result.graph.nodes if memory in storages(n.meta.get("val"))]
    return sharing == [result]


def _same_layout(made: Tensor, wanted: Tensor) -> bool:
    """Are sizes and strides the same, whatever the symbols will be? No guard is installed."""
    if made.dim() != wanted.dim():
        return False
    pairs = zip((*made.shape, *made.stride()), (*wanted.shape, *wanted.stride()), strict=True)
    return all(surely(one == other) for one, other in pairs)
