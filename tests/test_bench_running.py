"""Running suites of `attnops bench`: shares of the time, workers that share the cases, and cases that fail or whose worker dies."""

import json
import os
from functools import partial

import pytest
import torch

pytest.importorskip("transformers", reason="most suites measure transformers models")

from attnops.bench import kernels, run as suites
from attnops.bench.files import bad, read
from attnops.bench.rows import LeftOut
from attnops.bench.run import LOST, SPENT
from attnops.errors import InvalidInput
from tests.test_bench import TOY


def made(name, *cases, share=1.0):
    """A suite of cases that are functions without arguments."""
    return suites.Suite(name, "of a test", lambda setup: dict(cases), suites.SPEED, share=share)


def rows_of(name):
    return lambda: [{"case": name, "way": "way", "median_us": 1.0}]


def test_a_spent_budget_cuts_and_says_so(tmp_path):
    reports = suites.run(suites.named(("kernels", "decode")), TOY, budget_s=1e-9, out=tmp_path)
    assert set(reports["decode"]["left_out"]) == {"llama 2x12"} and len(reports["kernels"]["left_out"]) == 5
    assert set(reports["decode"]["left_out"].values()) == {SPENT} and not reports["decode"]["rows"]
    assert read(tmp_path / "decode.json")["left_out"] == reports["decode"]["left_out"]


def test_what_a_case_raises_is_said_and_the_others_stand(tmp_path):
    def here():
        raise LeftOut("not here")

    some = made("some", ("a", rows_of("a")), ("b", lambda: 1 // 0), ("c", here), ("d", rows_of("d")))
    reports = suites.run((some,), TOY, out=tmp_path)
    found = reports["some"]
    assert [row["case"] for row in found["rows"]] == ["a", "d"] and found["left_out"] == {"c": "not here"}
    assert found["failed"] == {"b": "ZeroDivisionError: integer division or modulo by zero"}
    assert read(tmp_path / "some.json")["rows"] == found["rows"]


def test_time_that_is_left_goes_to_what_was_left(monkeypatch):
    """Two suites of equal shares: the first spends its own with its first case, and has its second when the other is done."""
    now, order, seconds = [0.0], [], {"a": 60.0, "b": 31.0, "c": 30.0, "d": 10.0}
    monkeypatch.setattr(suites.time, "monotonic", lambda: now[0])
    both = (made("long"), made("short"))
    for suite, case in suites.in_order(both, {"long": "abc", "short": "d"}, 100.0):
        now[0] += seconds[case]
        order.append((suite.name, case))
    assert order == [("long", "a"), ("short", "d"), ("long", "b")], "and nothing begins when all is spent"


def in_workers(some, cases):
    found = {}

    def put(suite, case, outcome):
        assert case not in found
        found[case] = outcome

    whole = suites.measure(suites.in_order((some,), {some.name: list(cases)}, 60.0), TOY, 2, put, lambda case: None)
    return whole, found


def test_processes_share_the_cases():
    """As those of several GPUs do: each case is measured once."""
    whole, found = in_workers(suites.named(("kernels",))[0], kernels.cases(TOY))
    assert whole and set(found) == set(kernels.cases(TOY)) and all(one["rows"] and "failed" not in one for one in found.values())


def dying(setup):
    return {**{name: partial(list, [{"case": name, "way": "way"}]) for name in "acd"}, "b": partial(os._exit, 3)}


def test_a_process_that_ends_fails_its_case_and_ends_the_run():
    whole, found = in_workers(suites.Suite("some", "of a test", dying, suites.SPEED), "abcd")
    assert not whole and found["b"]["failed"].startswith("BrokenProcessPool") and "rows" not in found["b"]
    assert found["a"]["rows"] or found["a"]["failed"], "the process of the other GPU ends with it, or was done"


def test_nothing_comes_after_a_device_that_is_lost(tmp_path, monkeypatch):
    def reset():
        raise RuntimeError("an illegal memory access was encountered")

    some = made("some", ("a", lambda: 1 // 0), ("b", rows_of("b")))
    monkeypatch.setattr(torch._dynamo, "reset", reset)
    reports = suites.run((some,), TOY, out=tmp_path)
    assert reports["some"]["failed"] == {"a": "ZeroDivisionError: integer division or modulo by zero"}
    assert reports["some"]["left_out"] == {"b": LOST} and bad(reports)


def test_an_ended_run_says_so(tmp_path, monkeypatch):
    def ended(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(suites, "measure", ended)
    with pytest.raises(KeyboardInterrupt):
        suites.run(suites.named(("kernels",)), TOY, out=tmp_path)
    [path] = tmp_path.iterdir()
    assert set(json.loads(path.read_text())["left_out"].values()) == {"the run was ended before"}


def test_no_more_gpus_than_there_are():
    with pytest.raises(InvalidInput, match="gpus: got 2, want 1 to 1"):
        suites.run(suites.named(("kernels",)), TOY, gpus=2)
