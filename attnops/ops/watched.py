"""When a call has to pass torch's dispatcher, and the direct call of a kernel for when it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import is_grad_enabled
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling as _compiling

_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_profiling: Callable[[], bool] = vars(torch.autograd).get("_profiler_enabled", lambda: False)


def watched() -> bool:
    """Must a call pass the dispatcher: is a gradient possible, or does a compiler, a mode, a transform or a profiler have to see it?"""
    return is_grad_enabled() or overheard()


def overheard() -> bool:
    """`watched` without reverse-mode gradients: forward-mode ones and those of torch.func count."""
    # Compiling is asked first, so that Dynamo, to whom it is a constant, traces the dispatcher's call alone.
    return (
        _compiling() or _len_torch_dispatch_stack() > 0 or _len_torch_function_stack() > 0 or _profiling()
        or forward_ad._current_level >= 0 or _transformed()
    )  # fmt: skip


def direct(overload: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """`overload` without the dispatcher, which takes 9 us to carry two dozen named arguments into C++ and back; compiled code calls this.

    Args:
        overload: the kernel's overload. It takes a call that is `watched`, so that modes, gradients and profilers see the op.
        run: the kernel's Python function. It takes all other calls, with the arguments that the dispatcher would hand on: those at
            their defaults left out.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        # `watched()` without its two calls and without the question for a compiler, which never traces generated code.
        if (
            is_grad_enabled() or _len_torch_dispatch_stack() or _len_torch_function_stack() or _profiling()
            or forward_ad._current_level >= 0 or _transformed()
        ):  # fmt: skip
            return overload(*args, **kwargs)
        return run(*args, **kwargs)

    return call
