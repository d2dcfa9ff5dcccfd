"""On which GPUs each kernel of attnops has run its tests: `hardware.json`, which `make docs` writes from the committed results.

A kernel may be written for a machine that was never at hand. Its layouts and refusals are then tested against a stand-in, and every page
and command that names the kernel says that it has never run.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from attnops.problem import Target

FILE = Path(__file__).resolve().parent / "hardware.json"


@functools.cache
def ran_on() -> dict[str, tuple[str, ...]]:
    """By `op.kernel` the targets, such as sm90, on which its numerics were compared with the reference."""
    return {name: tuple(targets) for name, targets in json.loads(FILE.read_text("utf-8")).items()}


def never_run(op: str, kernel: str, target: Target) -> str:
    """`never run on hardware`, or `never run on sm100` of a kernel that ran elsewhere.

    Empty where it has run, on a CPU, and for kernels that are not of attnops.
    """
    found = ran_on().get(f"{op}.{kernel}")
    if found is None or target.device != "cuda" or str(target) in found:
        return ""
    return f"never run on {target}" if found else "never run on hardware"
