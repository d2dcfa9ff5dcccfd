"""Which calls a CUDA graph may not contain: one answer for the split of a traced model and for an
eager capture."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..core.kernel import Kernel, fits_a_graph, kernels_of
from ..core.private_torch import OpOverload
from ..core.select import choose
from ..ops import OPS

OUTSIDE = "marked outside"
DATA = "depends on data"
MARK = "_attnops_outside"
"""The attribute of functions that stay out of graphs: their name."""


@dataclass(frozen=True)
class Break:
    """A call of an op or function that runs between graphs, and why, in a few words. kernel: of an
    op of attnops, else ""."""

    op: str
    kernel: str
    why: str

    def __str__(self) -> str:
        return f"{self.op}.{self.kernel}" if self.kernel else self.op


def kernel_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kernel | None:
    """The kernel of a call on real or fake arguments, by its overload or chosen; None if `target`
    is not of attnops. Raises NoKernel."""
    if not isinstance(target, OpOverload) or target.namespace != "attnops":
        return None
    op = OPS.get(target._schema.name.partition("::")[2])
    if op is None:
        return None
    if (named := kernels_of(op.name).get(target._overloadname)) is not None:
        return named
    call: Any = op.call(*args, **kwargs)
    return choose(op.problem(call), call.policy)


def break_of(target: Any, kernel: Kernel | None, eager: Collection[str] = ()) -> Break | None:
    """The reason why a call of `target`, which runs `kernel`, may not be captured, or None. eager:
    ops that the user keeps out."""
    if kernel is not None:
        if not fits_a_graph(kernel):
            return Break(kernel.op, kernel.name, f"capture={kernel.capture.value}")
        return Break(kernel.op, kernel.name, "asked for") if kernel.op in eager else None
    if (name := getattr(target, MARK, None)) is not None:
        return Break(name, "", OUTSIDE)
    if isinstance(target, OpOverload):
        if torch.Tag.cudagraph_unsafe in target.tags:
            return Break(str(target), "", "tagged cudagraph_unsafe")
        if target._schema.name in eager:
            return Break(str(target), "", "asked for")
    return None


def depends_on_data(value: Any) -> bool:
    """Has a fake value a size or number that differs at every replay?"""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    symbolic = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(
        bool(free_unbacked_symbols(v)) for v in pytree.tree_leaves(value) if isinstance(v, symbolic)
    )
