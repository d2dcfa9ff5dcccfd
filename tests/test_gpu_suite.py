"""What can be said of the GPU suite without one: its grid is made of calls in order, and the runner merges what its processes found."""

import json
import os
import subprocess
import sys

import pytest
import torch

from attnops.bench.claims import Claims
from attnops.ops import OPS
from tests.gpu.run import counts, merge, text_of, unfinished
from tests.gpu.wide import WIDE, DeviceSource
from tests.helpers import ROOT


@pytest.mark.parametrize("op", WIDE)
def test_every_point_is_a_call_in_order_and_its_own_problem(op):
    seen = {}
    for case in WIDE[op]:
        if "32768" in case.label or "4096" in case.label:
            continue  # large; the same builders
        call = case.build(DeviceSource(0, "cpu"))
        OPS[op].check(*call.args, **call.kwargs)
        assert seen.setdefault(str(call.problem), case) is case or "page" in case.label, (case, seen[str(call.problem)])


def test_the_grid_has_what_it_is_there_for():
    sizes = {"page_size": set(), "group_size": set(), "head_dim": set(), "dtype": set()}
    for op in ("paged_attention", "mla_attention"):
        for case in WIDE[op]:
            if "32768" not in case.label:
                problem = case.build(DeviceSource(0, "cpu")).problem
                for name, values in sizes.items():
                    values.add(getattr(problem, name))
    assert sizes["page_size"] >= {1, 16, 64, 128, 256} and sizes["group_size"] >= {1, 2, 3, 4, 8, 16}
    assert sizes["head_dim"] >= {64, 96, 128, 192, 256, 576} and sizes["dtype"] >= {torch.float16, torch.bfloat16}


def test_the_text_of_a_report_is_the_report():
    report = {"passed": True, "torch": "2", "numerics": {"b": {"cases": 1}, "a": [1, 2]}, "empty": {}, "packages": ["x==1"]}
    assert json.loads(text_of(report)) == report
    assert ' "a": [1, 2],\n "b": {"cases": 1}\n}' in text_of(report)


def test_reports_are_merged():
    parts = [{"torch": "2", "passed": True, "numerics": {"a": 1}}, {"torch": "2", "passed": False, "numerics": {"b": 2}, "replay": {}}]
    assert merge(parts) == {"torch": "2", "passed": False, "numerics": {"a": 1, "b": 2}, "replay": {}}
    assert merge([])["passed"] is False


def test_outcomes_are_counted():
    assert counts(["...\n3 passed, 1 skipped in 2.0s\n", "x\n1 failed, 2 passed in 1s"]) == {"passed": 5, "skipped": 1, "failed": 1}
    assert counts(["killed"]) == {}
    whole = {"0": "...\n3 passed, 1 skipped in 2.00s\n", "3": "4 passed in 193.70s (0:03:13)"}
    assert unfinished({**whole, "1": "", "2": "..F\n"}) == ["1", "2"]


HOOKS = ("pytest_runtest_protocol", "pytest_runtest_logreport")
MODULE = """
import pytest
@pytest.fixture(scope="module")
def one():
    yield 1
    {after}
def test_0(one): {first}
def test_1(one): assert one == 1
def test_2(one): assert one == 1
"""


def as_a_shard(folder, taken, *, after="pass", first="assert one == 1"):
    """Run two files with fixtures of their own, as one of several processes of run.py; others have taken some tests. pytest's output."""
    (folder / "conftest.py").write_text("".join(f"from tests.gpu.conftest import {name} as {name}\n" for name in HOOKS))
    for name in ("a", "b"):
        (folder / f"test_{name}.py").write_text(MODULE.format(after=after, first=first))
    (folder / "found").mkdir()
    others = Claims(folder / "found")
    assert all(others.take("gpu-test", name) for name in taken)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)],
        cwd=folder, capture_output=True, text=True,
        env={**os.environ, "SHARD": "0/2", "OUT": str(folder / "found"), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stdout


TAKEN = ("test_a.py::test_1", "test_a.py::test_2", "test_b.py::test_0")


def test_what_another_process_has_taken_is_left_to_it(tmp_path):
    """Between two files with fixtures of their own, where pytest wants what stands taken down in order."""
    code, said = as_a_shard(tmp_path, TAKEN)
    assert code == 0 and counts([said]) == {"passed": 3}, said


def test_what_fails_when_it_is_taken_down_is_said(tmp_path):
    """By pytest, of the test that was passed over; and then the device is asked, which here is none."""
    code, said = as_a_shard(tmp_path, TAKEN, after="assert False")
    assert code == 2 and "ERROR test_a.py::test_2" in said and counts([said]) == {"passed": 1, "error": 1}, said


def test_a_process_whose_device_is_lost_takes_no_more(tmp_path):
    """Here no device answers at all."""
    code, said = as_a_shard(tmp_path, (), first="assert one == 2")
    assert code == 2 and counts([said.rpartition("!!!")[2].strip()]) == {"failed": 1}, said
    assert Claims(tmp_path / "found").free("gpu-test", "test_a.py::test_1")
