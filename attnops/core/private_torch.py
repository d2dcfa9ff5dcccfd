"""What torch is doing while a call runs: its modes, its transforms, and the tools that look on.

Private names of torch, which cost less than the public ones, and a public fallback for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


def _publicly_autocasting() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


autocasting: Callable[[], bool]
autocasting = vars(torch._C).get("_is_any_autocast_enabled", _publicly_autocasting)
"""Is autocast on, for any device?"""


@contextmanager
def _publicly_uncast() -> Iterator[None]:
    with ExitStack() as off:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            off.enter_context(torch.autocast(kind, enabled=False))
        yield


uncast: Callable[[], AbstractContextManager[None]]
uncast = vars(torch._C).get("_DisableAutocast", _publicly_uncast)
"""Autocast is off within the block: an op has no autocast rule, and its kernels compute in the
dtypes of its contract. torch.autocast takes longer."""

_functorch: Any = vars(torch._C)["_functorch"]
of_a_batch: Callable[[Tensor], bool]
of_a_batch = vars(_functorch).get("is_legacy_batchedtensor", lambda tensor: False)
"""Is it a batch of tensors, as torch.autograd.grad makes one of gradients?"""

profiling: Callable[[], bool] = vars(torch.autograd).get("_profiler_enabled", lambda: False)

tracing: Callable[[], bool]
tracing = vars(torch._C).get("_is_tracing", torch.jit.is_tracing)  # type: ignore[attr-defined]
"""Does torch.jit.trace record the call?"""

must_repeat: Callable[[], bool]
must_repeat = vars(torch._C).get(
    "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
"""Is torch.use_deterministic_algorithms on?"""

only_warns: Callable[[], bool]
only_warns = vars(torch._C).get(
    "_get_deterministic_algorithms_warn_only",
    torch.is_deterministic_algorithms_warn_only_enabled,
)
"""Does it only warn?"""


def capturing(tensor: Tensor) -> bool:
    """Does a call on `tensor` become part of a CUDA graph?"""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
