"""The first tokens over pages: without padding no kernel is given bounds, and a device that the
host waits for has them packed."""

import pytest
import torch

import attnops
from attnops.hf import tiny
from attnops.hf.attention import descriptor, over_pages
from attnops.hf.cache.names import named
from tests.hf.helpers import left_padded, near, paged, positions, replaced, tokens


@pytest.fixture
def calls():
    """The calls of ops over pages, each by its name and whether bounds were given."""
    found = []

    def noted(name, op):
        def call(*args, **kwargs):
            found.append((name, kwargs.get("kv_start") is not None))
            return op(*args, **kwargs)

        return call

    ops = {name: f"{name}_attention" for name in ("dense", "varlen", "paged")}
    with replaced(
        over_pages, **{op: noted(name, getattr(over_pages, op)) for name, op in ops.items()}
    ):
        yield found


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_bounds_are_those_of_padding(calls, monkeypatch, padded, far, name):
    """In a chunk after the first, too, which reads the pages."""
    monkeypatch.setattr(descriptor, "far", lambda device: far)
    model, ids = tiny.model(name), tokens(3, 12)
    mask = left_padded(3, 12) if padded else torch.ones_like(ids)
    given = {"attention_mask": mask, "position_ids": positions(mask)}
    with torch.no_grad():
        want = model(ids, **given).logits
        with paged(model) as handle:
            cache = handle.new_cache(3, 16)
            calls.clear()
            first = {"attention_mask": mask[:, :8], "position_ids": given["position_ids"][:, :8]}
            got = [model(ids[:, :8], **named(cache), **first).logits]
            layers = model.config.get_text_config().num_hidden_layers
            kind = "varlen" if far and not padded else "dense"
            assert calls == [(kind, padded)] * layers
            calls.clear()
            rest = {"attention_mask": mask, "position_ids": given["position_ids"][:, 8:]}
            got.append(model(ids[:, 8:], **named(cache), **rest).logits)
            assert all(name in ("paged", "dense") for name, _ in calls)
            assert name != "llama" or calls == [("paged", False)] * layers
    real = mask.bool()
    near(torch.cat(got, 1)[real], want[real])


def test_a_forced_kernel_without_packed_requests_stays(calls, monkeypatch):
    """As `patch(kernel="cudnn")` hands it on: of each op the kernel of that name, if it has one."""
    real = over_pages.attend_keys

    def without(asked, bounds, dense, paged, varlen):
        return real(asked, bounds, "sdpa", paged, None)

    monkeypatch.setattr(descriptor, "far", lambda device: True)
    monkeypatch.setattr(over_pages, "attend_keys", without)
    first(tiny.model("llama"), tokens(2, 8))
    assert calls == [("dense", False)] * 2


def first(model, ids, mask=None, mode=torch.no_grad):
    """A first step over pages."""
    given = {} if mask is None else {"attention_mask": mask, "position_ids": positions(mask)}
    with mode(), paged(model) as handle:
        return model(ids, **named(handle.new_cache(*ids.shape)), **given).logits


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_mode_has_it_too(calls, monkeypatch, mode):
    monkeypatch.setattr(descriptor, "far", lambda device: True)
    first(tiny.model("llama"), tokens(2, 8), mode=mode)
    assert calls == [("varlen", False)] * 2


@pytest.mark.parametrize(
    "policy",
    [
        {"deterministic": True},
        {"kernel": {"attention": "sdpa"}},
        {"prefer": ("attention:reference",)},
    ],
    ids=str,
)
def test_under_a_policy_bounds_are_given(calls, monkeypatch, policy):
    """A row of a deterministic policy takes the same kernel beside a row with padding."""
    monkeypatch.setattr(descriptor, "far", lambda device: True)
    model, ids = tiny.model("llama"), tokens(2, 8)
    with attnops.use(**policy):
        first(model, ids[:1])
        first(model, ids, left_padded(2, 8))
    assert calls == [("dense", True)] * 4
