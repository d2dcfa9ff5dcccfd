"""Results files: what is in them, and how they are written and read."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import attnops.version
from attnops.bench.setup import Setup
from attnops.bench.verdict import WRONG, Row, why
from attnops.errors import InvalidInput
from attnops.kernel import all_kernels
from attnops.measured.store import read_text

COUNTS = ("at_reference", "device_kernels", "graphs", "pieces", "recompiles", "unique_pieces")
"""Figures of a row of which more is worse, and which do not vary."""

Case = Callable[[], Iterable[Row]]
HERE = Path(__file__).resolve().parent


def environment(device: torch.device | str, commit: str = "") -> dict[str, Any]:
    """What figures were made with. commit: that of the code; "" asks git, where the code lies in a checkout of its own."""
    cuda = torch.device(device).type == "cuda"
    return {
        "commit": commit or _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attnops": attnops.version.VERSION,
        "packages": sorted({v for k in all_kernels() for v in k.versions() if not v.endswith("==None")}),
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    # Installed into an environment that lies in somebody's repository, the code is not of that repository.
    return git("rev-parse", "HEAD") if git("ls-files", Path(__file__).name) else "unknown"


class LeftOut(Exception):
    """Raised by a case that cannot be measured here, with the reason."""


@dataclass(frozen=True)
class Found:
    """What became of a case: rows in the form of `Row.as_dict`, or why it failed or was left out. seconds: that it took.

    last: the device answers no more, and whatever came next in this process would fail.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""
    left_out: str = ""
    seconds: float = 0.0
    last: bool = False


def measured(setup: Setup, name: str, case: Case) -> Found:
    """One case. What it raises is said."""
    setup.tell(name)
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    said: dict[str, str] = {}
    try:
        rows = [row.as_dict() for row in case()]
    except LeftOut as reason:
        said["left_out"] = str(reason)
    except Exception as error:  # the other cases stand
        said["failed"] = why(error)
    last = False
    try:
        _forget()
    except Exception as error:  # an illegal access is told by whatever comes next, and ever after
        said, last = {"failed": said.get("failed") or why(error)}, True
    return Found(rows, **said, seconds=round(time.monotonic() - start, 1), last=last)


SPENT = "the time was spent"
NOT_YET = "the run was ended before"


def joined(names: Iterable[str], found: Mapping[str, Found], reason: str = SPENT) -> dict[str, Any]:
    """`rows`, `left_out` and `failed` of a suite, `case_seconds` and their sum; what nothing is known of was left out for `reason`."""
    known = {**dict.fromkeys(names), **found}
    every = {name: found.get(name, Found(left_out=reason)) for name in known}
    return {
        "rows": [row for one in every.values() for row in one.rows],
        "left_out": {name: one.left_out for name, one in every.items() if one.left_out},
        "failed": {name: one.failed for name, one in every.items() if one.failed},
        "case_seconds": {name: one.seconds for name, one in every.items() if one.seconds},
        "seconds": round(sum(one.seconds for one in every.values()), 1),
    }


def _forget() -> None:
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def bad(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for every result that is wrong and every case that failed. A peer that cannot run here is neither."""
    rows = [f"{r['case']}: {r['way']}: {r['wrong']}" for x in reports.values() for r in x["rows"] if r.get("wrong", "").startswith(WRONG)]
    return rows + [f"{name}: {why}" for report in reports.values() for name, why in report.get("failed", {}).items()]


def write(report: Mapping[str, Any], path: Path) -> Path:
    """Write one results file, with the folders it lies in. Whoever reads it meanwhile finds the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text_of(report))
    new.replace(path)
    return path


def read(path: Path) -> dict[str, Any]:
    """A results file. Raises InvalidInput: there is none, or it has no rows."""
    try:
        data = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput("file", f"{path} ({type(error).__name__})", "a results file of attnops bench") from None
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise InvalidInput("file", f"{path}, which has no rows", "a results file of attnops bench")
    for at, row in enumerate(data["rows"]):
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("case", "way")):
            raise InvalidInput("file", f"{path}, whose row {at} has no case and way", "a results file of attnops bench")
        if odd := [name for name in ("median_us", "spread_us", *COUNTS) if not isinstance(row.get(name, 0), (int, float))]:
            raise InvalidInput("file", f"{path}, whose row {at} has no number for {', '.join(odd)}", "a results file of attnops bench")
    return data


def text_of(report: Mapping[str, Any]) -> str:
    """A results file's text: a line for each entry of a section, so that it is small and a change is seen where it is."""
    lines = []
    for name, section in sorted(report.items()):
        brackets = "{}" if isinstance(section, dict) else "[]"
        if isinstance(section, dict):
            entries = [f"{json.dumps(key)}: {_dense(value)}" for key, value in sorted(section.items())]
        else:
            entries = [_dense(value) for value in section] if isinstance(section, list) else []
        long = len(_dense(section)) > 120 and entries
        lines.append(f"{json.dumps(name)}: " + (brackets[0] + "\n" + ",\n".join(entries) + "\n" + brackets[1] if long else _dense(section)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _dense(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
