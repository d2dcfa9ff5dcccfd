"""Seconds of the first call of a kernel above its second, in a fresh process: `python -m tests.gpu.first_use MODULE`.

MODULE has FIRST_USES: by name, what makes the call. `first_use_s` runs it with an empty cache of Triton's.
"""

import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import torch

from attnops.kernel import kernels_of

LIMIT_S = 3.0


def first_use_s(module: str, cache: Path, limit_s: float) -> dict[str, float]:
    """By name. cache: an empty folder. Where one is over `limit_s` all are taken again: another process may have had the cores."""
    seconds = _once(module, cache / "once")
    if max(seconds.values()) < limit_s:
        return seconds
    again = _once(module, cache / "again")
    return {name: min(s, again[name]) for name, s in seconds.items()}


def _once(module: str, cache: Path) -> dict[str, float]:
    environ = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-m", __name__, module], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: round(float(s), 2) for name, s in (line.split() for line in done.stdout.splitlines())}


def main(module: str) -> None:
    calls = import_module(module).FIRST_USES
    torch.zeros(1, device="cuda")
    for name in ("call", "data"):
        import_module(f"attnops.kernels._triton.{name}")  # what is imported once is no part of a kernel's first use
    for name, make in calls.items():
        call = make()
        kernel = kernels_of(call.op)["triton"]
        torch.cuda.synchronize()
        times = []
        for _ in range(2):
            start = time.perf_counter()
            kernel.run(*call.args, **call.kwargs)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        print(name, times[0] - times[1])


if __name__ == "__main__":
    main(sys.argv[1])
