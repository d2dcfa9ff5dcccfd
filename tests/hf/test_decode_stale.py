"""Graphs of decode steps after something that is no part of the model has changed, and captures
that fail: eager's tokens again."""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

import attnops
from attnops.core.errors import InvalidInput, StaleGraph
from attnops.graphs.stale import Guard
from attnops.hf import tiny
from attnops.hf.cache.names import named
from attnops.hf.steps import decode
from tests.hf.decoding import CALL, asked, beside, generated, graphed, logits, replays
from tests.hf.helpers import LIMIT, near, of_a_library, paged, relative

FIXED = torch.arange(16.0)[:12].view(3, 4)
OTHERS = {
    "strides": torch.as_strided(FIXED, (3, 4), (5, 1)),
    "shape": FIXED.view(4, 3),
    "dtype": FIXED.view(torch.int32),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_fixed_argument_with_another_layout_is_stale(other):
    guard = Guard({"x": FIXED}, {}, 0)
    guard.check({"x": FIXED.view(3, 4)})
    with pytest.raises(StaleGraph, match=r"^x"):
        guard.check({"x": OTHERS[other]})


@pytest.fixture
def two():
    """A patched model, its handle, the tokens of a prompt, and two caches that the prompt has
    filled."""
    model, (ids, _) = tiny.model("llama"), asked(2, 6, 1)
    with torch.no_grad(), graphed(model) as handle:
        yield model, handle, ids, filled(model, handle, ids)


def filled(model, handle, ids):
    caches = handle.new_cache(2, 20), handle.new_cache(2, 20)
    for cache in caches:
        model(ids, **named(cache))
    return caches


def test_a_prompt_by_hand_is_when_one_looks(two):
    model, handle, ids, (ours, other) = two
    for change in (False, True):
        if change:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.flip(0))
        for cache in (ours, other):
            cache.reset()
            model(ids, **named(cache))
        want = model(ids[:, :1], **named(other)).logits
        near(handle.step(ids[:, :1], ours), want)


def test_steps_of_another_cache_are_no_reason_to_look_at_weights(two, monkeypatch):
    """The first step takes a glance, which the other cache's first step looks at. Captures are
    watched with glances of their own."""
    _, handle, ids, caches = two
    looks, real = [], decode.Glance.same
    monkeypatch.setattr(decode.Glance, "same", lambda glance: looks.append(glance) or real(glance))
    for cache in 3 * caches:
        handle.step(ids[:, :1], cache)
    assert looks.count(handle._paged.decoder().glance) == 1


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", ["breakable", "piecewise"])
def test_autocast_and_policy_of_the_call(mode):
    """Steps are of the modes of their own call, and no copy of a weight that autocast made outlives
    the block it was made in."""
    with beside(mode=mode) as pair, paged(pair.twin):
        for number, cast in enumerate((False, True, True, False)):
            pair.change(lambda model, by=1 + number / 8: model.lm_head.weight.data.mul_(by))
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                got, want = (logits(model, *CALL) for model in (pair.model, pair.twin))
            assert relative(got, want) < (4 * torch.finfo(torch.bfloat16).eps if cast else LIMIT)
        with attnops.use("reference"):
            pair.near(*CALL)


def test_policies_of_steps_by_hand(two):
    """Of one cache or of two in turn: every step has graphs of its own policy, and those from
    before are replayed."""
    _, handle, ids, (first, second) = two
    made = {}
    for cache, policy in [
        (first, None),
        (second, "reference"),
        (first, None),
        (first, "reference"),
        (second, None),
    ] * 2:
        with attnops.use(policy):
            handle.step(ids[:, :1], cache)
        assert made.setdefault((cache, policy), handle.graphs) is handle.graphs
    assert len(set(map(id, made.values()))) == 4


def test_offloaded_weights_are_refused():
    """As accelerate does it: there for the time of the module's forward."""
    with beside() as pair:
        mlp = pair.model.model.layers[1].mlp
        there = dict(mlp.state_dict())
        pair.same(*CALL)
        mlp.register_forward_pre_hook(
            lambda module, given: module.load_state_dict(there, assign=True) and None
        )
        mlp.register_forward_hook(lambda module, given, out: module.to("meta") and None)
        mlp.to("meta")
        with pytest.raises(
            InvalidInput, match=r"decode: got graphs over Linear\.weight, which is on meta"
        ):
            generated(pair.model, *CALL)
        assert replays(pair.handle) == CALL[2] - 1


@pytest.mark.sweep(4)
@pytest.mark.parametrize("mode", ["breakable", "piecewise"])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_capture_that_fails_leaves_nothing_behind(mode, failing):
    """In the first layer of the first run, and of the one that is captured: neither tokens nor what
    the next capture needs are gone."""
    model, (ids, _), runs = tiny.model("llama"), asked(2, 6, 1), []

    @torch.library.custom_op("attnops_tests::out_of_memory", mutates_args=())
    def out_of_memory(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if len(runs) == failing:
            raise torch.OutOfMemoryError("attnops: a test's")
        return x.clone()

    out_of_memory.register_fake(torch.empty_like)
    with torch.no_grad(), graphed(model, mode) as handle:
        ours, other = filled(model, handle, ids)
        want = model(ids[:, :1], **named(other)).logits
        model.model.layers[0].mlp.register_forward_hook(
            of_a_library(lambda module, given, out: out_of_memory(out))
        )
        with pytest.raises(torch.OutOfMemoryError):
            handle.step(ids[:, :1], ours)
        assert int(ours.get_seq_length()) == 6 and ours.state.unfinished == 0
        near(handle.step(ids[:, :1], ours), want)


@pytest.mark.parametrize("release", [False, True])
def test_compiled_layers_of_code_that_has_changed(monkeypatch, release):
    """A release keeps what is compiled, and Dynamo does not guard on the code."""
    with beside("llama", "piecewise") as pair:
        before = pair.near(*CALL)
        if release:
            pair.handle.release()
        own = LlamaMLP.forward
        monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x) * -3)
        assert not torch.equal(pair.near(*CALL), before)
