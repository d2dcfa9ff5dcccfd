"""Runs suites of measurements, each in a process of its own: one that fails or hangs leaves the others' files.

    python benchmarks/run.py [--suite bench,regret,latent] [--device cpu|cuda]

bench: `attnops bench`, its cases shared by all GPUs. overhead, regret, latent: its suites of that name.
tune: `attnops tune`, written to `tables` beside the results; a regret suite in the same run goes by it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
from common import ROOT, arguments, folder_of

# Imports included. The default suite keeps the promise of eight minutes.
LIMITS_S = {"bench": 475, "overhead": 100, "tune": 300, "regret": 240, "latent": 300}

DEFAULT = "bench"


def command(suite: str, device: str) -> list[str]:
    """The command of a suite."""
    out, attnops = folder_of(device), [sys.executable, "-m", "attnops"]
    commit = os.environ.get("COMMIT", "")
    measured = [*attnops, "bench", "--device", device, "--out", str(out), *(["--commit", commit] if commit else [])]
    gpus = ["--gpus", str(max(1, torch.cuda.device_count()))] if device == "cuda" else []
    if suite == "tune":
        return [*attnops, "tune", "--budget-s", "190"]
    return [*measured, *gpus] if suite == "bench" else [*measured, *gpus, "--budget-s", str(LIMITS_S[suite] - 60), suite]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--suite", default=DEFAULT, help=f"some of {', '.join(LIMITS_S)}, with commas")
    given = parser.parse_args()
    suites = given.suite.split(",")
    if unknown := set(suites) - LIMITS_S.keys():
        parser.error(f"suite: got {', '.join(sorted(unknown))}, want {', '.join(LIMITS_S)}")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    env |= {"ATTNOPS_CACHE_DIR": str(folder_of(given.device))} if "tune" in suites else {}
    failed = []
    for suite in suites:
        start, made = time.monotonic(), command(suite, given.device)
        try:
            code: int | str = subprocess.run(made, cwd=ROOT, timeout=LIMITS_S[suite], env=env).returncode
        except subprocess.TimeoutExpired:
            code = f"over {LIMITS_S[suite]} s"
        print(f"== {suite}: {'done' if code == 0 else f'FAILED ({code})'} in {time.monotonic() - start:.0f} s", flush=True)
        failed += [suite] * (code != 0)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
