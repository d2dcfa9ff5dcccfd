"""A machine with FlashInfer's metadata and a folder of its own for the modules it builds: what
attnops looks at to know whether a module is built."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from attnops.core import builds, needs
from attnops.core.kernel import renew
from attnops.core.problem import Target, pretend
from attnops.kernels.flashinfer import devices, libraries, modules

VERSION, ARCH = "0.7.2.post1", "90a"
BASE = "FLASHINFER_WORKSPACE_BASE"
SM90 = Target("cuda", 90)
"""The machine at hand: nothing is assumed of it."""


def folder() -> Path:
    """Where FlashInfer of this machine builds."""
    return Path(os.environ[BASE], ".cache", "flashinfer", VERSION, ARCH, "cached_ops")


def keep(name: str) -> None:
    """Leave a library as FlashInfer's `JitSpecNvcc.build` does, where a test gave it a folder."""
    if BASE in os.environ:
        library = folder() / name / f"{name}.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()


@contextmanager
def machine(path: Path) -> Iterator[None]:
    """Within the block FlashInfer's stand-in, which is in place, is installed on an SM90 machine
    where nothing is built yet."""
    site = path / "site"
    metadata = site / f"flashinfer_python-{VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {VERSION}\n")
    caches = (
        needs._installed,
        needs._version,
        libraries._prebuilt,
        libraries._announced,
        modules._announce,
        devices._announce_xqa,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv(BASE, str(path))
        patch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        patch.setattr(sys.modules["flashinfer"], "__spec__", ModuleSpec("flashinfer", None))
        patch.setattr(modules, "absent_compiler", lambda: None)
        try:
            for cache in caches:
                cache.cache_clear()
            with pretend(SM90):
                yield
        finally:
            for cache in caches:
                cache.cache_clear()
            builds._WISHES.clear()
            renew()
