"""Collects what the GPU tests found and writes it as JSON: under $OUT if set, else benchmarks/results/local."""

import functools
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from attnops.bench.claims import Claims
from attnops.kernel import all_kernels
from tests.gpu.run import ALONE

ROOT = Path(__file__).resolve().parents[2]
FOUND: dict[str, Any] = {}


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    # Last, what run.py has built meanwhile; before all others what takes a minute, so that no process ends long after the others.
    items.sort(key=lambda item: ("flashinfer" in item.nodeid or "xqa" in item.nodeid, not any(name in item.nodeid for name in LONG)))
    # One of several processes takes what nobody has; see run.py.
    if shard := os.environ.get("SHARD"):
        mine = [item for item in items if (item.get_closest_marker("alone") is not None) == (shard == ALONE)]
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine


LONG = (
    "test_a_quick_run", "test_generate_over_pages", "test_decode_in_graphs_equals_eager", "test_generate_equals_eager",
    "test_a_llama_shape", "piecewise",
)  # fmt: skip
"""In names of tests that compile models."""


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """One that another process has taken is no test of this one."""
    if os.environ.get("SHARD") in (None, ALONE):
        return None
    if FAILED and not _answers():
        # Every test would fail at once, and be taken from those who can run it.
        item.session.shouldstop = "the device answers no more"
        return True
    if Claims(folder()).take("gpu-test", item.nodeid):
        return None
    # The test before it left standing what this one needs, of which the next may need nothing.
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
    if call.excinfo is not None:
        item.ihook.pytest_runtest_logreport(report=item.ihook.pytest_runtest_makereport(item=item, call=call))
    return True


FAILED: list[str] = []
"""Tests since the device was last asked."""


def _answers() -> bool:
    FAILED.clear()
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


@pytest.fixture
def found() -> dict[str, Any]:
    """Where a test puts its figures, by section and name."""
    return FOUND


@functools.cache
def versions() -> dict[str, Any]:
    """What the figures were made with. The commit is that of the checkout, or $COMMIT where git has none."""
    import triton

    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "commit": os.environ.get("COMMIT") or (git.stdout.strip() if git.returncode == 0 else "unknown"),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "packages": sorted({v for k in all_kernels() for v in k.versions() if not v.endswith("==None")}),
    }


def folder() -> Path:
    """Where results go: $OUT if set, else benchmarks/results/local."""
    found = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / "local")
    found.mkdir(parents=True, exist_ok=True)
    return found


def shard() -> str:
    """".2" in the third of several processes, else nothing."""
    return f".{name.partition('/')[0]}" if (name := os.environ.get("SHARD")) else ""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Written at once: a kernel that breaks the process or hangs must not take with it what was found before.
    if report.failed:
        FAILED.append(report.nodeid)
        with (folder() / f"failures{shard()}.txt").open("a") as out:
            out.write(f"== {report.nodeid} ({report.when}, {report.duration:.1f} s)\n{report.longreprtext[-3000:]}\n")
    elif report.when == "call" and report.duration > 10:
        with (folder() / f"slow{shard()}.txt").open("a") as out:
            out.write(f"{report.duration:6.1f} s  {report.nodeid}\n")
    if report.when == "teardown":
        save(passed=False)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    save(passed=exitstatus == 0)


def save(passed: bool) -> None:
    """Write what was found so far. passed: whether the whole session did."""
    if FOUND and torch.cuda.is_available():
        report = {**versions(), "passed": passed, **FOUND}
        (folder() / f"kernels{shard()}.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
