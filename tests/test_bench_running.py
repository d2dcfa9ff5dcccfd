"""Running suites of `attnops bench`: shares of the time, workers that share the cases, and cases
that fail or whose worker dies."""

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import pytest
import torch

pytest.importorskip("transformers", reason="most suites measure transformers models")

from attnops.bench import run as suites
from attnops.bench.files import bad, read
from attnops.bench.rows import LeftOut
from attnops.bench.run import LOST, SPENT
from attnops.core.errors import InvalidInput
from tests.test_bench import TOY

NO_NUMBER = "ZeroDivisionError: integer division or modulo by zero"


def made(name, *cases, share=1.0):
    """A suite of cases that are functions without arguments."""
    return suites.Suite(name, "of a test", lambda setup: dict(cases), share=share)


def rows_of(name):
    return lambda: [{"case": name, "way": "way", "median_us": 1.0}]


def three():
    """A suite of three cases that say nothing of note."""
    return made("some", *((name, rows_of(name)) for name in "abc"))


def left_out():
    raise LeftOut("not here")


@pytest.mark.parametrize("suite", suites.SUITES, ids=lambda suite: suite.name)
def test_a_worker_knows_a_suite_again(suite):
    """It gets a copy with each case, and keeps what the cases share while the suite is the same."""
    again = pickle.loads(pickle.dumps(suite))
    assert again == suite and hash(again) == hash(suite)


def test_a_spent_budget_cuts_and_says_so(tmp_path):
    some = (
        made("some", ("a", rows_of("a"))),
        made("others", ("b", rows_of("b")), ("c", rows_of("c"))),
    )
    reports = suites.run(some, TOY, budget_s=1e-9, out=tmp_path)
    assert (
        reports["others"]["left_out"] == {"b": SPENT, "c": SPENT} and not reports["others"]["rows"]
    )
    for name, report in reports.items():
        assert read(tmp_path / f"{name}.json")["left_out"] == report["left_out"]


def test_what_a_case_raises_is_said_and_the_others_stand(tmp_path):
    broken = suites.Suite("broken", "of a test", lambda setup: 1 // 0)
    some = made(
        "some", ("a", rows_of("a")), ("b", lambda: 1 // 0), ("c", left_out), ("d", rows_of("d"))
    )
    reports = suites.run((broken, some), TOY, out=tmp_path)
    found = reports["some"]
    assert reports["broken"]["failed"] == {"broken": NO_NUMBER} and found["failed"] == {
        "b": NO_NUMBER
    }
    assert [row["case"] for row in found["rows"]] == ["a", "d"] and found["left_out"] == {
        "c": "not here"
    }
    assert read(tmp_path / "some.json")["rows"] == found["rows"]


def test_an_option_that_a_suite_refuses_ends_the_run():
    def refuses(setup):
        raise InvalidInput("ways", "x", "y")

    with pytest.raises(InvalidInput, match="ways: got x"):
        suites.run((suites.Suite("some", "of a test", refuses), made("other")), TOY)


def test_time_that_is_left_goes_to_what_was_left(monkeypatch):
    """Two suites of equal shares: the first spends its own with its first case, and has its second
    when the other is done."""
    now, order, seconds = [0.0], [], {"a": 60.0, "b": 31.0, "c": 30.0, "d": 10.0}
    monkeypatch.setattr(suites.time, "monotonic", lambda: now[0])
    both = (made("long"), made("short"))
    for suite, case in suites.in_order(both, {"long": "abc", "short": "d"}, 100.0):
        now[0] += seconds[case]
        order.append((suite.name, case))
    assert order == [("long", "a"), ("short", "d"), ("long", "b")], (
        "and nothing begins when all is spent"
    )


def in_workers(some, cases):
    found = {}

    def put(suite, case, outcome):
        assert case not in found
        found[case] = outcome

    whole = suites.measure(
        suites.in_order((some,), {some.name: list(cases)}, 60.0), TOY, 2, put, lambda case: None
    )
    return whole, found


def dying(setup):
    """The other process still has its first case when this one dies."""

    def slow():
        time.sleep(2.0)
        return rows_of("a")()

    return {"a": slow, "b": partial(os._exit, 3), **{name: rows_of(name) for name in "cd"}}


@pytest.mark.full
def test_a_process_that_ends_fails_its_case_and_the_other_goes_on():
    whole, found = in_workers(suites.Suite("some", "of a test", dying), "abcd")
    assert (
        not whole
        and found["b"]["failed"].startswith("BrokenProcessPool")
        and "rows" not in found["b"]
    )
    assert all(found[case].get("rows") and not found[case].get("failed") for case in "acd"), (
        "the process of the other GPU does the others"
    )


class Workers(ThreadPoolExecutor):
    """Threads that stand for processes. As many as `broken` died while they waited, as those that
    Linux kills for memory."""

    broken = 0

    def __init__(self, count, context, initializer, given):
        super().__init__(count)
        self.dead, Workers.broken = Workers.broken > 0, Workers.broken - 1

    def submit(self, *given):
        if self.dead:
            raise BrokenProcessPool("terminated abruptly")
        return super().submit(*given)


def test_a_process_that_died_after_its_case_fails_the_next_alone(monkeypatch):
    monkeypatch.setattr(Workers, "broken", 1)
    monkeypatch.setattr(suites, "ProcessPoolExecutor", Workers)
    whole, found = in_workers(three(), "abc")
    assert not whole and [case for case in "abc" if found[case].get("failed")] == ["a"]
    assert found["b"]["rows"] and found["c"]["rows"]


def test_cases_that_no_process_is_left_for_say_so(tmp_path, monkeypatch):
    inner = suites.measure
    monkeypatch.setattr(Workers, "broken", 2)
    monkeypatch.setattr(suites, "ProcessPoolExecutor", Workers)
    monkeypatch.setattr(
        suites, "measure", lambda order, setup, gpus, *rest: inner(order, setup, 2, *rest)
    )
    found = suites.run((three(),), TOY, out=tmp_path)["some"]
    assert (
        set(found["failed"]) == {"a", "b"}
        and found["left_out"] == {"c": LOST}
        and not found["rows"]
    )
    assert read(tmp_path / "some.json")["failed"] == found["failed"]


@pytest.mark.parametrize(
    ("case", "why"),
    [(lambda: 1 // 0, NO_NUMBER), (left_out, "RuntimeError: an illegal memory access")],
)
def test_nothing_comes_after_a_device_that_is_lost(case, why, monkeypatch):
    """Its case failed, though it was left out."""

    def reset():
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch._dynamo, "reset", reset)
    reports = suites.run((made("some", ("a", case), ("b", rows_of("b"))),), TOY)
    assert reports["some"]["failed"] == {"a": why}
    assert reports["some"]["left_out"] == {"b": LOST} and bad(reports)


def test_an_ended_run_says_so(tmp_path, monkeypatch):
    def ended(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(suites, "measure", ended)
    with pytest.raises(KeyboardInterrupt):
        suites.run((three(),), TOY, out=tmp_path)
    left = read(tmp_path / "some.json")["left_out"]
    assert left == dict.fromkeys("abc", "the run was ended before")
