"""The cases of a run in several processes, each with a GPU of its own, and each taking the next case that nobody has.

A process writes a line of JSON for everything it does to a file that the process which started it reads. One that is ended, or ends by
itself, takes with it the case it was at, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnops.bench.claims import Claims
from attnops.bench.report import Found, measured
from attnops.bench.setup import Point, Setup, device_of
from attnops.bench.suites import Suite, named
from attnops.bench.verdict import why

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.2
Put = Callable[[str, str, Found], None]
"""Is given a suite's name, a case's, and what was found of it."""
LOST = "the device or its process was lost"


def work(suites: Sequence[Suite], setup: Setup, claims: Claims, budget_s: float, put: Put) -> bool:
    """Measure all cases that can be had. put: is given each when it is done. False: a case broke the device, and nothing came after it.

    A suite has its share of what is left of `budget_s`; when all had theirs, cases that were left are measured while there is time.
    """
    end, known = time.monotonic() + budget_s, dict[str, list[str]]()
    for again in (False, True):
        for i, suite in enumerate(suites):
            start = time.monotonic()
            if again and not any(claims.free(suite.name, name) for name in known.get(suite.name, ())):
                continue
            part = 1.0 if again else suite.share / sum(s.share for s in suites[i:])
            mine = replace(setup, until_s=start + part * max(0.0, end - start), tell=_named(setup, suite))
            try:
                cases = suite.cases(mine)
            except Exception as error:  # the other suites stand
                if claims.take(suite.name, suite.name):
                    put(suite.name, suite.name, Found(failed=why(error)))
                continue
            known[suite.name] = list(cases)
            for name, case in cases.items():
                if not mine.late and claims.take(suite.name, name):
                    found = measured(mine, name, case)
                    put(suite.name, name, found)
                    if found.last:
                        return False
    return True


def _named(setup: Setup, suite: Suite) -> Callable[[str], None]:
    return lambda what: setup.tell(f"{suite.name}: {what}")


def spread_over(
    count: int, suites: Sequence[Suite], setup: Setup, budget_s: float, put: Put, stop_s: float = float("inf")
) -> bool:  # fmt: skip
    """As `work`, by a process for each of the first `count` GPUs. stop_s: after so many seconds what is not done is ended.

    A process that ends in an error is a failure of the case it was at, or of the suite that comes first. False: all did.
    """
    began = time.monotonic()
    told = {n: getattr(setup, n) for n in ("quick", "model", "layers", "points", "ways", "backend")} | {"ceilings": dict(setup.ceilings)}
    with tempfile.TemporaryDirectory(prefix="attnops-bench-") as name:
        folder = Path(name)
        asked = {"suites": [s.name for s in suites], "setup": told, "device": setup.device.type, "budget_s": budget_s, "folder": name}
        lanes: list[_Lane] = []
        lost = 0
        try:
            for gpu in range(count):
                lanes.append(_Lane({**asked, "gpu": gpu, "of": count, "parent": os.getpid(), "file": str(folder / f"{gpu}.jsonl")}))
            running = list(lanes)
            while running and time.monotonic() - began <= stop_s:
                for lane in list(running):
                    ended = lane.process.poll()
                    for event in lane.events():
                        _handle(event, lane, setup, put)
                    if ended is not None:
                        running.remove(lane)
                        lost += bool(ended)
                        if ended:
                            at = lane.at or (suites[0].name, f"GPU {lane.gpu}")
                            put(*at, Found(failed=f"its process ended with {ended}: {lane.last_words()}"))
                time.sleep(POLL_S)
            for lane in running:
                if lane.at:
                    put(*lane.at, Found(left_out=f"it was not done after {stop_s:.0f} s of the run"))
        finally:
            for lane in lanes:
                lane.end()
    return lost < count


def _handle(event: dict[str, Any], lane: _Lane, setup: Setup, put: Put) -> None:
    match event:
        case {"found": found, "suite": suite, "case": case}:
            lane.at = None
            put(suite, case, Found(**found))
        case {"at": case, "suite": suite}:
            lane.at = (suite, case)
        case {"tell": what}:
            setup.tell(f"GPU {lane.gpu}: {what}")


class _Lane:
    """A process and what is known of it. at: the suite and case it is measuring."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.gpu: int = asked["gpu"]
        self.at: tuple[str, str] | None = None
        self._file, self._read = Path(asked["file"]), 0
        self._log = self._file.with_suffix(".log")
        command = [*_sees_one(asked["device"], self.gpu), sys.executable, "-m", "attnops.bench.lanes", json.dumps(asked)]
        with self._log.open("w") as log, _cores(self.gpu, asked["of"]):
            # With the processes it starts it is a group, which ends as one.
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def events(self) -> list[dict[str, Any]]:
        """What it has written since, of which the last line may be half a line."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:200] if lines else "it said nothing"

    def end(self) -> None:
        """Kill it, and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _sees_one(device: str, gpu: int) -> list[str]:
    """What a command begins with whose process sees one GPU, so that no other is taken by what forgets to ask for one."""
    return ["env", f"CUDA_VISIBLE_DEVICES=GPU-{torch.cuda.get_device_properties(gpu).uuid}"] if device == "cuda" else []


@contextlib.contextmanager
def _cores(at: int, of: int) -> Iterator[None]:
    """What is started in the block has its share of the cores: none that compiles takes one from another whose host time is measured."""
    if not hasattr(os, "sched_setaffinity") or len(every := os.sched_getaffinity(0)) < of:
        yield
        return
    # Two threads of one core go to the same process.
    ordered, share = sorted(every, key=_place), len(every) // of
    os.sched_setaffinity(0, ordered[at * share :][:share])
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def _place(core: int) -> tuple[int, int, int]:
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, 0, core


def main(text: str) -> None:
    """A process's part. text: JSON, as `spread_over` makes it."""
    from attnops.cli.explain import quiet_transformers

    asked = json.loads(text)
    threading.Thread(target=_end_with, args=(asked["parent"],), daemon=True).start()
    told = asked["setup"]
    told |= {"points": tuple(Point(*p) for p in told["points"]), "ways": tuple(told["ways"])}
    with Path(asked["file"]).open("a") as file, quiet_transformers():

        def say(**event: Any) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        class Told(Claims):
            def take(self, suite: str, case: str) -> bool:
                taken = super().take(suite, case)
                if taken:
                    say(suite=suite, at=case)
                return taken

        setup = Setup(device_of(asked["device"]), **told, tell=lambda what: say(tell=what))
        alive = work(
            named(tuple(asked["suites"])), setup, Told(Path(asked["folder"])), asked["budget_s"],
            lambda suite, case, found: say(suite=suite, case=case, found=vars(found)),
        )  # fmt: skip
    if not alive:
        raise SystemExit(LOST)


def _end_with(parent: int) -> None:
    """Whoever started this may be killed, and then nobody ends it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
