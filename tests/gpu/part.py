"""A pytest plugin for one process of the GPU suite: which tests it takes, when it stops, and what
it writes into the journal.

run.py loads it with `-p tests.gpu.part` and says by the environment where the journal is
(GPU_TEST_JOURNAL), which folder has a file for each test that a process has taken, and "built" once
FlashInfer's modules are (GPU_TEST_FOLDER), when no further test begins (GPU_TEST_UNTIL, seconds
since the epoch), and whether this process runs what measures (GPU_TEST_ALONE).
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from attnops.core.kernel import all_kernels
from attnops.core.problem import Target
from attnops.measured.digests import digests
from tests.gpu.journal import FAILED, PASSED, SKIPPED, Journal, Pass

ROOT = Path(__file__).resolve().parents[2]
LONG = (
    "test_a_quick_run",
    "test_generate_over_pages",
    "test_decode_in_graphs_equals_eager",
    "test_generate_equals_eager",
    "test_a_llama_shape",
    "piecewise",
    "flex",
    "test_a_thousand_mixed_steps",
    "test_steps_of_a_llama_shape",
)
"""In names of tests that compile models or many kernels: after the cheap ones, before those that
fill the gaps at the end."""
BUILT_FIRST = ("flashinfer", "xqa")
"""In names of tests whose modules nvcc builds beside the others, so that they come last."""
ROOM_S = 60.0
"""A long test does not begin in the last seconds of a part."""


def among(item: pytest.Item, names: tuple[str, ...]) -> bool:
    """Is one of the names in the test's?"""
    return any(name in item.nodeid for name in names)


@functools.cache
def versions() -> dict[str, Any]:
    """What the figures were made with. The commit is that of the checkout, or $COMMIT where git has
    none."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    packages = sorted({v for k in all_kernels() for v in k.versions() if not v.endswith("==None")})
    return {
        "commit": os.environ.get("COMMIT")
        or (git.stdout.strip() if git.returncode == 0 else "unknown"),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "target": str(Target.of(torch.device("cuda", 0))) if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": next(
            (p.partition("==")[2] for p in packages if p.startswith("triton==")), "none"
        ),
        "cuda": torch.version.cuda,
        "packages": packages,
        "code": digests(all_kernels()),
    }


class Part:
    """The hooks of one process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.journal = Journal(Path(environ["GPU_TEST_JOURNAL"]))
        self.folder = Path(environ["GPU_TEST_FOLDER"])
        self.until, self.alone = float(environ["GPU_TEST_UNTIL"]), environ["GPU_TEST_ALONE"] == "1"
        self.results: dict[str, dict[str, Any]] = {}
        self.failed_since = False

    def take(self, name: str) -> bool:
        """Take a test, or what else one process does: no other process of this part can."""
        try:
            (self.folder / hashlib.sha256(name.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, items: list[pytest.Item], config: pytest.Config
    ) -> None:
        """Leave what measures to the process of its own, and what has ended to the earlier parts;
        order the rest."""
        alone = [item.nodeid for item in items if item.get_closest_marker("alone")]
        if self.take("collected"):
            self.journal.add(collected=[item.nodeid for item in items], alone=alone)
            self.journal.add(about=versions())
        self.journal.add(ready=os.getpid())
        ended = Pass.of(self.journal.records()).ended
        mine = [i for i in items if (i.nodeid in alone) == self.alone and i.nodeid not in ended]
        mine.sort(
            key=lambda i: (among(i, BUILT_FIRST), among(i, LONG))
        )  # cheap ones first: a first part says the most
        kept = set(mine)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = mine

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read: pytest then runs no test at all."""
        if report.failed and self.take(f"broken {report.nodeid}"):
            self.journal.add(broken=f"{report.nodeid}: {report.longreprtext[-3000:]}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run the test, or pass it over: one that another process has taken is no test of this
        one."""
        session = item.session
        if self.failed_since and not _answers():
            # Every test would fail at once, and be taken from those who can run it.
            session.shouldstop = "the device answers no more"
            return True
        self.failed_since = False
        if among(item, BUILT_FIRST):
            while not (self.folder / "built").exists() and time.time() < self.until:
                time.sleep(0.5)
        if time.time() > self.until:
            session.shouldstop = "the part is at its end"
            self.journal.add(stopped=os.getpid())
            return True
        late = among(item, LONG) and time.time() > self.until - ROOM_S
        if not late and self.take(item.nodeid):
            self.journal.add(begun=item.nodeid, pid=os.getpid())
            return None
        # The test before it left standing what this one needs, of which the next may need nothing.
        call = pytest.CallInfo.from_call(
            lambda: session._setupstate.teardown_exact(nextitem), "teardown"
        )
        if call.excinfo is not None:
            item.ihook.pytest_runtest_logreport(
                report=item.ihook.pytest_runtest_makereport(item=item, call=call)
            )
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a test's record when its last phase is over. A failure is written at once: the
        process may not live to that."""
        result = self.results.setdefault(
            report.nodeid, {"outcome": PASSED, "seconds": 0.0, "reason": "", "found": {}}
        )
        result["seconds"] = round(result["seconds"] + report.duration, 2)
        result["found"] = dict(report.user_properties).get("found", {})
        if report.failed:
            self.failed_since = True
            result |= {"outcome": FAILED, "reason": f"{report.when}: {report.longreprtext[-3000:]}"}
        elif report.skipped and result["outcome"] != FAILED:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            result |= {"outcome": SKIPPED, "reason": why.removeprefix("Skipped: ")}
        if report.when == "teardown":
            self.journal.add(test=report.nodeid, **self.results.pop(report.nodeid))
            if torch.cuda.is_initialized() and not self.failed_since:
                torch.cuda.empty_cache()  # other processes need the device's memory, too


def _answers() -> bool:
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def pytest_configure(config: pytest.Config) -> None:
    if "GPU_TEST_JOURNAL" in os.environ:
        config.pluginmanager.register(Part(os.environ), "gpu-test-part")
