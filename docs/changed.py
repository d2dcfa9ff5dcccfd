"""Which kernels have changed since a run: the digests that its results file keeps, beside those of
today's code.

A file whose code was not digested when it was measured is told by git, where the commit is there.
A tree without git does not know, and its pages say so. docs/generate.py writes what git tells into
such files, so that the pages of a commit are the same everywhere.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from attnops.bench.files import Report
from attnops.bench.run import SUITES
from attnops.core.kernel import Kernel, all_kernels
from attnops.core.problem import Target
from attnops.measured.digests import candidates, digests

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"NVIDIA H200": "sm90", "NVIDIA H100 80GB HBM3": "sm90"}
"""Of machines whose files were written before they said it themselves."""
MOST = 8
"""Kernels that a sentence names."""
SAME, CHANGED, UNKNOWN = "", "changed", "unknown"
GRIDS = ("numerics", "numerics_at_size")


@functools.cache
def today() -> dict[str, str]:
    """The digests of the code in this tree."""
    return digests(all_kernels())


def since(data: Report, name: str, root: Path = ROOT) -> str:
    """SAME, CHANGED or UNKNOWN: the code of the kernel `op.name` since a results file was
    measured."""
    kept = code_of(data, root)
    if kept is None:
        return UNKNOWN
    return SAME if kept.get(name) and kept[name] == today().get(name) else CHANGED


def sentence(data: Report, root: Path = ROOT) -> str:
    """What has changed of all that a results file may have run."""
    kept = code_of(data, root)
    if kept is None:
        return "It is unknown which kernels have changed since"
    if not kept:
        return "No kernel of ours ran"
    found = [name for name in kept if since(data, name, root)]
    if not found:
        return "No kernel has changed since"
    same = [name for name in kept if name not in found]
    if len(found) <= MOST:
        return f"Changed since: {listed(found)}"
    rest = f", not {listed(same)}" if 0 < len(same) <= MOST else ""
    return f"Changed since: {len(found)} of the {len(kept)} kernels that it may have run{rest}"


def share(data: Report, root: Path = ROOT) -> str:
    """A cell: `3 of 40` of the kernels that a results file may have run have changed since."""
    kept = code_of(data, root)
    return (
        UNKNOWN
        if kept is None
        else f"{sum(map(bool, (since(data, n, root) for n in kept)))} of {len(kept)}"
    )


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# Files that were written without digests ----------------------------------------------------------


def code_of(data: Report, root: Path = ROOT) -> dict[str, str] | None:
    """The digests of a results file: its own, or those of the commit that it names; None where
    nobody knows."""
    if "code" in data:
        return dict(data["code"])
    commit = str(data.get("commit", ""))
    kernels = tuple(run_by(data))
    return dict(_told(commit, kernels, root)) if _there(commit, root) else None


def run_by(data: Report) -> list[Kernel]:
    """The kernels that a results file is of, or may have run."""
    grids = {name for grid in GRIDS for name, n in data.get(grid, {}).items() if n.get("cases")}
    if grids:
        return [kernel for kernel in all_kernels() if f"{kernel.op}.{kernel.name}" in grids]
    if "memcheck" in data or "racecheck" in data:
        return [kernel for kernel in all_kernels() if kernel.name == "triton"]
    ops = next((suite.ops for suite in SUITES if suite.name == data.get("suite")), ())
    target = Target.parse(data.get("target") or TARGETS.get(str(data.get("device")), "cpu"))
    return candidates(target, ops, data.get("packages", ()))


@functools.cache
def _told(commit: str, kernels: tuple[Kernel, ...], root: Path) -> tuple[tuple[str, str], ...]:
    def read(path: str) -> str | None:
        done = _git(root, "show", f"{commit}:attnops/{path}")
        return done.stdout if done is not None and done.returncode == 0 else None

    return tuple(digests(kernels, functools.cache(read)).items())


@functools.cache
def _there(commit: str, root: Path) -> bool:
    """Is the commit in the history at hand?"""
    done = _git(root, "cat-file", "-e", f"{commit}^{{commit}}") if commit else None
    return done is not None and done.returncode == 0


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    except OSError:
        return None


def stamp(path: Path, root: Path = ROOT) -> bool:
    """Write into a results file the digests of the commit that it names. Returns whether it was
    done."""
    text = path.read_text()
    data = json.loads(text)
    if not isinstance(data, dict) or "code" in data:
        return False
    # Scripts that suites replaced wrote files under the suites' names.
    kept = code_of({"suite": path.stem.partition("_")[0], **data}, root)
    if kept is None:
        return False
    body = text.rstrip()
    if not body.endswith("}"):
        raise ValueError(f"{path}: want a JSON object")
    # At the end, so that all else stays as it was written.
    path.write_text(f'{body[:-1].rstrip()},\n "code": {json.dumps(kept)}\n}}\n')
    return True


def stamp_all(root: Path = ROOT) -> None:
    """`stamp` every committed results file, and name those that were written."""
    for path in sorted((root / "benchmarks" / "results").glob("*/*.json")):
        if path.parent.name != "local" and stamp(path, root):
            print(path.relative_to(root), "was given digests")
