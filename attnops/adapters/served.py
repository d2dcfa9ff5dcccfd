"""Classes that take the place of a module's own, under its name."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
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

_SERVED = "_attnops_served"
_OF_EVERY_CLASS = ("__dict__", "__weakref__")


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
    return _in_place_of(cls, cls, switched, (_served_again, (cls, method, kernel)))


@functools.cache
def put_in_place(into: Any, own: Any) -> type:
    """A subclass of `into`, a subclass of `own`, that goes by the name of `own`."""
    return _in_place_of(own, into, {}, (_put_again, (into, own)))


def is_served(cls: Any) -> bool:
    """Is it a class that takes the place of another, or a subclass of one?"""
    return hasattr(cls, _SERVED)


@functools.cache
def taken_out(cls: Any, ours: Any, own: Any) -> Any:
    """`cls` with `own` in the place of `ours`; None where it cannot be made.

    fully_shard and parametrisations make a class over that of a module.
    """
    if ours is own or not issubclass(cls, ours):
        return cls
    if cls is ours:
        return own
    bases = [taken_out(base, ours, own) for base in cls.__bases__]
    if None in bases or any(map(_knows_its_class, vars(cls).values())):
        return None
    body = {name: value for name, value in vars(cls).items() if name not in _OF_EVERY_CLASS}
    try:
        return type(cls)(cls.__name__, tuple(bases), body)
    except Exception:  # of a class that refuses such bases
        return None


def _knows_its_class(value: Any) -> bool:
    """Does it call `super()`, which holds the class in whose body it stands?"""
    function = getattr(value, "__func__", value)
    return isinstance(function, FunctionType) and "__class__" in function.__code__.co_freevars


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


def _in_place_of(own: Any, base: Any, body: Mapping[str, Any], again: tuple[Any, Any]) -> type:
    """A subclass of `base` that goes by the name of `own`, so that what is saved names `own`.

    again: a function, and its arguments, that make an empty object of it in another process.
    """

    def reduce(self: Any, protocol: int) -> Any:
        as_usual = base.__reduce_ex__(self, protocol)
        return (*again, *as_usual[2:]) if type(self) is made else as_usual

    named = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    made = type(own.__name__, (base,), {**named, **body, "__reduce_ex__": reduce, _SERVED: True})
    return made


def _served_again(cls: Any, method: str, kernel: str | None) -> Any:
    return object.__new__(served(cls, method, kernel))


def _put_again(into: Any, own: Any) -> Any:
    return object.__new__(put_in_place(into, own))
