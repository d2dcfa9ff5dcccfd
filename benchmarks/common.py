"""What the suites share: where results go, what they were made with, and timing of several calls in turn."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import attnops
from attnops.kernel import all_kernels

ROOT = Path(__file__).resolve().parent.parent


def interleaved_us(
    calls: dict[str, Callable[[], Any]], repeats: int = 15, inner: int = 400, wait: bool = True
) -> dict[str, dict[str, float]]:
    """Median and half the interquartile range, in microseconds a call, of each of `calls`, run in turn so that drift hits all alike.

    wait: for the device to be done before the clock is read.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    for _ in range(repeats):
        for name, call in calls.items():
            _sync()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            if wait:
                _sync()
            taken[name].append((time.perf_counter() - start) / inner * 1e6)
    return {name: spread(us) for name, us in taken.items()}


def spread(us: list[float]) -> dict[str, float]:
    """Median and half the interquartile range of some times."""
    low, _, high = statistics.quantiles(us, n=4)
    return {"median_us": round(statistics.median(us), 2), "spread_us": round((high - low) / 2, 2)}


def a_pass(device: str, nbytes: int) -> Callable[[], Any]:
    """A call that reads `nbytes` and writes as many, by a kernel: `copy_` in a CUDA graph is a copy node, which on an H200 is slower."""
    given, into = (torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device) for _ in range(2))
    return lambda: torch.neg(given, out=into)


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def environment(device: str) -> dict[str, Any]:
    """What the figures were made with."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "commit": os.environ.get("COMMIT") or (git.stdout.strip() if git.returncode == 0 else "unknown"),
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attnops": attnops.__version__,
        "packages": sorted({v for k in all_kernels() for v in k.versions() if not v.endswith("==None")}),
    }


def gpu_word(device: str) -> str:
    """`h200` for an NVIDIA H200, `cpu` without one: names folders and shipped tables."""
    return torch.cuda.get_device_name().split()[-1].lower() if device == "cuda" else "cpu"


def folder_of(device: str) -> Path:
    """`$OUT` if set, else benchmarks/results/<device>."""
    return Path(out) if (out := os.environ.get("OUT")) else ROOT / "benchmarks" / "results" / gpu_word(device)


def write(report: dict[str, Any], name: str, device: str) -> Path:
    """Write one results file."""
    path = folder_of(device) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(report))
    return path


def text_of(report: dict[str, Any]) -> str:
    """A results file's text: a line for each entry of a section, so that it is small and a change is seen where it is."""
    lines = []
    for name, section in sorted(report.items()):
        brackets = "{}" if isinstance(section, dict) else "[]"
        if isinstance(section, dict):
            entries = [f"{json.dumps(key)}: {_dense(value)}" for key, value in sorted(section.items())]
        else:
            entries = [_dense(value) for value in section] if isinstance(section, list) else []
        long = len(_dense(section)) > 120 and entries
        lines.append(f"{json.dumps(name)}: " + (brackets[0] + "\n" + ",\n".join(entries) + "\n" + brackets[1] if long else _dense(section)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _dense(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def default_device() -> str:
    """`cuda` where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
