"""What the scripts share: where results go, what they were made with, and, from `attnops.bench`, timing of several calls in turn."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from attnops.bench.ceilings import a_pass as a_pass
from attnops.bench.report import environment as made_with
from attnops.bench.report import text_of as text_of
from attnops.bench.timing import interleaved_us as interleaved_us
from attnops.bench.timing import spread as spread

ROOT = Path(__file__).resolve().parent.parent


def environment(device: str) -> dict[str, Any]:
    """What the figures were made with. `$COMMIT` names the commit where there is no git."""
    return made_with(device, os.environ.get("COMMIT", ""))


def gpu_word(device: str) -> str:
    """`h200` for an NVIDIA H200, `h100` for an NVIDIA H100 80GB HBM3, `cpu` without one: names folders and shipped tables."""
    return word_of(torch.cuda.get_device_name()) if device == "cuda" else "cpu"


def word_of(gpu: str) -> str:
    """The model in a device's name: letters and then digits, else the last word."""
    found = re.search(r"\b[A-Z]{1,2}\d+[A-Z]?\b", gpu)
    return (found[0] if found else gpu.split()[-1]).lower()


def folder_of(device: str) -> Path:
    """`$OUT` if set, else benchmarks/results/<device>."""
    return Path(out) if (out := os.environ.get("OUT")) else ROOT / "benchmarks" / "results" / gpu_word(device)


def write(report: dict[str, Any], name: str, device: str) -> Path:
    """Write one results file."""
    path = folder_of(device) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(report))
    return path


def default_device() -> str:
    """`cuda` where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
