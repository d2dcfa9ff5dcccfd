"""Runs suites of measurements, each in a process of its own: one that fails or hangs leaves the others' files.

    python benchmarks/run.py [--suite bench,direct,regret,data] [--device cpu|cuda]

bench: what `attnops bench` measures, its cases shared by all GPUs that torch finds.
overhead: its suite of that name alone, what a call through attnops costs.
direct: against the vendors' own calls. regret: the automatic choice against the best.
gradients: forward + backward beside FlashAttention-2. deterministic: that policy beside the default one.
data: the kernels that move data against plain torch ops and a copy.
triton: our Triton kernels against the vendors', see triton_vendors.py.
mla: one attention layer of DeepSeek-V3, see mla.py.
tune: the table of measured times, written as table.json beside the results; a regret suite in the same run goes by it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from common import ROOT, default_device, folder_of

LIMITS_S = {
    "bench": 475, "overhead": 100, "tune": 300, "direct": 175, "regret": 180, "gradients": 100, "deterministic": 100, "data": 150,
    "triton": 240, "mla": 240,
}  # fmt: skip
# A triton.py on the path would hide what has the name.
FILES = {"overhead": "bench", "triton": "triton_vendors"}
# Imports and ceilings come before, and the limits are the promise of eight minutes.
ARGUMENTS = {"overhead": ["--suites", "overhead"], "bench": ["--stop-s", "448"]}
DEFAULT = "bench"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--suite", default="", help=f"some of {', '.join(LIMITS_S)}, with commas")
    given = parser.parse_args()
    suites = (given.suite or DEFAULT).split(",")
    if unknown := set(suites) - LIMITS_S.keys():
        parser.error(f"suite: got {', '.join(sorted(unknown))}, want {', '.join(LIMITS_S)}")
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    failed = []
    for suite in suites:
        file = FILES.get(suite, suite)
        command = [sys.executable, str(ROOT / "benchmarks" / f"{file}.py"), "--device", given.device, *ARGUMENTS.get(suite, [])]
        if suite == "regret" and "tune" in suites:
            command += ["--table", str(folder_of(given.device) / "table.json")]
        start = time.monotonic()
        try:
            code: int | str = subprocess.run(command, cwd=ROOT, timeout=LIMITS_S[suite], env={**os.environ, "PYTHONPATH": paths}).returncode
        except subprocess.TimeoutExpired:
            code = f"over {LIMITS_S[suite]} s"
        print(f"== {suite}: {'done' if code == 0 else f'FAILED ({code})'} in {time.monotonic() - start:.0f} s", flush=True)
        failed += [suite] * (code != 0)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
