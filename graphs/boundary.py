"""What may not lie in a graph: the one question that the split of a traced model and a capture by hand both ask."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..kernel import Capture, Kernel, kernels_of
from ..ops import OPS
from ..select import choose, parse_policy

ATTENTION = (
    "attention",
    "varlen_attention",
    "paged_attention",
    "mla_attention",
    "sparse_mla_attention",
    "vertical_slash_attention",
)
"""The ops that a model has one of in every layer, and that a compiler fuses with nothing: between two of them layers are alike."""

OUTSIDE = "marked outside"
DATA = "depends on data"


@dataclass(frozen=True)
class Break:
    """A call that runs between graphs. kernel: of an op of ours, else "". why: in a few words."""

    op: str
    kernel: str
    why: str

    def __str__(self) -> str:
        return f"{self.op}.{self.kernel}" if self.kernel else self.op


def kernel_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kernel | None:
    """The kernel that a call of `target` runs: that of the overload, or the one chosen for these arguments, fake ones too.

    None where `target` is no op of ours. Raises NoKernel.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "attnops":
        return None
    op = OPS.get(target._schema.name.partition("::")[2])
    if op is None:
        return None
    if (named := kernels_of(op.name).get(target._overloadname)) is not None:
        return named
    given = dict(kwargs)
    policy = given.pop("policy", "")
    return choose(op.problem(*args, **given), policy)


def break_of(target: Any, kernel: Kernel | None, eager: Collection[str] = ()) -> Break | None:
    """Why a call of `target`, which runs `kernel`, may not be captured; None: it may. eager: ops that shall not be."""
    if kernel is not None:
        if kernel.capture is not Capture.WHOLE:
            return Break(kernel.op, kernel.name, f"capture={kernel.capture.value}")
        if kernel.op in eager:
            return Break(kernel.op, kernel.name, "asked for")
    elif (name := getattr(target, _MARK, None)) is not None:
        return Break(name, "", OUTSIDE)
    elif isinstance(target, torch._ops.OpOverload):
        if torch.Tag.cudagraph_unsafe in target.tags:
            return Break(str(target), "", "tagged cudagraph_unsafe")
        if target._schema.name in eager:
            return Break(str(target), "", "asked for")
    return None


def is_cut(kernel: Kernel | None) -> bool:
    """Does a call that runs `kernel`, and may be captured, end what is compiled as one? Not where its glue is to be fused."""
    return kernel is not None and kernel.op in ATTENTION and not kernel.inline


_MARK = "_attnops_outside"


def mark(function: Any, name: str) -> None:
    """Calls of `function` may not be captured."""
    setattr(function, _MARK, name)


def pinned(kernel: Kernel, policy: str) -> str:
    """The key of `policy` that forces `kernel` on its op: what was decided for all sizes is what runs at each."""
    return replace(parse_policy(policy), kernel=(f"{kernel.op}:{kernel.name}",)).key
