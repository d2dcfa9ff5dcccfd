"""The attention function by itself: every argument transformers may hand it, and the ones it must
not swallow."""

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
from attnops.hf.models.attention_modules import HARMLESS
from tests import formula
from tests.hf.helpers import near, tokens

attend = attention_function(None)
MODULE = types.SimpleNamespace(training=False, is_causal=True)


def close(ours, want):
    torch.testing.assert_close(ours, want, atol=1e-5, rtol=1e-5)


def qkv(queries=6, keys=6, heads=4, kv_heads=2, dim=16, v_dim=16):
    return (
        torch.randn(2, heads, queries, dim),
        torch.randn(2, kv_heads, keys, dim),
        torch.randn(2, kv_heads, keys, v_dim),
    )


def plain(query, key, value, *, scale=None, see=None, bias=None, softcap=0.0, sinks=None):
    """`[B, S, H, Dv]` by the formula, of tensors as transformers has them. Every key is visible,
    but for `see`."""
    mask = bias if see is None else see if bias is None else bias.masked_fill(~see, float("-inf"))
    shape = (*query.shape[:3], key.shape[2])
    masks = [None] * shape[0] if mask is None else mask.expand(shape)
    asks = {
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "softcap": softcap,
        "causal": False,
    }
    rows = zip(*(x.transpose(1, 2) for x in (query, key, value)), masks, strict=True)
    return torch.stack([formula.plain(*row, sinks, asks)[0] for row in rows])


def lower(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


LOWER = lower(6, 6)
SINKS, BIAS, SEE = torch.randn(4), torch.randn(1, 4, 6, 6), torch.rand(2, 1, 6, 6) < 0.7
SEE[..., 0] = True
# A distance that no position can be added to in 32 bits is none.
NO_WINDOW = descriptor.build(descriptor.Pattern(True, 2**31 - 1), 2, 0, 6, 0, 0, SEE.device)
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "s_aux": ({"s_aux": SINKS}, {"sinks": SINKS}),
    "sinks": ({"sinks": SINKS.view(1, 4, 1, 1)}, {"sinks": SINKS}),
    "scaling": ({"scaling": 0.3}, {"scale": 0.3}),
    "a tensor": ({"scaling": torch.tensor(0.3)}, {"scale": 0.3}),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
    "not causal": ({"is_causal": False}, {"see": None}),
    "window": ({"sliding_window": 3}, {"see": LOWER & ~LOWER.tril(-3)}),
    "wide": ({"sliding_window": 6}, {}),
    "wider": ({"sliding_window": 2**31 - 1}, {}),
    "descriptor": ({"attention_mask": NO_WINDOW}, {}),
    "mask": ({"attention_mask": SEE}, {"see": SEE}),
    "bias": ({"position_bias": BIAS}, {"bias": BIAS}),
    "weights": ({"output_attentions": True}, {}),
}


@torch.no_grad()
@pytest.mark.parametrize("v_dim", [16, 8])
@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case, v_dim):
    """None is lost, nor is it on a function that knows a plain call of these sizes."""
    given, words = ARGUMENTS[case]
    q, k, v = qkv(v_dim=v_dim)
    layer, knows = torch.nn.Linear(1, 1), attention_function(None, proven=True)
    want = plain(q, k, v, **{"see": LOWER} | words)
    for _ in range(2):
        first = knows(layer, q, k, v, None)[0]
    for function in (attend, knows):
        ours, weights = function(layer, query=q, key=k, value=v, **{"attention_mask": None} | given)
        close(ours, want)
        assert ours.is_contiguous() and (weights is None) == (case != "weights")
    assert torch.equal(knows(layer, q, k, v, None)[0], first)


def test_is_causal_beats_the_module():
    q, k, v = qkv()
    free = types.SimpleNamespace(training=False, is_causal=False)
    close(attend(free, q, k, v, None)[0], plain(q, k, v))
    close(attend(free, q, k, v, None, is_causal=True)[0], plain(q, k, v, see=LOWER))


def test_no_mask_and_more_keys_than_queries():
    """As in transformers' sdpa: an empty static cache at its first tokens. One query, though, sees
    every key."""
    q, k, v = qkv(4, 9)
    bias = torch.randn(1, 4, 4, 9)
    for more, words in (({}, {}), ({"position_bias": bias}, {"bias": bias[..., :4]})):
        close(
            attend(MODULE, q, k, v, None, **more)[0],
            plain(q, k[:, :, :4], v[:, :, :4], see=lower(4, 4), **words),
        )
    q, k, v = qkv(1, 9)
    close(attend(MODULE, q, k, v, None)[0], plain(q, k, v))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_beside_a_bias(dtype):
    """A row that sees nothing is zero."""
    q, k, v = qkv()
    see = SEE.clone()
    see[0, :, 2] = False
    mask = see if dtype == torch.bool else torch.where(see, 0.0, float("-inf"))
    close(attend(MODULE, q, k, v, mask, position_bias=BIAS)[0], plain(q, k, v, bias=BIAS, see=see))


def test_packed():
    """What flash-style callers pass for requests of 2 and 4 tokens in one row."""
    q, k, v = (x[:1] for x in qkv())
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 4, "max_length_k": 4}
    ours, _ = attend(MODULE, q, k, v, None, **lengths)
    parts = [
        plain(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], see=lower(b - a, b - a))
        for a, b in ((0, 2), (2, 6))
    ]
    close(ours, torch.cat(parts, 1))
    # Beside a mask, too, requests do not see each other.
    for mask in (LOWER[None, None], torch.zeros(1, 1, 6, 6).masked_fill(~LOWER, float("-inf"))):
        close(attend(MODULE, q, k, v, mask, **lengths)[0], ours)
    trained = types.SimpleNamespace(training=True, is_causal=True)
    for match, given, more in (
        ("cu_seq_lens_q", (MODULE, *qkv(), None), {}),
        ("dropout", (trained, q, k, v, None), {"dropout": 0.1}),
        ("cu_seq_lens_q", (MODULE, q[:, :, :4], k, v, LOWER[None, None, 2:]), {}),
    ):
        with pytest.raises(InvalidInput, match=match):
            attend(*given, **more, **lengths)


@pytest.mark.parametrize("mode", ["dense", "compact", "explicit", "additive"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3", "olmo3"])
def test_packed_requests_of_a_model(name, mode):
    """Every layer keeps them apart: those without a mask, and those whose window is written out as
    one."""
    model, ids, cuts = tiny.model(name), tokens(1, 40), (0, 11, 13, 40)
    cu = torch.tensor(cuts, dtype=torch.int32)
    with torch.no_grad():
        want = torch.cat([model(ids[:, a:b]).logits for a, b in itertools.pairwise(cuts)], 1)
        with attnops.patch(model, mask=mode):
            ours = model(
                ids, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=27, max_length_k=27
            ).logits
    near(ours, want)  # rotary positions are relative: the second request may begin at 11


MATTERS = {
    "indices": torch.zeros(2, 6, 3, dtype=torch.int32),
    "something_new": torch.zeros(1),
    "several_new": (torch.zeros(1), None),
    "window_of_another_name": 3,
    "block_table": [1, 2],
    "alibi_slopes": 0.5,
}


@pytest.mark.parametrize("name", MATTERS)
def test_nothing_that_matters_is_swallowed(name):
    with pytest.raises(InvalidInput, match=name):
        attend(MODULE, *qkv(), None, **{name: MATTERS[name]})


def test_what_does_not_matter_is_let_pass():
    """The generate() of CTC models hands its options down to its one forward."""
    tensors = {name: torch.zeros(1) for name in HARMLESS}
    attend(
        MODULE,
        *qkv(),
        None,
        **tensors,
        indices=None,
        output_attentions=False,
        a_flag_of_the_user=True,
        a_number=3,
    )
    attend(MODULE, *qkv(), None, **dict.fromkeys(vars(GenerationConfig()), "a value"))


def test_autocast():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        ours, _ = attend(MODULE, q, k.bfloat16(), v.bfloat16(), None)
        want = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )
    assert ours.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), want.float(), atol=3e-2, rtol=3e-2)


def test_registered_once():
    from transformers import AttentionInterface, AttentionMaskInterface

    before = AttentionInterface._global_mapping["attnops"]
    attnops.hf.register()
    assert AttentionInterface._global_mapping["attnops"] is before
    assert "attnops" in AttentionMaskInterface._global_mapping
    name = implementation(Options("sdpa", "compact"))
    assert (
        implementation(Options("sdpa", "compact"))
        == name
        != implementation(Options("sdpa", "dense"))
    )
    # transformers reads meaning into these.
    assert "flash" not in name and "/" not in name and "|" not in name
    with pytest.raises(UnknownKernel, match="no_such"):
        implementation(Options("no_such"))


def test_weights_of_large_logits_are_exact():
    """A float32 lse of -46,000 is rounded to 2e-3, which no weight may show."""
    q = torch.full((1, 1, 1, 4), -100.0)
    k = torch.full((1, 1, 3, 4), 115.0)
    v = torch.randn(1, 1, 3, 4)
    k[..., 0, 0] += 0.003
    for sinks in (None, torch.tensor([-46000.0])):
        logits = (q.double() @ k.double().transpose(2, 3)).float()
        beside = logits if sinks is None else torch.cat([logits, sinks.view(1, 1, 1, 1)], -1)
        want = beside.double().softmax(-1)[..., :3]
        _, weights = attend(
            MODULE, q, k, v, None, scaling=1.0, sinks=sinks, is_causal=False, output_attentions=True
        )
        torch.testing.assert_close(weights.double(), want, atol=1e-6, rtol=1e-6)
