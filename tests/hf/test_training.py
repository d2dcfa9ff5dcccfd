"""Gradients of a patched model are eager's; dropout drops what eager drops."""

from typing import Any

import pytest
import torch

import attnops
from attnops.hf import tiny
from tests.hf.helpers import left_padded, relative, tokens, watched

# The backward passes through every layer twice, and the gradients of small weights are sums of large terms.
LIMIT = 256 * torch.finfo(torch.float32).eps


def step(model, mask, checkpoint=False, autocast=False):
    """The loss and every gradient of one training step.

    Padding has no label, nor has a first token: it would be predicted from a padding row, where eager attention gives the mean of
    all values and attnops 0.
    """
    ids = tokens(3, 12)
    labels = ids.masked_fill((mask == 0) | (mask.cumsum(-1) == 1), -100)
    model.train()
    if checkpoint:
        model.gradient_checkpointing_enable()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(ours, eager, limit=LIMIT):
    assert ours[1].keys() == eager[1].keys()
    assert abs(ours[0] - eager[0]) <= limit * abs(eager[0])
    top = max(grad.abs().max().item() for grad in eager[1].values())
    for name, grad in eager[1].items():
        assert torch.isfinite(ours[1][name]).all(), name
        assert (ours[1][name] - grad).abs().max() <= limit * max(grad.abs().max().item(), 1e-2 * top), name


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen2_moe", "gpt2", "opt"])
def test_gradients(name, side, mode):
    mask = left_padded(3, 12) if side == "left" else left_padded(3, 12).flip(1)
    eager = step(tiny.model(name, **no_dropout(name)), mask)
    model = tiny.model(name, **no_dropout(name))
    with attnops.patch(model, mask=mode), watched() as calls:
        ours = step(model, mask)
    assert calls, "without dropout the op itself is differentiated"
    compare(ours, eager)


def no_dropout(name) -> dict[str, Any]:
    return {"gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, "opt": {"dropout": 0.0}}.get(name, {})


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_gradient_checkpointing(name):
    mask = left_padded(3, 12)
    eager = step(tiny.model(name), mask)
    model = tiny.model(name)
    with attnops.patch(model):
        compare(step(model, mask, checkpoint=True), eager)


@pytest.mark.parametrize("mode", ["dense", "compact"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_dropout(name, mode):
    """The same seed drops the same weights as eager attention does, so loss and gradients agree; another seed drops others."""
    mask = left_padded(3, 12)

    def run(patched, seed):
        model = tiny.model(name, attention_dropout=0.3)
        handle = attnops.patch(model, mask=mode) if patched else None
        torch.manual_seed(seed)
        with watched() as calls:
            result = step(model, mask)
        assert not calls, "the op has no dropout"
        if handle:
            assert any("dropout" in note for note in handle.report().notes)
            model.eval()
            with watched() as calls, torch.no_grad():
                model(tokens(3, 12), attention_mask=mask)
            assert calls, "in eval mode nothing is dropped"
        return result

    eager = run(False, 1)
    compare(run(True, 1), eager)
    assert relative(run(True, 2)[0], eager[0]) > LIMIT


def test_autocast():
    mask = left_padded(3, 12)
    eager = step(tiny.model("llama"), mask, autocast=True)
    model = tiny.model("llama")
    with attnops.patch(model):
        ours = step(model, mask, autocast=True)
    # bfloat16 has 8 bits: the two differ by rounding at every step.
    assert abs(ours[0] - eager[0]) < 2e-2 * abs(eager[0])
