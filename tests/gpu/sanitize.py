"""Our Triton kernels under compute-sanitizer: memcheck (accesses out of bounds) and racecheck
(shared memory); writes sanitizer.json.

    python3 tests/gpu/sanitize.py [--cases 6] [--limit-s 200]

A sample of the grid of every op that has a `triton` kernel, each case compared with the reference
as well. torch's allocator is told not to keep memory, so that what lies past a tensor belongs to
nobody.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from attnops.core.kernel import Kernel, all_kernels
from attnops.measured.digests import digests
from attnops.testing import CASES, Source, check_kernel

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = re.compile(
    r"(?:ERROR SUMMARY: (\d+) errors?)|(?:RACECHECK SUMMARY: (\d+) hazards? displayed)"
)
TOOLS = ("memcheck", "racecheck")


def ours() -> list[Kernel]:
    """The kernels that run under the tools."""
    return [kernel for kernel in all_kernels() if kernel.name == "triton"]


def sample(count: int) -> int:
    """Run `count` cases of each kernel, and say how many ran. Raises Mismatch."""
    ran = 0
    for kernel in ours():
        cases = enumerate(random.Random(kernel.op).sample(CASES[kernel.op], len(CASES[kernel.op])))
        figures = (check_kernel(kernel, case.build(Source(seed, "cuda"))) for seed, case in cases)
        for each in islice((each for each in figures if not each.refused), count):
            ran += 1
            print(each, flush=True)
    torch.cuda.synchronize()
    return ran


def check(tool: str, command: str, count: int, limit_s: float) -> dict[str, Any]:
    """What `tool` finds in a process that runs the sample."""
    start = time.monotonic()
    run = [
        command,
        "--tool",
        tool,
        "--print-limit",
        "20",
        sys.executable,
        "-m",
        "tests.gpu.sanitize",
        "--sample",
        str(count),
    ]
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            run, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired as late:
        return {
            "finished": False,
            "seconds": round(limit_s),
            "last": (late.stdout or b"").decode(errors="replace")[-500:],
        }
    print(done.stdout[-4000:], done.stderr[-2000:])
    found = [int(a or b) for a, b in SUMMARY.findall(done.stdout)]
    report: dict[str, Any] = {
        "finished": done.returncode == 0 and bool(found),
        "errors": sum(found),
        "seconds": round(time.monotonic() - start),
        "cases": sum(map(int, re.findall(r"^(\d+) cases$", done.stdout, re.M))),
    }
    if found != [0]:
        report["first"] = "\n".join(
            line for line in done.stdout.splitlines() if line.startswith("=")
        )[:3000]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=int, default=6, help="cases of each kernel")
    parser.add_argument("--limit-s", type=float, default=200.0, help="seconds for each tool")
    given = parser.parse_args()
    if given.sample:
        print(f"{sample(given.sample)} cases")
        return 0
    from tests.gpu.part import versions
    from tests.gpu.run import results

    command = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if command is None:
        parser.error("compute-sanitizer: not found, want it on PATH or in /usr/local/cuda/bin")
    report = (
        versions()
        | {"code": digests(ours())}
        | {tool: check(tool, command, given.cases, given.limit_s) for tool in TOOLS}
    )
    path = results() / "sanitizer.json"
    path.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    print({tool: report[tool] for tool in TOOLS}, path)
    return 0 if all(report[t].get("finished") and report[t]["errors"] == 0 for t in TOOLS) else 1


if __name__ == "__main__":
    sys.exit(main())
