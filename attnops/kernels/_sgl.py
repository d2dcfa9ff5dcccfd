"""The sgl_kernel wheel seen from outside: which files it has, and its libraries loaded one by one, without importing the package.

Importing sgl_kernel initialises CUDA and loads more than one op needs.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import torch

from attnops.kernel import Package
from attnops.problem import Refusal, Target

DISTS = ("sglang-kernel", "sgl-kernel")


OLDEST = "0.3.18"
"""The oldest wheel that was looked into. Up to 0.3.21 it is called sgl-kernel."""

DROPPED = "0.4.7"
"""The first wheel without CUTLASS MLA and without vertical-slash attention."""


def package(at_least: str = OLDEST, below: str = "", holds: str = "") -> Package:
    """The wheel in the versions that have the op `holds`. It bears one of two names."""
    return Package("sgl_kernel", DISTS, at_least, below=below, holds=holds)


def common_ops(target: Target) -> str:
    """Which file the ops that are no library of their own lie in: the wheel has one build for SM90 and one for every other GPU."""
    return f"{'sm90' if target.arch == 90 else 'sm100'}/common_ops.*"


def lacks_common_ops(target: Target) -> Refusal | None:
    """The probe of kernels in `common_ops`."""
    return lacks(target, common_ops(target))


def library(pattern: str) -> Path | None:
    """The wheel's file that matches the glob `pattern`, or None."""
    try:
        spec = find_spec("sgl_kernel")
    except (ImportError, ValueError):
        return None
    folders = spec.submodule_search_locations if spec is not None else None
    return next((f for folder in folders or () for f in sorted(Path(folder).glob(pattern))), None)


def lacks(target: Target, pattern: str) -> Refusal | None:
    """Is the library not in the installed wheel? A target that assumes its packages has it."""
    if target.assume is not None or library(pattern) is not None:
        return None
    return Refusal("package", f"sgl_kernel without {pattern}", f"a wheel that holds {pattern}")


@functools.cache
def load(op: str, pattern: str) -> None:
    """Make `torch.ops.sgl_kernel.<op>` exist. Raises OSError when the library does not load, its cause told by the loader."""
    if hasattr(torch.ops.sgl_kernel, op):
        return
    path = library(pattern)
    if path is None:
        raise OSError(f"sgl_kernel: got no file {pattern}, want the wheel that was there when the kernel was chosen")
    torch.ops.load_library(str(path))
