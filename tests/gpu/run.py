"""Runs the GPU tests in several processes, because kernels that are built at first use keep one core busy each, and merges their results.

    python3 tests/gpu/run.py [PROCESSES [PYTEST OPTIONS ...]]

Writes kernels.json under $OUT if set, else benchmarks/results/local. Exits with 1 when a test failed.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SELECTED = tuple(sys.argv[2:])
# Of the stand-ins only the files that define nothing at import: an op defined twice ends the process when the real library loads.
PINS = tuple(f"tests/standins/test_{name}.py" for name in ("fa3", "fa4"))
OPTIONS = ("-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short", "-o", "faulthandler_timeout=120")
SECONDS, SECONDS_ALONE = 400, 70
ALONE = "alone"
"""The shard of what measures."""


def devices() -> list[str]:
    """The GPUs to spread over, as CUDA_VISIBLE_DEVICES names them."""
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return given.split(",")
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ["0"]
    return [str(at) for at, _ in enumerate(found.strip().splitlines())] or ["0"]


def start(shard: str, folder: Path, device: str) -> subprocess.Popen[bytes]:
    """One process on one GPU, which takes the tests that no other has, its output in shard.<name>.txt."""
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "tests/gpu", "tests/hf/test_cuda.py", *PINS, *OPTIONS, *SELECTED],
        cwd=ROOT,
        env={**os.environ, "SHARD": shard, "OUT": str(folder), "CUDA_VISIBLE_DEVICES": device},
        stdout=(folder / f"shard.{shard.partition('/')[0]}.txt").open("w"),
        stderr=subprocess.STDOUT,
    )


def run(processes: int, folder: Path) -> int:
    """Every shard to its end or the end of the time, then what measures, with nothing beside it. Returns how many failed."""
    for taken in folder.glob("*.taken"):
        taken.unlink()
    # Its modules take a minute each; the tests that call them come last.
    builder = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.flashinfer_modules"], cwd=ROOT, stdout=(folder / "built.txt").open("w"), stderr=subprocess.STDOUT
    )
    gpus = devices()
    failed = ended([start(f"{at}/{processes}", folder, gpus[at % len(gpus)]) for at in range(processes)], SECONDS)
    builder.kill()
    builder.wait()
    return failed + ended([start(ALONE, folder, gpus[0])], SECONDS_ALONE)


def ended(started: list[subprocess.Popen[bytes]], seconds: float) -> int:
    """Wait for all, so many seconds in all. Returns how many failed."""
    failed, end = 0, time.monotonic() + seconds
    for process in started:
        try:
            failed += process.wait(max(end - time.monotonic(), 0.1)) not in (0, 5)  # 5: no test fell to this one
        except subprocess.TimeoutExpired:
            process.kill()
            failed += 1
    return failed


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of several: sections are joined, `passed` is that of all."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, dict):
                whole.setdefault(name, {}).update(value)
            else:
                whole[name] = value
    return whole | {"passed": bool(parts) and all(part["passed"] for part in parts)}


def counts(texts: list[str]) -> dict[str, int]:
    """Tests by outcome, from the last lines of pytest's outputs."""
    found: dict[str, int] = {}
    for text in texts:
        for number, outcome in re.findall(r"(\d+) (passed|failed|skipped|error)", text.strip().rpartition("\n")[2]):
            found[outcome] = found.get(outcome, 0) + int(number)
    return found


def unfinished(texts: dict[str, str]) -> list[str]:
    """The shards whose output has no last line of pytest's: they were ended, or ended themselves."""
    return sorted(name for name, text in texts.items() if not re.search(r" in \d+\.\d+s", text.strip().rpartition("\n")[2]))


def text_of(report: dict[str, Any]) -> str:
    """The file's text: a line for each entry of a section, so that it is small and a change is seen where it is."""
    sections = []
    for name, section in sorted(report.items()):
        pairs = sorted(section.items()) if isinstance(section, dict) else ()
        entries = [f" {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in pairs]
        sections.append(f"{json.dumps(name)}: " + ("{\n" + ",\n".join(entries) + "\n}" if entries else json.dumps(section)))
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main() -> int:
    # Kernels are compiled by more threads than there are processes.
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else max(1, min(9 * len(devices()), (os.cpu_count() or 1) * 9 // 16))
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / "local")
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    failed = run(processes, folder)
    shards = [*map(str, range(processes)), ALONE]
    by_shard = {name: (folder / f"shard.{name}.txt").read_text() for name in shards}
    texts = list(by_shard.values())
    print("\n".join(texts))
    files = [file for name in shards if (file := folder / f"kernels.{name}.json").exists()]
    report = merge([json.loads(file.read_text()) for file in files])
    if failures := sorted({name for text in texts for name in re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)}):
        report["failed_tests"] = failures
    if cut := unfinished(by_shard):
        report["unfinished"] = cut
    report |= {"tests": counts(texts), "seconds": round(time.monotonic() - began), "passed": failed == 0 and bool(files)}
    (folder / "kernels.json").write_text(text_of(report))
    for file in (*files, *folder.glob("*.taken")):
        file.unlink()
    print(f"{report['tests']} in {report['seconds']} s, {processes} processes -> {folder / 'kernels.json'}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
