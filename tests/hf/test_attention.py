"""The attention function by itself: every argument transformers may hand it, and the ones it must not swallow."""

import itertools
import types
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GenerationConfig

import attnops.hf
from attnops.core.errors import InvalidInput, UnknownKernel
from attnops.hf import tiny
from attnops.hf.attention import descriptor
from attnops.hf.attention.function import attention_function
from attnops.hf.interface import Options, implementation
from attnops.hf.matching.match import HARMLESS
from tests.hf.helpers import LIMIT, relative, tokens

attend = attention_function(None)
MODULE = types.SimpleNamespace(training=False, is_causal=True)


def close(ours, want):
    torch.testing.assert_close(ours, want, atol=1e-5, rtol=1e-5)


def qkv(queries=6, keys=6, heads=4, kv_heads=2, dim=16, v_dim=16):
    return torch.randn(2, heads, queries, dim), torch.randn(2, kv_heads, keys, dim), torch.randn(2, kv_heads, keys, v_dim)


def plain(query, key, value, *, scale=None, see=None, bias=None, softcap=None, sinks=None):
    """`[B, S, H, Dv]` in the words of transformers' eager attention: repeat the key heads, add, softmax, multiply."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    if see is not None:
        logits = logits.masked_fill(~see, torch.finfo(logits.dtype).min)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2)


def lower(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def test_the_names_transformers_uses():
    q, k, v = qkv()
    by_name, none = attend(module=MODULE, query=q, key=k, value=v, attention_mask=None)
    assert none is None and by_name.shape == (2, 6, 4, 16) and by_name.is_contiguous()
    close(by_name, plain(q, k, v, see=lower(6, 6)))


def test_a_window_that_says_none_of_int32():
    """A distance that no position can be added to in 32 bits is none, as a descriptor or as an argument."""
    q, k, v = qkv()
    mask = descriptor.build(descriptor.Pattern(True, 2**31 - 1), 2, 0, 6, 0, 0, q.device)
    for given in ({"attention_mask": mask}, {"attention_mask": None, "sliding_window": 2**31 - 1}):
        close(attend(MODULE, q, k, v, **given)[0], plain(q, k, v, see=lower(6, 6)))


@pytest.mark.parametrize("name", ["s_aux", "sinks"])
@pytest.mark.parametrize("shape", [(4,), (1, 4, 1, 1)])
def test_sinks(name, shape):
    q, k, v = qkv()
    sinks = torch.randn(4)
    ours, _ = attend(MODULE, q, k, v, None, **{name: sinks.view(shape)})
    close(ours, plain(q, k, v, see=lower(6, 6), sinks=sinks))


@pytest.mark.parametrize("scaling", [0.3, torch.tensor(0.3)])
def test_scaling_and_softcap(scaling):
    q, k, v = qkv(v_dim=8)
    ours, _ = attend(MODULE, q, k, v, None, scaling=scaling, softcap=2.0)
    close(ours, plain(q, k, v, see=lower(6, 6), scale=0.3, softcap=2.0))


def test_is_causal_beats_the_module():
    q, k, v = qkv()
    close(attend(MODULE, q, k, v, None, is_causal=False)[0], plain(q, k, v))
    free = types.SimpleNamespace(training=False, is_causal=False)
    close(attend(free, q, k, v, None)[0], plain(q, k, v))
    close(attend(free, q, k, v, None, is_causal=True)[0], plain(q, k, v, see=lower(6, 6)))


def test_no_mask_and_more_keys_than_queries():
    """As in transformers' sdpa: an empty static cache at its first tokens. One query, though, sees every key."""
    q, k, v = qkv(4, 9)
    close(attend(MODULE, q, k, v, None)[0], plain(q, k[:, :, :4], v[:, :, :4], see=lower(4, 4)))
    q, k, v = qkv(1, 9)
    close(attend(MODULE, q, k, v, None)[0], plain(q, k, v))


def test_a_window_without_a_mask():
    q, k, v = qkv()
    near = lower(6, 6) & ~lower(6, 6).tril(-3)
    close(attend(MODULE, q, k, v, None, sliding_window=3)[0], plain(q, k, v, see=near))
    close(attend(MODULE, q, k, v, None, sliding_window=6)[0], plain(q, k, v, see=lower(6, 6)))


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_position_bias(kind):
    q, k, v = qkv(4, 9)
    bias, see = torch.randn(1, 4, 4, 9), torch.rand(2, 1, 4, 9) < 0.7
    see[..., 0] = True
    mask = {"none": None, "bool": see, "float": torch.where(see, 0.0, torch.finfo(torch.float32).min)}[kind]
    ours, _ = attend(MODULE, q, k, v, mask, position_bias=bias)
    want = plain(q, k[:, :, :4], v[:, :, :4], bias=bias[..., :4], see=lower(4, 4)) if mask is None else plain(q, k, v, bias=bias, see=see)
    close(ours, want)


def test_a_row_that_sees_nothing_is_zero():
    q, k, v = qkv()
    see = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    see[0, :, 2] = False
    out, _ = attend(MODULE, q, k, v, see)
    assert torch.isfinite(out).all() and not out[0, 2].any()


def test_packed():
    """What flash-style callers pass for requests of 2 and 4 tokens in one row."""
    q, k, v = (x[:1] for x in qkv())
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 4, "max_length_k": 4}
    ours, _ = attend(MODULE, q, k, v, None, **lengths)
    parts = [plain(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], see=lower(b - a, b - a)) for a, b in ((0, 2), (2, 6))]
    close(ours, torch.cat(parts, 1))
    with pytest.raises(InvalidInput, match="cu_seq_lens_q"):
        attend(MODULE, *qkv(), None, **lengths)
    with pytest.raises(InvalidInput, match="dropout"):
        attend(types.SimpleNamespace(training=True, is_causal=True), q, k, v, None, dropout=0.1, **lengths)
    # Beside a mask, too, requests do not see each other.
    for mask in (lower(6, 6)[None, None], torch.zeros(1, 1, 6, 6).masked_fill(~lower(6, 6), float("-inf"))):
        close(attend(MODULE, q, k, v, mask, **lengths)[0], ours)
    with pytest.raises(InvalidInput, match="cu_seq_lens_q"):
        attend(MODULE, q[:, :, :4], k, v, lower(6, 6)[None, None, 2:], **lengths)


@pytest.mark.parametrize(
    "extra",
    [
        {"indices": torch.zeros(2, 6, 3, dtype=torch.int32)},
        {"block_indices": torch.zeros(2, 6, 3, dtype=torch.int32)},
        {"something_new": torch.zeros(1)},
        {"several_new": (torch.zeros(1), None)},
        {"window_of_another_name": 3},
        {"block_table": [1, 2]},
        {"alibi_slopes": 0.5},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_nothing_that_matters_is_swallowed(extra):
    with pytest.raises(InvalidInput, match=next(iter(extra))):
        attend(MODULE, *qkv(), None, **extra)


def test_what_does_not_matter_is_let_pass():
    tensors = {name: torch.zeros(1) for name in HARMLESS}
    attend(MODULE, *qkv(), None, **tensors, indices=None, output_attentions=False, a_flag_of_the_user=True, a_number=3)


def test_options_of_generate_do_not_matter():
    """The generate() of CTC models hands them down to its one forward."""
    attend(MODULE, *qkv(), None, **dict.fromkeys(vars(GenerationConfig()), "a value"))


def test_autocast():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        ours, _ = attend(MODULE, q, k.bfloat16(), v.bfloat16(), None)
        want = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert ours.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), want.float(), atol=3e-2, rtol=3e-2)


def test_registered_once():
    from transformers import AttentionInterface, AttentionMaskInterface

    before = AttentionInterface._global_mapping["attnops"]
    attnops.hf.register()
    assert AttentionInterface._global_mapping["attnops"] is before
    assert "attnops" in AttentionMaskInterface._global_mapping
    name = implementation(Options("sdpa", "compact"))
    assert implementation(Options("sdpa", "compact")) == name != implementation(Options("sdpa", "dense"))
    # transformers reads meaning into these.
    assert "flash" not in name and "/" not in name and "|" not in name


def test_wrong_options():
    with pytest.raises(UnknownKernel, match="no_such"):
        implementation(Options("no_such"))
    wrong: Any = "sparse"
    with pytest.raises(InvalidInput, match="mask"):
        implementation(Options(None, wrong))


@pytest.mark.parametrize("mode", ["dense", "compact", "explicit", "additive"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3", "olmo3"])
def test_packed_requests_of_a_model(name, mode):
    """Every layer keeps them apart: those without a mask, and those whose window is written out as one."""
    model, ids, cuts = tiny.model(name), tokens(1, 40), (0, 11, 13, 40)
    cu = torch.tensor(cuts, dtype=torch.int32)
    with torch.no_grad():
        want = torch.cat([model(ids[:, a:b]).logits for a, b in itertools.pairwise(cuts)], 1)
        with attnops.patch(model, mask=mode):
            ours = model(ids, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=27, max_length_k=27).logits
    assert relative(ours, want) < LIMIT  # rotary positions are relative: the second request may begin at 11


def test_weights_of_large_logits_are_exact():
    """A float32 lse of -46,000 is rounded to 2e-3, which no weight may show."""
    q, k, v = torch.full((1, 1, 1, 4), -100.0), torch.full((1, 1, 3, 4), 115.0), torch.randn(1, 1, 3, 4)
    k[..., 0, 0] += 0.003
    for sinks in (None, torch.tensor([-46000.0])):
        logits = (q.double() @ k.double().transpose(2, 3)).float()
        beside = logits if sinks is None else torch.cat([logits, sinks.view(1, 1, 1, 1)], -1)
        want = beside.double().softmax(-1)[..., :3]
        _, weights = attend(MODULE, q, k, v, None, scaling=1.0, sinks=sinks, is_causal=False, output_attentions=True)
        torch.testing.assert_close(weights.double(), want, atol=1e-6, rtol=1e-6)
