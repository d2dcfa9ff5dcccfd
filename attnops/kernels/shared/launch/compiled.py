"""Launches of kernels that Triton has compiled, past its search for them. Importing this module
imports triton.

Triton looks up the compiled kernel in Python at every launch. A decode step repeats the launches of
the step before, and an eager one keeps the GPU waiting for that lookup.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
import triton.language as tl
from torch import Tensor, nn
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from attnops.kernels.shared.launch.beside import descriptor_kind, memory_kind

MOST = 4096
"""Kinds of launches that are kept. Numbers that change from call to call, such as lengths, make
kinds of their own."""

Values = tuple[Any, ...]
Made = tuple[Callable[..., None], Values]
"""Of a launch: what launches the compiled kernel on the grid, and its arguments."""

_SHOWN: dict[type, Callable[[Any], Values]] = {
    Tensor: memory_kind,
    nn.Parameter: memory_kind,
    TensorDescriptor: descriptor_kind,
}
"""By type: what Triton may compile another kernel for. A number is its own kind, which is finer
than Triton's kinds."""
_COMPARED = frozenset({*_SHOWN, int, float, bool, str, type(None), tl.dtype})
"""Arguments of other types, such as a subclass of Tensor, are left to Triton's lookup."""
_ENTRIES: dict[Values, tuple[Any, Callable[[Values], Values]]] = {}
"""By kind of launch: the compiled kernel, and what reorders values as its arguments."""
_ADDING = threading.Lock()


def launch_compiled(
    kernel: Any, grid: tuple[int, ...], args: Values, keywords: dict[str, Any]
) -> Made | None:
    """`kernel[grid](*args, **keywords)`, straight to the compiled kernel if a launch of this kind
    was made before.

    args: the first arguments. keywords: the others by name, with Triton's options. None: Triton
    searched for the kernel.
    """
    values = (*args, *keywords.values())
    types = tuple(map(type, values))
    if not (_COMPARED.issuperset(types) and is_plain(kernel)):
        kernel[grid](*args, **keywords)
        return None
    shown = [_SHOWN[type(x)](x) if type(x) in _SHOWN else x for x in values]
    kind = (id(kernel), torch.cuda.current_device(), tuple(keywords), types, *shown)
    entry = _ENTRIES.get(kind)
    if entry is None:
        names = (*kernel.arg_names[: len(args)], *keywords)
        _add(kind, kernel, names, kernel[grid](*args, **keywords))
        return None
    compiled, reordered = entry
    runner = compiled[(*grid, 1, 1)[:3]]
    values = reordered(values)
    runner(*values)
    return runner, values


def is_plain(kernel: Any) -> bool:
    """Would Triton's lookup find what it found before? Not in its interpreter, nor under a debugger
    or a profiler."""
    if type(kernel) is not JITFunction or kernel.pre_run_hooks or knobs.runtime.debug:
        return False
    instrumented = knobs.compilation.instrumentation_mode
    return not (instrumented or knobs.runtime.add_stages_inspection_hook)


def _add(kind: Values, kernel: Any, names: tuple[str, ...], compiled: Any) -> None:
    """Keep a compiled kernel. names: of the values of its launch, in their order."""
    positions = {name: i for i, name in enumerate(names)}
    # A kernel of one argument would be handed that and no tuple.
    complete = len(kernel.arg_names) > 1 and positions.keys() >= {*kernel.arg_names}
    if not complete or not isinstance(compiled, CompiledKernel):
        return
    reordered = itemgetter(*(positions[name] for name in kernel.arg_names))
    with _ADDING:
        if len(_ENTRIES) >= MOST:
            del _ENTRIES[next(iter(_ENTRIES))]
        _ENTRIES[kind] = compiled, reordered
