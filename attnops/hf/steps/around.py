"""What is in force around a model and decides how it computes: torch's flags, hooks, modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as of_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

# The getters behind torch.backends, torch.use_deterministic_algorithms and the like; not every
# torch has all of them.
_FLAGS = (
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "_get_deterministic_fill_uninitialized_memory",
    "_get_float32_matmul_precision",
    "_get_cublas_allow_tf32",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_cudnn_allow_tf32",
    "_get_cudnn_enabled",
    "_get_cudnn_deterministic",
    "_get_cudnn_benchmark",
    "_get_mkldnn_enabled",
    "_get_mkldnn_deterministic",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_cudnn_sdp_enabled",
)
_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
)


def _getters() -> Iterable[Callable[[], Any]]:
    yield from (get for name in _FLAGS if (get := getattr(torch._C, name, None)) is not None)
    if (precision := getattr(torch._C, "_get_fp32_precision_getter", None)) is not None:
        yield from (partial(precision, *names) for names in _PRECISIONS)


_GETTERS = tuple(_getters())


def flags() -> tuple[Any, ...]:
    """torch's flags that change what an operation computes: determinism, TF32, reduced
    precision."""
    return (torch.get_default_dtype(), *[_read(get) for get in _GETTERS])


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:  # of two ways to set it that contradict each other
        return "mixed"


def global_hooks() -> tuple[Any, ...]:
    """The names of the hooks that torch calls for every module."""
    return (*of_modules._global_forward_hooks, *of_modules._global_forward_pre_hooks)


def function_modes() -> tuple[str, ...]:
    """The classes of the function modes in force around a model, but for a default device."""
    modes = _get_current_function_mode_stack()
    return tuple(type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext))
