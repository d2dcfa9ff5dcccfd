"""attnops' scaled_dot_product_attention has torch's arguments, results and gradients."""

import pytest
import torch
from torch.nn import functional as F

from attnops.adapters.sdpa import scaled_dot_product_attention
from attnops.errors import NoKernel, UnknownKernel
from tests.adapters.helpers import Calls

LEAD = {3: (4,), 4: (2, 4), 5: (2, 3, 4)}
MASKS = {"bool": (2, 4, 5, 7), "rows": (5, 7), "keys": (2, 1, 1, 7), "heads": (1, 4, 5, 7), "queries": (2, 1, 5, 1), "3d": (4, 5, 7)}


def qkv(lead, queries=5, keys=7, kv_heads=None, dtype=torch.float32):
    kv_lead = lead if kv_heads is None else (*lead[:-1], kv_heads)
    shapes = [(*lead, queries, 8), (*kv_lead, keys, 8), (*kv_lead, keys, 6)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def check(tensors, *, ours=True, **options):
    with Calls() as calls:
        got = scaled_dot_product_attention(*tensors, **options)
    assert [name for name in calls.names if name.startswith("attnops::")] == ["attnops::attention"] * ours
    want = F.scaled_dot_product_attention(*tensors, **options)
    torch.testing.assert_close(got, want)
    leaves = [x for x in (*tensors, options.get("attn_mask")) if x is not None and x.requires_grad]
    weight = torch.randn_like(want)
    for one, other in zip(*(torch.autograd.grad((x * weight).sum(), leaves) for x in (got, want)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dims", LEAD)
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (5, 7), (7, 5)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes_and_causal(dims, queries, keys, is_causal):
    check(qkv(LEAD[dims], queries, keys), is_causal=is_causal, scale=0.3)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("additive", [False, True])
def test_masks(kind, additive):
    mask = torch.randn(MASKS[kind], requires_grad=True) if additive else torch.rand(MASKS[kind]) > 0.3
    if not additive and kind != "queries":
        mask[..., 0] = True
    if kind == "queries" and not additive:
        mask[:] = True
    check(qkv((2, 4)), attn_mask=mask)


def test_grouped_heads():
    check(qkv((2, 4), kv_heads=2), enable_gqa=True)
    with pytest.raises(RuntimeError):
        scaled_dot_product_attention(*qkv((2, 4), kv_heads=2))


def test_a_query_without_keys_gives_zero():
    query, key, value = qkv((1, 2))
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    got = scaled_dot_product_attention(query, key, value, mask)
    assert not got[:, :, 2].any() and got[:, :, [0, 1, 3, 4]].all()


@pytest.mark.parametrize("mixed", [False, True])
def test_autocast(mixed):
    """Also of a query and a key that a norm has left in float32."""
    query, key, value = qkv((2, 4))
    value = value.bfloat16() if mixed else value
    with torch.autocast("cpu", torch.bfloat16), Calls() as calls:
        got = scaled_dot_product_attention(query, key, value)
    assert calls.names == ["attnops::attention"]
    with torch.autocast("cpu", torch.bfloat16):
        want = F.scaled_dot_product_attention(query, key, value)
        assert scaled_dot_product_attention(query.double(), key.double(), value.double()).dtype == torch.float64
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("what", ["broadcast batch", "mask beside 5 dims", "2 dims", "meta"])
def test_what_attnops_does_not_take_is_torchs(what):
    if what == "broadcast batch":
        query, key, value = qkv((2, 4))
        check([query, key[:1], value[:1]], ours=False)
    elif what == "meta":
        assert scaled_dot_product_attention(*(x.to("meta") for x in qkv((2, 4)))).shape == (2, 4, 5, 6)
    elif what == "2 dims":
        check([x[0, 0] for x in qkv((2, 4))], ours=False)
    else:
        check(qkv((2, 3, 4)), ours=False, attn_mask=torch.randn(5, 7))


def test_dropout_is_torchs():
    tensors = qkv((2, 4))
    torch.manual_seed(1)
    got = scaled_dot_product_attention(*tensors, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(got, F.scaled_dot_product_attention(*tensors, dropout_p=0.5))


def test_torchs_errors():
    query, key, value = qkv((2, 4))
    with pytest.raises(RuntimeError, match="is_causal"):
        scaled_dot_product_attention(query, key, value, torch.ones(5, 7), is_causal=True)
    with pytest.raises(RuntimeError, match="dtype"):
        scaled_dot_product_attention(query, key.double(), value)


def test_a_forced_kernel():
    tensors = qkv((2, 4))
    torch.testing.assert_close(scaled_dot_product_attention(*tensors, kernel="reference"), F.scaled_dot_product_attention(*tensors))
    with pytest.raises(UnknownKernel):
        scaled_dot_product_attention(*tensors, kernel="no_such")
    with pytest.raises(NoKernel):
        scaled_dot_product_attention(*tensors, kernel="fa3")
