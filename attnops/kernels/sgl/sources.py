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

from attnops.errors import one_line
from attnops.kernel import Package
from attnops.kernels.sgl import wheel
from attnops.needs import within
from attnops.problem import Target, pretended


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

    namespace: of its ops in torch.ops. pattern: a glob of its library. lse_base: the base to which
    `sparse_prefill_fwd` gives its lse.
    """

    package: Package
    namespace: str
    pattern: str
    lse_base: float

    @property
    def ops(self) -> Any:
        """`torch.ops.<namespace>`. Raises OSError when the library does not load."""
        found = getattr(torch.ops, self.namespace)
        # The ops of a stand-in are there without a library.
        if not hasattr(found, "dense_decode_fwd"):
            why = unfit(self.package.module, self.pattern)
            if why is not None:
                raise OSError(f"{self.package.module} {why}")
        return found


def _package(package: Package, pattern: str) -> Package:
    return replace(package, unfit=functools.partial(unfit, package.module, pattern))


STABLE_TORCH = "2.14.1"
"""The torch that the metadata of sgl-flash-mla ask for. It loads under older ones, too."""


def hint(torch_version: str) -> str:
    """The command that installs sgl-flash-mla and leaves torch as it is."""
    alone = "" if within(torch_version, STABLE_TORCH, "") else "--no-deps "
    return f"pip install {alone}'sgl-flash-mla>=1.0'"


SGL, LEGACY = "flashmla_ops.*", "_C_legacy.*"
FLASH_MLA = Package("flash_mla", ("sgl-flash-mla",), "1.0", install=hint(torch.__version__))
SOURCES = (
    # Its docstring says base 2, and so did an H200; tests/gpu/test_sparse.py holds both to it.
    Source(_package(wheel.package("0.4.3"), SGL), "sgl_kernel", SGL, 2.0),
    Source(_package(FLASH_MLA, LEGACY), "flash_mla_legacy", LEGACY, math.e),
)
PACKAGE = replace(SOURCES[0].package, other=SOURCES[1].package)
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
