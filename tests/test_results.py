"""Results: where `make gpu-bench` writes them, and the page made of committed ones."""

import json
import os
import shutil
import subprocess
from typing import Any

import pytest

from attnops.measured import RATES, Grid, Table
from attnops.ops.linear.timed import product
from tests.helpers import ROOT
from tests.measuring import results_file as write


@pytest.fixture
def results(docs) -> Any:
    return docs("results")


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_measures_within_eight_minutes_where_it_is_told():
    given = {"OUT": "/some where", "COMMIT": "c0ffee", "SUITES": "data decode", "MAKEFLAGS": ""}
    command = ["make", "-n", "--no-print-directory", "gpu-bench", "gpu-tune"]
    made = subprocess.check_output(command, cwd=ROOT, env={**os.environ, **given}, text=True)
    bench, tune, regret = made.splitlines()
    assert bench.startswith("timeout 475 ") and bench.endswith(" data decode")
    assert '--out "/some where" --commit "c0ffee"' in bench
    for line in (tune, regret):
        assert line.startswith('ATTNOPS_CACHE_DIR="/some where" '), "the choice goes by that table"


def test_no_results_are_no_error(results, tmp_path):
    assert results.results_full(tmp_path) == results.results_short(tmp_path) == results.NONE
    write(tmp_path, "h200", "regret", "{ cut off")
    write(tmp_path, "h200", "other", {"what": 1})
    assert results.results_full(tmp_path) == results.NONE


def test_tables_of_linears_are_those_that_ship(docs, tmp_path):
    """The faster time is bold, with the share of the bandwidth that the weight's bytes reach in
    it."""
    linears = docs("linears")
    assert linears.linears_full(tmp_path) == linears.NONE
    us = {"aten": (14.0, 15.0), "triton": (11.0, None)}
    grid = Grid(product(4096, 4096, "residual"), (1.0, 64.0), (1.0,), (1.0,), us)
    tables = tmp_path / "attnops" / "tables"
    tables.mkdir(parents=True)
    (tables / "some.json").write_text(Table("NVIDIA H200", "sm90", {}, (grid,)).to_json())
    share = 100 * 2 * 4096 * 4096 / 11e-6 / RATES["NVIDIA H200"].bandwidth / 1e12
    assert f"| **11** / 14, {share:.0f}% | - | - |" in linears.linears_full(tmp_path)


def test_results_become_tables(results, tmp_path):
    ran = {"cases": 19, "refused": 3, "wrong": 0, "worst_share_of_budget": 0.1727}
    proven = {
        "target": "sm90",
        "numerics": {"attention.fa3": ran, "attention.far": {**ran, "cases": 0}},
        "numerics_at_size": {"attention.fa3": {**ran, "cases": 1200, "refused": 0, "left_out": 2}},
        "left_out_cases": {"numerics_at_size attention.fa3": {"of pairs": ["a", "b"]}},
        "opcheck": {"attention.fa3": 2},
        "replay": {},
        "tests": {"passed": 7, "failed": 0},
        "not_run": ["test_it.py::test_z"],
        "skipped_tests": {"no library": ["a", "b", "c"]},
    }
    write(tmp_path, "h200", "kernels", proven)
    slow = {"fa3": 5.0, "automatic": 10.0, "direct.fa3": 8.0, "torch.sdpa": 1.0}
    ways = {"a": {"fa3": 4.0, "automatic": 4.0, "direct.fa3": 8.0}, "b": slow}
    times = [
        {"case": case, "way": way, "median_us": us}
        for case, by_way in ways.items()
        for way, us in by_way.items()
    ]
    write(
        tmp_path,
        "h200",
        "kernel_times",
        {"rows": [*times, {"case": "c", "way": "automatic", "wrong": "wrong: off by 1"}]},
    )
    for suite in ("regret", "kernel_times"):
        write(tmp_path, "zz", suite, {})
    text, short = results.results_full(tmp_path), results.results_short(tmp_path)
    for shown in (
        "| `attention.fa3` | 19 (3 refused) | 0 | 17% | 1,200 (2 left out) | 0, 17% | 2 | - |",
        "take 1,219 ran and 2 were left out: 2 because of pairs; `left_out_cases` in "
        "kernels.json names them.",
        "Tests of this run: 7 passed.",
        "Skipped: 3 because no library.",
        "Not run: `test_it.py::test_z`.",
        "No case of the grid runs there: `attention.far`",
        "The file is of another form",
        "Some GPU, torch 2.11.0, far==1.0, 2026-01-01, commit 0123456789.",
    ):
        assert shown in text, shown
    row = (
        "| Some GPU | 1 of 1 | 1,219 / 2 | 0.50 to 1.25, median 0.88 of 2 calls | 50.0% / "
        "100% of 2 calls | - |"
    )
    assert row in short and "| zz | a file of another form |" in short


def test_hardware_is_where_numerics_were_compared(results, tmp_path):
    ran, idle = (
        {"cases": n, "refused": 3, "wrong": 0, "worst_share_of_budget": 0.1} for n in (2, 0)
    )
    write(
        tmp_path,
        "h200",
        "kernels",
        {"device": "NVIDIA H200", "numerics": {"attention.fa3": ran, "attention.far": idle}},
    )
    write(
        tmp_path,
        "b200",
        "kernels",
        {"target": "sm100", "numerics": {}, "numerics_at_size": {"attention.far": ran}},
    )
    write(tmp_path, "cpu", "kernels", {"numerics": {"attention.near": ran}})
    want = {"attention.fa3": ["sm90"], "attention.far": ["sm100"]}
    assert (
        results.hardware({*want, "attention.near", "attention.new"}, tmp_path)
        == json.loads(results.hardware_text(want))
        == want
    )


def test_committed_results_are_shown(results):
    for _, files in results.machines(ROOT):
        for stem in (
            s for s in set(results.PARTS) & set(files) if not isinstance(files[s].get("rows"), list)
        ):
            assert "of another form" not in results._made(
                results.PARTS[stem.partition("-")[0]][1], files[stem]
            )
