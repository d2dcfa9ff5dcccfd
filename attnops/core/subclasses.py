"""Tensors that ops refuse: sparse, nested, and those of classes with a `__torch_function__`.

The data alone of such a class may not be what it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attnops.core.errors import InvalidInput, fail

_PLAIN: Any = getattr(Tensor.__torch_function__, "__func__")  # noqa: B009 - untyped
_DISABLED = nn.Parameter.__torch_function__
WANT = "a plain tensor, as x.as_subclass(torch.Tensor): what else it means, only its class knows"


def is_foreign(cls: Any) -> bool:
    """Has a class of tensors a `__torch_function__` of its own?"""
    function = getattr(cls, "__torch_function__", _DISABLED)
    return function is not _DISABLED and getattr(function, "__func__", None) is not _PLAIN


# As torch.compiler.assume_constant_result does, but its import takes as long as torch's.
is_foreign._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_foreign(field: str, value: Any) -> None:
    """Raise InvalidInput for a tensor of such a class. A nested one has an error of its own."""
    if isinstance(value, Tensor) and is_foreign(type(value)) and not value.is_nested:
        fail(InvalidInput, field, f"a {type(value).__name__}", WANT)


def plain_only(names: Iterable[str], values: Any) -> None:
    """As `refuse_foreign`, of all arguments of a call."""
    for name, value in zip(names, values, strict=True):
        refuse_foreign(name, value)


def check_strided(field: str, value: Tensor, dims: str) -> None:
    """Raise InvalidInput for a sparse or a nested tensor."""
    if value.layout == torch.strided and not value.is_nested:
        return
    kind = "a nested tensor"
    if not value.is_nested:
        kind = f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
    fail(InvalidInput, field, kind, f"a plain strided tensor [{dims}]")
