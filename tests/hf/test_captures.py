"""What captured steps and captured prompts of generate() see of a model that changes between two calls, and what they leave alone."""

import copy
import gc
import itertools
import sys

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_modules
from torch.overrides import TorchFunctionMode

import attnops
from attnops.core.errors import InvalidInput, NotCapturable, NotFast, PatchError
from attnops.graphs.regional import twin, write_back
from attnops.hf import tiny
from attnops.hf.cache_names import named
from attnops.hf.paged import prompt
from attnops.hf.paged.guarded import Glance
from tests.hf import steered
from tests.hf.helpers import DECODERS, LIMIT, relative
from tests.hf.test_decode_graphs import asked, generated, how, replays
from tests.hf.test_defaults import auto

CALL = (2, 14, 3)
MODES = {
    "auto": {"decode": auto(compile_after=6)},
    "breakable": {"cache": "paged", "decode": how("breakable")},
    "piecewise": {"cache": "paged", "decode": how("piecewise", compile_after=0)},
}


FEW = ("auto", "breakable", pytest.param("piecewise", marks=pytest.mark.full))
"""Compiled steps take seconds for each change."""


def patched(model, mode):
    given = MODES[mode]
    make = auto if mode == "auto" else how
    more = {} if mode == "auto" else {"mode": mode}
    return attnops.patch(model, **{**given, "decode": make(**more, compile_after=given["decode"].compile_after)})


def logits(model, *call, **more):
    return torch.stack(generated(model, *call, output_logits=True, return_dict_in_generate=True, **more).logits)


def captures(handle):
    return len(handle.decode.graphs.graphs)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Prompts are captured at once where they are compiled."""
    monkeypatch.setattr(prompt, "CAPTURED", (32,))
    monkeypatch.setattr(prompt, "CAPTURE_AFTER", 0)


# test_a_glance_sees_each_change has each, and tests/hf/test_captures_fuzz.py breakable steps of models that change.
@pytest.mark.parametrize("mode", ["auto", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("breakable", "piecewise"))])
def test_each_change_is_seen(mode, monkeypatch):
    compared(mode, steered.CHANGES, monkeypatch)


@pytest.mark.full
def test_changes_that_compiled_code_is_not_guarded_on(monkeypatch):
    """Dynamo takes tuples for constants, and looks for no other method of a class. Prompts are captured, too."""
    compared("piecewise", ("a list in a tuple", "a method of a class"), monkeypatch)


def compared(mode, changes, monkeypatch):
    model, twin = steered.twins()
    with patched(model, mode) as handle:
        got, want = logits(model, *CALL), logits(twin, *CALL)
        assert relative(got, want) < LIMIT
        for what in changes:
            before, change = want, steered.CHANGES[what]
            change(model, monkeypatch)
            change(twin, monkeypatch)
            want = logits(twin, *CALL)
            assert relative(before, want) > 10 * LIMIT, f"{what}: changes nothing"
            assert relative(logits(model, *CALL), want) < LIMIT, what
            assert (handle.took.cache, handle.took.why) == ("paged", ""), what
            # Layers with a forward of an instance share no code, and prompts are compiled after steps.
            assert mode != "piecewise" or handle.took.prompt == "captured" or "forward of" in what, what


@pytest.mark.parametrize("what", steered.CHANGES)
def test_a_glance_sees_each_change(what, monkeypatch):
    model = steered.model()
    for earlier, change in steered.CHANGES.items():
        if earlier == what:
            break
        change(model, monkeypatch)
    glance = Glance(model)
    for harmless in (lambda: logits(model, *CALL), lambda: model.load_state_dict(model.state_dict())):
        harmless()
        assert glance.same() and glance.unknown == ""
    steered.CHANGES[what](model, monkeypatch)
    later = Glance(model, glance)
    assert not glance.same() and glance.state != later.state and glance.changed(later)
    assert later.same() and later.state == Glance(model).state


OF_THIS_FILE = 1.0


@pytest.mark.parametrize("where", ["the function", "what it closes over"])
def test_new_code_of_a_function_is_walked_again(where, monkeypatch):
    model, module = steered.model(), sys.modules[__name__]

    def inner(x):
        return x

    def outer(x):
        return inner(x)

    model.model.layers[1].mlp.function = inner if where == "the function" else outer
    glance = Glance(model)
    inner.__code__ = (lambda x: x * OF_THIS_FILE).__code__
    later = Glance(model, glance)
    assert later.same()
    monkeypatch.setattr(module, "OF_THIS_FILE", 2.0)
    assert not later.same() and Glance(model, later).state != later.state


def test_experts_of_a_router():
    model, twin = tiny.model("qwen3_moe"), tiny.model("qwen3_moe")
    with patched(model, "breakable"):
        assert relative(logits(model, *CALL), before := logits(twin, *CALL)) < LIMIT
        for each in (model, twin):
            each.model.layers[0].mlp.gate.top_k = 1
        assert relative(logits(model, *CALL), want := logits(twin, *CALL)) < LIMIT < relative(before, want)


FLAGS = {
    "determinism": lambda on: torch.use_deterministic_algorithms(on, warn_only=on),
    "tf32": lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
    "bf16 sums": lambda on: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", not on),
    "fp16 sums": lambda on: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", not on),
    "cudnn": lambda on: setattr(torch.backends.cudnn, "allow_tf32", not on),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_torch(flag):
    """On a CPU most change nothing, so that captures are counted."""
    model = tiny.model("llama")
    with patched(model, "auto") as handle:
        FLAGS[flag](False)  # a flag that was never set may differ from both
        generated(model, *CALL)
        before = captures(handle)
        try:
            FLAGS[flag](True)
            generated(model, *CALL)
            made = captures(handle)
            # Of the step, and of the choice of a token.
            assert made == before + 2
        finally:
            FLAGS[flag](False)
        generated(model, *CALL)
        assert captures(handle) == made, "the graphs from before are there still"


WITHOUT = (
    "kimi_linear", "qwen3_next", "qwen3_5", "lfm2", "doge", "llama4", "longcat_flash", "gpt2", "opt",
)  # fmt: skip
"""Families whose steps have no graphs: their layers have states that move, pages do not serve them,
or their code waits for the device."""

STEADY = [
    *((name, mode) for name in (*DECODERS, "llava") for mode in ("auto", "breakable")),
    *(pytest.param(name, "piecewise", marks=pytest.mark.full) for name in ("llama", "gpt_oss")),
]


@pytest.mark.sweep(5)
@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
@pytest.mark.parametrize(("name", "mode"), STEADY)
def test_a_model_that_does_not_change_is_captured_once(name, mode):
    model = tiny.model(name)
    ids, given = asked(1, 6, 3)
    if mode != "auto" and name in WITHOUT:
        with pytest.raises((PatchError, NotCapturable)), patched(model, mode):
            model.generate(ids, **given)
        return
    never = {"decode": auto(compile_after=99)}
    with attnops.patch(model, **never) if mode == "auto" else patched(model, mode) as handle:
        made = []
        for call in range(12):
            model.generate(ids, **{**given, "do_sample": call % 2 == 1})
            made.append(handle.decode.graphs.calls.count("begin"))
        assert made[1:] == made[1:2] * 11, "a call of each kind captures"
        # Without graphs there is a reason.
        assert (handle.took.decode == "hf") is (name in WITHOUT), handle.took
        assert (handle.took.why != "") is (name in WITHOUT)
        assert "captured anew" not in str(handle.report())


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_layers(count):
    models = tiny.model("llama"), tiny.model("llama")
    model, twin = models
    with patched(model, "auto") as handle:
        generated(model, *CALL)
        for each in models:
            layers = list(each.model.layers)
            layers.append(copy.deepcopy(layers[1]))
            layers[2].self_attn.layer_idx = 2
            each.model.layers, each.config.num_hidden_layers = nn.ModuleList(layers[:count]), count
        assert relative(logits(model, *CALL), logits(twin, *CALL)) < LIMIT
        why = f"model.layers has {count} layers, and had 2 at patch()"
        assert (handle.took.cache, handle.took.why) == ("hf", why)
    model = tiny.model("llama")
    with patched(model, "breakable"):
        model.model.layers = model.model.layers[:1]
        with pytest.raises(InvalidInput, match=r"has 1 layers, and had 2 at patch.*call unpatch"):
            generated(model, *CALL)


# Side effects --------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own, self.calls, self.seen = own, 0, []

    def forward(self, x):
        self.calls += 1
        return self.own(x)


class Recording(Counting):
    def forward(self, x):
        self.seen.append(x.shape[-2])
        return self.own(x)


ALL: list[int] = []


class RecordingForAll(Counting):
    def forward(self, x):
        ALL.append(x.shape[-2])
        return self.own(x)


def closed_over(own):
    found = Counting(own)
    seen = found.seen

    def forward(x):
        seen.append(1)
        return own(x)

    found.forward = forward
    return found


EFFECTS = {
    "calls": (Counting, lambda mlp: mlp.calls),
    "seen": (Recording, lambda mlp: len(mlp.seen)),
    "RecordingForAll.forward|ALL": (RecordingForAll, lambda mlp: len(ALL)),
    "forward": (closed_over, lambda mlp: len(mlp.seen)),
}


@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("name", EFFECTS)
def test_a_step_with_a_side_effect_is_not_captured(name, mode):
    model = tiny.model("llama")
    layer = model.model.layers[1]
    want, own = generated(model, *CALL), layer.mlp
    make, count = EFFECTS[name]
    layer.mlp = make(own)
    with patched(model, mode) as handle:
        with pytest.warns(NotFast, match="the model's own forward writes"):
            assert torch.equal(generated(model, *CALL), want)
        assert "the model's own forward writes" in handle.took.why
        assert any(part in handle.took.why for part in name.split("|")), handle.took.why
        made = captures(handle)
        for _ in range(2):
            before = count(layer.mlp)
            assert torch.equal(generated(model, *CALL), want)
            assert count(layer.mlp) == before + CALL[2], "each call of the model ran it once"
        assert captures(handle) == made
        layer.mlp = own
        assert torch.equal(generated(model, *CALL), want)
        assert handle.took.why == "" and handle.took.decode != "hf"


def test_what_a_twin_has_written_is_the_modules():
    """Compiled layers run as twins, whose attributes are their own."""
    module = Counting(nn.Linear(2, 2))
    same, _ = twin(module)
    assert not write_back(module, same)
    same.calls, same.last = 3, 1
    assert write_back(module, same) and (module.calls, module.last) == (3, 1)
    assert not write_back(module, same)


@pytest.mark.full
def test_a_compiled_step_that_counts_its_calls():
    """A layer runs as its twin, and the count is the module's all the same."""
    model = tiny.model("llama")
    layer = model.model.layers[1]
    layer.mlp = Counting(layer.mlp)
    with attnops.patch(model, cache="paged", decode=how("piecewise")) as handle:
        with pytest.warns(NotFast, match=r"writes model\.layers\.1\.mlp\.calls"):
            generated(model, *CALL)
        before, made = layer.mlp.calls, captures(handle)
        generated(model, *CALL)
        assert layer.mlp.calls == before + CALL[2] and captures(handle) == made


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
def test_a_recording_forward_that_is_taken_away():
    """The same module: what it wrote no longer matters."""
    model = tiny.model("llama")
    layer = model.model.layers[1]
    layer.mlp = closed_over(layer.mlp)
    with patched(model, "breakable") as handle:
        generated(model, *CALL)
        assert "forward" in handle.took.why
        del layer.mlp.forward
        layer.mlp.__class__ = Recording
        generated(model, *CALL)
        assert "seen" in handle.took.why
        layer.mlp = layer.mlp.own
        generated(model, *CALL)
        assert handle.took.why == ""


def test_what_cannot_be_compared_is_not_captured():
    model = tiny.model("llama")
    want = generated(model, *CALL)
    mlp = model.model.layers[0].mlp
    mlp.numbers = itertools.count()
    with patched(model, "breakable") as handle:
        with pytest.warns(NotFast, match="itertools.count"):
            assert torch.equal(generated(model, *CALL), want)
        assert handle.graphs is None
        assert "LlamaMLP.numbers holds an object of itertools.count, which cannot be compared" in handle.took.why
        with torch.no_grad():
            cache = handle.new_cache(2, 20)
            ids = asked(*CALL)[0]
            model(ids, **named(cache))
            with pytest.raises(NotCapturable, match="which cannot be compared"):
                handle.capture(cache)
            step = handle.step(ids[:, :1], cache)
        del mlp.numbers
        assert torch.equal(generated(model, *CALL), want) and replays(handle) == CALL[2] - 1
        with torch.no_grad():
            other = handle.new_cache(2, 20)
            model(ids, **named(other))
            assert relative(handle.step(ids[:, :1], other), step) < LIMIT


# Hooks and modes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("every", [True, False])
def test_hooks_of_the_caller_run_at_every_step(every, mode):
    """Those of one module, and those that torch calls for every module."""
    model, seen = tiny.model("llama"), []
    mlp = model.model.layers[0].mlp
    want = generated(model, *CALL)

    def hook(module, given, out):
        if module is mlp:
            seen.append(tuple(out.shape[:2]))

    register = of_modules.register_module_forward_hook if every else mlp.register_forward_hook
    with patched(model, mode) as handle:
        generated(model, *CALL)
        added = register(hook)
        try:
            for _ in range(2):
                seen.clear()
                assert torch.equal(generated(model, *CALL), want)
                assert seen == [(2, 14), (2, 1), (2, 1)] and "hooks of the caller" in handle.took.why
        finally:
            added.remove()
        seen.clear()
        assert torch.equal(generated(model, *CALL), want) and not seen
        assert handle.took.why == "" and handle.took.decode != "hf"


def test_a_step_by_hand_runs_the_hooks_of_the_model():
    """As a call of the model does, and as generate() does: a hook may change what they return."""
    model, ids = tiny.model("llama"), asked(*CALL)[0]

    def steps(handle):
        cache = handle.new_cache(2, 20)
        with torch.no_grad():
            model(ids, **named(cache))
        return torch.cat([handle.step(ids[:, at : at + 1], cache) for at in range(2)])

    with patched(model, "breakable") as handle:
        want = steps(handle)
        with model.register_forward_pre_hook(lambda *_: None), model.register_forward_hook(_doubled):
            assert relative(steps(handle), 2 * want) < LIMIT
        with of_modules.register_module_forward_hook(_doubled_of_models):
            assert relative(steps(handle), 2 * want) < LIMIT
        assert relative(steps(handle), want) < LIMIT


def _doubled_of_models(module, given, out):
    return _doubled(module, given, out) if hasattr(out, "logits") else out


def _doubled(module, given, out):
    out.logits = 2 * out.logits
    return out


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is torch.nn.functional.silu else out


@pytest.mark.parametrize("mode", FEW)
def test_function_modes(mode):
    model, twin = tiny.model("llama"), tiny.model("llama")
    with patched(model, mode) as handle:
        plain = logits(model, *CALL)
        with Doubled():
            got, want = logits(model, *CALL), logits(twin, *CALL)
        assert relative(got, want) < LIMIT < relative(plain, want)
        assert "the function mode Doubled sees each operation" in handle.took.why
        with torch.device("cpu"):
            assert relative(logits(model, *CALL), plain) < LIMIT and handle.took.why == ""


# The cure ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_release_drops_every_graph(mode):
    """Of steps, of prompts and of the choice of tokens, over pages that a cache uses, too."""
    model = tiny.model("llama")
    with patched(model, mode) as handle:
        want = generated(model, *CALL)
        kept = handle.new_cache(2, 20)
        ids, given = asked(*CALL)
        assert torch.equal(model.generate(ids, **given, **named(kept)), want)
        graphs = handle.decode.graphs.graphs
        assert any(graph.alive for graph in graphs)
        handle.release()
        gc.collect()
        assert not any(graph.alive for graph in graphs)
        kept.reset()
        made = len(graphs)
        assert torch.equal(model.generate(ids, **given, **named(kept)), want) and len(graphs) > made
