"""The FlashInfer package seen from outside, and its modules, imported at the first call of a kernel and never before.

Importing it makes a folder for what it compiles and asks every GPU for its capability, which initialises CUDA; a call has a CUDA
tensor in hand, so that is done by then. It compiles each module at its first use, with nvcc: once, before any capture.
"""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from typing import Any

from attnops.kernel import Need, Package
from attnops.problem import Problem, Refusal, Target

ARCHS = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
HEAD_DIMS = (64, 128, 256, 512)
"""What its merging kernels are compiled for."""

MAX_THREADS = 1024


def package(at_least: str = "0.7.2") -> Package:
    """The wheel, `at_least` of this version."""
    return Package("flashinfer", ("flashinfer-python",), at_least)


def missing(target: Target) -> Refusal | None:
    """The probe: what the package imports and may be absent."""
    if target.assume is not None or find_spec("tvm_ffi") is not None:
        return None
    return Refusal("package", "tvm_ffi missing", "pip install apache-tvm-ffi")


@functools.cache
def module(name: str) -> Any:
    """`flashinfer.<name>`. Raises OSError, which says what to set, where its folder cannot be made."""
    try:
        return importlib.import_module(f"flashinfer.{name}")
    except OSError as error:
        hint = "flashinfer writes below $FLASHINFER_WORKSPACE_BASE, or the home folder, and cannot"
        raise OSError(f"{hint}: {error}") from error


def one_block(heads: str, dim: str, dtype: str) -> Need:
    """A token's heads, their number in the field `heads`, share a block of threads, each of which moves 16 bytes or more."""

    def need(p: Problem) -> Refusal | None:
        numbers = getattr(p, dim)
        if numbers not in HEAD_DIMS:
            return Refusal(dim, numbers, " | ".join(map(str, HEAD_DIMS)))
        most = MAX_THREADS * max(16 // getattr(p, dtype).itemsize, numbers // 32) // numbers
        return None if getattr(p, heads) <= most else Refusal(heads, getattr(p, heads), f"<= {most} of {numbers} numbers each")

    return need
