"""What is in force around a model and decides how it computes: torch's flags, hooks, modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnops.core.private_torch import (
    FLAGS,
    DeviceContext,
    function_mode_stack,
    module_hooks,
    module_pre_hooks,
)


def flags() -> tuple[Any, ...]:
    """torch's flags that change what an operation computes: determinism, TF32, reduced
    precision."""
    return (torch.get_default_dtype(), *[_read(get) for get in FLAGS])


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:  # of two ways to set it that contradict each other
        return "mixed"


def global_hooks() -> tuple[Any, ...]:
    """The names of the hooks that torch calls for every module."""
    return (*module_hooks, *module_pre_hooks)


def function_modes() -> tuple[str, ...]:
    """The classes of the function modes in force around a model, but for a default device."""
    return tuple(
        type(mode).__name__ for mode in function_mode_stack() if not isinstance(mode, DeviceContext)
    )
