"""Adds everything that a choice of kernel depends on to the keys of Inductor's caches."""

import functools
import glob
import hashlib
from pathlib import Path
from typing import Any

import torch

from .. import version
from ..core.kernel import CONTRACT, Kernel, all_kernels
from ..core.problem import pretended, repeatable
from ..measured.store import digests


def code_files() -> list[Path]:
    """The sources of attnops.

    In a checkout lowering and graphs are links, which rglob does not follow.
    """
    return sorted(map(Path, glob.glob(f"{Path(version.__file__).parent}/**/*.py", recursive=True)))


@functools.cache
def code_digest() -> str:
    """A digest of `code_files()`: a changed cost function or reference may change the choice."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in code_files())).hexdigest()


def choice_inputs() -> tuple[str, ...]:
    """Everything outside the graph that a choice depends on.

    Code, kernels and their packages' versions, GPUs, pretended target, measured times, and
    torch.use_deterministic_algorithms. Policies are arguments of the ops, so the graph differs.
    """
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return (
        "attnops",
        str(CONTRACT),
        code_digest(),
        *map(torch.cuda.get_device_name, gpus),
        repr(pretended()),
        repeatable(),
        *digests(),
        *map(_version, all_kernels()),
    )


def _version(k: Kernel) -> str:
    return f"{k.op}.{k.name}:{k.run.__module__}:{','.join(k.versions())}:{k.absences_key()}"


def install() -> None:
    """Have Inductor hash `choice_inputs()` into the keys of its caches.

    It hashes the uuid of every entry of `custom_backend_passes`. An entry for a device that does
    not exist never runs, and takes no slot that a user may want.
    """
    from .inductor import (
        CustomGraphModulePass,
        custom_backend_passes,
        init_backend_registration,
    )

    class ChoiceInputs(CustomGraphModulePass):
        def __call__(self, gm: torch.fx.GraphModule) -> None:
            raise RuntimeError("the device 'attnops' does not exist")

        def uuid(self) -> Any:
            return choice_inputs()

    init_backend_registration()
    custom_backend_passes["attnops"] = ChoiceInputs()
