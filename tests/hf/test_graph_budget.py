"""The graphs of several states of a model, as of adapters in turn, share a budget of bytes."""

import pytest
import torch
from torch import nn

import attnops
from attnops.hf import tiny
from attnops.hf.steps import captures as states
from tests.hf.decoding import CALL, TIERS, asked, captures, graphed, how, logits, prompts_in_graphs
from tests.hf.helpers import near, paged


@pytest.mark.parametrize("tier", ["recorded", "breakable"])
@pytest.mark.usefixtures("own_prompts")
def test_three_adapters_in_turn_are_captured_once_each(tier):
    peft = pytest.importorskip("peft", reason="the package peft (extra dev) is not installed")
    options = peft.LoraConfig(target_modules=["k_proj", "v_proj"], r=4, init_lora_weights=False)
    model, names = peft.get_peft_model(tiny.model("llama"), options), ("default", "second", "third")
    for name in names[1:]:
        model.add_adapter(name, options)
    model.eval()
    ids, given = asked(*CALL)

    def texts():
        for name in names:
            model.set_adapter(name)
            yield model.generate(input_ids=ids, **given)

    want = list(texts())
    with attnops.patch(model, **TIERS[tier]()) as handle:
        for _ in range(4):
            assert all(map(torch.equal, texts(), want))
            # Of the step for each adapter. The choice of a token is the same for all.
            assert captures(handle) == len(names) + 1
        assert handle.took.decode == "breakable" and "were freed" not in str(handle.report())


class Scaled(nn.Linear):
    """A linear with a state for each number."""

    def __init__(self, own):
        super().__init__(own.in_features, own.out_features, bias=False)
        self.weight, self.by = own.weight, 1.0

    def forward(self, x):
        return self.by * super().forward(x)


@pytest.fixture
def model():
    found = tiny.model("llama")
    found.lm_head = Scaled(found.lm_head)
    return found


def of_state(model, by):
    """The logits of one state."""
    model.lm_head.by = by
    return logits(model, *CALL)


@pytest.mark.parametrize("asked", [True, False], ids=["budget_bytes", "of the device"])
def test_those_that_were_not_used_for_longest_are_freed(asked, model, monkeypatch):
    with graphed(model) as handle:
        plain = of_state(model, 1.0)
        one = handle._paged.decoder().captures.nbytes
    assert one > 0
    budget = int(2.5 * one)
    if not asked:
        monkeypatch.setattr(states, "most_graph_bytes", lambda device: budget)
    given = how(budget_bytes=budget if asked else None)
    with paged(model, decode=given) as handle:
        made, held = [], []
        for by in (1.0, 2.0, 3.0, 2.0, 3.0, 1.0, 3.0, 2.0, 3.0):
            near(of_state(model, by), by * plain)
            made.append(len(handle.decode.graphs.graphs))
            held.append(handle._paged.decoder().captures.nbytes <= budget)
        # The third frees the first. Met again, the first frees the second, and that the first: the
        # third was used after it.
        new = [after - before for before, after in zip([0, *made], made, strict=False)]
        assert new == [1, 1, 1, 0, 0, 1, 0, 1, 0] and all(held)
        assert sum(graph.alive for graph in handle.decode.graphs.graphs) == 2
        told = "graphs of 3 states of the model were freed, over the budget of"
        assert told in str(handle.report())


def test_the_state_in_use_stays(model, monkeypatch):
    """However small the budget is."""
    monkeypatch.setattr(states, "most_graph_bytes", lambda device: 0)
    with graphed(model) as handle:
        plain = of_state(model, 1.0)
        for by in (1.0, 1.0, 2.0, 2.0):
            near(of_state(model, by), by * plain)
        assert [graph.alive for graph in handle.decode.graphs.graphs] == [False, True]
        logits(model, 1, 9, 4)
        # Of another bucket.
        assert [graph.alive for graph in handle.decode.graphs.graphs] == [False, True, True]


def test_small_states_are_not_kept_for_ever(model, monkeypatch):
    monkeypatch.setattr(states, "MOST", 3)
    with graphed(model) as handle:
        for by in range(5):
            of_state(model, float(by))
            assert sum(graph.alive for graph in handle.decode.graphs.graphs) <= 3
        assert sum(graph.alive for graph in handle.decode.graphs.graphs) == 3
        handle.release()
        of_state(model, 1.0)
        # States without graphs are forgotten.
        assert len(handle._paged.decoder().captures._kept) == 1


@pytest.mark.full
def test_graphs_of_prompts_count(model, monkeypatch):
    """They are most of the bytes."""
    prompts_in_graphs(monkeypatch, 32)
    bound = [float("inf")]
    monkeypatch.setattr(states, "most_graph_bytes", lambda device: bound[0])
    with graphed(model, "piecewise", compile_after=0) as handle:
        plain = of_state(model, 1.0)
        of_state(model, 1.0)  # the first prompt comes before the first step, which compiles
        assert handle.took.prompt == "captured"
        decoder, graphs = handle._paged.decoder(), handle.decode.graphs.graphs
        held = decoder._kept.over.items()
        steps = sum(over.graphed.nbytes for (_, mode), over in held if "chunks" not in mode)
        assert steps < decoder.captures.nbytes
        before, bound[0] = len(graphs), decoder.captures.nbytes + steps
        near(of_state(model, 2.0), 2 * plain)
        assert handle.took.prompt == "captured"
        assert not any(graph.alive for graph in graphs[:before])
