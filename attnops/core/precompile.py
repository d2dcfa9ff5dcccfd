"""Begins to build what calls will wait for, such as kernels to compile, before the calls are
made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from attnops.core.kernel import FAILURES, Kernel, all_kernels
from attnops.core.op import Op, watch
from attnops.core.private_torch import FakeTensorMode, without_modes
from attnops.core.problem import Problem
from attnops.core.record import changed, values
from attnops.core.select import choose


def start() -> None:
    """Have every kernel begin to build what all of its calls will wait for, in a process that is
    about to call some."""
    for kernel in all_kernels():
        if kernel.ahead is not None:
            with suppress(*FAILURES):
                kernel.ahead(None)


@contextmanager
def beginning() -> Iterator[None]:
    """Of each call on fake tensors within the block, the kernel that is chosen begins to build what
    it will wait for."""

    def begun(op: Op, problem: Problem, call: Any) -> None:
        with suppress(*FAILURES):  # the call itself raises them
            begin(choose(problem, call.policy), call)

    end = watch(begun)
    try:
        yield
    finally:
        end()


@contextmanager
def ahead() -> Iterator[None]:
    """As `beginning`, of calls that are made on fake tensors within the block. No kernel runs. Real
    tensors are read as fake ones."""
    with beginning(), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def begin(kernel: Kernel, call: Any) -> None:
    """Have `kernel` begin to build what its run of such a call will wait for (`Kernel.ahead`). Its
    errors are left to the run.

    call: of real or fake tensors. A symbolic size is taken for its hint.
    """
    if kernel.ahead is None:
        return
    with suppress(*FAILURES), without_modes(), FakeTensorMode():
        kernel.ahead(
            changed(
                call,
                **{
                    a.name: _of_one_size(value)
                    for a, value in zip(call.spec.args, values(call), strict=True)
                },
            )
        )


def _of_one_size(x: Any) -> Any:
    """A fake tensor or a number with hints in place of symbols. Raises ValueError for a size
    without one."""
    if isinstance(x, torch.SymInt):
        if not x.node.has_hint():
            raise ValueError(f"{x} has no hint")
        return int(x.node.hint)
    if not isinstance(x, Tensor):
        return x
    shape, strides, offset = (
        [_of_one_size(n) for n in sizes] for sizes in (x.shape, x.stride(), (x.storage_offset(),))
    )
    room = (
        offset[0]
        + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        + 1
    )
    return torch.empty(max(room, 1), dtype=x.dtype, device=x.device).as_strided(
        shape, strides, offset[0]
    )
