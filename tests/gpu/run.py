"""Runs the GPU tests in several processes, because kernels that are built at first use keep one
core busy each.

    python3 tests/gpu/run.py                    the whole pass, however long it takes
    python3 tests/gpu/run.py --seconds 450      one part of it; the same command again goes on where
    this one ended python3 tests/gpu/run.py --seconds 450 --resume part1/gpu-test.jsonl     the same
    on another machine python3 tests/gpu/run.py --tests tests/gpu/test_fa.py -- -k decode       some
    of it

A part begins no test after its time and waits for those that run. Writes kernels.json,
gpu-test.jsonl (the journal) and gpu-test.log under $OUT if set, else benchmarks/results/local.
Exits with 0 when every test has run and none failed, with 1 when one failed or none passed, and
with 3 when tests are left for another part.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.gpu.journal import FAILED, Journal, Pass, text_of  # noqa: E402

# Of the stand-ins only the files that define nothing at import: an op defined twice ends the
# process when the real library loads.
PINS = tuple(f"tests/standins/test_{name}.py" for name in ("fa3", "fa4"))
TESTS = ("tests/gpu", "tests/hf/test_cuda.py", *PINS)
# Of a test that hangs the stacks are printed before its process is ended.
OPTIONS = (
    "-m",
    "gpu",
    "-q",
    "-p",
    "tests.gpu.part",
    "-p",
    "no:cacheprovider",
    "--tb=short",
    "-o",
    "faulthandler_timeout=120",
)
HUNG_S = 340.0
"""Seconds after which a process that still runs one test is ended."""
BUILD_S = 900.0
"""Seconds after which tests no longer wait for FlashInfer's modules."""
MAX_JOBS = "6"
"""Compilers that build one module of FlashInfer: three modules are built at once, and a compiler of
one may take 4 GB."""
AGAIN = 2
"""How often each process is started anew after it has died."""
NOTHING, LEFT = 1, 3
# As tests/conftest.py sets them, but the plugin loads torch before that file is read.
SETTINGS = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
CODE = ("attnops", "lowering", "graphs", "tests")


def devices() -> list[str]:
    """The GPUs to spread over, as CUDA_VISIBLE_DEVICES names them. An empty value hides every
    GPU."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return given.split(",")
    return [str(at) for at in range(torch.cuda.device_count())] or ["0"]


def results() -> Path:
    """Where results go: $OUT if set, else benchmarks/results/local."""
    found = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / "local")
    found.mkdir(parents=True, exist_ok=True)
    return found


def code() -> str:
    """A digest of the code that is tested and of its tests."""
    digest = hashlib.sha256()
    for folder in CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


@dataclass
class Worker:
    """One process on one GPU, which takes the tests that no other has. again: how often another may
    follow it."""

    process: subprocess.Popen[bytes]
    log: Path
    device: str
    alone: bool
    again: int


@dataclass
class Runner:
    """One part. folder: of this part alone. until: when no further test begins, seconds since the
    epoch. copy: of the journal."""

    journal: Journal
    folder: Path
    tests: list[str]
    options: list[str]
    until: float
    copy: Path
    logs: list[Path] = field(default_factory=list)

    def spawn(self, command: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a Python process, whose output is the last of the logs."""
        self.logs.append(self.folder / f"{len(self.logs)}.log")
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**SETTINGS, **os.environ, **environ},
            stdout=self.logs[-1].open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def start(self, device: str, alone: bool, again: int = AGAIN) -> Worker:
        """Start a process of tests."""
        said = {
            "GPU_TEST_JOURNAL": str(self.journal.path),
            "GPU_TEST_FOLDER": str(self.folder),
            "GPU_TEST_UNTIL": str(self.until),
            "GPU_TEST_ALONE": str(int(alone)),
            "CUDA_VISIBLE_DEVICES": device,
        }
        process = self.spawn(["pytest", *self.tests, *OPTIONS, *self.options], said)
        return Worker(process, self.logs[-1], device, alone, again)

    def wait(self, workers: list[Worker], builder: subprocess.Popen[bytes] | None = None) -> None:
        """Wait for all of them; what dies is started anew, without the test in which it died."""
        began = looked = time.monotonic()
        while workers:
            if builder is None or builder.poll() is not None or time.monotonic() - began > BUILD_S:
                (self.folder / "built").touch()
            for worker in [w for w in workers if w.process.poll() is not None]:
                workers.remove(worker)
                if self._ended(worker) and worker.again and time.time() < self.until:
                    workers.append(self.start(worker.device, worker.alone, worker.again - 1))
            if time.monotonic() - looked > 5:
                looked = time.monotonic()
                self._look(workers)
            time.sleep(0.1)

    def _look(self, workers: list[Worker]) -> None:
        """Keep a copy of the journal, and end what hangs."""
        shutil.copy(self.journal.path, self.copy)
        begun = {
            record["pid"]: record["at"] for record in Pass.of(self.journal.records()).begun.values()
        }
        for worker in workers:
            if time.time() - begun.get(worker.process.pid, time.time()) > HUNG_S:
                end(worker.process)

    def _ended(self, worker: Worker) -> bool:
        """Write down what a process left open. Returns whether there is more to do for another."""
        records = self.journal.records()
        now, pid, status = Pass.of(records), worker.process.pid, worker.process.returncode
        why = f"exit status {status}: {worker.log.read_text(errors='replace')[-3000:]}"
        if not any(record.get("ready") == pid for record in records):
            self.journal.add(broken=f"before the first test, {why}")
            return False
        lost = [test for test, record in now.begun.items() if record["pid"] == pid]
        for test in lost:
            self.journal.add(
                test=test,
                outcome=FAILED,
                seconds=0.0,
                reason=f"its process ended with {why}",
                found={},
            )
        if now.broken or any(record.get("stopped") == pid for record in records):
            return False
        return bool(lost) or status not in (0, 1, 5)  # 5: no test fell to this one


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started here, with those that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(runner: Runner, processes: int, modules: bool) -> None:
    """All processes to the end of the tests or of the part, then what measures or takes all GPUs,
    with nothing beside it."""
    gpus = devices()
    # FlashInfer's modules take a minute each; the tests that call them come last.
    builder = (
        runner.spawn(["tests.gpu.flashinfer_modules"], {"MAX_JOBS": MAX_JOBS}) if modules else None
    )
    workers = [runner.start(gpus[at % len(gpus)], False) for at in range(processes)]
    try:
        runner.wait(workers, builder)
        now = Pass.of(runner.journal.records())
        if now.left(True) and not now.left(False) and time.time() < runner.until:
            workers = [runner.start(",".join(gpus), True)]
            runner.wait(workers)
    finally:
        for process in [w.process for w in workers] + ([builder] if builder else []):
            end(process)


def opened(
    journal: Journal, resume: Path | None, options: list[str], anew: bool, any_code: bool
) -> str:
    """Make the journal one that this part may go on with. Returns what was done."""
    journal.path.parent.mkdir(parents=True, exist_ok=True)
    if resume is not None and len(Pass.of(Journal(resume).records()).ended) > len(
        Pass.of(journal.records()).ended
    ):
        shutil.copy(resume, journal.path)
    before, head = Pass.of(journal.records()), {"pass": code(), "options": options}
    why = ""
    if not before.head:
        why = "a new pass"
    elif anew:
        why = "a new pass, as asked"
    elif before.head["options"] != options:
        why = "a new pass: the last was of other tests or options"
    elif before.head["pass"] != head["pass"] and not any_code:
        why = "a new pass: the last was of other code"
    elif not before.not_run and not before.broken and before.ended:
        why = "a new pass: the last was at its end"
    if why:
        journal.path.write_text("")
        journal.add(**head)
        return why
    return f"goes on: {len(before.ended)} tests have ended, {len(before.not_run)} have not"


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="begin no test after so many seconds; 0: no limit",
    )
    parser.add_argument(
        "--processes", type=int, default=0, help="0: three for four cores, at most 14 a GPU"
    )
    parser.add_argument(
        "--state", type=Path, default=ROOT / ".cache" / "gpu-test.jsonl", help="the journal"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        help="a journal of another machine, taken if it is further than the one here",
    )
    parser.add_argument("--anew", action="store_true", help="begin a new pass")
    parser.add_argument(
        "--any-code", action="store_true", help="go on although the code has changed"
    )
    parser.add_argument(
        "--no-modules", action="store_true", help="build no FlashInfer modules beside the tests"
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        default=list(TESTS),
        help="files and folders instead of the whole suite",
    )
    parser.add_argument("options", nargs="*", help="of pytest, after --")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    given = parsed(arguments)
    # Kernels are compiled by more threads than there are processes.
    processes = given.processes or max(1, min(14 * len(devices()), (os.cpu_count() or 1) * 3 // 4))
    until = time.time() + (given.seconds or float("inf"))
    journal = Journal(given.state)
    out = results()
    print(
        opened(journal, given.resume, [*given.tests, *given.options], given.anew, given.any_code),
        flush=True,
    )
    journal.add(part=len(Pass.of(journal.records()).parts) + 1)
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(
            journal, Path(folder), given.tests, given.options, until, out / "gpu-test.jsonl"
        )
        try:
            run(runner, processes, not given.no_modules)
        finally:
            logs = [f"== {log.name}\n{log.read_text(errors='replace')}" for log in runner.logs]
            (out / "gpu-test.log").write_text("\n".join(logs))
            shutil.copy(journal.path, runner.copy)
    return say(Pass.of(journal.records()), out / "kernels.json", processes)


def say(now: Pass, file: Path, processes: int) -> int:
    """Write the report, and print what a reader needs first. Returns the exit status."""
    report = now.report()
    file.write_text(text_of(report))
    for name, reason in report.get("failed_tests", {}).items():
        print(f"FAILED {name}\n{reason[-1200:]}\n")
    for text in now.broken:
        print(f"BROKEN {text[-1200:]}\n")
    for reason, names in report.get("skipped_tests", {}).items():
        print(f"skipped {len(names)}: {reason[:160]}")
    print(
        "slowest:",
        *(f"\n{s:7.1f} s  {name}" for name, s in [*report.get("slowest_s", {}).items()][:12]),
    )
    tests = report["tests"]
    print(
        f"{tests} of {len(now.collected)} in {report['seconds']} s, parts {report['parts_s']}, "
        f"{processes} processes -> {file}"
    )
    if report["passed"]:
        return 0
    if not tests["passed"]:
        print("no test passed: this run shows nothing")
    if report.get("failed_tests") or now.broken or not tests["passed"]:
        return NOTHING
    print(f"{tests['not_run']} tests are left: the same command goes on with them")
    return LEFT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
