"""The suite `generate` at toy size: which results are timed."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the suite measures transformers models")

from attnops.bench import Point, Setup, generate, models, ways
from attnops.core.errors import InvalidInput
from attnops.core.record import changed
from attnops.hf import Decode
from tests.graphs.standin import StandIn
from tests.measuring import by_way
from tests.test_bench import TOY, patch_with

HERE = Point(2, 12)


def rows():
    return by_way(generate.measure(TOY, models.keeper(TOY), "llama", HERE))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request, monkeypatch):
    monkeypatch.setattr(Setup, "dtype", request.param)
    return request.param


def test_the_ways_take_turns(dtype):
    found = rows()
    assert list(found) == [*ways.chosen(TOY, "generate")], found
    for way, row in found.items():
        assert (
            row["error"] <= row["budget"] < (1e-4 if dtype == torch.float32 else 0.05)
            and row["new_tokens"] == 6
        )
        assert row["tokens_s"] == pytest.approx(2e6 / row["median_us"], rel=1e-3, abs=0.06) and (
            "of_hf" in row
        ) == (way != "hf")


def test_only_the_ways_asked_for():
    chosen = replace(TOY, ways=("hf_again", "attnops_hf"))
    assert list(generate.cases(chosen)) == ["llama 2x12"], "no first calls"
    found = generate.measure(chosen, models.keeper(chosen), "llama", HERE)
    assert [row["way"] for row in found if row["median_us"]] == ["hf", "attnops_hf", "hf_again"]
    with pytest.raises(InvalidInput, match="ways: got 'fastest', want some of hf, hf_static"):
        generate.cases(replace(TOY, ways=("fastest",)))


def test_steps_that_graphs_did_not_serve_are_counted(monkeypatch):
    decode = Decode("breakable", inner="eager", graphs=StandIn())
    some = {"hf": ways.How(), "attnops_breakable": ways.How({"cache": "paged", "decode": decode})}
    monkeypatch.setitem(ways.WAYS, "generate", some)
    row = rows()["attnops_breakable"]
    assert (row["plain_steps"], row["cache"], row["decode"]) == (0, "paged", "breakable") and row[
        "median_us"
    ] > 0


def another_head(call, right):
    output, *rest = right(call)
    output = output.clone()
    output[:, :, 1] = output[:, :, 0]
    return output, *rest


def dropped(call, right):
    """The newest key is not seen."""
    if call.query.shape[1] > 1:
        return right(call)
    return right(changed(call, key=call.key[:, :-1], value=call.value[:, :-1]))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("wrong", [another_head, dropped])
def test_a_wrong_way_has_no_time(dtype, wrong, monkeypatch):
    patch_with(monkeypatch, wrong)
    found = rows()
    assert all("median_us" in found[way] for way in ("hf", "hf_static"))
    for way in ("attnops", "attnops_hf"):
        assert (
            found[way]["wrong"].startswith("wrong: off by")
            and found[way]["error"] > 2 * found[way]["budget"]
        ), found


def test_tokens_of_the_timed_call_are_judged(dtype, monkeypatch):
    """Though the call that gives logits is right."""
    right = generate.prepared

    def wrong(setup, model, way, *more):
        call, handle = right(setup, model, way, *more)

        def shifted(**more):
            found = call(**more)
            return (
                found
                if more or way == "hf"
                else torch.cat([found[:, :12], found[:, 12:].roll(1, 1)], 1)
            )

        return shifted, handle

    monkeypatch.setattr(generate, "prepared", wrong)
    found = rows()
    assert [way for way, row in found.items() if "median_us" in row] == ["hf"], found


def test_first_calls_are_those_of_processes(monkeypatch):
    """Two for each way, with the same folder for what is compiled, which was empty."""
    seen = []

    def in_a_process(function, *given):
        assert pickle.loads(pickle.dumps((function, given))) == (generate.calls_s, given)
        folder = Path(os.environ["TRITON_CACHE_DIR"])
        seen.append((given[-1], folder, folder.exists()))
        folder.mkdir(parents=True, exist_ok=True)
        return float(len(seen)), 0.5

    monkeypatch.setattr(generate, "in_a_process", in_a_process)
    cases = generate.cases(replace(TOY, quick=False)).items()
    found = [row for name, case in cases if "first call" in name for row in case()]
    assert [row["way"] for row in found] == list(generate.FIRST[:3]) and all(
        row["second_s"] == 0.5 for row in found
    )
    assert [(row["first_s"], row["warm_s"]) for row in found] == [
        (1.0, 2.0),
        (3.0, 4.0),
        (5.0, 6.0),
    ]
    colds, warms = seen[::2], seen[1::2]
    assert [(*cold[:2], True) for cold in colds] == warms and not any(there for *_, there in colds)
    assert len({folder for _, folder, _ in seen}) == 3


def test_kernels_that_threads_compile_are_waited_for(monkeypatch):
    """After the first call of a patched model and after those that follow it, before its time
    counts."""
    told, prepared = [], generate.prepared

    class Launch:
        @property
        def done(self):
            return self

        def wait(self):
            told.append("wait")

    def noted(setup, model, way, *given):
        call, handle = prepared(setup, model, way, *given)

        def counted(**more):
            told.append(way)
            return call(**more)

        return counted, handle

    monkeypatch.setattr(generate, "prepared", noted)
    monkeypatch.setattr(generate.BESIDE, "pending", lambda: [Launch()])
    rows()
    at = told.index("attnops")
    assert told[at : at + 7] == ["attnops", "wait"] * 3 + ["attnops"]
