"""Steps of mode "auto" before anything is compiled: the layers, rewritten, without a compiler."""

import copy
import gc
import weakref

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

import attnops
from attnops.core.errors import NotFast
from attnops.hf import tiny
from attnops.hf.cache.names import named
from attnops.hf.steps import graphed_steps
from tests.hf.decoding import beside, first, generated, logits

pytestmark = pytest.mark.usefixtures("own_prompts")

CALLS = ((2, 9, 4), (1, 7, 3), (3, 30, 3))


def report(pair):
    return pair.handle.graphs.report()


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "kinds", "dtype"),
    [
        ("llama", 1, torch.float32),
        ("qwen3", 1, torch.float32),
        ("gemma3", 2, torch.float32),
        ("mistral", 1, torch.float32),
        ("phi3", 1, torch.float32),
        ("mixtral", 1, torch.bfloat16),
        ("gpt_oss", 2, torch.bfloat16),
        ("deepseek_v3", 2, torch.bfloat16),
    ],
)
def test_recorded_layers_have_the_bits_of_the_layers(name, kinds, dtype, monkeypatch):
    """Where no fused kernel is chosen, as on a CPU, and rotations are left alone. torch's grouped
    products have no fake result in float32, so mixtures are of bfloat16."""
    monkeypatch.setattr(graphed_steps, "fuse_rotated_write_pass", lambda gm: ())
    model = tiny.model(name).to(dtype)
    with beside(model, "breakable") as pair:
        want = [logits(pair.model, *call) for call in CALLS]
    with first(model) as pair:
        got = [logits(pair.model, *call) for call in CALLS]
        found, regions = report(pair), pair.decoder.graphed.runner.regions
        assert found.not_recorded == "" and found.recorded >= kinds + 2 and not found.compiled
        layers = [p for p in regions.programs if any(part.calls for part in p.split.parts)]
        assert len({len(p.split.parts) for p in layers}) == 1 and found.modes == {"decode": "whole"}
        assert "run without a compiler, fused" in str(found)
    assert all(map(torch.equal, got, want))


def test_all_layers_of_a_kind_share_a_graph():
    with first(tiny.model("llama", num_hidden_layers=5)) as pair:
        pair.same(2, 9, 4)
        assert report(pair).recorded == 4, "rotation, layer, last norm and logits"
        assert pair.decoder.graphed.runner.regions._traces == 4


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_passes_find_what_they_find_in_a_trace_of_dynamo(name):
    model, found = tiny.model(name), []
    for mode, more in (("auto", {"compile_after": 99}), ("piecewise", {})):
        with beside(model, mode, **more) as pair:
            pair.same(2, 9, 4)
            found.append([str(product) for product in pair.decoder.products])
    assert found[0] == found[1] and len(found[0]) == 5
    assert "norm + linear" in found[0][0]


def test_modes_that_are_captured_as_they_run():
    """Mode "breakable", and bits that follow from the steps before."""
    with beside("llama", "breakable") as pair:
        pair.same(2, 9, 4)
        assert report(pair).recorded == 0 == report(pair).compile_seconds
    with first("llama") as pair, attnops.use(deterministic=True):
        generated(pair.model, 2, 9, 4)
        assert report(pair).recorded == 0


@pytest.mark.parametrize("release", [False, True])
def test_a_changed_model_is_recorded_anew(release):
    with first("llama") as pair:
        pair.same(2, 9, 4)
        if release:
            pair.handle.release()
        pair.change(lambda model: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.GELU()))
        pair.same(2, 9, 4)
        assert report(pair).recorded == 5, "the two layers differ now"


def test_pages_and_policies_share_what_was_recorded():
    """Where all is equal that the code may read. A policy may choose other kernels."""
    with first("llama") as pair:
        pair.same(2, 9, 4)
        kept = pair.decoder._recorded.kinds
        assert len(kept) == 4
        for cache in (pair.handle.new_cache(2, 20), pair.handle.new_cache(2, 20)):
            pair.same(2, 9, 4, **named(cache))
            assert report(pair).recorded == 4
        assert len(kept) == 4
        with attnops.use(deny=("flex",)):
            pair.same(2, 9, 4)
        assert len(kept) == 8


def test_other_weights_share_what_was_recorded():
    """Those of another dtype have layers of their own, and find them again."""
    with first("llama") as pair:
        generated(pair.model, 2, 9, 4)
        kept, counts = pair.decoder._recorded.kinds, []
        for _ in range(2):
            for dtype in (torch.bfloat16, torch.float32):
                pair.change(lambda model, dtype=dtype: model.to(dtype))
                want, got = logits(pair.twin, 2, 9, 4), logits(pair.model, 2, 9, 4)
                assert (got - want).norm() < torch.finfo(dtype).eps ** 0.5 * want.norm()
                assert pair.decoder._recorded.kinds is kept
            counts.append(len(kept))
        assert counts[0] == counts[1] and report(pair).not_recorded == ""


class Rule:
    factor = 1.0


class Scaled(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * self.rule.factor


@pytest.mark.parametrize("release", [False, True])
def test_an_object_whose_contents_change(release):
    """A form knows it by identity."""
    with first("llama") as pair:

        def scale(model, rule):
            for layer in model.model.layers:
                layer.mlp.__class__, layer.mlp.rule = Scaled, rule

        rules = [Rule(), Rule()]
        for model, rule in zip((pair.model, pair.twin), rules, strict=True):
            rule.factor = 2.0
            scale(model, rule)
        want = pair.near(2, 9, 4)
        assert report(pair).not_recorded == ""
        if release:
            pair.handle.release()
        for rule in rules:
            rule.factor = -3.0
        assert not torch.equal(pair.near(2, 9, 4), want)
        assert report(pair).recorded == 4


def test_release_keeps_nothing_that_was_recorded():
    """What is recorded keeps the objects of its calls."""
    with first("llama") as pair:
        pair.same(2, 9, 4)
        kinds = [weakref.ref(kind) for kind in pair.decoder._recorded.kinds.values()]
        assert kinds
        pair.handle.release()
        gc.collect()
        assert not any(kind() for kind in kinds)


class Calls:
    count = 0


OF_ALL: list[int] = []


class OnAnObject(LlamaMLP):
    def forward(self, x):
        self.calls.count += 1
        return super().forward(x)


class OnAGlobal(LlamaMLP):
    def forward(self, x):
        OF_ALL.append(1)
        return super().forward(x)


@pytest.mark.parametrize("make", [OnAnObject, OnAGlobal])
def test_layers_that_change_more_than_tensors_are_not_captured(make):
    """Their code runs when they are recorded, and not in a capture. Each layer does it, so that
    they are equal."""
    twin = tiny.model("llama")
    model, calls = copy.deepcopy(twin), Calls()
    for layer in model.model.layers:
        layer.mlp.__class__, layer.mlp.calls = make, calls
    with first(model, twin=twin) as pair:
        with pytest.warns(NotFast, match="the model's own forward writes"):
            pair.same(2, 9, 4)
        before = calls.count + len(OF_ALL)
        pair.same(2, 9, 4)
        assert calls.count + len(OF_ALL) == before + 4 * 2, "each call of the model ran it twice"
