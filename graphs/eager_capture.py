"""Captures a step as it runs, without a compiler: capture stops at every call that a graph may not
contain, and resumes after it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..core.errors import NotCapturable, fail
from ..core.private_torch import FakeTensor, TorchDispatchMode, dispatch_mode_stack
from .cuda_graphs import Recorded
from .graph_breaks import MARK, OUTSIDE, Break, break_of, kernel_of

R = TypeVar("R")


class CaptureMode(TorchDispatchMode):
    """Sees every op of a step and splits the capture into `into`. eager: names of further ops to
    keep out of graphs."""

    def __init__(self, into: Recorded, eager: Collection[str] = ()) -> None:
        super().__init__()
        self._into, self._eager = into, eager
        self._made: set[int] = set()
        # By op: may every call be captured? For most ops it does not depend on the arguments.
        self._capturable: dict[Any, bool] = {}
        self._paused = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if (capturable := self._capturable.get(func)) is None:
            tagged = _DATA.intersection(func.tags)
            capturable = self._capturable[func] = (
                func.namespace != "attnops"
                and not tagged
                and break_of(func, None, self._eager) is None
            )
        if not capturable:
            found = break_of(func, kernel_of(func, args, kwargs), self._eager)
            if found is not None:
                return self.between(found, func, args, kwargs)
            if _depends_on_data(func, args, kwargs):
                fail(
                    NotCapturable,
                    str(func),
                    "later ops depend on data; mark the function that calls it with "
                    "attnops.graphs.outside",
                )
        out = func(*args, **kwargs)
        for t in (out,) if isinstance(out, Tensor) else pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                self._made.add(_address(t))
        return out

    def between(
        self, found: Break, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `call` between graphs, now and at every replay, on the same tensors and into the same
        results."""
        self._into.end()
        self._paused = True
        try:
            out = call(*args, **kwargs)
        finally:
            self._paused = False
        given = {_address(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        leaves = pytree.tree_leaves(out)
        if others := [
            type(x).__name__ for x in leaves if x is not None and not isinstance(x, Tensor)
        ]:
            fail(
                NotCapturable,
                str(found),
                f"it returns {others[0]}; a call between graphs may return tensors only",
            )
        # Later captures may reuse the memory of captured tensors: this call has read them by then,
        # at every replay.
        weak, made = self._into.device.weak, self._made
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: weak(t) if _address(t) in made else t, (args, kwargs)
        )
        results = [
            (i, x)
            for i, x in enumerate(leaves)
            if isinstance(x, Tensor) and _address(x) not in given
        ]

        def again() -> None:
            new = pytree.tree_leaves(call(*args, **kwargs))
            for i, x in results:
                if x.shape != new[i].shape:
                    fail(
                        NotCapturable,
                        str(found),
                        f"its result has shape {list(new[i].shape)}, and had {list(x.shape)} at "
                        "capture",
                    )
                x.copy_(new[i])

        self._into.steps.append(again)
        self._into.breaks.append(found)
        self._into.begin()
        return out

    @contextmanager
    def aside(self) -> Iterator[Recorded]:
        """This mode is off in the block, because compiled code must not run under one. The code
        captures into the yielded Recorded."""
        self.__exit__(None, None, None)
        try:
            yield self._into
        finally:
            self.__enter__()
        self._into.begin()

    def note(self, out: Any) -> None:
        """Note that `out` was captured."""
        self._made.update(_address(t) for t in pytree.tree_leaves(out) if isinstance(t, Tensor))


def capture_mode() -> CaptureMode | None:
    """The mode that captures this step, if any."""
    return next(
        (m for m in reversed(dispatch_mode_stack()) if isinstance(m, CaptureMode)),
        None,
    )


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _depends_on_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does Python read a value, or does the result's shape depend on values?"""
    # The second tag is the op's, not the call's: an integer index or a given output size fixes the
    # shape.
    if func is torch.ops.aten.index.Tensor:
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    dynamic = torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None
    return dynamic or torch.Tag.data_dependent_output in func.tags


def outside(function: Callable[..., R], fake: Callable[..., R] | None = None) -> Callable[..., R]:
    """Keep `function` out of graphs: it runs between them at every step, for instance because its
    control flow depends on data.

    Args:
        function: a function or method of tensors that returns tensors, of shapes that do not depend
            on data.
        fake: returns results of the right shapes, strides and dtypes, for the compiler, which does
            not trace the function. Default: one contiguous tensor like the first tensor argument.

    Returns:
        The function to call instead. Without `piecewise` and `breakable` it equals `function`,
        opaque to torch.compile.
    """

    def opaque(*args: Any, **kwargs: Any) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not any(isinstance(t, FakeTensor) for t in given):
            return function(*args, **kwargs)
        if fake is not None:
            return fake(*args, **kwargs)
        return cast(Any, torch.empty_like(given[0], memory_format=torch.contiguous_format))

    name = getattr(function, "__qualname__", type(function).__name__)
    setattr(opaque, MARK, name)
    torch.compiler.allow_in_graph(opaque)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return opaque(*args, **kwargs)
        mode = capture_mode()
        if mode is None or mode._paused:
            return function(*args, **kwargs)
        return mode.between(Break(name, "", OUTSIDE), function, args, kwargs)

    return call
