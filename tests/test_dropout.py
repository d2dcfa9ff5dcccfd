"""Dropout of the modules: torch's own call and seeds, a linear map of the values, and what no kernel has with it."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from attnops.cache import PagedCache
from attnops.core.errors import InvalidInput
from attnops.nn import Attention, LatentAttention, MultiheadAttention, RotaryEmbedding, SelfAttention

B, S, HQ, HKV, D, DV, E = 2, 6, 4, 2, 8, 5, 24
P = 0.3
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
SIZES: dict[str, int] = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
MASKS = {
    "none": None, "bool": torch.rand(B, 1, S, S) < 0.6, "by head": torch.rand(1, HQ, S, S) < 0.6, "additive": torch.randn(S, S, **DOUBLE),
    "wide": torch.randn(B, HQ, 1, S, **DOUBLE),
}  # fmt: skip


def core(dropout=P, **more):
    return Attention(HQ, HKV, head_dim=D, v_head_dim=DV, dropout=dropout, **more)


def heads(queries=S, keys=S, dtype=torch.float64):
    shapes = ((B, queries, HQ, D), (B, keys, HKV, D), (B, keys, HKV, DV))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def layers(dropout=P):
    return {
        "self": SelfAttention(E, HQ, HKV, D, rope=RotaryEmbedding(D), dropout=dropout, **DOUBLE),
        "latent": LatentAttention(E, 3, rope=RotaryEmbedding(4), dropout=dropout, **SIZES, **DOUBLE),
    }


def seeded(seed, module, *args, **kwargs):
    torch.manual_seed(seed)
    return module(*args, **kwargs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_the_weights_that_are_kept_are_those_of_attention(mask, causal):
    """The map from values to the result has dropped weights and weights of the undropped map by 1 / (1 - p), and no others."""
    module, (q, k, _) = core(causal=causal), heads()
    unit = torch.eye(S, **DOUBLE)[None, :, None].expand(B, S, HKV, S)  # the result of these values is the weights
    module.v_head_dim = S
    kept = seeded(1, module, q, k, unit, mask=MASKS[mask])
    whole = module.eval()(q, k, unit, mask=MASKS[mask])
    dropped = (kept == 0) & (whole != 0)
    torch.testing.assert_close(kept, torch.where(dropped, 0.0, whole / (1 - P)), atol=1e-6, rtol=1e-6)
    assert 0.1 < dropped.sum() / (whole != 0).sum() < 0.5, "a share of P, of a hundred weights or more"


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (1, 6)], ids=str)
def test_causal_is_aligned_with_the_last_key(shape):
    module, (q, k, v) = core(dropout=1e-12), heads(*shape)  # no draw is as small
    got = module(q, k, v)
    torch.testing.assert_close(got, module.eval()(q, k, v), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mask", ["none", "additive"])
def test_seeds(mask):
    module, (q, k, v) = core(), heads()
    given = {"mask": MASKS[mask]}
    out = seeded(1, module, q, k, v, **given)
    torch.testing.assert_close(seeded(1, module, q, k, v, **given), out, atol=0, rtol=0)
    assert not torch.equal(seeded(2, module, q, k, v, **given), out)
    torch.manual_seed(1)
    group = HQ // HKV
    mask_ = MASKS[mask]
    if mask_ is not None:
        mask_ = mask_.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
    heads_first = (q.transpose(1, 2), *(x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v)))
    torchs = F.scaled_dot_product_attention(*heads_first, attn_mask=mask_, is_causal=mask_ is None, dropout_p=P)
    torch.testing.assert_close(out, torchs.transpose(1, 2))


def test_it_is_linear_in_the_values_and_its_mean_is_attention():
    module, (q, k, v) = core(), heads()
    other = torch.randn_like(v)
    out, both = (seeded(1, module, q, k, x) for x in (v, v + other))
    torch.testing.assert_close(both, out + seeded(1, module, q, k, other))
    grad = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, v, grad)
    torch.testing.assert_close((found * other).sum(), (grad * seeded(1, module, q, k, other)).sum())
    many = torch.stack([module(q, k, v) for _ in range(400)])
    # Each element of the mean has this standard error; of 240 elements none is 5 of them away but once in 7,000 seeds.
    assert ((many.mean(0) - module.eval()(q, k, v)).abs() <= 5 * many.std(0) / 20 + 1e-6).all()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("mask", ["none", "by head", "wide"])
def test_gradients(mask):
    module, given = core(causal=mask == "none"), heads(3, 4)
    keep = None if mask == "none" else MASKS[mask][..., :3, :4]
    inputs = [*given, keep.clone().requires_grad_()] if mask == "wide" else given

    def run(q, k, v, mask=keep):
        return seeded(1, module, q, k, v, mask=mask)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("kind", [torch.bool, torch.float64], ids=str)
def test_a_query_that_sees_nothing_gives_0(kind):
    module, given = core(causal=False), heads()
    mask = torch.ones(S, S, dtype=torch.bool)
    mask[2] = False
    mask = mask if kind == torch.bool else torch.zeros(S, S, dtype=kind).masked_fill(~mask, float("-inf"))
    out = module(*given, mask=mask)
    assert (out[:, 2] == 0).all() and (out[:, 3] != 0).any()
    grads = torch.autograd.grad(out.sum(), given)
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, 2] == 0).all()


def test_a_mask_keeps_its_precision():
    """A position bias beyond bfloat16's eight bits."""
    module, given = core(dropout=1e-12, causal=False), heads(dtype=torch.bfloat16)
    mask = 1000.0 + torch.rand(S, S)
    got = module(*given, mask=mask)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, module.eval()(*given, mask=mask), atol=2**-7, rtol=2**-7)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["self", "latent"])
def test_layers(name):
    layer, x = layers()[name], torch.randn(B, S, E, **DOUBLE, requires_grad=True)
    plain = layers(0.0)[name]
    plain.load_state_dict(layer.state_dict())
    first = seeded(1, layer, x)
    assert torch.equal(seeded(1, layer, x), first) and not torch.equal(seeded(2, layer, x), first)
    assert torch.autograd.gradcheck(lambda x: seeded(1, layer, x), (x,))
    torch.testing.assert_close(layer.eval()(x), plain(x))
    assert "dropout=0.3" in repr(layer) and "dropout" not in repr(plain)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["self", "latent"])
def test_compiled(name):
    layer, x = layers()[name], torch.randn(B, S, E, **DOUBLE)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(seeded(1, compiled, x), seeded(1, layer, x))
    assert not torch.equal(seeded(2, compiled, x), seeded(1, layer, x))


CU, ENDS = torch.tensor([0, 3, 6], dtype=torch.int32), torch.full((B,), S)
JAGGED = torch.nested.nested_tensor_from_jagged(torch.randn(6, E), CU.long())


def paged(layer, x):
    cache = PagedCache(1, 4, 4, HKV, D, max_requests=1, max_pages_per_request=2, dtype=x.dtype, device="cpu")
    return layer(x, batch=cache.batch([cache.alloc()], [6]), k_pages=cache.k_pages[0], v_pages=cache.v_pages[0])


def dense(**more):
    return lambda: core(**more)(*heads())


FLAT = torch.randn(6, E)
REFUSED = [
    (dense(window=(3, -1)), "window", "(3, -1)"),
    (dense(softcap=5.0), "softcap", "5.0"),
    (dense(attention_chunk=2), "attention_chunk", "2"),
    (dense(sinks=True), "sinks", "shape (4,)"),
    (dense(kernel="reference"), "kernel", "reference"),
    (lambda: core()(*heads(), kv_start=ENDS), "kv_start", "shape (2,)"),
    (lambda: core()(*heads(), kv_end=ENDS), "kv_end", "shape (2,)"),
    (lambda: layers()["self"].float()(FLAT, cu_seqlens=CU, max_seqlen=3), "cu_seqlens_q", "shape (3,)"),
    (lambda: layers()["latent"].float()(FLAT, cu_seqlens=CU, max_seqlen=3), "cu_seqlens", "shape (3,)"),
    (lambda: layers()["latent"].float()(FLAT[None], kv_end=ENDS[:1]), "kv_end", "shape (1,)"),
    (lambda: layers()["self"].float()(JAGGED), "hidden", "nested"),
    (lambda: layers()["latent"].float()(JAGGED), "hidden", "nested"),
    (lambda: core()(*[torch.nested.nested_tensor_from_jagged(torch.randn(6, HQ, D), CU.long())] * 3), "query", "nested"),
    (lambda: paged(layers()["self"].float(), FLAT), "batch", "batch"),
]


@pytest.mark.parametrize(("call", "field", "got"), REFUSED, ids=[f"{i}-{r[1]}" for i, r in enumerate(REFUSED)])
def test_refused_by_name(call, field, got):
    with pytest.raises(InvalidInput, match=r"dropout is 0\.3 in training") as caught:
        call()
    assert caught.value.field == field and got in str(caught.value.got)


BROKEN: dict[str, Any] = {
    "one key row": (lambda q, k, v: (q, k[:1], v[:1]), None), "fewer values": (lambda q, k, v: (q, k, v[:, 1:]), None),
    "key dtype": (lambda q, k, v: (q, k.half(), v), None), "integers": (lambda q, k, v: (q.long(), k.long(), v.long()), None),
    "mask of rows": (None, torch.ones(B + 1, 1, S, S, dtype=torch.bool)), "mask of heads": (None, torch.zeros(B, HKV, S, S)),
    "mask of integers": (None, torch.ones(S, S, dtype=torch.int64)), "mask that is a list": (None, [True] * S),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_call_has_the_error_of_eval_mode(what):
    change, mask = BROKEN[what]
    given = heads(dtype=torch.float32) if change is None else change(*heads(dtype=torch.float32))
    texts = []
    for module in (core(), core().eval()):
        with pytest.raises(InvalidInput) as caught:
            module(*given, mask=mask)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dropout", [-0.1, 1.0, "0.1", None])
def test_a_share(dropout):
    for build in (core, lambda dropout: layers(dropout)["latent"]):
        with pytest.raises(InvalidInput, match="dropout"):
            build(dropout)


def test_multihead_attention_takes_torchs_call():
    """Without weights; with them it drops the same, for it draws as many numbers in the same order."""
    ours = MultiheadAttention(E, HQ, dropout=P, batch_first=True, **DOUBLE)
    x = torch.randn(B, S, E, **DOUBLE)
    hide = torch.rand(S, S) < 0.3
    hide[1] = True
    torch.testing.assert_close(*(seeded(1, ours, x, x, x, attn_mask=hide, need_weights=w)[0] for w in (False, True)))
