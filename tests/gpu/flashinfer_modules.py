"""Builds in advance, side by side, what FlashInfer's tests need: `python3 -m tests.gpu.flashinfer_modules [wide] [list]`.

Without `wide`: the grid of tests/gpu/test_kernels.py and tests/gpu/test_flashinfer.py. `wide` adds the grid at size. `list` builds nothing.
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from attnops.kernel import kernels_of
from attnops.kernels._flashinfer_build import Module, build
from attnops.testing import CASES, Case

OWN = (
    "decode:bfloat16:128", "fa2:bfloat16:128", "fa2:bfloat16:64", "fa2:bfloat16:64:window:sinks", "fa3:bfloat16:64",
    "fa3:bfloat16:64:window:sinks", "fa3:bfloat16:192x128",
)  # fmt: skip
"""What tests/gpu/test_flashinfer.py calls on SM90."""


def of_cases(cases: Iterable[Case], source: Any) -> set[Module]:
    """The modules of the cases that flashinfer takes. source: makes the Source of a seed."""
    found = set()
    for case in cases:
        call = case.build(source(0))
        kernel = kernels_of(call.op)["flashinfer"]
        if not kernel.refusals(replace(call.problem, plan="host")) and all(t.numel() for t in call.tensors().values()):
            found.add(Module.of(call.problem, call.arguments["max_seqlen_q"]))
    return found


def grid(wide: bool, device: str = "cuda") -> set[Module]:
    """The modules of the GPU suite's grids."""
    from attnops.testing import Source

    ops = ("paged_attention", "varlen_attention")
    found = set.union(*(of_cases(CASES[op], lambda seed: Source(seed, device)) for op in ops))
    if wide:
        at_size = import_module("tests.gpu.wide")
        found |= set.union(*(of_cases(at_size.WIDE[op], lambda seed: at_size.DeviceSource(seed, device)) for op in ops))
    return found


def main(arguments: list[str]) -> int:
    wanted = grid("wide" in arguments)
    if torch.cuda.get_device_capability() == (9, 0):
        wanted |= {Module.parse(text) for text in OWN}
    print(*sorted(map(str, wanted)), f"{len(wanted)} modules", sep="\n")
    if "list" not in arguments:
        start = time.perf_counter()
        for module, seconds in build(wanted).items():
            print(f"{seconds:7.1f} s  {module}", flush=True)
        print(f"{time.perf_counter() - start:7.1f} s in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
