"""What can be said of the GPU suite without one: its grids are made of calls in order, and its
runner goes on, stops, and says what ran."""

import functools
import json
import os
import subprocess
import sys
from itertools import combinations

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, altered, leaf, pretend
from attnops.core.record import check
from attnops.lowering.explain import packages_of_kernels
from attnops.testing import CASES, Source
from tests.gpu import run
from tests.gpu.flashinfer_modules import is_built, suite
from tests.gpu.grid import PAIRS, share_of, values
from tests.gpu.journal import Journal, Pass, joined, text_of
from tests.gpu.wide import WIDE, DeviceSource
from tests.helpers import ROOT, ready_process
from tests.pairwise import cover, pairwise

H200 = Target("cuda", 90, packages_of_kernels(), "NVIDIA H200")


# The grids ----------------------------------------------------------------------------------------


NEEDED = {
    "page_size": {1, 16, 64, 128, 256},
    "group_size": {1, 2, 3, 4, 8, 16},
    "head_dim": {64, 96, 128, 192, 256, 576},
    "dtype": {torch.float16, torch.bfloat16},
}


def test_every_point_at_size_is_a_call_in_order_and_its_own_problem():
    found, seen = {name: set() for name in NEEDED}, {}
    for case in (
        case for op in WIDE for case in WIDE[op] if not {"32768", "4096"} & {*case.label.split("_")}
    ):  # large; made the same way
        call = case.build(DeviceSource(0, "cpu"))
        check(call.record)
        problem = call.problem
        assert seen.setdefault(str(problem), case) is case or "page" in case.label, (
            case,
            seen[str(problem)],
        )
        for name, some in found.items():
            some.add(leaf(problem, name))
    assert all(found[name] >= some for name, some in NEEDED.items())


def test_a_cover_has_every_pair_that_the_grid_has():
    axes = {"a": (1, 2, 3), "b": "xyz", "c": (True, False), "d": (None, 1.0, 2.0)}
    points = pairwise(**axes)
    seen = {pair for point in points for pair in combinations(zip(axes, point, strict=True), 2)}
    assert seen == {
        ((n, x), (m, y)) for n, m in combinations(axes, 2) for x in axes[n] for y in axes[m]
    }
    assert 9 <= len(points) <= 12 and points == pairwise(**axes)
    assert cover({}) == [] and cover({"only": {"a": 1, "b": 2}}) == ["only"]


@functools.cache
def problems(op):
    """The Problem of each case on an H200, by label."""
    with pretend(H200):
        return {case.label: case.call().problem for case in CASES[op]}


def pairs_of(some):
    """All pairs of values of two fields in some Problems."""
    return {
        pair
        for p in some
        for pair in combinations(((name, str(value)) for name, value in values(p).items()), 2)
    }


SOME = (
    "attention.flex",
    "varlen_attention.fa4",
    "paged_attention.flashinfer",
    "plan_paged_attention.flashinfer",
    "mla_attention.triton",
)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", SOME)
def test_what_is_left_out_is_named_and_has_no_pair_of_its_own(name):
    op, _, kernel_name = name.partition(".")
    kernel = kernels_of(op)[kernel_name]
    built = is_built if kernel.name == "flashinfer" else lambda *_: True
    with pretend(H200):
        share = share_of(kernel, CASES[kernel.op], Source, built=built)
    taken, left = {case.label for _, case in share.cases}, share.left_out.get(PAIRS, [])
    assert len(taken) + sum(map(len, share.left_out.values())) + len(share.refused) == len(
        CASES[kernel.op]
    )
    assert pairs_of(problems(kernel.op)[n] for n in taken) >= pairs_of(
        problems(kernel.op)[n] for n in left
    )


def test_shares_are_all_of_it():
    kernel, cases = kernels_of("paged_attention")["triton"], CASES["paged_attention"]
    with pretend(H200):
        whole, *shares = (
            share_of(kernel, cases, Source, *at) for at in ((0, 1), (0, 3), (1, 3), (2, 3))
        )
    assert sorted(seed for share in shares for seed, _ in share.cases) == [
        seed for seed, _ in whole.cases
    ]
    assert shares[0].left_out == whole.left_out and not any(
        share.refused or share.left_out for share in shares[1:]
    )


def test_the_modules_are_those_of_the_grid():
    modules = suite(H200)
    kernel = kernels_of("paged_attention")["flashinfer"]
    assert 5 < len(modules) < 16, "each takes nvcc up to a minute"
    for case in CASES["paged_attention"]:
        with pretend(H200):
            call = case.call()
        problem = altered(call.problem, plan="host", workspace=1 << 62)
        if not kernel.refusals(problem) and all(t.numel() for t in call.tensors().values()):
            assert is_built(problem, call.arguments["max_seqlen_q"])


# The journal --------------------------------------------------------------------------------------


def test_the_text_of_a_report_is_the_report():
    report = {
        "passed": True,
        "torch": "2",
        "numerics": {"b": {"cases": 1}, "a": [1, 2]},
        "empty": {},
        "packages": ["x==1"],
    }
    assert json.loads(text_of(report)) == report
    assert ' "a": [1, 2],\n "b": {"cases": 1}\n}' in text_of(report)


def test_findings_of_one_name_are_joined():
    a = {
        "numerics": {"k": {"cases": 2, "worst": 0.25, "first": "x"}, "l": 1},
        "whole": True,
        "names": ["a"],
    }
    b = {
        "numerics": {"k": {"cases": 3, "worst": 0.5, "first": "y"}},
        "whole": False,
        "names": ["b"],
        "more": 1,
    }
    k = {"cases": 5, "worst": 0.5, "first": "x"}
    assert joined(a, b) == {
        "numerics": {"k": k, "l": 1},
        "whole": False,
        "names": ["a", "b"],
        "more": 1,
    }


def ended(test, outcome="passed", **more):
    return {"test": test, "outcome": outcome, "seconds": 1.0, "reason": "", "found": {}, **more}


def test_a_pass_is_passed_when_all_ran_and_nothing_failed():
    start = [{"part": 1, "at": 10.0}, {"collected": ["a", "b"], "alone": ["b"], "at": 11.0}]
    assert Pass.of([]).report()["passed"] is False
    begun = Pass.of([*start, ended("a", at=14.0)]).report()
    assert not begun["passed"] and begun["not_run"] == ["b"]
    whole = Pass.of(
        [*start, ended("a", at=14.0), {"part": 2, "at": 100.0}, ended("b", at=102.0)]
    ).report()
    assert (
        whole["passed"]
        and (whole["seconds"], whole["parts_s"]) == (6, [4, 2])
        and "not_run" not in whole
    )
    for bad in (ended("b", "failed", at=15.0), {"broken": "no file", "at": 15.0}):
        assert not Pass.of([*start, ended("a", at=14.0), ended("b", at=14.0), bad]).report()[
            "passed"
        ]
    skipped = Pass.of([*start, *(ended(n, "skipped", reason="no device") for n in "ab")]).report()
    assert not skipped["passed"] and skipped["skipped_tests"] == {"no device": ["a", "b"]}


def test_a_line_cut_short_is_left_out(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.add(test="a", n=1)
    journal.path.write_text(journal.path.read_text() + '{"test": "b", ')
    assert [r["test"] for r in journal.records()] == ["a"]


# The runner, on files that need no device ---------------------------------------------------------

HEAD = """
import os, time, pytest, torch
pytestmark = pytest.mark.gpu
@pytest.fixture
def found(request):
    figures = {}
    request.node.user_properties.append(("found", figures))
    return figures
"""


@pytest.fixture
def suite_of(tmp_path):
    """Makes a file of tests, and returns what runs it: the exit status, what was printed, and
    kernels.json."""

    def made(text):
        (tmp_path / "test_it.py").write_text(HEAD + text)
        # Names of tests do not follow from the folder of the clone.
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\nmarkers =\n    gpu: of a test\n    alone: of a test\n"
        )

        def go(*options, processes=1, out="out", state="state.jsonl", gpus=""):
            command = [
                sys.executable,
                "tests/gpu/run.py",
                "--no-modules",
                "--processes",
                str(processes),
                "--tests",
                str(tmp_path),
            ]
            environ = {**os.environ, "OUT": str(tmp_path / out), "CUDA_VISIBLE_DEVICES": gpus}
            command += ["--state", str(tmp_path / state), *options]
            done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
            return (
                done.returncode,
                done.stdout + done.stderr,
                json.loads((tmp_path / out / "kernels.json").read_text()),
            )

        return go

    return made


@pytest.mark.parametrize(
    ("given", "want"),
    [(None, ["0", "1"]), ("", [""]), ("1", ["1"]), ("GPU-8a,GPU-9b", ["GPU-8a", "GPU-9b"])],
)
def test_hidden_devices_stay_hidden(monkeypatch, given, want):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert run.devices() == want


@pytest.mark.full
def test_two_processes_run_each_test_once(suite_of, tmp_path):
    """Also one that ends its process, one that loses its device, and a fixture that fails when it
    is taken down: these fail alone."""
    go = suite_of(f"""
@pytest.mark.parametrize("n", range(4))
def test_one(n, found):
    open({str(tmp_path / "ran")!r}, "a").write(f"{{n}}\\n")
    found.setdefault("numerics", {{}})["k"] = {{"cases": 2, "worst": n / 4}}
def test_skipped(): pytest.skip("no such library")
def test_dies(): os._exit(7)
def test_loses():
    torch.cuda.is_initialized = lambda: True  # and there is none, so that nothing answers
    assert False
@pytest.mark.parametrize("n", range(2))
def test_after(n): assert not torch.cuda.is_initialized()
@pytest.fixture(scope="module")
def one():
    yield 1
    assert False, "not taken down"
def test_last(one): pass
@pytest.mark.alone
def test_measures(found):
    assert len(open({str(tmp_path / "ran")!r}).read().split()) == 4
    found["clock"] = {{"us": 1.5}}
    found["seen"] = {{"gpus": os.environ["CUDA_VISIBLE_DEVICES"]}}
""")
    status, said, report = go(processes=2, gpus="7,8")
    assert status == run.NOTHING and not report["passed"], said
    assert report["seen"] == {"gpus": "7,8"}, "what runs alone sees all GPUs"
    assert report["tests"] == {"passed": 7, "skipped": 1, "failed": 3, "not_run": 0}, said
    assert sorted((tmp_path / "ran").read_text().split()) == list("0123")
    assert report["numerics"] == {"k": {"cases": 8, "worst": 0.75}} and report["clock"] == {
        "us": 1.5
    }
    assert report["skipped_tests"] == {"no such library": ["test_it.py::test_skipped"]}
    failed = {name.partition("::")[2]: why for name, why in report["failed_tests"].items()}
    assert (
        "exit status 7" in failed["test_dies"]
        and "not taken down" in failed["test_last"]
        and "FAILED test_it.py::test_dies" in said
    )
    assert {"commit", "date", "device", "torch", "packages", "code", "slowest_s"} <= report.keys()


@pytest.mark.full
def test_parts_go_on_where_the_last_one_ended(suite_of, tmp_path):
    """At the limit the running test ends; the next part runs the others, here and where only the
    journal was carried."""
    go = suite_of(f"""
@pytest.mark.parametrize("n", range(3))
def test_one(n, found, request):
    open({str(tmp_path / "ran")!r}, "a").write(f"{{n}}\\n")
    if not os.path.exists({str(tmp_path / "out" / "kernels.json")!r}):
        part = request.config.pluginmanager.get_plugin("gpu-test-part")
        assert 0 < part.until - time.time() <= 600
        part.until = time.time()
    found["n"] = {{str(n): n}}
""")
    status, said, report = go("--seconds", "600")
    assert (
        status == run.LEFT
        and not report["passed"]
        and report["not_run"] == [f"test_it.py::test_one[{n}]" for n in (1, 2)]
    ), said
    status, said, report = go(
        "--resume", str(tmp_path / "out" / "gpu-test.jsonl"), out="there", state="other.jsonl"
    )
    assert (
        status == 0
        and report["passed"]
        and report["n"] == {"0": 0, "1": 1, "2": 2}
        and len(report["parts_s"]) == 2
    ), said
    assert (tmp_path / "ran").read_text().split() == ["0", "1", "2"]


@pytest.mark.full
def test_nothing_is_no_success(suite_of):
    status, said, report = suite_of("import no_such_module")()
    assert status == run.NOTHING and not report["passed"], said
    assert (
        "no test passed" in said
        and "no_such_module" in said
        and "no_such_module" in report["broken_processes"][0]
    )


def test_other_code_begins_a_new_pass(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "state")
    assert run.opened(journal, None, [], False, False) == "a new pass"
    journal.add(collected=["a", "b"], alone=[])
    journal.add(**ended("a"))
    assert run.opened(journal, None, [], False, False) == "goes on: 1 tests have ended, 1 have not"
    monkeypatch.setattr(run, "code", lambda: "other")
    assert run.opened(journal, None, [], False, True).startswith("goes on")
    assert "other tests or options" in run.opened(
        Journal(tmp_path / "copy"), journal.path, ["-k x"], False, True
    )
    assert (
        "other code" in run.opened(journal, None, [], False, False)
        and not Pass.of(journal.records()).ended
    )
    journal.add(collected=["a"], alone=[])
    journal.add(**ended("a"))
    assert run.opened(journal, None, [], False, False) == "a new pass: the last was at its end"


def test_tests_of_the_gpu_register_no_stand_in():
    """Beside the wheels a stand-in's ops would be called in place of theirs."""
    code = """
import importlib, pathlib, torch
for path in pathlib.Path("tests/gpu").glob("test_*.py"):
    importlib.import_module(f"tests.gpu.{path.stem}")
print([name for name in torch._C._dispatch_get_all_op_names() if name.startswith(("sgl_kernel::", "flash_mla_legacy::"))])
"""  # noqa: E501
    assert ready_process(code).strip().endswith("[]")
