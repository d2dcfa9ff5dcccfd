"""Adapters around a kernel's function: tables without holes, and the GPU it runs on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from attnops.core.private_torch import current_device

PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def takes_a_call(run: object) -> bool:
    """Is it a function with one parameter, the call?"""
    try:
        kinds = [p.kind for p in inspect.signature(run).parameters.values()]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return len(kinds) == 1 and kinds[0] in PLACES


def without_flag(
    flag: str, change: Callable[[Any], Any], run: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """`run`, which does not know a flag of its op: `change` makes a call without of one with the
    flag, before `run` reads it."""

    @functools.wraps(run)
    def whole(call: Any) -> Any:
        return run(change(call) if getattr(call, flag) else call)

    return whole


# The GPU of a call --------------------------------------------------------------------------------


def elsewhere(x: Tensor) -> bool:
    """Is `x` on a GPU that is not the current one? Where CUDA is not initialised `x` is a fake
    tensor, and nothing is launched."""
    return x.is_cuda and torch.cuda.is_initialized() and x.get_device() != current_device()


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Within the block the GPU of `x` is the current one."""
    return torch.cuda.device(x.device) if elsewhere(x) else nullcontext()


def placed(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`run`, a function of a call, with the GPU of the call's first tensor as the current one.

    Triton and most launchers of other packages launch on the current GPU, whatever GPU holds their
    arguments. Where that is the right one already, as in all but a few calls, this costs a
    comparison.
    """
    before: Callable[[Any], Any] | None = getattr(run, "placed", None)
    if before is run and before is not None:
        return before

    @functools.wraps(run)
    def there(call: Any) -> Any:
        if call is None or not elsewhere(call[0]):  # `Kernel.ahead` is given None, too
            return run(call)
        with torch.cuda.device(call[0].device):
            return run(call)

    there.__module__ = origin(run).__module__
    there.placed = there  # type: ignore[attr-defined]
    return there


def origin(run: Any) -> Any:
    """The function below wrappers and `functools.partial`."""
    while (inner := getattr(run, "__wrapped__", None) or getattr(run, "func", None)) is not None:
        run = inner
    return run
