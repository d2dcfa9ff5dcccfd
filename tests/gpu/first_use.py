"""What the first call of a kernel costs in a fresh process: `python -m tests.gpu.first_use MODULE`.

MODULE has FIRST_USES: by name, what makes the call. `first_use` runs it with an empty cache of Triton's.
"""

import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch

from attnops.core.kernel import kernels_of

MOST = 2
"""Device kernels that one call launches, at most: attention has two stages. A call that compiles more tries variants."""


class Use(NamedTuple):
    """seconds: of the first call above the second. compiled: device kernels that it compiled."""

    seconds: float
    compiled: int


def first_use(module: str, cache: Path) -> dict[str, Use]:
    """By name. cache: an empty folder."""
    environ = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-m", __name__, module], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (line.split() for line in done.stdout.splitlines())
    return {name: Use(round(float(seconds), 2), int(compiled)) for name, seconds, compiled in lines}


def main(module: str) -> None:
    calls, cache = import_module(module).FIRST_USES, Path(os.environ["TRITON_CACHE_DIR"])
    torch.zeros(1, device="cuda")
    for name in ("attention", "data"):
        import_module(f"attnops.kernels.triton.launch.{name}")  # what is imported once is no part of a kernel's first use
    for name, make in calls.items():
        call = make()
        kernel = kernels_of(call.op)["triton"]
        torch.cuda.synchronize()
        times, before = [], len([*cache.rglob("*.cubin")])
        for _ in range(2):
            start = time.perf_counter()
            kernel.run(call.record)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        print(name, times[0] - times[1], len([*cache.rglob("*.cubin")]) - before)


if __name__ == "__main__":
    main(sys.argv[1])
