"""FlashInfer's modules built in advance and side by side.

    python -m attnops.kernels.flashinfer.build decode:bfloat16:128 fa2:bfloat16:128
    fa3:bfloat16:128:window

A module is written path:dtype:head_dim[xv_head_dim][:window][:softcap][:sinks]. Without this a
module is built by nvcc at the first plan that needs it, which takes a quarter of a minute (decode,
fa2) to more than one (fa3).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from attnops.core.errors import InvalidInput
from attnops.kernels.flashinfer.modules import NAMES, Module, load_paged

WANT = "decode|fa2|fa3:float16|bfloat16:64|128|256|192x128[:window][:softcap][:sinks]"


def parse(text: str) -> Module:
    """The inverse of str(module). Raises InvalidInput."""
    path, dtype, dims, *flags = (*text.split(":"), "", "")[: max(text.count(":") + 1, 3)]
    names, numbers, known = (
        {name: number for number, name in NAMES.items()},
        dims.split("x"),
        Module._fields[4:],
    )
    right = path in names and dtype in ("float16", "bfloat16") and set(flags) <= set(known)
    if not right or not all(n.isdigit() for n in numbers) or len(numbers) > 2:
        raise InvalidInput("module", repr(text), WANT)
    return Module(
        names[path],
        getattr(torch, dtype),
        int(numbers[0]),
        int(numbers[-1]),
        *(f in flags for f in known),
    )


def timed(module: Module) -> float:
    """The seconds that it took to load the module, built if need be."""
    start = time.perf_counter()
    load_paged(module)
    return time.perf_counter() - start


def build(modules: Iterable[Module]) -> dict[Module, float]:
    """Build and load `modules` side by side. Returns the seconds of each; the first error of a
    build is raised when all have ended."""
    wanted = sorted(set(modules), key=lambda m: (-m.path, str(m)))  # the slow ones first
    import flashinfer.prefill  # noqa: F401 - not first in several threads at once, which it does not survive

    with ThreadPoolExecutor(max(len(wanted), 1)) as pool:
        return dict(zip(wanted, pool.map(timed, wanted), strict=True))


if __name__ == "__main__":
    for _module, _seconds in build(map(parse, sys.argv[1:])).items():
        print(f"{_seconds:7.1f} s  {_module}")
