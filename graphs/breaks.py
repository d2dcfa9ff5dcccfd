"""Capture without a compiler: what runs is recorded, but for the calls that may not be, between which capture ends and begins again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ..errors import AttnopsError, NotCapturable
from .boundary import OUTSIDE, Break, break_of, kernel_of, mark
from .device import Device
from .pieces import Recorded

R = TypeVar("R")


class Breaks(TorchDispatchMode):
    """Sees every op of a step. To be entered within a `session` of the device, with a capture open while ordinary code runs.

    eager: names of further ops that shall not be captured.
    """

    def __init__(self, device: Device, into: Recorded, eager: Collection[str] = ()) -> None:
        super().__init__()
        self._device, self._into, self._eager = device, into, eager
        self._made: set[int] = set()
        # Most ops of a step are a few, whose answer does not follow from their arguments.
        self._plain: dict[Any, bool] = {}
        self._used = 0
        self._asleep = False

    def start(self) -> None:
        """A graph begins."""
        self._used = self._device.used()
        self._device.begin()

    def stop(self) -> None:
        """It ends, and is the next step."""
        graph = self._device.end()
        self._into.add(graph, self._device.used() - self._used)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._asleep:
            return func(*args, **kwargs)
        if (plain := self._plain.get(func)) is None:
            plain = self._plain[func] = _is_plain(func, self._eager)
        if not plain:
            found = break_of(func, kernel_of(func, args, kwargs), self._eager)
            if found is not None:
                return self.between(found, func, args, kwargs)
            if _depends_on_data(func, args, kwargs):
                raise NotCapturable(str(func), "what follows depends on data; mark the function around it with attnops.graphs.outside")
        out = self._device.call(func, args, kwargs)
        for t in (out,) if isinstance(out, Tensor) else pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                self._made.add(t.untyped_storage().data_ptr())
        return out

    def between(self, found: Break, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call` outside of graphs, now and at every replay, on the same tensors and into the same results."""
        self.stop()
        self._asleep = True
        try:
            out = call(*args, **kwargs)
        finally:
            self._asleep = False
        given = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        leaves = pytree.tree_leaves(out)
        if bad := next((x for x in leaves if x is not None and not isinstance(x, Tensor)), None):
            raise NotCapturable(str(found), f"it returns {type(bad).__name__}, which a graph cannot follow; tensors it can")
        # Later captures may lie where what was captured lay; this call is over by then at every replay.
        args, kwargs = pytree.tree_map_only(Tensor, self._weak, (args, kwargs))
        results = [x if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given else None for x in leaves]

        def again() -> None:
            for ours, new in zip(results, pytree.tree_leaves(call(*args, **kwargs)), strict=True):
                if ours is not None:
                    if ours.shape != new.shape:
                        raise NotCapturable(str(found), f"its result is {list(new.shape)} now and was {list(ours.shape)} when captured")
                    ours.copy_(new)

        self._into.steps.append(again)
        self._into.breaks.append(found)
        self.start()
        return out

    def _weak(self, tensor: Tensor) -> Tensor:
        return self._device.weak(tensor) if tensor.untyped_storage().data_ptr() in self._made else tensor


def _is_plain(func: Any, eager: Collection[str]) -> bool:
    """May every call of it be captured, whatever its arguments?"""
    return func.namespace != "attnops" and break_of(func, None, eager) is None and not _DATA.intersection(func.tags)


_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _depends_on_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Is the value given to Python, or the shape another for other values?"""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    # The tag is the op's. By whole numbers the result is as long as the index, and a known length is no question.
    if func is torch.ops.aten.index.Tensor:
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return kwargs.get("output_size") is None


def record(run: Callable[[], Any], device: Device, into: Recorded, eager: Collection[str] = ()) -> Any:
    """Capture `run`, broken where it has to be. Returns the tensors that every replay fills.

    Raises NotCapturable: values of tensors are asked for, or something else that cannot be captured is done.
    """
    breaks = Breaks(device, into, eager)
    with breaks:
        breaks.start()
        try:
            out = run()
            breaks.stop()
        except (AttnopsError, torch.OutOfMemoryError):
            device.abort()
            raise
        except Exception as e:
            device.abort()
            raise NotCapturable("the function", str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__) from e
    return out


def outside(function: Callable[..., R], fake: Callable[..., R] | None = None) -> Callable[..., R]:
    """`function`, which runs outside of graphs at every step, e.g. because its control flow depends on data.

    Args:
        function: takes tensors and returns tensors, of shapes that do not depend on data. It may be the method of a module.
        fake: results of the right shapes, strides and dtypes for the same arguments, for the compiler, which does not look into the
            function. Default: one tensor as the first argument that is one, contiguous.

    Returns:
        What to call instead. Outside of `piecewise` and `breakable` it is `function`, but that torch.compile does not look into it.
    """
    from torch._dynamo import allow_in_graph

    def opaque(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(t, FakeTensor) for t in pytree.tree_leaves((args, kwargs))):
            return (fake or _like_first)(*args, **kwargs)
        return function(*args, **kwargs)

    name = getattr(function, "__qualname__", type(function).__name__)
    mark(opaque, name)
    allow_in_graph(opaque)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return opaque(*args, **kwargs)
        mode = next((m for m in reversed(_get_current_dispatch_mode_stack()) if isinstance(m, Breaks)), None)
        if mode is None or mode._asleep:
            return function(*args, **kwargs)
        return mode.between(Break(name, "", OUTSIDE), function, args, kwargs)

    return call


def _like_first(*args: Any, **kwargs: Any) -> Any:
    first: Tensor = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    return torch.empty_like(first, memory_format=torch.contiguous_format)
