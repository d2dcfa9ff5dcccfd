"""The wheels that carry FlashMLA's kernels, and the ops of the one that is there.

`sgl_kernel` (sglang-kernel) is built for one torch release and looked at first, because the results
and times of this project are its. `flash_mla` (sgl-flash-mla) comes second: it keeps the kernels
for SM90 and the older formats of pages, which FlashMLA's own project dropped, behind torch's stable
ABI, so that one wheel loads under every torch from 2.10 on with CUDA 13. Its ops are in
`torch.ops.flash_mla_legacy`. It never ran here on a GPU.

A wheel counts as there if its library loads, which initialises no CUDA. FlashMLA's own package is
called `flash_mla`, too, and has no such library.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnops.core.errors import one_line
from attnops.core.kernel import Package
from attnops.core.needs import within
from attnops.core.problem import Target, pretended
from attnops.kernels.sgl import wheel


def _sgl_unfit() -> str | None:
    # A library for another torch may load and end the process at a call.
    return wheel.misfit() or unfit("sgl_kernel", SGL)


@functools.cache
def unfit(module: str, pattern: str) -> str | None:
    """Why the library of an installed wheel cannot be used here; None once it is loaded."""
    path = wheel.library(pattern, module)
    if path is None:
        return f"without {pattern}"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"whose {path.name} does not load ({one_line(error.__cause__ or error)})"
    return None


@dataclass(frozen=True)
class Source:
    """A wheel with FlashMLA's ops.

    namespace: of its ops in torch.ops. lse_base: the base to which `sparse_prefill_fwd` gives its
    lse.
    """

    package: Package
    namespace: str
    lse_base: float

    @property
    def ops(self) -> Any:
        """`torch.ops.<namespace>`. Raises OSError when the library does not load."""
        found = getattr(torch.ops, self.namespace)
        # The ops of a stand-in are there without a library.
        if not hasattr(found, "dense_decode_fwd"):
            why = None if self.package.unfit is None else self.package.unfit()
            if why is not None:
                raise OSError(f"{self.package.module} {why}")
        return found


STABLE_TORCH = "2.14.1"
"""The torch that the metadata of sgl-flash-mla ask for. Its library loads under 2.11, too."""


def hint(torch_version: str) -> str:
    """The command that installs sgl-flash-mla and leaves torch as it is."""
    alone = "" if within(torch_version, STABLE_TORCH, "") else "--no-deps "
    return f"pip install {alone}'sgl-flash-mla>=1.0'"


SGL, LEGACY = "flashmla_ops.*", "_C_legacy.*"
SGL_KERNEL = replace(wheel.package("0.4.3"), unfit=_sgl_unfit)
FLASH_MLA = Package(
    "flash_mla",
    ("sgl-flash-mla",),
    "1.0",
    install=hint(torch.__version__),
    unfit=functools.partial(unfit, "flash_mla", LEGACY),
)
SOURCES = (
    # Its docstring says base 2, and so did an H200; tests/gpu/test_sparse.py holds both to it.
    Source(SGL_KERNEL, "sgl_kernel", 2.0),
    # Its docstring says natural.
    Source(FLASH_MLA, "flash_mla_legacy", math.e),
)
PACKAGE = replace(SGL_KERNEL, other=FLASH_MLA)
"""What the kernels of FlashMLA need: either wheel."""


def source() -> Source:
    """The first wheel that is there. Raises OSError with the reasons when none is."""
    target = pretended()
    return _found(None if target is None else target.assume)


@functools.cache
def _found(assume: tuple[str, ...] | None) -> Source:
    target = Target(assume=assume)
    reasons = []
    for each in SOURCES:
        why = each.package.absent(target)
        if why is None:
            return each
        reasons.append(str(why))
    raise OSError(f"FlashMLA: {'; '.join(reasons)}")


def op(name: str) -> Any:
    """FlashMLA's op of this name, of the wheel that is there. Raises OSError when none is."""
    return getattr(source().ops, name)
