"""Running suites of `attnops bench`: shares of the time, cases in processes of their own, and what becomes of those that are lost."""

import ast
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="most suites measure transformers models")

from attnops.bench import Row, kernels, lanes, running, suites
from attnops.bench.claims import Claims
from attnops.bench.report import SPENT, Found, LeftOut, bad, read
from tests.helpers import ROOT
from tests.test_bench import TOY


def made(name, *cases, share=1.0):
    """A suite of cases that are functions without arguments."""
    return suites.Suite(name, "of a test", lambda setup: dict(cases), suites.SPEED, share=share)


def rows_of(name):
    return lambda: [Row(name, "way", 1.0)]


def test_a_spent_budget_cuts_and_says_so(tmp_path):
    reports = running.run(suites.named(("kernels", "decode")), TOY, budget_s=1e-9, out=tmp_path)
    assert set(reports["decode"]["left_out"]) == {"llama 2x12"} and len(reports["kernels"]["left_out"]) == 5
    assert set(reports["decode"]["left_out"].values()) == {SPENT} and not reports["decode"]["rows"]
    assert read(tmp_path / "decode.json")["left_out"] == reports["decode"]["left_out"]


def test_what_a_case_raises_is_said_and_the_others_stand(tmp_path):
    def here():
        raise LeftOut("not here")

    broken = suites.Suite("broken", "of a test", lambda setup: 1 // 0, suites.SPEED)
    both = made("some", ("a", rows_of("a")), ("b", lambda: 1 // 0), ("c", here), ("d", rows_of("d")))
    reports = running.run((broken, both), TOY, out=tmp_path)
    found = reports["some"]
    assert [row["case"] for row in found["rows"]] == ["a", "d"] and found["left_out"] == {"c": "not here"}
    assert found["failed"] == {"b": "ZeroDivisionError: integer division or modulo by zero"}
    assert list(reports["broken"]["failed"]) == ["broken"] and read(tmp_path / "some.json")["rows"] == found["rows"]


def test_time_that_is_left_goes_to_what_was_left(tmp_path, monkeypatch):
    """Two suites of equal shares: the first spends its own with its first case, and has its second when the other is done."""
    now, order = [0.0], []
    monkeypatch.setattr(lanes.time, "monotonic", lambda: now[0])

    def case(name, seconds):
        def run():
            now[0] += seconds
            order.append(name)
            return [Row(name, "way", 1.0)]

        return name, run

    several = (made("long", case("a", 60.0), case("b", 31.0), case("c", 30.0)), made("short", case("d", 10.0)))
    assert lanes.work(several, TOY, Claims(tmp_path), 100.0, lambda *_: None)
    assert order == ["a", "d", "b"], "and nothing begins when all is spent"


def test_a_case_is_taken_once(tmp_path):
    one, other = Claims(tmp_path), Claims(tmp_path)
    assert one.free("s", "a/b") and one.take("s", "a/b") and not other.free("s", "a/b") and not other.take("s", "a/b")
    assert other.take("s/a", "b") and other.take("s", "x" * 500)


def test_processes_share_the_cases():
    """As those of several GPUs do: each case is measured once."""
    found: dict[str, Found] = {}

    def put(suite, case, what):
        assert suite == "kernels" and case not in found
        found[case] = what

    assert lanes.spread_over(2, suites.named(("kernels",)), TOY, 60.0, put)
    assert set(found) == set(kernels.cases(TOY)) and all(one.rows and not one.failed for one in found.values())


def python_that(tmp_path, monkeypatch, *lines):
    """Have lanes run a shell script instead of Python; `$into` is the file that its part is written to."""
    fake = tmp_path / "python"
    into = '$(echo $3 | sed \'s/.*"file": "//; s/".*//\')'
    fake.write_text("\n".join(("#!/bin/sh", f"into={into}", *lines, "")))
    fake.chmod(0o755)
    monkeypatch.setattr(lanes.sys, "executable", str(fake))


def ends(pid, seconds=30.0):
    """Is a process gone, or soon? One whose parent has not asked for it is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(("last", "stop_s", "said"), [("exit 3", 60.0, "failed"), ("sleep 61 & echo $! > $0.pid; wait", 1.0, "left_out")])
def test_a_process_that_ends_takes_its_case_alone(tmp_path, monkeypatch, last, stop_s, said):
    lines = [
        '{"suite": "kernels", "at": "a"}', '{"suite": "kernels", "case": "a", "found": {"rows": [{"case": "a", "way": "w"}]}}',
        '{"suite": "kernels", "at": "b"}',
    ]  # fmt: skip
    python_that(tmp_path, monkeypatch, "echo out of memory", *(f"echo '{x}' >> $into" for x in lines), "printf '{\"half' >> $into", last)
    found: dict[str, Found] = {}
    some = suites.named(("kernels",))
    alive = lanes.spread_over(1, some, TOY, 1.0, lambda suite, case, what: found.update({case: what}), stop_s)
    assert found["a"].rows == [{"case": "a", "way": "w"}] and set(found) == {"a", "b"} and alive == (said == "left_out")
    what = getattr(found["b"], said)
    assert what == ("its process ended with 3: out of memory" if said == "failed" else "it was not done after 1 s of the run")
    if said == "left_out":
        assert ends((tmp_path / "python.pid").read_text().strip()), "what a process has started ends with it"


def test_a_run_whose_processes_are_lost_says_so(tmp_path, monkeypatch):
    python_that(tmp_path, monkeypatch, "echo no such device", "exit 1")
    reports = running.run(suites.named(("kernels", "decode")), TOY, out=tmp_path, stop_s=60.0)
    assert reports["kernels"]["failed"] == {"GPU 0": "its process ended with 1: no such device"} and bad(reports)
    assert set(reports["decode"]["left_out"].values()) == {lanes.LOST}
    assert read(tmp_path / "decode.json")["left_out"] == reports["decode"]["left_out"]


def test_nothing_comes_after_a_device_that_is_lost(tmp_path, monkeypatch):
    def forget():
        raise RuntimeError("an illegal memory access was encountered")

    some = made("some", ("a", lambda: 1 // 0), ("b", rows_of("b")))
    monkeypatch.setattr(import_module("attnops.bench.report"), "_forget", forget)
    found = running.run((some,), TOY, out=tmp_path)["some"]
    assert found["failed"] == {"a": "ZeroDivisionError: integer division or modulo by zero"} and found["left_out"] == {"b": lanes.LOST}


def test_a_process_ends_with_who_started_it(tmp_path):
    child, starter, pid = tmp_path / "child.py", tmp_path / "starter.py", tmp_path / "pid"
    child.write_text("import sys\nfrom attnops.bench.lanes import _end_with\n_end_with(int(sys.argv[1]))\n")
    starter.write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid())], start_new_session=True)\n"
        "open(sys.argv[2], 'w').write(str(child.pid))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(starter), str(child), str(pid)], check=True, env=environment)
    assert ends(pid.read_text()), "it runs on"


def test_threads_of_a_core_go_to_the_same_process(monkeypatch):
    monkeypatch.setattr(lanes, "_place", lambda core: (0, core % 4, core))
    given = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, cores: given.append(sorted(cores)))
    for at in range(2):
        with lanes._cores(at, 2):
            pass
    assert given == [[0, 1, 4, 5], [*range(8)], [2, 3, 6, 7], [*range(8)]]


def test_an_ended_run_says_so(tmp_path, monkeypatch):
    def ended(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "work", ended)
    with pytest.raises(KeyboardInterrupt):
        running.run(suites.named(("kernels",)), TOY, out=tmp_path)
    [path] = tmp_path.iterdir()
    assert set(json.loads(path.read_text())["left_out"].values()) == {"the run was ended before"}


def test_a_process_sees_a_gpu_and_cores_of_its_own(tmp_path, monkeypatch):
    told = tmp_path / "told"
    seen = "import os; print([os.environ.get('CUDA_VISIBLE_DEVICES'), sorted(os.sched_getaffinity(0))])"
    python_that(tmp_path, monkeypatch, f'{sys.executable} -c "{seen}" >> {told}')
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=f"{gpu}-{gpu}"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    everything = sorted(os.sched_getaffinity(0))

    def of(count, device):
        told.write_text("")
        lanes.spread_over(count, suites.named(("kernels",)), replace(TOY, device=torch.device(device)), 1.0, lambda *_: None)
        return dict(map(ast.literal_eval, told.read_text().splitlines()))

    found = of(2, "cuda")
    assert set(found) == {"GPU-0-0", "GPU-1-1"} and sorted(os.sched_getaffinity(0)) == everything
    if len(everything) > 1:
        its, others = found.values()
        assert len(its) == len(others) == len(everything) // 2 and not set(its) & set(others)
    assert of(1, "cpu") == {None: everything}
