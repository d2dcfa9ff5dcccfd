"""Graphs of decode steps after something they were captured with has changed: eager's tokens again, from other graphs."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import attnops
from attnops.core.errors import InvalidInput, StaleGraph
from attnops.graphs.guard import Guard, in_force
from attnops.hf import cache_names, tiny
from attnops.hf.paged.guarded import Glance
from tests.hf.helpers import LIMIT, of_a_library, relative
from tests.hf.test_decode_graphs import asked, generated, how, replays

CALL = (2, 9, 5)


def logits(model, *call):
    return torch.stack(generated(model, *call, output_logits=True, return_dict_in_generate=True).logits)


def noise(model, seed=1):
    """Other weights of the same shapes, by name."""
    rng = torch.Generator().manual_seed(seed)
    return {name: t + 0.1 * torch.randn(t.shape, generator=rng) for name, t in model.state_dict().items()}


def assigned(model):
    model.load_state_dict(noise(model), assign=True)


def replaced(model):
    for name, t in noise(model).items():
        model.get_parameter(name).data = t


def written(model):
    model.load_state_dict(noise(model))


def another_head(model):
    torch.manual_seed(3)
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: 3 * out)


def hooked_before(model):
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, given: (3 * given[0],))


def merged(model):
    """As adapters are: their weights into those beside them, by a flag and in place."""
    head = model.lm_head
    head.weight.data += head.delta
    head.merged = ["default"]


def scaled(model):
    model.lm_head.scaling["default"] = 1.5


class Adapted(nn.Linear):
    def __init__(self, own):
        super().__init__(own.in_features, own.out_features, bias=False)
        self.weight = own.weight
        self.delta = torch.randn(own.weight.shape, generator=torch.Generator().manual_seed(5))
        self.merged = []
        self.scaling = {"default": 0.5}

    def forward(self, x):
        out = super().forward(x)
        return out if self.merged else out + x @ self.delta.t() * self.scaling["default"]


def answered(model):
    model.model.layers[0].mlp.forward = torch.zeros_like


CHANGES = (assigned, replaced, written, another_head, merged, scaled, answered)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("mode", "change"), [*(("breakable", c) for c in CHANGES), ("piecewise", replaced), ("piecewise", merged)])
def test_a_changed_model_is_captured_anew(mode, change):
    model = tiny.model("llama")
    model.lm_head = Adapted(model.lm_head)
    plain = copy.deepcopy(model)
    with attnops.patch(model, cache="paged", decode=how(mode)) as handle:
        before = logits(model, *CALL)
        captured = handle.graphs
        change(model)
        change(plain)
        assert relative(logits(model, *CALL), want := logits(plain, *CALL)) < LIMIT
        assert relative(before, want) > 10 * LIMIT
        assert (handle.graphs is captured) == (change is written), "what is changed in place is read by the same graphs"
        kept = handle.graphs
        logits(model, *CALL)
        assert handle.graphs is kept


def trained(model):
    model.model.layers[1].mlp.train()


def turned(model):
    """The same numbers at the same address, in another order."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()


def of_another_class(model):
    model.model.norm.__class__ = type("Norm", (type(model.model.norm),), {})


def called_otherwise(model):
    layer = model.model.layers[1].mlp
    layer.forward = layer.forward


def biased(model):
    model.lm_head.register_parameter("bias", nn.Parameter(torch.zeros(model.lm_head.out_features)))


def named(model):
    model.lm_head.merged.append("default")


SEEN = (
    assigned, replaced, another_head, hooked, hooked_before, merged, scaled, trained, turned, of_another_class, called_otherwise, biased,
    named,
)  # fmt: skip


@pytest.mark.parametrize("change", SEEN)
def test_a_glance_sees_each_change(change):
    model = tiny.model("llama")
    model.lm_head = Adapted(model.lm_head)
    glance = Glance(model)
    ids, _ = asked(2, 6, 1)
    for harmless in (lambda: model(ids), lambda: generated(model, 2, 6, 3), lambda: written(model)):
        harmless()
        assert glance.same()
    change(model)
    assert not glance.same()
    assert Glance(model).same()


def guarded_state(model):
    return (*in_force(), *Glance(model).state)


@pytest.mark.parametrize("change", SEEN)
def test_the_guarded_state_has_each_change(change):
    """It is what decides, where a glance sees a difference."""
    model = tiny.model("llama")
    model.lm_head = Adapted(model.lm_head)
    before = guarded_state(model)
    written(model)
    assert guarded_state(model) == before
    change(model)
    assert guarded_state(model) != before


FIXED = torch.arange(16.0)[:12].view(3, 4)
OTHERS = {
    "strides": torch.as_strided(FIXED, (3, 4), (5, 1)),
    "shape": FIXED.view(4, 3),
    "dtype": FIXED.view(torch.int32),
    "address": FIXED.clone(),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_fixed_argument_with_another_layout_is_stale(other):
    guard = Guard({"x": FIXED}, {}, 0)
    guard.check({"x": FIXED.view(3, 4)})
    with pytest.raises(StaleGraph, match=r"^x"):
        guard.check({"x": OTHERS[other]})


def test_a_glance_holds_no_weight():
    model = tiny.model("llama")
    glance, head = Glance(model), weakref.ref(model.lm_head.weight)
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    gc.collect()
    assert head() is None and not glance.same()


def test_graphs_of_adapters_that_are_switched_are_kept():
    model = tiny.model("llama")
    model.lm_head = Adapted(model.lm_head)
    with attnops.patch(model, cache="paged", decode=how()) as handle:
        found = []
        for names in ([], ["other"], [], ["other"]):
            model.lm_head.merged = names
            found.append((logits(model, *CALL), handle.graphs))
        (plain, first), (other, second), *again = found
        assert relative(plain, other) > 10 * LIMIT
        for (got, graphs), want, kept in zip(again, (plain, other), (first, second), strict=True):
            assert torch.equal(got, want) and graphs is kept


def test_a_prompt_by_hand_is_when_one_looks():
    model = tiny.model("llama")
    ids, _ = asked(2, 6, 1)
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=how()) as handle:
        ours, other = handle.new_cache(2, 20), handle.new_cache(2, 20)
        for change in (lambda _: None, replaced):
            change(model)
            for cache in (ours, other):
                cache.reset()
                model(ids, **cache_names.named(cache))
            want = model(ids[:, :1], **cache_names.named(other)).logits
            assert relative(handle.step(ids[:, :1], ours), want) < LIMIT


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", ["breakable", "piecewise"])
def test_autocast_and_policy_of_the_call(mode):
    """Steps are of the modes of their own call, and no copy of a weight that autocast made outlives the block it was made in."""
    model, twin = tiny.model("llama"), tiny.model("llama")
    with attnops.patch(model, cache="paged", decode=how(mode)), attnops.patch(twin, cache="paged"):
        for cast in (False, True, True, False):
            written(model)
            twin.load_state_dict(model.state_dict())
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                got, want = logits(model, *CALL), logits(twin, *CALL)
            assert relative(got, want) < (4 * torch.finfo(torch.bfloat16).eps if cast else LIMIT)
        with attnops.use("reference"):
            assert relative(logits(model, *CALL), logits(twin, *CALL)) < LIMIT


def test_policies_of_steps_by_hand():
    """Of one cache or of two in turn: every step has graphs of its own policy, and those from before are replayed."""
    model = tiny.model("llama")
    ids, _ = asked(2, 6, 1)
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=how()) as handle:
        one, two = handle.new_cache(2, 20), handle.new_cache(2, 20)
        for cache in (one, two):
            model(ids, **cache_names.named(cache))
        made = {}
        for cache, policy in [(one, None), (two, "reference"), (one, None), (one, "reference"), (two, None)] * 2:
            with attnops.use(policy):
                handle.step(ids[:, :1], cache)
            assert made.setdefault((cache, policy), handle.graphs) is handle.graphs
        assert len(set(map(id, made.values()))) == 4


def test_offloaded_weights_are_refused():
    """As accelerate does it: there for the time of the module's forward."""
    model = tiny.model("llama")
    mlp = model.model.layers[1].mlp
    there = dict(mlp.state_dict())

    def bring(module, given):
        module.load_state_dict(there, assign=True)

    with attnops.patch(model, cache="paged", decode=how()) as handle:
        generated(model, *CALL)
        mlp.register_forward_pre_hook(bring)
        mlp.register_forward_hook(lambda module, given, out: module.to("meta") and None)
        mlp.to("meta")
        with pytest.raises(InvalidInput, match=r"decode: got graphs over Linear\.weight, which is on meta"):
            generated(model, *CALL)
        assert replays(handle) == CALL[2] - 1


@pytest.mark.sweep(4)
@pytest.mark.parametrize("mode", ["breakable", "piecewise"])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_capture_that_fails_leaves_nothing_behind(mode, failing, monkeypatch):
    """In the first layer of the first run, and of the one that is captured: neither tokens nor what the next capture needs are gone."""
    model = tiny.model("llama")
    ids, _ = asked(2, 6, 1)
    runs = []

    @torch.library.custom_op("attnops_tests::out_of_memory", mutates_args=())
    def out_of_memory(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if len(runs) == failing:
            raise torch.OutOfMemoryError("attnops: a test's")
        return x.clone()

    out_of_memory.register_fake(torch.empty_like)
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=how(mode)) as handle:
        ours, other = handle.new_cache(2, 20), handle.new_cache(2, 20)
        for cache in (ours, other):
            model(ids, **cache_names.named(cache))
        want = model(ids[:, :1], **cache_names.named(other)).logits
        model.model.layers[0].mlp.register_forward_hook(of_a_library(lambda module, given, out: out_of_memory(out)))
        with pytest.raises(torch.OutOfMemoryError):
            handle.step(ids[:, :1], ours)
        assert int(ours.get_seq_length()) == 6 and ours.state.unfinished == 0
        assert relative(handle.step(ids[:, :1], ours), want) < LIMIT


def test_what_is_no_step_is_told():
    model = tiny.model("llama")
    ids, _ = asked(2, 6, 1)
    with torch.no_grad(), attnops.patch(model, cache="paged", decode=how()) as handle:
        cache = handle.new_cache(2, 20)
        model(ids, **cache_names.named(cache))
        one = ids[:, :1]
        for given, text in (
            ((one[0, 0], cache), r"input_ids: got int64 \[\]"),
            ((one.float(), cache), r"input_ids: got float32 \[2, 1\]"),
            ((one, DynamicCache()), f"{cache_names.NAME}: got DynamicCache"),
            ((one, cache, one[:, 0]), r"position_ids: got int64 \[2\]"),
            ((one, cache, one[:1]), r"position_ids: got int64 \[1, 1\]"),
        ):
            with pytest.raises(InvalidInput, match=text):
                handle.step(*given)
        with pytest.raises(InvalidInput, match=f"{cache_names.NAME}: got DynamicCache"):
            handle.capture(DynamicCache())
        assert handle.graphs is None
