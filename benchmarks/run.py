"""Runs suites of measurements, each in a process of its own: one that fails or hangs leaves the others' files.

    python benchmarks/run.py [--suite bench,regret,mla] [--device cpu|cuda]

bench: `attnops bench`, its cases shared by all GPUs. overhead, regret: its suites of that name.
mla: our layer over latents beside others, see mla.py.
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
LIMITS_S = {"bench": 475, "overhead": 100, "tune": 300, "regret": 240, "mla": 240}
COMPARED = ("mla",)

DEFAULT = "bench"


def command(suite: str, device: str) -> list[str]:
    """The command of a suite."""
    out, attnops = folder_of(device), [sys.executable, "-m", "attnops"]
    commit = os.environ.get("COMMIT", "")
    measured = [*attnops, "bench", "--device", device, "--out", str(out), *(["--commit", commit] if commit else [])]
    gpus = ["--gpus", str(max(1, torch.cuda.device_count()))] if device == "cuda" else []
    script = ["compare.py", suite] if suite in COMPARED else [f"{suite}.py"]
    commands = {"bench": measured + gpus, "overhead": [*measured, "overhead"], "tune": [*attnops, "tune", "--budget-s", "190"]}
    commands["regret"] = [*measured, *gpus, "--budget-s", "200", "regret"]
    return commands.get(suite) or [sys.executable, str(ROOT / "benchmarks" / script[0]), *script[1:], "--device", device]


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
