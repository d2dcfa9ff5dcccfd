"""The FlashInfer package seen from outside, and its modules, imported at the first call of a kernel and never before.

Importing it makes a folder for what it compiles and asks every GPU for its capability, which initialises CUDA; a call has a CUDA
tensor in hand, so that is done by then. It compiles each module at its first use, with nvcc: once, before any capture.
"""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from typing import Any

from attnops.kernel import Package
from attnops.problem import Refusal, Target

ARCHS = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


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
