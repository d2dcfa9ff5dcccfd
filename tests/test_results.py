"""Results: where `make gpu-bench` writes them, and the page made of committed ones."""

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from attnops.bench import choices
from attnops.measured import RATES, Grid, Table
from attnops.ops.linear.timed import product
from tests.helpers import ROOT

CALLS = [
    {"case": "mla 1x1 of 9", "way": "automatic", "us": {"a": 10.0, "b": 12.0}, "chosen": dict.fromkeys(choices.WAYS, "b")},
    {"case": "packed 1x9 of 9", "way": "automatic", "us": {"a": 10.0, "b": 11.0}, "chosen": dict.fromkeys(choices.WAYS, "a")},
]
STAMP = {"device": "Some GPU", "torch": "2.11.0", "date": "2026-01-01", "commit": "0123456789abcdef", "packages": ["far==1.0"]}


def write(root, machine, name, data):
    path = root / "benchmarks" / "results" / machine / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps({**STAMP, **data}))


@pytest.fixture
def results(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "docs")
    yield import_module("results")
    sys.modules.pop("results")


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_measures_within_eight_minutes_where_it_is_told():
    given = {"OUT": "/some where", "COMMIT": "c0ffee", "SUITES": "data decode"}
    command = ["make", "-n", "--no-print-directory", "gpu-bench", "gpu-tune"]
    made = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **given, "MAKEFLAGS": ""}, capture_output=True, text=True, check=True
    ).stdout
    bench, tune, regret = made.splitlines()
    assert bench.startswith("timeout 475 ") and bench.endswith(" data decode") and regret.endswith(" regret")
    assert all('-m attnops bench --device cuda --out "/some where" --commit "c0ffee" --gpus' in line for line in (bench, regret))
    assert all(line.startswith('ATTNOPS_CACHE_DIR="/some where" ') for line in (tune, regret)), "the choice goes by that table"


def test_no_results_are_no_error(results, tmp_path):
    assert results.results_full(tmp_path) == results.results_short(tmp_path) == results.NONE
    write(tmp_path, "h200", "regret", "{ cut off")
    write(tmp_path, "h200", "other", {"what": 1})
    assert results.results_full(tmp_path) == results.NONE


def test_tables_of_linears_are_those_that_ship(results, tmp_path):
    """The faster time is bold, with the share of the bandwidth that the weight's bytes reach in it."""
    linears = import_module("linears")
    assert linears.linears_full(tmp_path) == linears.NONE
    grid = Grid(product(4096, 4096, "residual"), (1.0, 64.0), (1.0,), (1.0,), {"aten": (14.0, 15.0), "triton": (11.0, None)})
    (tmp_path / "attnops" / "tables").mkdir(parents=True)
    (tmp_path / "attnops" / "tables" / "some.json").write_text(Table("NVIDIA H200", "sm90", {}, (grid,)).to_json())
    *_, row = linears.linears_full(tmp_path).splitlines()
    share = 100 * 2 * 4096 * 4096 / 11e-6 / RATES["NVIDIA H200"].bandwidth / 1e12
    assert row.startswith(f"| 4096 x 4096 | residual | llama-3-8b o, qwen3-8b o | **11** / 14, {share:.0f}% | - | - |")
    some = [{"case": f"m qkv x{n}", "way": "automatic", "us": {"aten": 3.0}, "chosen": {}} for n in (3, 8)]
    report = {
        "suite": "linear",
        "rows": [*some, {"case": "m qkv x8", "way": "aten"}, {"case": "m", "way": "automatic", "mean_percent": 1.0}],
    }
    assert [row["case"] for row in linears.shown(report)["rows"]] == ["m qkv x8", "m"]
    sys.modules.pop("linears")


def test_results_become_tables(results, tmp_path):
    numerics = {"cases": 19, "refused": 3, "wrong": 0, "worst_share_of_budget": 0.1727}
    idle = {"cases": 0, "refused": 9, "wrong": 0, "worst_share_of_budget": 0.0}
    proven = {"numerics": {"attention.fa3": numerics, "attention.far": idle}, "opcheck": {"attention.fa3": 2}, "replay": {}}
    proven["numerics_at_size"] = {"attention.fa3": {**numerics, "cases": 1200, "refused": 0, "left_out": 2}}
    proven["left_out_cases"] = {"numerics_at_size attention.fa3": {"of pairs": ["a", "b"]}}
    proven["target"] = "sm90"
    proven |= {"tests": {"passed": 7, "failed": 0}, "not_run": ["test_it.py::test_z"], "skipped_tests": {"no library": ["a", "b", "c"]}}
    write(tmp_path, "h200", "kernels", proven)
    figures = {"mean_percent": 20.0, "worst_percent": 20.0, "best_chosen": 0}
    write(tmp_path, "h200", "regret", {"families": {"mla": {"calls": 1, "automatic": figures}}, "all": {"calls": 1, "automatic": figures}})
    case = {
        "unit": "TB/s",
        "gpu": {n: {"median_us": us, "rate": 3.3} for n, us in {"op.fa3": 10.1, "direct.fa3": 10.0}.items()},
        "device_kernels": {"op.fa3": ["k", "combine"], "direct.fa3": ["k"]},
        "against": {"op.fa3": {"direct": "direct.fa3", "ratio": 1.01, "more_device_kernels": 1}},
        "left_out": {"direct.flashinfer_fa3": "ModuleNotFoundError: No module named 'flashinfer'"},
    }
    write(tmp_path, "h200", "direct", {"cases": {"decode 1x8192": case}})
    call = {"case": "eager call of a kernel that does nothing", "way": "function", "median_us": 11.6, "spread_us": 0.19}
    write(tmp_path, "cpu", "overhead", {"rows": [call]})
    write(tmp_path, "zz", "regret", {})
    write(tmp_path, "zz", "kernel_times", {})
    slow = {"fa3": 5.0, "automatic": 10.0, "direct.fa3": 8.0, "torch.sdpa": 1.0}
    ways = {"a": {"fa3": 4.0, "automatic": 4.0, "direct.fa3": 8.0}, "b": slow}
    times = [{"case": case, "way": way, "median_us": us} for case, by_way in ways.items() for way, us in by_way.items()]
    times.append({"case": "c", "way": "automatic", "wrong": "wrong: off by 1"})
    write(tmp_path, "h200", "kernel_times", {"rows": times})
    text = results.results_full(tmp_path)
    for shown in (
        "| `attention.fa3` | 19 (3 refused) | 0 | 17% | 1,200 (2 left out) | 0, 17% | 2 | - |",
        "take 1,219 ran and 2 were left out: 2 because of pairs; `left_out_cases` in kernels.json names them.",
        "Tests of this run: 7 passed.",
        "Skipped: 3 because no library.",
        "Not run: `test_it.py::test_z`.",
        "No case of the grid runs there: `attention.far`",
        "| decode 1x8192 | `op.fa3` | 10.1 | 3.3 TB/s | 1.010 of `direct.fa3` | 2 (+1) |",
        "`direct.flashinfer_fa3`: ModuleNotFoundError",
        "| mla | 1 | 20.0% / 20% |",
        "The file is of another form",
        "Some GPU, torch 2.11.0, far==1.0, 2026-01-01, commit 0123456789.",
    ):
        assert shown in text, shown
    assert text.index("Proven") < text.index("Against the vendors' own calls")
    short = results.results_short(tmp_path)
    assert "| Some GPU | 1 of 1 | 1,219 / 2 | 0.50 to 1.25, median 0.88 of 2 calls | 50.0% / 100% of 2 calls | - |" in short
    assert "| Some GPU | - | - | - | - | 11.6 us |" in short and "| zz | a file of another form |" in short


def test_the_larger_grid_of_regret_is_shown(results, tmp_path):
    write(tmp_path, "h200", "kernel_times", {"rows": [{"case": "a", "way": way, "median_us": 5.0} for way in ("fa3", "automatic")]})
    assert "| 0.0% / 0% of 1 calls |" in results.results_short(tmp_path)
    write(tmp_path, "h200", "regret", {"rows": CALLS})
    assert "| 10.0% / 20% of 2 calls |" in results.results_short(tmp_path)


def test_hardware_is_where_numerics_were_compared(results, tmp_path):
    ran, idle = ({"cases": n, "refused": 3, "wrong": 0, "worst_share_of_budget": 0.1} for n in (2, 0))
    write(tmp_path, "h200", "kernels", {"device": "NVIDIA H200", "numerics": {"attention.fa3": ran, "attention.far": idle}})
    write(tmp_path, "b200", "kernels", {"target": "sm100", "numerics": {}, "numerics_at_size": {"attention.far": ran}})
    write(tmp_path, "cpu", "kernels", {"numerics": {"attention.near": ran}})
    names = ("attention.far", "attention.fa3", "attention.near", "attention.new")
    want = {"attention.fa3": ["sm90"], "attention.far": ["sm100"]}
    assert results.hardware(names, tmp_path) == want
    assert json.loads(results.hardware_text(want)) == want


def test_committed_results_are_shown(results):
    for _, files in results.machines(ROOT):
        for stem in (s for s in set(results.PARTS) & set(files) if not isinstance(files[s].get("rows"), list)):
            assert "of another form" not in results._made(results.PARTS[stem.partition("-")[0]][1], files[stem])
