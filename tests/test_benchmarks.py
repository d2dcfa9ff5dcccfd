"""The suites of measurements as far as they go without a GPU: what they draw, count and write, and the pages made of it."""

import json
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from attnops.bench import regret
from tests.helpers import ROOT


@pytest.fixture
def suites(monkeypatch):
    """The folders of scripts on the path, as when one of them is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "docs")
    yield
    for name in ("results", "performance", *(path.stem for path in (ROOT / "benchmarks").glob("*.py"))):
        sys.modules.pop(name, None)


# Running --------------------------------------------------------------------------------------------------------------


def test_one_suite_that_fails_leaves_the_others(suites, monkeypatch, capsys):
    run = import_module("run")
    asked = []

    def fake(command, timeout, env, **_):
        assert env["ATTNOPS_CACHE_DIR"] == "/somewhere", "the choice goes by the table that the same run made"
        asked.append([p.rpartition("/")[2] for p in command[1:]])
        if "latent" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 3 if "overhead" in command else 0)

    monkeypatch.setattr(run.subprocess, "run", fake)
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cpu", "--suite", "overhead,latent,tune,regret"])
    monkeypatch.setenv("OUT", "/somewhere")
    monkeypatch.setenv("COMMIT", "c0ffee")
    assert run.main() == 1
    overhead, latent, tune, measured = asked
    assert overhead[:3] == ["-m", "attnops", "bench"] and "c0ffee" in overhead
    assert tune[:3] == ["-m", "attnops", "tune"]
    assert [made[-1] for made in (overhead, latent, measured)] == ["overhead", "latent", "regret"]
    printed = capsys.readouterr().out
    assert "overhead: FAILED (3)" in printed and "latent: FAILED (over" in printed and "regret: done" in printed
    monkeypatch.setattr(sys, "argv", ["run.py", "--suite", "speed"])
    with pytest.raises(SystemExit):
        run.main()


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_every_script_can_be_imported(suites, script):
    """A script that needs a GPU is not run here: what it imports has to be there all the same."""
    assert import_module(script)


def test_all_limits_are_within_the_promise(suites):
    run = import_module("run")
    assert sum(run.LIMITS_S[s] for s in run.DEFAULT.split(",")) <= 480, "eight minutes"


@pytest.mark.parametrize(
    ("gpu", "word"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L40S", "l40s"), ("NVIDIA GeForce RTX 4090", "4090"), ("NVIDIA B200", "b200"),
    ],
)  # fmt: skip
def test_folders_are_named_by_the_model(suites, gpu, word):
    assert import_module("common").word_of(gpu) == word


# Pages ----------------------------------------------------------------------------------------------------------------

CALLS = [
    {"case": "mla 1x1 of 9", "way": "automatic", "us": {"a": 10.0, "b": 12.0}, "chosen": dict.fromkeys(regret.WAYS, "b")},
    {"case": "packed 1x9 of 9", "way": "automatic", "us": {"a": 10.0, "b": 11.0}, "chosen": dict.fromkeys(regret.WAYS, "a")},
]
STAMP = {"device": "Some GPU", "torch": "2.11.0", "date": "2026-01-01", "commit": "0123456789abcdef", "packages": ["far==1.0"]}


def write(root, machine, name, data):
    path = root / "benchmarks" / "results" / machine / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps({**STAMP, **data}))


@pytest.fixture
def results(suites) -> Any:
    return import_module("results")


def test_no_results_are_no_error(results, tmp_path):
    assert results.results_full(tmp_path) == results.results_short(tmp_path) == results.NONE
    write(tmp_path, "h200", "regret", "{ cut off")
    write(tmp_path, "h200", "other", {"what": 1})
    assert results.results_full(tmp_path) == results.NONE


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
    want = {"attention.fa3": ["sm90"], "attention.far": ["sm100"], "attention.near": [], "attention.new": []}
    assert results.hardware(names, tmp_path) == want
    assert json.loads(results.hardware_text(want)) == want


def test_committed_results_are_shown(results):
    for _, files in results.machines(ROOT):
        for stem in set(results.PARTS) & set(files):
            assert "of another form" not in results._made(results.PARTS[stem.partition("-")[0]][1], files[stem])
