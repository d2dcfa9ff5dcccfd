"""The promise that masks only grow holds for the steps of one generate() and for nothing that runs
beside them."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import attnops
from attnops.hf import tiny
from attnops.hf.attention import descriptor
from attnops.hf.cache.names import named
from attnops.hf.generation import current_generation, growing
from attnops.hf.models import methods
from tests.hf.helpers import generated, left_padded, near, same_tokens, tokens

HOLES = torch.ones(3, 14, dtype=torch.int64)
HOLES[0, 3:6] = HOLES[1, 9] = HOLES[2, :4] = 0


@pytest.fixture
def impatient(monkeypatch):
    """`auto` behaves as on CUDA: lengths, and no look at the mask at one-token steps."""
    monkeypatch.setattr(descriptor, "_FAR", ("cpu",))


class Beside:
    """Steps a model over a cache and masks of its own, and leaves the scores alone. logits: of
    every step."""

    def __init__(self, model, prepares):
        self.model, self.prepares = model, prepares
        self.cache = DynamicCache(config=model.config)
        self.mask = HOLES
        self.ids = tokens(3, 14, seed=3)
        self.logits = []
        self(None, None)

    @torch.no_grad()
    def __call__(self, input_ids, scores):
        given = {
            "input_ids": self.ids,
            "attention_mask": self.mask,
            **named(self.cache),
            "use_cache": True,
        }
        if self.prepares:  # as loops of one's own do
            given = self.model.prepare_inputs_for_generation(**given)
        out = self.model(**given)
        self.logits.append(out.logits[:, -1])
        self.ids = self.logits[-1].argmax(-1, keepdim=True)
        # What is shown changes from step to step.
        self.mask = torch.cat([self.mask, torch.ones(3, 1, dtype=torch.int64)], 1)
        self.mask[:, len(self.logits)] = 0
        return scores


ONES = torch.ones(3, 14, dtype=torch.int64)


def alone(model, prepares):
    beside = Beside(model, prepares)
    for _ in range(6):
        beside(None, None)
    return beside.logits


@pytest.mark.parametrize("prepares", [False, True])
@pytest.mark.parametrize("same", [False, True], ids=["another-model", "the-same-model"])
def test_a_model_that_is_stepped_inside_generate(impatient, same, prepares):
    model, other = tiny.model("llama"), tiny.model("llama", seed=1)
    want = generated(model, new=6, attention_mask=ONES)
    wanted = alone(model if same else other, prepares)
    attnops.patch(model)
    attnops.patch(other)
    beside = Beside(model if same else other, prepares)
    got = generated(model, new=6, attention_mask=ONES, logits_processor=[beside])
    assert torch.equal(got, want)
    near(torch.stack(beside.logits), torch.stack(wanted))


def test_guidance_by_a_negative_prompt(impatient):
    model = tiny.model("llama")
    more = {
        "guidance_scale": 3.0,
        "negative_prompt_ids": tokens(3, 14, seed=4),
        "negative_prompt_attention_mask": HOLES,
        "new": 6,
    }
    same_tokens(model, **more)


def test_generate_inside_generate(impatient):
    """Of the same model, with other masks, in each step."""
    model, made = tiny.model("llama"), []

    def nested(input_ids, scores):
        made.append(generated(model, new=3, attention_mask=HOLES))
        return scores

    want, inner = generated(model, new=4), generated(model, new=3, attention_mask=HOLES)
    with attnops.patch(model):
        assert torch.equal(generated(model, new=4, logits_processor=[nested]), want)
    assert len(made) == 4 and all(torch.equal(each, inner) for each in made)


def test_threads(impatient):
    model, masks = tiny.model("llama"), (left_padded()[:, :14], HOLES)

    def run(mask):
        return generated(model, new=8, attention_mask=mask)

    want = list(map(run, masks))
    with attnops.patch(model), ThreadPoolExecutor(2) as pool:
        assert all(map(torch.equal, pool.map(run, masks), want))


def test_over_pages_another_model_is_looked_at(impatient):
    """Its cache of pages refuses a mask that it cannot follow, inside of another model's generate()
    as outside of it."""
    model, other = tiny.model("llama"), tiny.model("llama", seed=1)
    attnops.patch(model, cache="paged")
    handle = attnops.patch(other, cache="paged")
    cache, seen = handle.new_cache(3, 40), []

    def steps(input_ids, scores):
        ids, count = (tokens(3, 14), 14) if not seen else (tokens(3, 1), 14 + len(seen))
        other(ids, attention_mask=torch.ones(3, count, dtype=torch.int64), **named(cache))
        seen.append(current_generation())
        return scores

    generated(model, new=4, logits_processor=[steps])
    assert seen == [None] * 4


def test_blocks_and_copies(impatient):
    with growing() as outer:
        assert current_generation() is outer
        with growing(tiny.model("llama")):
            assert current_generation() is None
    model = tiny.model("llama")
    want = generated(model, new=4)
    attnops.patch(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.prepare_inputs_for_generation.owner is twin
        assert torch.equal(generated(twin, new=4), want)
        twin._attnops.unpatch()
        assert "prepare_inputs_for_generation" not in vars(twin) and not twin._forward_hooks


def test_a_tree_follows_the_modules_that_are_set_and_taken_away():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    tree = methods.Tree(model)

    def replace():
        model[1][0] = nn.Linear(2, 2)

    def join():
        model[0].more = nn.Dropout()  # it had no modules

    def leave():
        del model[1]

    def exchange():
        model._modules = {"0": nn.Linear(2, 2)}

    for change in (replace, join, leave, exchange):
        change()
        for module in model.modules():
            if not module._forward_hooks:
                module.register_forward_hook(lambda *_: None)
        hooked, training = tree.walk()
        assert set(hooked) == {*model.modules()} - {model}, change
        assert set(training) == {*model.modules()}, change
