"""Replicas that torch.nn.DataParallel makes of a patched model: each runs its own weights, without
pages and graphs."""

import copy
import sys

import pytest
import torch
from torch.nn.parallel import replicate

import attnops
from attnops.hf import tiny
from tests.hf.decoding import CALL, beside, how
from tests.hf.helpers import LIMIT, relative, tokens


@pytest.fixture
def other_weights(monkeypatch):
    """torch's replicate() without GPUs: the n-th replica has weights of its own in place of copies
    on the n-th device."""

    def broadcast(tensors, devices, detach=False):
        return [[t.detach() * (1 + (n + 1) / 8) for t in tensors] for n in range(len(devices))]

    monkeypatch.setattr(
        sys.modules["torch.nn.parallel.replicate"], "_broadcast_coalesced_reshape", broadcast
    )


def outputs(model):
    """The logits of a prompt and of a step after it."""
    ids = tokens()
    with torch.no_grad():
        first = model(input_ids=ids[:, :-1], use_cache=True)
        step = model(
            input_ids=ids[:, -1:],
            **{name: value for name, value in first.items() if name != "logits"},
        )
    return torch.cat((first.logits, step.logits), 1)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_replicas_run_their_own_weights(name, other_weights):
    """Ordinary attention; latents, whose modules get a method; routers and experts."""
    with beside(name, "auto") as pair:
        model, twin = pair.model, pair.twin
        pair.same(*CALL)
        assert pair.took.cache == "paged"
        before = outputs(model)
        for ours, theirs in zip(replicate(model, [0, 1]), replicate(twin, [0, 1]), strict=True):
            expected = outputs(theirs)
            assert relative(outputs(ours), expected) < LIMIT < relative(before, expected) / 10
        pair.same(*CALL)
    assert vars(model).keys() == vars(twin).keys()


def test_replicas_hold_nothing_that_holds_the_model(other_weights):
    """A copy makes replicas of itself; what the caller had put on the model before and after is the
    replicas', too."""
    model = tiny.model("deepseek_v3")
    own, later = (lambda *args, **kwargs: args, lambda *args, **kwargs: kwargs)
    model.prepare_inputs_for_generation = own
    with attnops.patch(model, cache="paged", decode=how()):
        model._update_model_kwargs_for_generation = later
        copied = copy.deepcopy(model)
        for each in (model, copied):
            for replica in replicate(each, [0]):
                assert vars(replica)["prepare_inputs_for_generation"] is own
                assert vars(replica)["_update_model_kwargs_for_generation"] is later
                held = {id(x) for module in (model, copied) for x in module.modules()}
                for module in replica.modules():
                    assert not [
                        n for n, x in vars(module).items() if any(id(y) in held for y in parts(x))
                    ]
    assert "_replicate_for_data_parallel" not in vars(model)


def parts(value):
    """What a method of attnops holds."""
    return [getattr(value, name, None) for name in ("owner", "module", "model", "_owner")] + list(
        getattr(value, "args", ())
    )
