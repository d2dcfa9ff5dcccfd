"""The suite `first_token` at toy size, over a stand-in for CUDA graphs."""

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", reason="the suite measures transformers models")

from attnops.bench import first_token, generate, models, run, ways
from attnops.cli import bench
from attnops.hf import Decode
from attnops.hf.steps import prompt
from tests.graphs.standin import StandIn
from tests.measuring import by_way
from tests.test_bench import TOY, patch_with
from tests.test_bench_generate import another_head

TWO = replace(TOY, layers=2)
"""A layer alone has no equal one, and is not captured in layers."""


@pytest.fixture
def graphs(monkeypatch):
    """The way `attnops` as on a GPU."""
    decode = Decode("auto", inner="eager", graphs=StandIn())
    some = {"hf": ways.How(), "attnops": ways.How({"decode": decode})}
    monkeypatch.setitem(ways.WAYS, "first_token", some)
    monkeypatch.setitem(ways.WAYS, "generate", some)
    monkeypatch.setattr(prompt, "CAPTURED", (64,))


def rows(case, setup=TWO):
    return by_way(first_token.cases(setup)[case]())


@pytest.mark.parametrize("suite", ways.WAYS)
def test_the_command_takes_ways_of_every_suite_that_has_some(suite):
    assert not bench.unmet(replace(TOY, ways=tuple(ways.WAYS[suite])), run.named((suite,)))


def test_a_point_is_timed_from_the_third_call_on(graphs):
    found = rows("llama 2x12")["attnops"]
    assert (found["cache"], found["prompt"], found["new_tokens"]) == ("paged", "captured", 1)
    assert found["median_us"] > 0 and found["error"] <= found["budget"]


def test_random_lengths_have_what_a_new_size_costs(graphs):
    found = rows("llama 3 lengths up to 12")
    assert found["attnops"]["captured"] == 2 and found["hf"]["captured"] == 0, "all but the first"
    for row in found.values():
        assert row["worst_us"] >= row["median_us"] > 0
    assert found["attnops"]["of_hf"] > 0


def test_a_wrong_way_has_no_time(graphs, monkeypatch):
    monkeypatch.setattr(prompt, "CAPTURED", (1,))
    patch_with(monkeypatch, another_head)
    for case in first_token.cases(TWO):
        found = rows(case)
        assert "median_us" in found["hf"] and "median_us" not in found["attnops"]
        assert found["attnops"]["wrong"].startswith("wrong: off by")


def scaled(at, factor):
    """The logits of the call `at`, or of all calls (None), times a factor."""

    def change(call, given, number):
        found = call(**given)
        if number == at or at is None:
            found.logits = tuple(factor * each for each in found.logits)
        return found

    return change


def without_the_first_token(call, given, _):
    return call(**{**given, **{name: given[name][:, 1:] for name in ("inputs", "attention_mask")}})


MIXTURES = {
    "a tie of stock transformers": ("hf", scaled(1, 1.3), ""),
    "a tie": ("attnops", scaled(1, 1.3), ""),
    "a little, always": ("attnops", scaled(None, 1.01), "at half of the lengths"),
    "zeros": ("attnops", scaled(None, 0), "off by 1, "),
    "zeros once": ("attnops", scaled(1, 0), "off by 1, allowed 0.667, at"),
    "shorter": ("attnops", without_the_first_token, "at half of the lengths"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("what", MIXTURES)
def test_a_mixture_is_judged_by_its_median_length(what, graphs, monkeypatch):
    changed, change, wrong = MIXTURES[what]
    right = generate.prepared

    def prepared(setup, model, way, *more):
        call, handle = right(setup, model, way, *more)
        numbers = itertools.count()
        other = lambda **given: change(call, given, next(numbers))  # noqa: E731
        return (other if way == changed else call), handle

    monkeypatch.setattr(generate, "prepared", prepared)
    found = rows("mixtral 3 lengths up to 12", replace(TWO, model="mixtral"))
    assert found["hf"]["error"] <= found["hf"]["budget"] and "median_us" in found["hf"]
    if wrong:
        assert wrong in found["attnops"]["wrong"] and "median_us" not in found["attnops"]
    else:
        assert found["attnops"]["error"] <= found["attnops"]["budget"]
        assert found["attnops"]["median_us"] > 0


def test_every_model_has_the_same_points():
    places = ways.PLACES["first_token"]
    assert {*places["full"].values()} == {ways.FIRST} and len(places["full"]) >= 7
    with torch.device("meta"):
        for name in places["full"]:
            assert models.config_of(name).num_hidden_layers > 0
