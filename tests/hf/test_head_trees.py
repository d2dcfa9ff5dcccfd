"""Trees of a head in generate(): those of EAGLE-2 over the whole text, and greedy tokens are those
of plain decoding."""

import copy
import json
import re
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import attnops
from attnops.core.errors import InvalidInput, PatchError
from attnops.core.problem import Target
from attnops.hf import tiny
from attnops.hf.cache.names import named
from attnops.hf.steps import rounds
from attnops.hf.steps.choice_graphs import ChoiceGraphs
from attnops.hf.steps.eagle import Eagle
from attnops.hf.steps.round_graph import Round
from attnops.hf.steps.speculate import Plan, plan_of
from attnops.nn import DraftTree
from tests.hf.decoding import auto
from tests.hf.drafting import asked, head_of, patched, words_of, worth
from tests.hf.test_heads import taught
from tests.test_judge import H200

COST = Plan.cost  # tests run without it, see the fixture


class Node(NamedTuple):
    """Of a tree. words: on its way. hidden: `[1, S, E]`, what the head reads to follow it. value:
    the sum of the logarithms of the probabilities."""

    words: tuple[int, ...]
    hidden: torch.Tensor
    value: float


@torch.no_grad()
def best_words(model, tree, text):
    """The ways of the nodes that EAGLE-2 drafts after a text, by dense steps over whole ways."""
    head, embed = tree.head, model.get_input_embeddings()
    states = model(text[None, :-1], output_hidden_states=True).hidden_states
    read = torch.cat([states[n] for n in Eagle(head).states_of(len(states) - 1)], -1)
    level, found = [Node((), head.fc(read), 0.0)], []
    for _ in range(tree.depth):
        further = []
        for node in level:
            tokens = torch.cat([text[1:], torch.tensor(node.words, dtype=torch.int64)])
            logits, states = head(embed(tokens)[None], node.hidden)
            hidden = torch.cat([node.hidden, states[:, -1:]], 1)
            values, words = torch.log_softmax(logits[0, -1], -1).topk(tree.top_k)
            for value, word in zip(values.tolist(), head.to_target(words).tolist(), strict=True):
                further.append(Node((*node.words, word), hidden, node.value + value))
        found += further
        level = sorted(further, key=lambda node: -node.value)[: tree.top_k]
    best = sorted(found, key=lambda node: -node.value)[: tree.nodes - 1]
    return sorted(node.words for node in best)


def ways(tokens, parents):
    """Of the nodes of a row behind its root, which is node 0."""
    found = {0: ()}
    for node, (word, parent) in enumerate(zip(tokens, parents, strict=True), 1):
        found[node] = (*found[parent], word)
    return sorted(way for way in found.values() if way)


@pytest.fixture
def proposed(monkeypatch):
    """Of each round: the tokens that each row's pages keep, and the tree behind the next one."""
    found, own = [], Round.send

    def noted(made, draft):
        found.append((made.stored.clone(), made._drafts.clone(), made.paths.parents.clone()))
        own(made, draft)

    monkeypatch.setattr(Round, "send", noted)
    return found


def check(model, tree, given, want, proposed):
    """Each tree is the one after the whole text. Returns how many were compared."""
    pad, count = (given["attention_mask"] == 0).sum(1), 0
    for stored, tokens, parents in proposed:
        for row, length in enumerate(pad + stored + 1):
            if length < want.shape[1] and (tokens[row, 1:] >= 0).any():
                text = want[row, pad[row] : length]
                found = ways(tokens[row, 1:].tolist(), parents[row, 1:].tolist())
                assert found == best_words(model, tree, text)
                count += 1
    return count


@pytest.fixture
def always(monkeypatch):
    """Each round drafts, whatever that is worth."""
    monkeypatch.setattr(rounds.Depth, "next", lambda depth, *_, **__: depth.depths[-1])


LAYERS: dict[str, dict[str, int]] = {"gemma3": {}}
PENALTY = {"repetition_penalty": 1.5, "min_new_tokens": 9, "eos_token_id": 125, "pad_token_id": 0}
TREES = [
    ("llama", (9, 3, 3), {}),
    ("llama", (6, 2, 4), PENALTY),
    ("gemma3", (12, 4, 2), {}),
    ("gpt_oss", (5, 1, 4), {}),
]
"""Nodes, depth and top_k; and more of a call. A penalty counts the drafts before a token."""


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("kind", "shape", "more"), TREES)
def test_what_a_head_drafts(kind, shape, more, proposed, always):
    """From prompts with padding, in graphs and in the model's own layers, and from rounds whose
    rows accept branches of different lengths."""
    model = tiny.model(kind, **LAYERS.get(kind, {"num_hidden_layers": 4}))
    calls = [{**asked(rows), "max_new_tokens": 18, **more} for rows in (1, 3, 3)]
    texts = [model.generate(**given) for given in calls]
    head = taught(model, head_of(model, draft_vocab_size=None), texts[2][::2])
    tree = DraftTree(head, *shape)
    ours, handle = patched(model, tree)
    for given, want in zip(calls, texts, strict=True):
        proposed.clear()
        assert torch.equal(ours.generate(**given), want)
        assert worth(handle) >= 1 and handle.took.decode == "breakable"
        assert check(model, tree, given, want, proposed) > 5
    assert worth(handle) > 1.3


def test_a_head_that_is_seldom_right(proposed, monkeypatch):
    """It reads nothing while nothing is drafted, and then all that it missed."""
    monkeypatch.setattr(rounds, "PROBE", 5)
    model = tiny.model("llama", num_hidden_layers=4)
    tree = DraftTree(head_of(model), 9, 3, 3)
    ours, _ = patched(model, tree)
    given = {**asked(3), "max_new_tokens": 50}
    want = model.generate(**given)
    assert torch.equal(ours.generate(**given), want)
    idle = [bool((tokens[:, 1:] < 0).all()) for _, tokens, _ in proposed]
    assert 4 < len(idle) - sum(idle) < len(idle) / 2 and (True, False) in pairwise(idle)
    assert check(model, tree, given, want, proposed) > 8


def test_a_tree_that_needs_more_pages_than_the_text(proposed, always):
    """Of a text that fills its own."""
    model = tiny.model("llama", num_hidden_layers=4)
    tree, ours = DraftTree(head_of(model), 5, 6, 16), copy.deepcopy(model)
    handle = attnops.patch(ours, cache="paged", decode=auto(compile_after=None), speculate=tree)
    given = {**asked(1), "max_new_tokens": 50}
    want, cache = model.generate(**given), handle.new_cache(1, 63)
    assert torch.equal(ours.generate(**given, **named(cache)), want) and worth(handle) >= 1
    assert check(model, tree, given, want, proposed[-4:]) > 1


def test_rounds_without_graphs_draft_the_same(proposed, always, monkeypatch):
    model = tiny.model("llama", num_hidden_layers=4)
    given = {**asked(3), "max_new_tokens": 12}
    ours, _ = patched(model, DraftTree(head_of(model), 9, 3, 3))
    want = ours.generate(**given)
    in_graphs = list(proposed)
    proposed.clear()
    ours, _ = patched(model, DraftTree(head_of(model), 9, 3, 3))
    monkeypatch.setattr(ChoiceGraphs, "capture", lambda *_: None)
    assert torch.equal(ours.generate(**given), want) and len(in_graphs) > 3
    for one, other in zip(in_graphs, proposed, strict=True):
        assert all(map(torch.equal, one, other))


WRONG = {
    "nodes: got 1, want 2 to 64": {"nodes": 1},
    "nodes: got 65, want 2 to 64": {"nodes": 65},
    "depth: got True, want 1 to 16": {"depth": True},
    "top_k: got 17, want 1 to 16": {"top_k": 17},
    "nodes: got 32, want at most 21: depth 2 and top_k 4": {"top_k": 4, "depth": 2},
    "head: got Linear, want an attnops.nn.Eagle3Head": {"head": torch.nn.Linear(1, 1)},
}


@pytest.mark.parametrize("told", WRONG)
def test_trees_that_cannot_be(told):
    with pytest.raises(InvalidInput, match=re.escape(told)):
        DraftTree(**{"head": "folder", **WRONG[told]})


def test_a_head_with_fewer_words_than_branches():
    model = tiny.model("llama", num_hidden_layers=4)
    tree = DraftTree(head_of(model, draft_vocab_size=4), 9, 3, 5)
    with pytest.raises(PatchError, match="the 5 likeliest of 4 words"):
        attnops.patch(model, speculate=tree)


def test_what_a_round_is_planned_for():
    """The root alone or whole trees, for the price of a step of the head over each level."""
    model = tiny.model("llama", num_hidden_layers=4)
    head = head_of(model)
    chain, tree = plan_of(head), plan_of(DraftTree(head, 9, 3, 3))
    assert chain.form.depths == (1, 4, 6) and tree.form.depths == (1, 9)
    assert COST(tree, model) == pytest.approx(COST(chain, model) / 5 * 3 * 1.04)


def test_layers_with_states_follow_one_chain():
    model = tiny.model("qwen3_next", num_hidden_layers=4)
    ours, handle = patched(model, DraftTree(head_of(model)))
    given = {**asked(1), "max_new_tokens": 4}
    assert torch.equal(ours.generate(**given), model.generate(**given))
    told = "nothing was drafted: the head drafts trees, and layers with states follow one chain"
    assert handle.took.rounds == told


def test_a_policy_without_a_kernel_for_trees(monkeypatch):
    """A head may draft chains under it."""
    monkeypatch.setattr(Target, "of", lambda _: H200)
    head = Eagle(head_of(tiny.model("llama")).bfloat16())
    pages = SimpleNamespace(sizes=SimpleNamespace(device=None, states=()), page_size=16)
    assert not list(rounds.why_no_trees(head, pages))
    with attnops.use({"paged_attention": "fa3"}):
        assert "attends to a tree" in next(rounds.why_no_trees(head, pages))


def test_a_folder(tmp_path):
    model = tiny.model("llama", num_hidden_layers=4)
    with pytest.raises(PatchError, match="the folder of a checkpoint"):
        attnops.patch(model, speculate=DraftTree("lookup"))
    (tmp_path / "config.json").write_text(json.dumps(words_of(model)))
    torch.save(head_of(model).state_dict(), tmp_path / "pytorch_model.bin")
    how = auto(compile_after=None)
    handle = attnops.patch(model, decode=how, speculate=DraftTree(tmp_path))
    assert attnops.patch(model, decode=how, speculate=DraftTree(str(tmp_path))) is handle
    with pytest.raises(PatchError, match=r"got decode\.speculate=DraftTree"):
        attnops.patch(model, decode=how, speculate=DraftTree(tmp_path, depth=5))
