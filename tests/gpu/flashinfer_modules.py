"""Builds in advance, side by side, what FlashInfer's tests need:
`python3 -m tests.gpu.flashinfer_modules [list]`.

Attention's modules of the grid of tests/gpu/test_kernels.py and those of
tests/gpu/test_flashinfer.py, latent attention's, and XQA's of tests/gpu/test_xqa.py. The grids at
size and of plans are run on these alone. `list` builds nothing.
"""

import functools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import Problem, Target, altered, pretend
from attnops.kernels.flashinfer.build import module as parse
from attnops.kernels.flashinfer.modules import FA2, FA3, NAMES, Module, library_of, module_of
from attnops.testing import CASES

OWN = (
    "decode:bfloat16:128",
    "fa2:bfloat16:128",
    "fa2:bfloat16:64",
    "fa2:bfloat16:64:window:sinks",
    "fa3:bfloat16:64",
    "fa3:bfloat16:64:window:sinks",
    "fa3:bfloat16:192x128",
    "fa3:bfloat16:128",
)
"""What tests/gpu/test_flashinfer.py calls on SM90, and the module of most of the grid at size."""
AT_ONCE = 3
"""Modules that are built side by side, each by several compilers of up to 4 GB."""


@functools.cache
def suite(target: Target) -> frozenset[Module]:
    """The modules that the GPU suite builds on `target`."""
    found = {parse(text) for text in OWN} if target.arch == 90 else set()
    with pretend(target):
        for op in ("paged_attention", "varlen_attention"):
            kernel = kernels_of(op)["flashinfer"]
            for case in CASES[op]:
                call = case.call()
                problem = altered(call.problem, plan="host", workspace=1 << 62)
                if not kernel.unmet(problem) and all(t.numel() for t in call.tensors().values()):
                    found.add(module_of(problem, call.arguments.get("max_seqlen_q", 0)))
    return frozenset(found)


def is_built(problem: Problem, queries: int) -> bool:
    """Is the module of the call one of the suite's?"""
    return module_of(problem, queries) in suite(problem.target)


def others() -> dict[str, Callable[[], Any]]:
    """What loads, and so builds, each module of latent attention and of XQA."""
    from attnops.kernels.flashinfer import mla
    from tests.gpu.test_xqa import BUILT, load

    half, bf16, e4m3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
    pairs = [
        (path, *dtypes)
        for path in (FA2, FA3)
        for dtypes in ((bf16, bf16), (half, half), (bf16, e4m3))
    ]
    latents: dict[str, Callable[[], Any]] = {
        f"mla {NAMES[p[0]]} {p[1]} {p[2]}": mla.library_of(*p).load for p in pairs
    }
    return latents | {
        f"xqa {name}": functools.partial(load, *point) for name, point in BUILT.items()
    }


def loaded(name: str, load: Callable[[], Any]) -> None:
    """Load one, and print how long that took or why it failed: a test that needs it says more."""
    start = time.perf_counter()
    try:
        load()
        print(f"{time.perf_counter() - start:7.1f} s  {name}", flush=True)
    except Exception as error:
        print(f"failed    {name}: {str(error)[:2000]}", flush=True)


def main(arguments: list[str]) -> int:
    if find_spec("flashinfer") is None:
        print("flashinfer is not installed")
        return 0
    wanted = suite(Target.of(torch.device("cuda", 0)))
    print(*sorted(map(str, wanted)), f"{len(wanted)} modules", sep="\n", flush=True)
    if "list" not in arguments:
        import flashinfer.prefill  # noqa: F401 - not first in several threads at once, which it does not survive

        rest = [
            (str(module), library_of(module).load)
            for module in sorted(wanted, key=lambda m: (-m.path, str(m)))
        ]  # the slow ones first
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda one: loaded(*one), [*rest, *others().items()]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
