"""The GPUs on which each kernel has run its tests: `hardware.json`, which `make docs` writes from the committed results.

A kernel without such a GPU is tested against a stand-in alone. Every page and command that names it says that it has never run.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from attnops.problem import Target

FILE = Path(__file__).resolve().parent / "hardware.json"


@functools.cache
def ran_on() -> dict[str, list[str]]:
    """By `op.kernel` the targets, such as sm90, on which its numerics were compared with the reference."""
    return dict(json.loads(FILE.read_text("utf-8")))


def never_run(op: str, kernel: str, target: Target) -> str:
    """`never run on hardware`, or `never run on sm100`; "" on a CPU, where it has run, and for kernels of other packages."""
    found = ran_on().get(f"{op}.{kernel}")
    if found is None or target.device != "cuda" or str(target) in found:
        return ""
    return f"never run on {target}" if found else "never run on hardware"
