"""The folder of results files, and the script's command line."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def word_of(gpu: str) -> str:
    """The model in a device's name: letters and then digits, else the last word. `h200` for an NVIDIA H200."""
    found = re.search(r"\b[A-Z]{1,2}\d+[A-Z]?\b", gpu)
    return (found[0] if found else gpu.split()[-1]).lower()


def folder_of(device: str) -> Path:
    """`$OUT` if set, else benchmarks/results/<device>."""
    machine = word_of(torch.cuda.get_device_name()) if device == "cuda" else "cpu"
    return Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / machine)


def arguments(doc: str | None, budget_s: float = 0.0) -> argparse.ArgumentParser:
    """A parser with `--device` and, given a default, `--budget-s`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    if budget_s:
        parser.add_argument("--budget-s", type=float, default=budget_s)
    return parser
