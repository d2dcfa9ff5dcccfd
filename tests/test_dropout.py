"""Dropout of the modules: torch's own call and seeds, a linear map of the values, and what no
kernel has with it."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from attnops.cache import PagedCache
from attnops.core.errors import InvalidInput
from attnops.nn import Attention, LatentAttention, RotaryEmbedding, SelfAttention
from tests.modules import pages_of, refused

B, S, HQ, HKV, D, DV, E = 2, 6, 4, 2, 8, 5, 24
P = 0.3
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
SIZES = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
MASKS = {
    "none": None,
    "bool": torch.rand(B, 1, S, S) < 0.6,
    "by head": torch.rand(1, HQ, S, S) < 0.6,
    "additive": torch.randn(S, S, **DOUBLE),
    "wide": torch.randn(B, HQ, 1, S, **DOUBLE),
}


def core(dropout=P, **more):
    return Attention(HQ, HKV, head_dim=D, v_head_dim=DV, dropout=dropout, **more)


def heads(queries=S, keys=S, dtype=torch.float64):
    shapes = ((B, queries, HQ, D), (B, keys, HKV, D), (B, keys, HKV, DV))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def layers(dropout=P):
    return {
        "self": SelfAttention(E, HQ, HKV, D, rope=RotaryEmbedding(D), dropout=dropout, **DOUBLE),
        "latent": LatentAttention(
            E, 3, rope=RotaryEmbedding(4), dropout=dropout, **SIZES, **DOUBLE
        ),
    }


def seeded(seed, module, *args, **kwargs):
    torch.manual_seed(seed)
    return module(*args, **kwargs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_the_weights_that_are_kept_are_those_of_attention(mask, causal):
    """The map from values to the result has dropped weights and weights of the undropped map by 1 /
    (1 - p), and no others."""
    module, (q, k, _) = core(causal=causal), heads()
    unit = torch.eye(S, **DOUBLE)[None, :, None].expand(
        B, S, HKV, S
    )  # the result of these values is the weights
    module.v_head_dim = S
    kept = seeded(1, module, q, k, unit, mask=MASKS[mask])
    whole = module.eval()(q, k, unit, mask=MASKS[mask])
    dropped = (kept == 0) & (whole != 0)
    torch.testing.assert_close(
        kept, torch.where(dropped, 0.0, whole / (1 - P)), atol=1e-6, rtol=1e-6
    )
    assert 0.1 < dropped.sum() / (whole != 0).sum() < 0.5, (
        "a share of P, of a hundred weights or more"
    )


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (1, 6)], ids=str)
def test_causal_is_aligned_with_the_last_key(shape):
    module, (q, k, v) = core(dropout=1e-12), heads(*shape)  # no draw is as small
    got = module(q, k, v)
    torch.testing.assert_close(got, module.eval()(q, k, v), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mask", ["none", "additive"])
def test_it_is_torchs_own_with_the_same_seed(mask):
    module, (q, k, v) = core(), heads()
    out = seeded(1, module, q, k, v, mask=MASKS[mask])
    assert not torch.equal(seeded(2, module, q, k, v, mask=MASKS[mask]), out)
    hidden = (
        None
        if mask == "none"
        else MASKS[mask].masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
    )
    heads_first = (
        q.transpose(1, 2),
        *(x.repeat_interleave(HQ // HKV, 2).transpose(1, 2) for x in (k, v)),
    )
    torchs = seeded(
        1,
        F.scaled_dot_product_attention,
        *heads_first,
        attn_mask=hidden,
        is_causal=hidden is None,
        dropout_p=P,
    )
    torch.testing.assert_close(out, torchs.transpose(1, 2))


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
    mask = (
        mask
        if kind == torch.bool
        else torch.zeros(S, S, dtype=kind).masked_fill(~mask, float("-inf"))
    )
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
    layer, plain = layers()[name], layers(0.0)[name]
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(B, S, E, **DOUBLE, requires_grad=True)
    first = seeded(1, layer, x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(seeded(1, compiled, x), first)
    assert not torch.equal(seeded(2, compiled, x), first)
    assert torch.autograd.gradcheck(lambda x: seeded(1, layer, x), (x,))
    torch.testing.assert_close(layer.eval()(x), plain(x))
    assert "dropout=0.3" in repr(layer) and "dropout" not in repr(plain)


CU, ENDS = torch.tensor([0, 3, 6], dtype=torch.int32), torch.full((B,), S)


def jagged(*shape):
    return torch.nested.nested_tensor_from_jagged(torch.randn(6, *shape, **DOUBLE), CU.long())


FLAT, JAGGED = torch.randn(6, E, **DOUBLE), jagged(E)


def paged(layer, x):
    cache = PagedCache(
        1, 4, 4, HKV, D, max_requests=1, max_pages_per_request=2, dtype=x.dtype, device="cpu"
    )
    return layer(x, batch=cache.batch([cache.alloc()], [6]), **pages_of(cache))


def dense(**more):
    return lambda: core(**more)(*heads())


REFUSED = {
    "window: got (3, -1)": dense(window=(3, -1)),
    "softcap: got 5.0": dense(softcap=5.0),
    "attention_chunk: got 2": dense(attention_chunk=2),
    "sinks: got shape (4,)": dense(sinks=True),
    "kernel: got reference": dense(kernel="reference"),
    "kv_start: got shape (2,)": lambda: core()(*heads(), kv_start=ENDS),
    "kv_end: got shape (2,)": lambda: core()(*heads(), kv_end=ENDS),
    "kv_end: got shape (1,)": lambda: layers()["latent"](FLAT[None], kv_end=ENDS[:1]),
    "cu_seqlens_q: got shape (3,)": lambda: layers()["self"](FLAT, cu_seqlens=CU, max_seqlen=3),
    "cu_seqlens: got shape (3,)": lambda: layers()["latent"](FLAT, cu_seqlens=CU, max_seqlen=3),
    "hidden: got a nested tensor, want a plain tensor, because": lambda: layers()["self"](JAGGED),
    "hidden: got a nested tensor, want a plain tensor": lambda: layers()["latent"](JAGGED),
    "query: got a nested tensor": lambda: core()(*[jagged(HQ, D)] * 3),
    "batch: got a batch": lambda: paged(layers()["self"], FLAT),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_by_name(text):
    assert "dropout is 0.3 in training" in refused(REFUSED[text], text).want


BROKEN = {
    "fewer values": (lambda q, k, v: (q, k, v[:, 1:]), None),
    "key dtype": (lambda q, k, v: (q, k.half(), v), None),
    "mask of heads": (lambda *x: x, torch.zeros(B, HKV, S, S)),
    "mask that is a list": (lambda *x: x, [True] * S),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_call_has_the_error_of_eval_mode(what):
    change, mask = BROKEN[what]
    given = change(*heads(dtype=torch.float32))
    texts = []
    for module in (core(), core().eval()):
        with pytest.raises(InvalidInput) as caught:
            module(*given, mask=mask)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
