"""Tensors that are not plain strided memory, which every op refuses by name. The dispatcher's keys
tell them apart at no cost to others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import NestedTensor

KEYS = (
    "SparseCPU",
    "SparseCUDA",
    "SparseCsrCPU",
    "SparseCsrCUDA",
    "MkldnnCPU",
    "QuantizedCPU",
    "QuantizedCUDA",
    "NestedTensorCPU",
    "NestedTensorCUDA",
    "AutogradNestedTensor",
)
PACKED = "a plain strided tensor; attnops.varlen_attention takes the values of ragged ones"


def refuse_others(library: torch.library.Library, packet: Any) -> None:
    """Have the op raise InvalidInput on tensors of another layout, whichever of its arguments they
    are."""
    names = [a.name for a in packet.default._schema.arguments]
    op = packet._qualified_op_name

    def run(*args: Any, **kwargs: Any) -> Any:
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if isinstance(value, Tensor) and (
                value.layout != torch.strided or value.is_nested or value.is_quantized
            ):
                fail(
                    InvalidInput,
                    name,
                    described(value),
                    PACKED if value.is_nested else "a plain strided tensor",
                )
        fail(InvalidInput, op, "a tensor of another layout", "plain strided tensors")

    for key in KEYS:
        library.impl(packet._qualified_op_name.partition("::")[2], run, key)

    def rule(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(*args, **(kwargs or {}))

    torch.library.register_torch_dispatch(op, NestedTensor, rule, lib=library)


def described(value: Tensor) -> str:
    """A tensor that is not plain, in words: nested, quantised, or of another layout."""
    if value.is_nested:
        return "a nested tensor"
    kind = f"quantised as {value.dtype}" if value.is_quantized else f"of layout {value.layout}"
    return f"a tensor {kind.replace('torch.', '')}"
