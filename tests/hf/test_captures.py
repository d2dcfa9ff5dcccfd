"""What captured steps and captured prompts of generate() see of a model that changes between two
calls, and what they leave alone."""

import copy
import gc
import itertools
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_modules
from torch.overrides import TorchFunctionMode

from attnops.core.errors import InvalidInput, NotCapturable, NotFast
from attnops.graphs.per_layer import twin, write_back
from attnops.hf import tiny
from attnops.hf.cache.names import named
from attnops.hf.steps.model_state import Glance
from tests.hf import steered
from tests.hf.decoding import (
    asked,
    beside,
    captures,
    generated,
    graphed,
    logits,
    prompts_in_graphs,
    replays,
)
from tests.hf.helpers import LIMIT, near, relative

CALL = (2, 14, 3)
COMPILE_AFTER = {"auto": 6, "breakable": 0, "piecewise": 0}
FEW = ("auto", "breakable", pytest.param("piecewise", marks=pytest.mark.full))
"""Compiled steps take seconds for each change."""


def both(mode, model="llama", twin=None):
    return beside(model, mode, twin, compile_after=COMPILE_AFTER[mode])


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Prompts are captured at once where they are compiled."""
    prompts_in_graphs(monkeypatch, 32)


# test_a_glance_sees_each_change has each, and tests/hf/test_captures_fuzz.py breakable steps of
# models that change.
@pytest.mark.parametrize(
    ("mode", "every"),
    [("auto", 3), *(pytest.param(mode, 1, marks=pytest.mark.full) for mode in COMPILE_AFTER)],
)
def test_each_change_is_seen(mode, every, monkeypatch):
    """Also those that compiled code is not guarded on: Dynamo takes tuples for constants, and looks
    for no other method of a class."""
    with both(mode, steered.model()) as pair:
        want = pair.near(*CALL)
        for number, what in enumerate((steered.CHANGES + steered.LAST)[::every]):
            before, graphs = want, pair.handle.graphs
            for model in (pair.model, pair.twin):
                steered.make(what, model, monkeypatch, 1.3 + number / 50)
            want = pair.near(*CALL)
            assert relative(before, want) > 10 * LIMIT, f"{what}: changes nothing"
            assert (pair.took.cache, pair.took.why) == ("paged", ""), what
            assert mode == "auto" or (pair.handle.graphs is graphs) == (what in steered.IN_PLACE), (
                what
            )
            # Layers with a forward of an instance share no code, and prompts are compiled after
            # steps.
            assert mode != "piecewise" or pair.took.prompt == "captured" or "forward of" in what, (
                f"{what}: {pair.decoder.prompts.why}"
            )


@pytest.mark.parametrize("what", steered.CHANGES + steered.LAST + steered.UNFELT)
def test_a_glance_sees_each_change(what, monkeypatch):
    """And the state in it, which decides, is another one."""
    model = steered.model()
    for earlier in itertools.takewhile(lambda name: name != what, steered.CHANGES):
        steered.make(earlier, model, monkeypatch, 1.2)
    glance = Glance(model)
    for harmless in (
        lambda: logits(model, *CALL),
        lambda: model.load_state_dict(model.state_dict()),
    ):
        harmless()
        assert glance.same() and glance.unknown == ""
    steered.make(what, model, monkeypatch, 1.3)
    later, seen = Glance(model, glance), what not in steered.IN_PLACE
    assert (
        glance.same() is not seen
        and (glance.state != later.state) is seen
        and bool(glance.changed(later)) is seen
    )
    assert later.same() and later.state == Glance(model).state


def test_a_glance_holds_no_weight():
    model = tiny.model("llama")
    glance, head = Glance(model), weakref.ref(model.lm_head.weight)
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    gc.collect()
    assert head() is None and not glance.same()


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
    with both("breakable", "qwen3_moe") as pair:
        before = pair.near(*CALL)
        pair.change(lambda model: setattr(model.model.layers[0].mlp.gate, "top_k", 1))
        assert relative(before, pair.near(*CALL)) > LIMIT


FLAGS = {
    "determinism": lambda on: torch.use_deterministic_algorithms(on, warn_only=on),
    "tf32": lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
    "bf16 sums": lambda on: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", not on
    ),
    "fp16 sums": lambda on: setattr(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", not on
    ),
    "cudnn": lambda on: setattr(torch.backends.cudnn, "allow_tf32", not on),
}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.usefixtures("own_prompts")
def test_flags_of_torch(flag):
    """On a CPU most change nothing, so that captures are counted."""
    with both("auto") as pair:
        counts = []
        try:
            for on in (False, True, False):  # a flag that was never set may differ from both
                FLAGS[flag](on)
                pair.same(*CALL)
                counts.append(captures(pair.handle))
        finally:
            FLAGS[flag](False)
        # Of the step, and of the choice of a token. The graphs from before are there still.
        assert counts == [2, 4, 4]


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_layers(count):
    def relisted(model):
        layers = [*model.model.layers, copy.deepcopy(model.model.layers[1])]
        layers[2].self_attn.layer_idx = 2
        model.model.layers, model.config.num_hidden_layers = nn.ModuleList(layers[:count]), count

    with both("auto") as pair:
        pair.near(*CALL)
        pair.change(relisted)
        pair.near(*CALL)
        assert (pair.took.cache, pair.took.why) == (
            "hf",
            f"model.layers has {count} layers, and had 2 at patch()",
        )
    with both("breakable") as pair:
        relisted(pair.model)
        with pytest.raises(
            InvalidInput, match=rf"has {count} layers, and had 2 at patch.*call unpatch"
        ):
            generated(pair.model, *CALL)


# Side effects -------------------------------------------------------------------------------------


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
    """Compiled layers run as twins, and the count is the module's all the same."""
    twin = tiny.model("llama")
    model = copy.deepcopy(twin)
    layer, (make, count) = model.model.layers[1], EFFECTS[name]
    own = layer.mlp
    layer.mlp = make(own)
    with both(mode, model, twin) as pair:
        with pytest.warns(NotFast, match="the model's own forward writes"):
            assert "the model's own forward writes" in pair.same(*CALL).why
        assert any(part in pair.took.why for part in name.split("|")), pair.took.why
        made = captures(pair.handle)
        for _ in range(2):
            before = count(layer.mlp)
            pair.same(*CALL)
            assert count(layer.mlp) == before + CALL[2], "each call of the model ran it once"
        assert captures(pair.handle) == made
        layer.mlp = own
        took = pair.same(*CALL)
        assert took.why == "" and took.decode != "hf"


def test_what_a_twin_has_written_is_the_modules():
    """Compiled layers run as twins, whose attributes are their own."""
    module = Counting(nn.Linear(2, 2))
    same, _ = twin(module)
    assert not write_back(module, same)
    same.calls, same.last = 3, 1
    assert write_back(module, same) and (module.calls, module.last) == (3, 1)
    assert not write_back(module, same)


@pytest.mark.filterwarnings("ignore::attnops.core.errors.NotFast")
def test_a_recording_forward_that_is_taken_away():
    """The same module: what it wrote no longer matters."""
    model = tiny.model("llama")
    layer = model.model.layers[1]
    layer.mlp = closed_over(layer.mlp)
    with both("breakable", model) as pair:
        assert "forward" in pair.same(*CALL).why
        del layer.mlp.forward
        layer.mlp.__class__ = Recording
        assert "seen" in pair.same(*CALL).why
        layer.mlp = layer.mlp.own
        assert pair.same(*CALL).why == ""


def test_what_cannot_be_compared_is_not_captured():
    with both("breakable") as pair, torch.no_grad():
        mlp, handle, ids = pair.model.model.layers[0].mlp, pair.handle, asked(*CALL)[0]
        mlp.numbers = itertools.count()

        def filled():
            cache = handle.new_cache(2, 20)
            pair.model(ids, **named(cache))
            return cache

        with pytest.warns(NotFast, match="itertools.count"):
            pair.same(*CALL)
        assert handle.graphs is None
        assert (
            "LlamaMLP.numbers holds an object of itertools.count, which cannot be compared"
            in pair.took.why
        )
        cache = filled()
        with pytest.raises(NotCapturable, match="which cannot be compared"):
            handle.capture(cache)
        step = handle.step(ids[:, :1], cache)
        del mlp.numbers
        pair.same(*CALL)
        assert replays(handle) == CALL[2] - 1
        near(handle.step(ids[:, :1], filled()), step)


# Hooks and modes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", FEW)
@pytest.mark.parametrize("every", [True, False])
def test_hooks_of_the_caller_run_at_every_step(every, mode):
    """Those of one module, and those that torch calls for every module."""
    seen = []
    with both(mode) as pair:
        mlp = pair.model.model.layers[0].mlp

        def hook(module, given, out):
            if module is mlp:
                seen.append(tuple(out.shape[:2]))

        pair.same(*CALL)
        with (of_modules.register_module_forward_hook if every else mlp.register_forward_hook)(
            hook
        ):
            for _ in range(2):
                seen.clear()
                pair.same(*CALL)
                assert seen == [(2, 14), (2, 1), (2, 1)] and "hooks of the caller" in pair.took.why
        seen.clear()
        pair.same(*CALL)
        assert not seen and pair.took.why == "" and pair.took.decode != "hf"


def test_a_step_by_hand_runs_the_hooks_of_the_model():
    """As a call of the model does, and as generate() does: a hook may change what they return."""
    model, ids = tiny.model("llama"), asked(*CALL)[0]

    def steps(handle):
        cache = handle.new_cache(2, 20)
        with torch.no_grad():
            model(ids, **named(cache))
        return torch.cat([handle.step(ids[:, at : at + 1], cache) for at in range(2)])

    with graphed(model) as handle:
        want = steps(handle)
        with (
            model.register_forward_pre_hook(lambda *_: None),
            model.register_forward_hook(_doubled),
        ):
            near(steps(handle), 2 * want)
        with of_modules.register_module_forward_hook(_doubled_of_models):
            near(steps(handle), 2 * want)
        near(steps(handle), want)


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
    with both(mode) as pair:
        plain = pair.near(*CALL)
        with Doubled():
            assert relative(plain, pair.near(*CALL)) > LIMIT
        assert "the function mode Doubled sees each operation" in pair.took.why
        with torch.device("cpu"):
            pair.near(*CALL)
        assert pair.took.why == ""


# The cure -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", COMPILE_AFTER)
def test_release_drops_every_graph(mode):
    """Of steps, of prompts and of the choice of tokens, over pages that a cache uses, too."""
    with both(mode) as pair:
        handle = pair.handle
        pair.same(*CALL)
        kept = handle.new_cache(2, 20)
        pair.same(*CALL, **named(kept))
        graphs = handle.decode.graphs.graphs
        assert any(graph.alive for graph in graphs)
        handle.release()
        gc.collect()
        assert not any(graph.alive for graph in graphs)
        kept.reset()
        made = len(graphs)
        pair.same(*CALL, **named(kept))
        assert len(graphs) > made
