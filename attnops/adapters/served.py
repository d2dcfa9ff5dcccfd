"""Classes that take the place of a module's own, under its name."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from attnops.adapters import recomputed
from attnops.adapters.callers import TORCHS, callers
from attnops.adapters.sdpa import scaled_dot_product_attention
from attnops.core.tracers import is_recorded
from attnops.nn.class_swap import subclass

_SERVED = "_attnops_served"


class Ours(TorchFunctionMode):
    """Within the block torch's `scaled_dot_product_attention` is ours.

    What a checkpoint that begins within the block recomputes later runs in such a block, too:
    autograd compares what both passes save.
    """

    def __init__(self, kernel: str | None) -> None:
        super().__init__()
        self.kernel = kernel
        # Weak: what is recomputed remembers the block, and shall not keep what is around it.
        outside = None if is_dynamo_compiling() else recomputed.current()
        self.outside = None if outside is None else weakref.ref(outside)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        alike = is_dynamo_compiling() or self._recomputes_alike()
        if func is TORCHS and alike:
            return scaled_dot_product_attention(*args, **(kwargs or {}), kernel=self.kernel)
        if func is Tensor.unflatten:
            func = torch.unflatten  # Dynamo does not trace the `super()` of the other one
        return func(*args, **(kwargs or {}))

    def _recomputes_alike(self) -> bool:
        """Will a checkpoint that began within the block run in one again? True without any."""
        # Asked at every function, because a checkpoint within another hides it.
        hook = recomputed.current()
        if hook is None or (self.outside is not None and hook is self.outside()):
            return True
        frame = recomputed.frame(hook)
        if frame is None:
            return False
        if not isinstance(frame.recompute_fn, _Recompute) or frame.recompute_fn.mode is not self:
            frame.recompute_fn = _Recompute(self, frame.recompute_fn)
        return True


@dataclass(frozen=True)
class _Recompute:
    """What a checkpoint runs again, in a mode like the one that it began in."""

    mode: Ours
    run: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        with Ours(self.mode.kernel):
            return self.run(*args)


@functools.cache
def served(cls: Any, method: str, kernel: str | None) -> type:
    """A subclass of `cls` whose methods that call `scaled_dot_product_attention` call ours.

    method: the one that calls it where the code of none shows it.
    """
    names = callers(cls) or (method,)
    switched = {name: _calls_ours(getattr(cls, name), kernel) for name in names}
    return subclass(cls, {**switched, _SERVED: True}, (served, cls, method, kernel))


@functools.cache
def put_in_place(own: Any, into: Any) -> type:
    """A subclass of `into`, a subclass of `own`, that goes by the name of `own`."""
    return subclass(own, {_SERVED: True}, (put_in_place, own, into), into)


def is_served(cls: Any) -> bool:
    """Is it a class that takes the place of another, or a subclass of one?"""
    return hasattr(cls, _SERVED)


def _calls_ours(own: Callable[..., Any], kernel: str | None) -> Callable[..., Any]:
    recorded, ours = is_recorded, Ours

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if recorded(*args, *kwargs.values()):
            return own(self, *args, **kwargs)
        with ours(kernel):
            return own(self, *args, **kwargs)

    # torch.jit.script compiles the source of `own`, and looks its names up in the globals of this.
    names = getattr(own, "__globals__", globals())
    return functools.wraps(own)(FunctionType(call.__code__, names, closure=call.__closure__))
