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


def blt():
    from transformers import BltConfig, BltForCausalLM

    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    part = {"hidden_size": 16, "max_position_embeddings": 32, "vocab_size": 128, **layers}
    parts = {"patcher_config": part, "encoder_config": part, "global_config": {**part, "hidden_size": 32}}
    parts["decoder_config"] = {**part, "hidden_size_global": 32}
    hashes = {"encoder_hash_byte_group_size": [2, 3], "encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_nb_functions": 1}
    torch.manual_seed(0)
    return BltForCausalLM(BltConfig(vocab_size=128, patch_in_forward=False, cross_attn_k=2, initializer_range=0.2, **parts, **hashes))


def test_text_that_reads_padding():
    """Patches of BLT hold the bytes of both, so what layers give for padding has to be what sdpa gives."""
    model, mask = blt(), left_padded(3, 12)
    model.set_attn_implementation("sdpa")
    sdpa = step(model, mask)
    with attnops.patch(model, mask="compact") as handle:
        assert "masks are always written out: BltModel pools padding with text" in handle.report().notes
        compare(step(model, mask), sdpa)


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
