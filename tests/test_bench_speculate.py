"""The suite `speculate` at toy size, over a stand-in for CUDA graphs."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", reason="the suite measures transformers models")

from attnops.bench import models, speculate, ways
from attnops.hf.steps import round_graph
from attnops.hf.steps.speculate import Plan
from tests.hf.decoding import auto
from tests.measuring import by_way
from tests.test_bench import TOY

OURS = {name: how for name, how in ways.WAYS["speculate"].items() if how.patch is not None}


@pytest.fixture
def graphs(monkeypatch):
    """Our ways as on a GPU."""
    patch = {"decode": auto(compile_after=None)}
    some = {name: replace(how, patch=patch, device="") for name, how in OURS.items()}
    monkeypatch.setitem(ways.WAYS, "speculate", some)
    monkeypatch.setattr(Plan, "cost", lambda plan, owner: 0.0)


def rows(setup=TOY):
    (case,) = speculate.cases(setup).values()
    return by_way(case())


def test_rounds_beside_steps(graphs):
    found = rows()
    assert list(found) == list(OURS)
    assert "round_us" not in found["attnops"]
    for way, row in found.items():
        assert row["tokens_s"] == pytest.approx(2e6 / row["median_us"], rel=1e-3, abs=0.06)
        if way != "attnops":
            # Of toys the prompt may take longer than the call.
            assert row["decode"] == "breakable" and row["of_attnops"] != 0
            whole = row["round_us"] / found["attnops"]["median_us"]
            assert row["of_step"] == pytest.approx(whole, rel=1e-3)
    each = {way: row["tokens_a_round"] for way, row in found.items() if way != "attnops"}
    # Of 16 tokens, behind the prompt's own.
    rounds = {"lookup_1": 8, "lookup_3": 4, "lookup_4": 4, "lookup_7": 2}
    rounds |= {"right_0": 16, "right_100": 2, "eagle3_0": 16, "eagle3_100": 3}
    rounds |= {"head_tree_0": 16, "head_tree_100": 3}
    rounds |= {"mtp1_0": 16, "mtp1_100": 8, "mtp3_0": 16, "mtp3_100": 4}
    rounds |= {"dflash_0": 16, "dflash_100": 2}
    rounds |= {f"tree_{nodes}": 2 for nodes in (8, 16, 32, 64)}
    for way, count in rounds.items():
        assert each[f"attnops_{way}"] == round(16 / count, 2)
    for kind in ("right", "eagle3", "head_tree", "mtp3", "dflash"):
        assert 1.5 < each[f"attnops_{kind}_80"] < each[f"attnops_{kind}_100"]


def test_a_wrong_text_has_no_time(graphs, monkeypatch):
    """Every draft is accepted, though it is wrong."""

    own = round_graph.advance_rows

    def agree(drafts, target, *given, **more):
        own(drafts, torch.cat([drafts[:, 1:], target[:, -1:]], 1), *given, **more)

    monkeypatch.setattr(round_graph, "advance_rows", agree)
    two = {name: ways.WAYS["speculate"][name] for name in ("attnops", "attnops_right_0")}
    monkeypatch.setitem(ways.WAYS, "speculate", two)
    found = rows()
    wrong = found["attnops_right_0"]
    assert wrong["wrong"].startswith("wrong: off by") and "median_us" not in wrong
    assert found["attnops"]["median_us"] > 0


def test_ways_without_drafts_say_why(monkeypatch):
    """On a CPU steps have no graphs."""
    some = {name: replace(how, device="") for name, how in OURS.items()}
    monkeypatch.setitem(ways.WAYS, "speculate", some)
    found = rows()
    assert "nothing was drafted" in found["attnops_right_100"]["wrong"]
    assert not found["attnops_right_100"]["wrong"].startswith("wrong: ")
    assert found["attnops"]["median_us"] > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_the_text_is_that_of_transformers(name):
    """Tied embeddings or not, over several cycles."""
    model = models.build(TOY, name)
    vocab = len(speculate.teach(model))
    want = speculate.text_from(models.tokens(TOY, model, 2, 1), 210, vocab)
    mask = torch.ones(2, 9, dtype=torch.int64)
    given = {"attention_mask": mask, "max_new_tokens": 201, "do_sample": False}
    assert torch.equal(model.generate(want[:, :9], **given), want)
