"""Eager steps of patched models, most of which find what serves them known: by layers and tokens alike, and never for another call."""

import pytest
import torch
from transformers import DynamicCache

import attnops
from attnops.hf import tiny
from attnops.ops import eager
from attnops.ops.dense import ATTENTION
from attnops.problem import Extent
from tests.hf.helpers import LIMIT, left_padded, logits, relative, tokens

if eager._TensorGuards is None:
    pytest.skip("this torch has no TensorGuards", allow_module_level=True)


@pytest.fixture(autouse=True)
def looked(monkeypatch):
    """The shapes of queries and keys, heads first, of every call that was looked at; nothing is remembered at the start."""
    ATTENTION.seen.clear()
    calls, real = [], eager.checked

    def checked(op, call):
        if op is ATTENTION:
            calls.append((tuple(call.query.transpose(1, 2).shape), tuple(call.key.transpose(1, 2).shape)))
        return real(op, call)

    monkeypatch.setattr(eager, "checked", checked)
    return calls


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("mask", ["dense", "compact"])
def test_the_second_run_is_known_and_the_same(name, mask, looked):
    model = tiny.model(name)
    want = logits(model, "dynamic", tokens(), left_padded())
    with attnops.patch(model, mask=mask):
        first = logits(model, "dynamic", tokens(), left_padded())
        assert looked and relative(first, want) < LIMIT
        looked.clear()
        assert torch.equal(logits(model, "dynamic", tokens(), left_padded()), first)
        assert not looked


@torch.no_grad()
def test_layers_and_tokens_share_a_look(looked):
    model, ids = tiny.model("llama"), tokens(2, 80)
    lines = []
    for patched in (False, True):
        cache = DynamicCache(config=model.config)
        handle = attnops.patch(model) if patched else None
        out = [model(ids[:, :33], past_key_values=cache).logits[:, -1:]]
        out += [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(33, 80)]
        lines.append(torch.cat(out, 1))
        if handle is not None:
            handle.unpatch()
    assert relative(lines[1], lines[0]) < LIMIT
    # Once for all layers and all numbers of keys that no kernel tells apart; 64 is the end of such a range.
    keys = [k[2] for _, k in looked]
    assert keys[:2] == [33, 34] and len(keys) <= 12 and {Extent.of(k) for k in keys} == {Extent.of(k) for k in range(33, 81)}


@torch.no_grad()
def test_a_window_that_begins_to_bind(looked):
    model, ids = tiny.model("mistral", sliding_window=8), tokens(1, 20)
    want = model(ids).logits[:, 5:]
    with attnops.patch(model):
        for _ in range(2):
            cache = DynamicCache(config=model.config)
            model(ids[:, :5], past_key_values=cache)
            got = torch.cat([model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(5, 20)], 1)
            assert relative(got, want) < LIMIT


def test_training_and_autocast_in_between(looked):
    model, ids = tiny.model("llama", attention_dropout=0.5), tokens(1, 9)
    with attnops.patch(model):
        with torch.no_grad():
            want = model(ids).logits
            known = len(looked)
            assert torch.equal(model(ids).logits, want) and len(looked) == known
            model.train()
            torch.manual_seed(0)
            dropped = model(ids).logits
            assert not torch.allclose(dropped, model(ids).logits) and len(looked) == known  # no kernel drops
            model.eval()
            cast = {}
            for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
                with torch.autocast("cpu", dtype):
                    again = model(ids).logits
                assert torch.equal(cast.setdefault(dtype, again), again) and again.dtype == dtype
            assert not torch.equal(cast[torch.bfloat16].float(), cast[torch.float16].float())
            assert torch.equal(model(ids).logits, want)
        model(ids).logits.square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        assert all(g is not None and bool(torch.isfinite(g).all()) for g in grads)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, want)
            with attnops.use(kernel={"attention": "reference"}):
                other = model(ids).logits
            assert relative(other, want) < LIMIT and not torch.equal(other, want)
            assert torch.equal(model(ids).logits, want)
