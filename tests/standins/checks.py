"""Checks that stand-ins share. A stand-in registers ops at its import, which must not happen beside
the wheels: this file has none.

The error texts of `laid_out` are attnops' own, whatever the wheel would say of that argument.
Checks written by hand quote the wheel where it has a text.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import evaluate, layout_of
from attnops.core.problem import pretended

KINDS = {
    torch.int32: "torch::kInt32",
    torch.float32: "torch::kFloat32",
    torch.bfloat16: "torch::kBFloat16",
}
LAST, ALL = "have contiguous last dimension", "be contiguous"


def check(ok: bool, message: str, error: type[Exception] = RuntimeError) -> None:
    """TORCH_CHECK, TVM_FFI_ICHECK, FLASHINFER_CHECK; with another error, what a package's Python
    raises."""
    if not ok:
        raise error(message)


def laid_out(
    *,
    sizes: dict[str, int] | None = None,
    **given: tuple[Tensor | None, str, torch.dtype | tuple[torch.dtype, ...], str],
) -> Any:
    """Check tensors by name, each with its layout (as attnops.core.arguments writes it), dtypes,
    and LAST, ALL or "" for any strides.

    The sizes by the layouts' names, in order of appearance. sizes: those that are known before.
    """
    found = dict(sizes or {})
    for field, (x, dims, dtypes, strides) in given.items():
        if x is None:
            continue
        wanted = dtypes if isinstance(dtypes, tuple) else (dtypes,)
        check(
            x.dtype in wanted,
            f"{field} must have dtype {' or '.join(KINDS.get(d, str(d)) for d in wanted)}",
        )
        check(
            not strides or (x.is_contiguous() if strides == ALL else x.stride(-1) == 1),
            f"{field} must {strides}",
        )
        check(
            x.dim() == len(layout_of(dims)), f"{field} must have {len(layout_of(dims))} dimensions"
        )
        for size, got in zip(layout_of(dims), x.shape, strict=True):
            want = (
                evaluate(size.text.removeprefix(">="), found)
                if size.options
                else found.setdefault(size.text, got)
            )
            check(got >= want if size.least else got == want, f"{field} must have shape ({dims})")
    return SimpleNamespace(**found)


def architecture() -> int:
    """Of the GPU that a test pretends to have; 0 where it pretends none."""
    target = pretended()
    return 0 if target is None else target.arch
