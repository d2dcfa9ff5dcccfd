"""The suites of measurements as far as they go without a GPU: what they draw, count and write, and the pages made of it."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from attnops.inputs import Pool, build, lengths, problem_of
from attnops.kernel import Kernel, kernels_of
from attnops.measured import MEASURED, Grid, Table, costs
from attnops.measured.table import from_json
from attnops.problem import Target
from attnops.tune import Stopwatch
from attnops.tune.shapes import DENSE, FULL
from tests.helpers import ROOT

SM90 = Target("cuda", 90, assume=())


@pytest.fixture
def suites(monkeypatch):
    """The folders of scripts on the path, as when one of them is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "docs")
    yield
    for name in ("results", "performance", *(path.stem for path in (ROOT / "benchmarks").glob("*.py"))):
        sys.modules.pop(name, None)


@pytest.fixture
def regret(suites) -> Any:
    return import_module("regret")


# Regret ---------------------------------------------------------------------------------------------------------------


def test_what_is_held_out(regret):
    held = regret.held_out(240)
    assert held == regret.held_out(240) != regret.held_out(240, seed=2), "a seed gives the same calls"
    assert {f: sum(h.family == f for h in held) for f in regret.FAMILIES} == dict.fromkeys(regret.FAMILIES, 48)
    on_grid = {(p.shape, *at) for p in FULL for at in Grid(p.shape, p.batch, p.queries, p.ratio, {}).points()}
    for h in held:
        batch, queries, keys = len(h.q_lens), max(h.q_lens), max(h.k_lens)
        assert (h.shape, batch, queries, keys / queries) not in on_grid
        assert len(h.k_lens) == batch and all(1 <= q <= k or h.shape.kv_range for q, k in zip(h.q_lens, h.k_lens, strict=True))
        if h.shape.op == "attention":
            assert len(set(h.q_lens)) == 1
    assert {h.shape.decode for h in held if h.family == "dense"} == {True, False}
    ragged = sum(len(set(h.k_lens)) > 1 for h in held if len(h.k_lens) > 1)
    assert ragged > 60


def test_the_problem_of_a_held_call_is_that_of_the_call(regret):
    pool, seen = Pool("cpu"), set()
    for held in regret.held_out(1500, seed=3):
        if held.work()[0] > 2e6:
            continue
        call = build(held.shape, held.q_lens, held.k_lens, pool)
        assert problem_of(held.shape, held.q_lens, held.k_lens, Target()) == call.problem, held
        seen.add(held.family)
    assert len(seen) >= 3


def row(us, chosen, family="mla"):
    ways = dict.fromkeys(("automatic", "by_estimates", "by_powers_of_two"), chosen)
    return {"family": family, "batch": 2, "queries": [1, 1], "keys": [7, 9], "us": us, "chosen": ways}


def test_regret_is_counted(regret):
    rows = [
        row({"a": 10.0, "b": 12.0}, "a"), row({"a": 10.0, "b": 12.0}, "b"), row({"a": 10.0, "b": 8.0}, "b", "packed"),
        row({"a": 10.0, "b": 12.0}, "gone", "packed"),
    ]  # fmt: skip
    found = regret.report_of(rows, None)
    assert found["all"]["calls"] == 4
    assert found["all"]["automatic"] == {
        "mean_percent": 6.67, "worst_percent": 20.0, "best_chosen": 2, "over_10_percent": 1, "unanswered": 1,
    }  # fmt: skip
    assert found["families"]["packed"]["automatic"]["unanswered"] == 1
    assert regret.summary([])["all"]["automatic"]["mean_percent"] is None
    assert [r["regret_percent"] for r in found["calls"]] == [None, 20.0, 0.0, 0.0] and json.dumps(found)


def test_the_shipped_table_chooses_as_the_committed_figures_say(regret):
    """What was timed on an H200, chosen for once more: a change that chooses worse shows here, without a GPU."""
    data = json.loads((ROOT / "benchmarks" / "results" / "h200" / "regret.json").read_text())
    table = from_json((ROOT / "attnops" / "tables" / "h200.json").read_text())
    rows = regret.chosen_again(data, table)
    found = json.loads(json.dumps(regret.summary(rows)))
    for now, then in ((found["all"], data["all"]), *((found["families"][f], data["families"][f]) for f in data["families"])):
        assert now == {n: then[n] for n in ("calls", *regret.WAYS)}, "regret.py --again writes them anew"
    assert data["table"]["digest"] == table.digest[:12] and len(rows) == len(data["calls"])
    assert found["all"]["automatic"]["mean_percent"] < 2.0 < found["all"]["by_estimates"]["mean_percent"]
    other = regret.summary(regret.chosen_again(data, replace(table, grids=table.grids[:5])))
    assert other["all"]["automatic"]["mean_percent"] > found["all"]["automatic"]["mean_percent"], "fewer shapes were measured"


def test_a_kernel_that_is_wrong_is_no_candidate(regret):
    shape = replace(DENSE, dtype="float32", kv_dtype="float32", q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16)
    held = regret.Held("dense", shape, (6, 6), (6, 6))
    call = build(shape, held.q_lens, held.k_lens, Pool("cpu"))
    sdpa = kernels_of("attention")["sdpa"]

    def off(call):
        output, lse = sdpa.run(call)
        return output * 1.5, lse

    checked: dict[str, list[str]] = {}
    assert regret.trusted(sdpa, call, held, checked)
    assert not regret.trusted(replace(sdpa, name="off", run=off, contract=2), call, held, checked)
    assert not regret.trusted(replace(sdpa, name="off", run=off, contract=2), call, held, checked)
    assert checked["dense: attention.sdpa"] == [""]
    [error] = checked["dense: attention.off"]
    assert "off by" in error, "once is enough"


def test_a_row_of_real_kernels(regret):
    shape = replace(DENSE, dtype="float32", kv_dtype="float32", q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16)
    held = regret.Held("dense", shape, (6, 6), (6, 6))
    stopwatch = Stopwatch(lambda kernel, call, run: {"sdpa": 10.0, "reference": 30.0}.get(kernel.name, 500.0))
    found = regret.time_one(held, Pool("cpu"), stopwatch, {}, None)
    assert found["us"]["sdpa"] == 10.0 and found["us"]["reference"] == 30.0
    assert found["chosen"]["automatic"] == found["chosen"]["by_estimates"] == "sdpa" and regret.regret(found) == 0
    assert found["shape"]["op"] == "attention" and found["shape"]["q_heads"] == 4 and "rope_dim" not in found["shape"]


# Kernels made up to cross each other: what they take depends on every request, as selection cannot know it.
def moved(s, q_lens, k_lens):
    width = s.head_dim + s.v_head_dim
    stored = s.head_dim if s.rope_dim else s.kv_heads * width
    pairs = sum(q * (k - (q - 1) / 2 if s.causal else k) for q, k in zip(q_lens, k_lens, strict=True))
    return 2.0 * (sum(q_lens) * s.q_heads * width + sum(k_lens) * stored), 2.0 * pairs * s.q_heads * width


def splitting(s, q_lens, k_lens):
    size, flops = moved(s, q_lens, k_lens)
    blocks = sum(s.kv_heads * math.ceil(q * s.q_heads / s.kv_heads / 128) for q in q_lens)
    return 8 + 7 * (blocks < 106) + max(size / 4.1e6, flops / 6e8) * (1.1 if blocks < 106 else 1.0)


def steady(s, q_lens, k_lens):
    size, flops = moved(s, q_lens, k_lens)
    return 12 + size / 3.9e6 + flops / 5e8


def quick(s, q_lens, k_lens):
    size, flops = moved(s, q_lens, k_lens)
    return 5 + size / 2.5e6 + flops / 4e8


MADE_UP = {"splitting": splitting, "steady": steady, "quick": quick}


def made_up_table():
    grids = []
    for plan in FULL:
        empty = Grid(plan.shape, plan.batch, plan.queries, plan.ratio, {})
        at = [lengths(plan.shape, p) if plan.allows(p) else None for p in empty.points()]
        us = {n: tuple(float(f"{f(plan.shape, *a):.3g}") if a else None for a in at) for n, f in MADE_UP.items()}
        grids.append(replace(empty, us=us))
    return Table("Made up", "sm90", {f"{p.shape.op}.{n}": "" for p in FULL for n in MADE_UP}, tuple(grids))


def test_a_table_chooses_well_between_its_points(regret):
    """The grid and the hints are fine enough: mean and worst regret on calls that the table does not contain."""
    table, exact, coarse = made_up_table(), [], []
    assert len(table.to_json()) < 100_000
    for held in regret.held_out(300, seed=5):
        kernels = [Kernel(n, held.shape.op, print) for n in MADE_UP]
        us = {n: f(held.shape, held.q_lens, held.k_lens) for n, f in MADE_UP.items()}
        for change, regrets in ((lambda p: p, exact), (regret.coarse, coarse)):
            found = costs(change(problem_of(held.shape, held.q_lens, held.k_lens, SM90)), kernels, table)
            assert all(c.how == MEASURED for c in found.values()), held
            regrets.append(us[min(found, key=lambda n: found[n].us)] / min(us.values()) - 1)
    # The worst are calls of some 10 us between two points where one of the kernels stops splitting.
    assert sum(exact) / len(exact) <= 0.01 and max(exact) <= 0.5
    assert sum(r > 0.1 for r in exact) <= 0.03 * len(exact)
    assert sum(coarse) > 1.5 * sum(exact)


# Running --------------------------------------------------------------------------------------------------------------


def test_one_suite_that_fails_leaves_the_others(suites, monkeypatch, capsys):
    run = import_module("run")
    asked = []

    def fake(command, timeout, **_):
        asked.append([p.rpartition("/")[2] for p in command[1:]])
        if "mla" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 3 if "bench" in command else 0)

    monkeypatch.setattr(run.subprocess, "run", fake)
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cpu", "--suite", "overhead,mla,tune,regret"])
    monkeypatch.setenv("OUT", "/somewhere")
    monkeypatch.setenv("COMMIT", "c0ffee")
    assert run.main() == 1
    overhead, mla, tune, regret = asked
    assert overhead[:3] == ["-m", "attnops", "bench"] and overhead[-3:] == ["--commit", "c0ffee", "overhead"]
    assert mla[:2] == ["compare.py", "mla"] and tune[:3] == ["-m", "attnops", "tune"] and regret[0] == "regret.py"
    assert tune[-2:] == ["--output", "table.json"] and regret[1:3] == ["--table", "table.json"], "a fresh table is what the choice goes by"
    printed = capsys.readouterr().out
    assert "overhead: FAILED (3)" in printed and "mla: FAILED (over" in printed and "regret: done" in printed
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


def compare(monkeypatch, tmp_path, suite, *more):
    """The exit code of a suite of compare.py on a CPU, and its report."""
    monkeypatch.setenv("OUT", str(tmp_path))
    code = import_module("compare").main([suite, "--device", "cpu", *more])
    return code, json.loads((tmp_path / f"{suite}.json").read_text())


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


def test_results_become_tables(results, regret, tmp_path):
    numerics = {"cases": 19, "refused": 3, "wrong": 0, "worst_share_of_budget": 0.1727}
    idle = {"cases": 0, "refused": 9, "wrong": 0, "worst_share_of_budget": 0.0}
    proven = {"numerics": {"attention.fa3": numerics, "attention.far": idle}, "opcheck": {"attention.fa3": 2}, "replay": {}}
    proven["numerics_at_size"] = {"attention.fa3": {**numerics, "cases": 1200, "refused": 0, "left_out": 2}}
    proven["left_out_cases"] = {"numerics_at_size attention.fa3": {"of pairs": ["a", "b"]}}
    proven["target"] = "sm90"
    proven |= {"tests": {"passed": 7, "failed": 0}, "not_run": ["test_it.py::test_z"], "skipped_tests": {"no library": ["a", "b", "c"]}}
    write(tmp_path, "h200", "kernels", proven)
    write(tmp_path, "h200", "regret", regret.summary([row({"a": 10.0, "b": 12.0}, "b"), row({"a": 10.0}, "a", "packed")]))
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


def test_the_larger_grid_of_regret_is_shown(results, regret, tmp_path):
    write(tmp_path, "h200", "kernel_times", {"rows": [{"case": "a", "way": way, "median_us": 5.0} for way in ("fa3", "automatic")]})
    assert "| 0.0% / 0% of 1 calls |" in results.results_short(tmp_path)
    rows = [row({"a": 10.0, "b": 12.0}, "b"), row({"a": 10.0}, "a", "packed")]
    write(tmp_path, "h200", "regret", regret.summary(rows))
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


# A layer over latents -------------------------------------------------------------------------------------------------


@pytest.fixture
def uncompiled(suites, monkeypatch) -> Any:
    """mla.py without the compiler."""
    mla = import_module("mla")
    monkeypatch.setattr(mla, "compiled", lambda function, *args, **kwargs: lambda: function(*args, **kwargs))
    return mla


def test_a_layer_over_latents_at_toy_size(uncompiled, monkeypatch, tmp_path):
    """The suite as it runs on a GPU, but for the compiler: the numbers are checked, the file is written and shown."""
    code, data = compare(monkeypatch, tmp_path / "benchmarks" / "results" / "cpu", "mla")
    assert code == 0
    [layer] = data["layer"].values()
    assert set(layer["off_by"]) == {"layer", "hf_eager", "hf_compiled"} and max(layer["off_by"].values()) < 1e-5
    assert set(layer["us"]) == {"layer", "layer_eager", "kernel", "projections", "hf_eager", "hf_compiled"} and not layer["left_out"]
    [float8] = data["float8"].values()
    assert 1e-3 < float8["off_by"]["float8_pages"] < float8["off_by"]["float8_both"] < uncompiled.FAR
    assert {new: f["chosen"] for new, f in data["forms"]["4 heads, 2x16 before"].items()} == {"1": "absorbed", "4": "absorbed"}
    text = import_module("results").results_full(tmp_path)
    assert "Attention over latents, a whole layer" in text and "of another form" not in text
    assert f"| 4 heads, 2x24 | {layer['us']['layer']['median_us']:.0f} |" in text


def test_a_layer_that_is_wrong_has_no_times(uncompiled, monkeypatch):
    right = uncompiled.ours

    def wrong(*args, **kwargs):
        made = right(*args, **kwargs)
        made.scale = made.scale * (1.5 if made.kernel is None else 1.0)
        return made

    monkeypatch.setattr(uncompiled, "ours", wrong)
    with torch.no_grad(), pytest.raises(AssertionError, match="off by"):
        uncompiled.measure(uncompiled.TOY[0], "cpu")


@pytest.mark.parametrize("most", [8192, 0])
def test_a_layer_whose_reference_is_wrong_too_fails_its_case(uncompiled, monkeypatch, tmp_path, most):
    """transformers' layer judges it, as the exact result or, where that is too large, beside ours."""
    right = uncompiled.ours

    def wrong(*args, **kwargs):
        made = right(*args, **kwargs)
        made.scale = made.scale * 1.5
        return made

    monkeypatch.setattr(uncompiled, "ours", wrong)
    monkeypatch.setattr(uncompiled, "MOST_EXACT", most)
    code, data = compare(monkeypatch, tmp_path, "mla", "--only", "4 heads, 2x24")
    assert code == 1 and "wrong: off by" in data["failed"]["4 heads, 2x24"]


def test_floors_are_below_what_was_reached(suites):
    mla = import_module("mla")
    data = json.loads((ROOT / "benchmarks" / "results" / "h200" / "mla.json").read_text())
    found = mla.with_floors(data, "cpu")
    assert found == data
    assert min(case[f"{part}_over_floor"] for case in found["layer"].values() for part in ("kernel", "layer")) >= 1.0
    slow = mla.with_floors(data | {"ceilings": data["ceilings"] | {"copy_tb_s": 100.0}}, "cpu")
    name = "16 heads, 64x32768"
    assert slow["layer"][name]["kernel_floor_us"] < 0.5 * found["layer"][name]["kernel_floor_us"]
