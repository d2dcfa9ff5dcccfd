"""The sgl_kernel wheel seen from outside: which files it has, and its libraries loaded one by one, without importing the package.

Importing sgl_kernel initialises CUDA and loads more than one op needs.
"""

from __future__ import annotations

import functools
import re
from importlib.util import find_spec
from pathlib import Path

import torch

from attnops.kernel import Package
from attnops.problem import Refusal, Target

DISTS = ("sglang-kernel", "sgl-kernel")


def package(at_least: str) -> Package:
    """The wheel, `at_least` of this version. It bears one of two names."""
    return Package("sgl_kernel", DISTS, at_least, "pip install sglang-kernel")


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


def numbers(version: str) -> tuple[int, ...]:
    """`0.4.6.post1` as (0, 4, 6)."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
