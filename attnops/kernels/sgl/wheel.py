"""The sgl_kernel wheel seen from outside: which files it has, and its libraries loaded one by one,
without importing the package.

Importing sgl_kernel initialises CUDA and loads more than one op needs.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attnops.core.kernel import Package
from attnops.core.needs import parse, within
from attnops.core.problem import Refusal, Target

DISTS = ("sglang-kernel", "sgl-kernel")
OLDEST = "0.3.18"
"""The oldest wheel that was looked into. Up to 0.3.21 it is called sgl-kernel."""
DROPPED = "0.4.7"
"""The first wheel without CUTLASS MLA and without vertical-slash attention."""
WHEELS = {"2.11": ("0.4.2", "0.4.6.post1"), "2.13": ("0.4.6.post1", "0.4.9"), "2.14": ("0.4.9", "")}
"""By minor version of torch, the first wheel built for it and the first that no longer is. torch
2.12 and 2.15 have none. From 0.4.7 on a wheel pins its torch exactly, and pip would replace the one
that is installed."""
UNKNOWN = "0.4.11"
"""Wheels from this version on were not looked into."""


def package(at_least: str = OLDEST, below: str = "", holds: str = "") -> Package:
    """The wheel in the versions that have the op `holds`, under either of its names."""
    return Package(
        "sgl_kernel",
        DISTS,
        at_least,
        install=hint(torch.__version__, at_least, below),
        below=below,
        holds=holds,
    )


def minor_of(torch_version: str) -> str:
    """`2.13` of `2.13.0+cpu`; a text that is no version as it is."""
    known = parse(torch_version)
    return ".".join(map(str, (*known.release, 0)[:2])) if known is not None else torch_version


def built_for(version: str) -> str | None:
    """The minor version of torch that this wheel is built for; None where it is not known."""
    if within(version, UNKNOWN, ""):
        return None
    return next(
        (minor for minor, (first, end) in WHEELS.items() if within(version, first, end)),
        "before 2.11",
    )


def hint(torch_version: str, at_least: str = "", below: str = "") -> str:
    """The command that installs a wheel within the bounds for this torch, and leaves torch as it
    is."""
    minor = minor_of(torch_version)
    if minor not in WHEELS:
        return f"a torch that sglang-kernel has wheels for ({', '.join(WHEELS)}), not {minor}"
    oldest, end = WHEELS[minor]
    first = oldest if within(oldest, at_least, "") else at_least
    end = below if below and (not end or within(below, "", end)) else end
    if not within(first, "", end):
        return (
            f"another torch: its wheels for torch {minor} start at {oldest}, and this was "
            f"dropped in {below}"
        )
    return f"pip install --no-deps '{DISTS[0]}>={first}{f',<{end}' if end else ''}'"


def common_ops(target: Target) -> str:
    """The file of the ops that have no library of their own: the wheel has one build for SM90 and
    one for every other GPU."""
    return f"{'sm90' if target.arch == 90 else 'sm100'}/common_ops.*"


def library(pattern: str, module: str = "sgl_kernel") -> Path | None:
    """The file of the wheel that matches the glob `pattern`, or None."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    folders = spec.submodule_search_locations if spec is not None else None
    return next((f for folder in folders or () for f in sorted(Path(folder).glob(pattern))), None)


def lacks(target: Target, pattern: str) -> Refusal | None:
    """A probe: the wheel may be installed without this library (a CPU build, a wheel cut down), or
    be built for another torch."""
    if target.assume is not None:
        return None
    if library(pattern) is None:
        return Refusal("package", f"sgl_kernel without {pattern}", f"a wheel that holds {pattern}")
    why = misfit()
    return None if why is None else Refusal("package", f"sgl_kernel {why}", hint(torch.__version__))


def misfit() -> str | None:
    """Why the installed wheel does not go with this torch, by its version; None where it does, or
    its version says nothing."""
    version = package().version()
    built = None if version is None else built_for(version)
    return (
        None
        if built in (None, minor_of(torch.__version__))
        else f"{version}, which torch {built} loads"
    )


def op(name: str, pattern: str) -> Any:
    """`torch.ops.sgl_kernel.<name>`, from the library that fits `pattern`. Raises OSError when it
    does not load."""
    load(name, pattern)
    return getattr(torch.ops.sgl_kernel, name)


@functools.cache
def load(op: str, pattern: str) -> None:
    """Make `torch.ops.sgl_kernel.<op>` exist. Raises OSError, with the loader's cause, when the
    library does not load."""
    if hasattr(torch.ops.sgl_kernel, op):
        return
    path = library(pattern)
    if path is None:
        raise OSError(
            f"sgl_kernel: got no file {pattern}, want the wheel that was there when the kernel "
            "was chosen"
        )
    torch.ops.load_library(str(path))
