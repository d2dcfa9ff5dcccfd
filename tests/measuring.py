"""What tests of measured times share: tables of their own in a folder, Problems, kernels that are
off, and results files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnops.core.kernel import _REGISTRY, kernels_of
from attnops.core.problem import Problem, Target, altered
from attnops.measured import Grid, Table, cpu_name, forget, store
from attnops.measured.table import version_of
from attnops.ops.attention.timed import DENSE
from attnops.ops.pages.timed import PAGED
from attnops.ops.sweeps import decoding, toy
from attnops.testing.timed_calls import problem_of

SM90 = Target("cuda", 90, assume=())
STEP, SQUARE = decoding(PAGED), toy(DENSE)


@contextmanager
def tables_in(folder: Path) -> Iterator[Path]:
    """Within the block the user's tables are below `folder`, and those that ship in
    `folder/shipped`: none at first."""
    (folder / "shipped").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ATTNOPS_CACHE_DIR", str(folder / "cache"))
        patched.setattr(store, "SHIPPED", folder / "shipped")
        forget()
        yield folder
    forget()


def decode(batch: int = 8, context: int = 4096, target: Target = SM90, **more: Any) -> Problem:
    """A decode step over pages of a Llama's shape."""
    return altered(problem_of(STEP, [1] * batch, [context] * batch, target), **more)


def square(batch: int = 1, length: int = 16, target: Target | None = None, **more: Any) -> Problem:
    """A dense prompt of a small shape."""
    return altered(
        problem_of(SQUARE, [length] * batch, [length] * batch, target or Target()), **more
    )


def table(
    *grids: Grid,
    gpu: str = "Some GPU",
    target: str = "sm90",
    versions: Mapping[str, str] | None = None,
) -> Table:
    """A table of these grids. versions: those of no kernel if None."""
    names = {f"{g.kind.op}.{n}": "" for g in grids for n in g.us}
    given = names if versions is None else versions
    return Table(gpu, target, given, grids, {"date": "2026-01-01"})


def timed(gpu: str = "", kind: Problem = SQUARE, **us: float) -> Table:
    """Times of today's kernels of one dense prompt, on a GPU or on this machine's CPU."""
    kernels = kernels_of(kind.op)
    grid = Grid(kind, (1.0,), (16.0,), (1.0,), {name: (time,) for name, time in us.items()})
    versions = {f"{kind.op}.{name}": version_of(kernels[name]) for name in us}
    return table(grid, gpu=gpu or cpu_name(), target="sm90" if gpu else "cpu", versions=versions)


def by_way(rows):
    return {row["way"]: row for row in rows}


def exchange(monkeypatch, op, name, run, **more):
    """Until the test ends a kernel of an op has another body."""
    like = kernels_of(op).get(name) or kernels_of(op)["reference"]
    kernel = replace(like, name=name, run=run, contract=2, **more)
    monkeypatch.setitem(_REGISTRY.kernels[op], name, kernel)


def scaled(by):
    """What a run of sdpa gives, and its output so many times."""

    def run(call, right):
        output, lse = right(call)
        return output * by, lse

    return run


STAMP = {
    "device": "Some GPU",
    "torch": "2.11.0",
    "date": "2026-01-01",
    "commit": "0123456789abcdef",
    "packages": ["far==1.0"],
}


def results_file(root, machine, name, data):
    """A results file of a machine below `root`: its path. data: of the file besides STAMP, or its
    text."""
    path = root / "benchmarks" / "results" / machine / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps({**STAMP, **data}))
    return path
