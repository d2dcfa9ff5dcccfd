"""Classes whose methods call our `scaled_dot_product_attention` in place of torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnops.adapters.callers import TORCHS, callers
from attnops.adapters.sdpa import scaled_dot_product_attention

_SERVED = "_attnops_served"


class Ours(TorchFunctionMode):
    """Within the block torch's `scaled_dot_product_attention` is ours."""

    def __init__(self, kernel: str | None) -> None:
        super().__init__()
        self.kernel = kernel

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is TORCHS:
            return scaled_dot_product_attention(*args, **(kwargs or {}), kernel=self.kernel)
        if func is Tensor.unflatten:
            func = torch.unflatten  # Dynamo does not trace the `super()` of the other one
        return func(*args, **(kwargs or {}))


@functools.cache
def served(cls: Any, method: str, kernel: str | None) -> type:
    """A subclass of `cls` with its name, whose methods that call `scaled_dot_product_attention`, or else `method`, call ours.

    Its objects can be copied and pickled.
    """

    def ours(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with Ours(kernel):
                return own(self, *args, **kwargs)

        return call

    def reduce(self: Any, protocol: int) -> Any:
        return (_blank, (cls, method, kernel), *cls.__reduce_ex__(self, protocol)[2:])

    switched = {name: ours(getattr(cls, name)) for name in callers(cls) or (method,)}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **switched, "__reduce_ex__": reduce, _SERVED: True})


def is_served(cls: Any) -> bool:
    """Is it a class that `served` made, or a subclass of one?"""
    return hasattr(cls, _SERVED)


def _blank(cls: Any, method: str, kernel: str | None) -> Any:
    return object.__new__(served(cls, method, kernel))
