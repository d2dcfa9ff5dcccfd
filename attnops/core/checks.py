"""Checks of single arguments: numbers, tensors that an op writes, and tensors that no op takes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from math import isfinite
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from attnops.core.arguments import REQUIRED, Arg
from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import assume_constant
from attnops.core.tensors import surely

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (int,),
    "str": (str,),
}
"""By kind of argument, the Python types that the dispatcher takes or converts."""


def name(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def need(ok: Any, field: str, got: object, want: str) -> None:
    """Raise InvalidInput unless `ok`. A symbolic `ok` that is not known yet becomes a check at run
    time."""
    if isinstance(ok, bool):
        if not ok:
            fail(InvalidInput, field, got, want)
        return
    if not surely(ok):
        if surely(torch.sym_not(ok)):
            fail(InvalidInput, field, got, want)
        try:
            torch._check(ok, lambda: f"{field}: got {got}, want {want}")
        except RuntimeError:
            fail(InvalidInput, field, got, want)


def python_number(value: Any) -> Any:
    """`value`; where it is a number of numpy or of another library, the same number of Python."""
    if type(value) in (int, float, bool) or isinstance(value, Tensor):
        return value
    if isinstance(value, Integral):
        return operator.index(value)
    if isinstance(value, Real):
        return float(value)
    # numpy's bool, and its arrays of a single number.
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_scalar else value


def check_number(a: Arg, value: Any) -> None:
    """Raise InvalidInput unless the value of an argument that is no tensor has its type and is
    within its bounds."""
    kinds: Any = (*_TYPES[a.kind], torch.SymInt, torch.SymFloat, torch.SymBool)
    if value is REQUIRED:
        fail(InvalidInput, a.name, "nothing", f"a value of type {a.kind}")
    if not isinstance(value, kinds):
        fail(InvalidInput, a.name, repr(value), f"a value of type {a.kind}")
    _check_extent(a, value)
    if a.least is not None:
        need(value >= a.least, a.name, value, f">= {a.least:g}")
    if a.most is not None:
        need(value <= a.most, a.name, value, f"<= {a.most}")
    if a.choices and value not in a.choices:
        fail(InvalidInput, a.name, repr(value), " | ".join(c or '""' for c in a.choices))


def _check_extent(a: Arg, value: Any) -> None:
    bound = "" if a.least is None else f" >= {a.least:g}"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        got = f"an int of {value.bit_length()} bits"
        fail(InvalidInput, a.name, got, f"a number{bound} that fits into 64 bits")
    if isinstance(value, float) and not isfinite(value):
        fail(InvalidInput, a.name, value, f"a finite number{bound}")


def check_written(field: str, value: Tensor) -> None:
    """Raise InvalidInput for a tensor that torch refuses to write, which a kernel would find out
    after its first writes."""
    if surely(value.numel() == 0):
        return
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if surely(stride == 0) and surely(size > 1):
            want = "no stride of 0, because each of its numbers is written"
            fail(InvalidInput, f"{field}.stride()", value.stride(), want)
    if value.is_neg():
        got, want = "a tensor whose numbers are negated when they are read", "its resolve_neg()"
        fail(InvalidInput, field, got, want)


# Tensors that ops refuse: sparse, nested, and those of classes with a `__torch_function__`, whose
# data alone may not be what they stand for.

_PLAIN: Any = getattr(Tensor.__torch_function__, "__func__")  # noqa: B009 - untyped
_DISABLED = nn.Parameter.__torch_function__
WANT = "a plain tensor, as x.as_subclass(torch.Tensor): what else it means, only its class knows"


@assume_constant
def is_foreign(cls: Any) -> bool:
    """Has a class of tensors a `__torch_function__` of its own?"""
    function = getattr(cls, "__torch_function__", _DISABLED)
    return function is not _DISABLED and getattr(function, "__func__", None) is not _PLAIN


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
