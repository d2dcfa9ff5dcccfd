"""What `unpatch()` leaves behind: no memory of the model, and no half of a patch."""

import gc
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers.generation.streamers import BaseStreamer

import attnops
from attnops import adapters
from attnops.core.errors import InvalidInput, PatchError
from attnops.hf import patching, tiny
from attnops.hf.cache.names import named
from tests.hf.decoding import TIERS, generated

CALL = (2, 14, 3)
WAYS = ("default", "pages", "auto", "breakable", "piecewise")


@contextmanager
def no_collection():
    """Within the block objects are freed by their reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def parts(model):
    """Weak references to a model's modules and parameters."""
    return [weakref.ref(part) for part in (*model.modules(), *model.parameters())]


def alive(parts):
    return [type(part()).__name__ for part in parts if part() is not None]


# Traces of llama's layers leave no cycles behind.
FEW = {
    ("default", "llama"),
    ("pages", "deepseek_v3"),
    ("auto", "llama"),
    ("breakable", "gpt_oss"),
    ("piecewise", "gpt_oss"),
}
EACH = [
    case if case in FEW else pytest.param(*case, marks=pytest.mark.full)
    for case in itertools.product(WAYS, ("llama", "deepseek_v3", "gpt_oss"))
]


@pytest.mark.parametrize(("way", "name"), EACH)
def test_a_model_is_freed_at_once(way, name):
    """By reference counts, while the handle and its report live on."""
    with no_collection():
        model = tiny.model(name)
        handle = attnops.patch(model, **TIERS[way]())
        generated(model, *CALL)
        head, *_ = str(handle.report()).splitlines()
        handle.unpatch()
        held = parts(model)
        assert handle.model is model
        del model
        assert not alive(held)
        assert handle.model is None and handle.took is not None
        assert str(handle.report()).startswith(head) and "unpatched" in repr(handle)


@pytest.mark.parametrize(
    "way",
    [*WAYS[:-1], pytest.param("piecewise", marks=pytest.mark.full)],
)
def test_a_patched_model_is_freed_by_a_collection(way):
    model = tiny.model("llama")
    attnops.patch(model, **TIERS[way]())
    generated(model, *CALL)
    held = parts(model)
    del model
    gc.collect()
    assert not alive(held)


class Late:
    """In place of a function: its first call waits for `second`, which another thread sets unless
    it waits itself."""

    def __init__(self, real):
        self.real = real
        self.calls = 0
        self.came = threading.Event()
        self.second = threading.Event()

    def __call__(self, *args):
        self.calls += 1
        (self.came if self.calls == 1 else self.second).set()
        if self.calls == 1:
            self.second.wait(1)
        return self.real(*args)


def in_turn(late, first, second):
    """The results of two functions, of which the second begins while the first waits."""
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        assert late.came.wait(60)
        two = pool.submit(second)
        return one.result(), two.result()


MODELS = {
    "transformers": (lambda: tiny.model("llama"), patching, "match"),
    "another": (lambda: nn.Sequential(nn.MultiheadAttention(8, 2)), adapters, "_sites"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_threads_patch_in_turn(kind, monkeypatch):
    make, where, name = MODELS[kind]
    model, late = make(), Late(getattr(where, name))
    monkeypatch.setattr(where, name, late)
    one, two = in_turn(late, lambda: attnops.patch(model), lambda: attnops.patch(model))
    assert one is two and late.calls == 1


@pytest.mark.parametrize("kind", MODELS)
def test_threads_unpatch_and_patch_in_turn(kind, monkeypatch):
    model = MODELS[kind][0]()
    handle = attnops.patch(model)
    patched = [(type(each), set(vars(each))) for each in model.modules()]
    part = handle._swaps[-1] if kind == "another" else handle._parts[-1]
    late = Late(part.undo)
    monkeypatch.setattr(part, "undo", late)

    def patch_again():
        again = attnops.patch(model)
        late.second.set()
        return again

    _, again = in_turn(late, handle.unpatch, patch_again)
    assert again is not handle and again.active and not handle.active
    assert [(type(each), set(vars(each))) for each in model.modules()] == patched


class Unpatches(BaseStreamer):
    """Calls `unpatch()` at the third token."""

    def __init__(self, handle):
        self.handle, self.tokens = handle, 0

    def put(self, value):
        self.tokens += 1
        if self.tokens == 3:
            self.handle.unpatch()

    def end(self):
        pass


ONE = torch.full((1, 9), 5)


@pytest.mark.parametrize("way", ["default", "pages", "breakable"])
def test_unpatch_within_generate(way):
    model = tiny.model("llama")
    given = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    want = model.generate(ONE, **given)
    handle = attnops.patch(model, **TIERS[way]())
    with pytest.raises(PatchError, match=r"want unpatch\(\) after generate\(\) has returned"):
        model.generate(ONE, **given, streamer=Unpatches(handle))
    other = tiny.model("llama")

    def another(ids, scores):
        other.generate(ONE, **given, streamer=Unpatches(handle))

    with attnops.patch(other), pytest.raises(PatchError, match="LlamaForCausalLM within a call"):
        model.generate(ONE, **given, logits_processor=[another])
    assert handle.active and torch.equal(model.generate(ONE, **given), want)
    handle.unpatch()
    assert torch.equal(model.generate(ONE, **given), want)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_cache_after_unpatch(name):
    """Its pages are free, too."""
    model = tiny.model(name)
    handle = attnops.patch(model, cache="paged")
    kept = handle.new_cache(1, 40)
    with torch.no_grad():
        model(ONE, **named(kept))
    pages = weakref.ref(kept.state.pages)
    handle.unpatch()
    gc.collect()
    assert pages() is None
    whole = torch.ones(1, 1, 1, 10, dtype=torch.bool)
    for use in (
        lambda: model(ONE[:, :1], **named(kept)),
        lambda: model(
            ONE[:, :1], attention_mask=whole, position_ids=torch.tensor([[9]]), **named(kept)
        ),
        lambda: model.generate(ONE, max_new_tokens=2, **named(kept)),
        lambda: kept.crop(-1),
    ):
        with (
            torch.no_grad(),
            pytest.raises(InvalidInput, match="a cache of a model that was unpatched since"),
        ):
            use()
