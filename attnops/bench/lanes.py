"""The cases of a run in several processes, each with a GPU of its own, and each taking the next case that nobody has.

A process writes a line of JSON for everything it does to a file that the process which started it reads. One that is ended, or ends by
itself, takes with it the case it was at, and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
Begin = Callable[[str, list[str]], None]
"""Is given a suite's name, and the names of its cases."""


def work(suites: Sequence[Suite], setup: Setup, claims: Claims, budget_s: float, put: Put, begin: Begin) -> None:
    """Measure all cases that can be had. put: is given each when it is done, begin: those of a suite beforehand.

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
            if not again:
                known[suite.name] = list(cases)
                begin(suite.name, known[suite.name])
            for name, case in cases.items():
                if not mine.late and claims.take(suite.name, name):
                    put(suite.name, name, measured(mine, name, case))


def _named(setup: Setup, suite: Suite) -> Callable[[str], None]:
    return lambda what: setup.tell(f"{suite.name}: {what}")


def gpus_of(count: int) -> list[str]:
    """The first `count` GPUs, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    return names[:count]


def spread_over(
    gpus: Sequence[str], suites: Sequence[Suite], setup: Setup, budget_s: float, put: Put, begin: Begin,
    stop_s: float = float("inf"),
) -> None:  # fmt: skip
    """As `work`, by a process for each of `gpus`. stop_s: after so many seconds what is not done is ended."""
    began = time.monotonic()
    told = {n: getattr(setup, n) for n in ("quick", "model", "layers", "points", "ways", "backend")} | {"ceilings": dict(setup.ceilings)}
    with tempfile.TemporaryDirectory(prefix="attnops-bench-") as name:
        folder = Path(name)
        asked = {"suites": [s.name for s in suites], "setup": told, "device": setup.device.type, "budget_s": budget_s, "folder": name}
        lanes = [_Lane(gpu, i, {**asked, "file": str(folder / f"{i}.jsonl")}) for i, gpu in enumerate(gpus)]
        try:
            running = list(lanes)
            while running:
                for lane in list(running):
                    ended = lane.process.poll()
                    for event in lane.events():
                        _handle(event, lane, setup, put, begin)
                    if ended is not None:
                        running.remove(lane)
                        if ended and lane.at:
                            put(*lane.at, Found(failed=f"its process ended with {ended}: {lane.last_words()}"))
                if time.monotonic() - began > stop_s:
                    break
                time.sleep(POLL_S)
            for lane in running:
                if lane.at:
                    put(*lane.at, Found(left_out=f"it was not done after {stop_s:.0f} s of the run"))
        finally:
            for lane in lanes:
                lane.end()


def _handle(event: dict[str, Any], lane: _Lane, setup: Setup, put: Put, begin: Begin) -> None:
    match event:
        case {"cases": names, "suite": suite}:
            begin(suite, names)
        case {"found": found, "suite": suite, "case": case}:
            lane.at = None
            put(suite, case, Found(**found))
        case {"at": case, "suite": suite}:
            lane.at = (suite, case)
        case {"tell": what}:
            setup.tell(f"GPU {lane.gpu}: {what}")


class _Lane:
    """A process and what is known of it. at: the suite and case it is measuring."""

    def __init__(self, gpu: str, index: int, asked: dict[str, Any]) -> None:
        self.gpu = gpu
        self.at: tuple[str, str] | None = None
        self._file, self._read = Path(asked["file"]), 0
        self._log = Path(asked["folder"]) / f"{index}.log"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": path, **({"CUDA_VISIBLE_DEVICES": gpu} if asked["device"] == "cuda" else {})}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "attnops.bench.lanes", json.dumps(asked)], env=environment, stdout=log, stderr=subprocess.STDOUT
            )  # fmt: skip

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
        """Kill it, if it runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def main(text: str) -> None:
    """A process's part. text: JSON, as `spread_over` makes it."""
    from attnops.cli.explain import quiet_transformers

    asked = json.loads(text)
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
        work(
            named(tuple(asked["suites"])), setup, Told(Path(asked["folder"])), asked["budget_s"],
            lambda suite, case, found: say(suite=suite, case=case, found=vars(found)), lambda suite, names: say(suite=suite, cases=names),
        )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
