"""Launches of kernels that Triton has compiled, past its search for them. Importing this module
imports triton.

Triton finds the compiled kernel of a launch by names, types and values of all arguments, in Python,
for every launch. A decode step launches the same kernels with the same numbers again and again, so
that a host that runs ahead of no GPU waits for that search.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from attnops.kernels.shared.launch.beside import ALIGNED

MOST = 4096
"""Kinds of launches that are kept. Numbers that change from call to call, such as lengths, make
kinds of their own."""

Values = tuple[Any, ...]


def _tensor(x: Tensor) -> Values:
    return x.dtype, x.data_ptr() % ALIGNED


def _descriptor(x: TensorDescriptor) -> Values:
    return x.base.dtype, *x.block_shape


_KINDS: dict[type, Callable[[Any], Values]] = {
    Tensor: _tensor,
    nn.Parameter: _tensor,
    TensorDescriptor: _descriptor,
}
"""By type: what Triton may compile another kernel for. Each number is a kind of its own, which is
finer than Triton's kinds."""
_KEPT: dict[Values, tuple[Any, Callable[[Values], Values]]] = {}
"""By kind: the compiled kernel, and what puts values into the order of its arguments."""


def launch_compiled(
    kernel: Any, grid: tuple[int, ...], args: Values, given: dict[str, Any]
) -> None:
    """`kernel[grid](*args, **given)`, straight to the compiled kernel if a launch of this kind was
    made before.

    args: the first arguments; given: the others by name, with Triton's options.
    """
    if (
        type(kernel) is not JITFunction or kernel.pre_run_hooks
    ):  # Triton's interpreter, or a profiler
        kernel[grid](*args, **given)
        return
    values = (*args, *given.values())
    kinds = [_KINDS[type(x)](x) if type(x) in _KINDS else x for x in values]
    key = (id(kernel), torch.cuda.current_device(), tuple(given), tuple(map(type, values)), *kinds)
    kept = _KEPT.get(key)
    if kept is None:
        _remember(key, kernel, len(args), given, kernel[grid](*args, **given))
        return
    compiled, ordered = kept
    compiled[(*grid, 1, 1)[:3]](*ordered(values))


def _remember(key: Values, kernel: Any, first: int, given: dict[str, Any], compiled: Any) -> None:
    places = {name: i for i, name in enumerate((*kernel.arg_names[:first], *given))}
    if not isinstance(compiled, CompiledKernel) or not places.keys() >= {
        *kernel.arg_names
    }:  # an argument is at its default
        return
    if len(_KEPT) >= MOST:
        _KEPT.clear()
    _KEPT[key] = compiled, itemgetter(*(places[name] for name in kernel.arg_names))
