"""Attention and SelfAttention: the three forms agree, what nobody owns is never read, bad arguments name themselves."""

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import attnops
from attnops.cache import PagedCache
from attnops.core.errors import AttnopsError, InvalidInput, NoGradient, UnknownKernel
from attnops.nn import Attention, RotaryEmbedding, SelfAttention

NAN = float("nan")
E, HQ, HKV, D = 24, 4, 2, 8
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_kv_heads": HQ},
    "gqa": {},
    "mqa": {"num_kv_heads": 1},
    "window": {"window": (4, -1)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "chunk": {"attention_chunk": 3},
    "scale": {"scale": 0.11},
    "all": {"window": (6, 0), "softcap": 5.0, "sinks": True, "scale": 0.4},
}


def formula(module, q, k, v, mask=None):
    """`[S, Hq, D]`, `[K, Hkv, D]`, `[K, Hkv, Dv]` -> `[S, Hq, Dv]`, written down once more, one query and head at a time."""
    s, kk = q.shape[0], k.shape[0]
    out = torch.zeros(s, module.num_heads, v.shape[-1], dtype=q.dtype)
    for i, h in itertools.product(range(s), range(module.num_heads)):
        at, hk = i + kk - s, h // (module.num_heads // module.num_kv_heads)
        left, right = module.window
        seen = [
            j
            for j in range(kk)
            if (j <= at or not module.causal) and (left < 0 or j >= at - left) and (right < 0 or j <= at + right)
            and (mask is None or mask[i, j]) and (not module.attention_chunk or j // module.attention_chunk == at // module.attention_chunk)
        ]  # fmt: skip
        if not seen:
            continue
        logits = k[seen, hk] @ q[i, h] * module.scale
        if module.softcap:
            logits = module.softcap * torch.tanh(logits / module.softcap)
        if module.sinks is not None:
            p = torch.softmax(torch.cat([logits, module.sinks[h, None]]), 0)[:-1]
        else:
            p = torch.softmax(logits, 0)
        out[i, h] = p @ v[seen, hk]
    return out


def core(variant="gqa", dtype=torch.float64, **more):
    module = Attention(HQ, **{"num_kv_heads": HKV, "head_dim": D, "dtype": dtype, **VARIANTS[variant], **more})
    if module.sinks is not None:
        with torch.no_grad():
            module.sinks.normal_()
    return module


def heads(module, *lead, keys=None, dtype=torch.float64):
    key_lead = lead if keys is None else (*lead[:-1], keys)
    return (
        torch.randn(*lead, module.num_heads, module.head_dim, dtype=dtype),
        torch.randn(*key_lead, module.num_kv_heads, module.head_dim, dtype=dtype),
        torch.randn(*key_lead, module.num_kv_heads, module.v_head_dim, dtype=dtype),
    )


def close(got, want, tolerance=1e-6):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def cu(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def refused(call, field, got, want):
    """The call raises InvalidInput for this field, with these words."""
    with pytest.raises(InvalidInput) as caught:
        call()
    assert isinstance(caught.value, AttnopsError)
    assert caught.value.field == field
    assert got in str(caught.value.got)
    assert want in caught.value.want


def cache_for(module, page_size=4, num_layers=1, num_pages=64, dtype=torch.float64, poison=True, length=24):
    cache = PagedCache(
        num_layers, num_pages, page_size, module.num_kv_heads, module.head_dim, module.v_head_dim, max_requests=6,
        max_pages_per_request=-(-length // page_size), dtype=dtype, device="cpu",
    )  # fmt: skip
    if poison:
        for pool in (*cache.k_pages, *cache.v_pages):
            pool.fill_(NAN)
    return cache


# The three forms of Attention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_cache_with_windows_gives_the_same(page_size):
    """Layers that see 5 tokens, from a cache that keeps no more pages than they need: forks, texts of any length, drafts taken back."""
    module, rng = core("window"), random.Random(page_size)
    whole, some = (
        PagedCache(
            2, 99, page_size, HKV, D, max_requests=4, max_pages_per_request=40, windows=windows, max_new_tokens=6, dtype=torch.float64,
            device="cpu",
        )
        for windows in (None, (0, 5))
    )  # fmt: skip
    for pool in (*some.k_pages, *some.v_pages):
        pool.fill_(NAN)
    assert some.k_pages[1].shape[0] < some.k_pages[0].shape[0] and some.tables[1].shape[1] < some.tables[0].shape[1]
    live = [(whole.alloc(), some.alloc())]
    for turn in range(12):
        if turn in (3, 5):
            live.append((whole.fork(live[0][0]), some.fork(live[0][1])))
        counts = [rng.randint(1, 6 if turn % 2 else 1) for _ in live]
        steps = [cache.batch(ids, counts) for cache, ids in zip((whole, some), zip(*live, strict=True), strict=True)]
        q, k, v = heads(module, sum(counts))
        with torch.no_grad():
            want = module(q, k, v, batch=steps[0], k_pages=whole.k_pages[0], v_pages=whole.v_pages[0])
            for layer in (0, 1):
                pages = {"k_pages": some.k_pages[layer], "v_pages": some.v_pages[layer]}
                close(module(q, k, v, batch=steps[1].of(some.table_of[layer]), **pages), want)
        for a, b in live if turn % 3 == 2 else ():
            back = rng.randint(0, counts[0] if len(live) == 1 else min(counts))
            whole.truncate(a, whole.length(a) - back)
            some.truncate(b, some.length(b) - back)
    assert whole.length(live[0][0]) > some.tables[1].shape[1] * page_size
    with pytest.raises(InvalidInput, match="Split the prompt"):
        some.batch([live[0][1]], 7)


@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (1, 6)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dense(variant, causal, shape):
    module = core(variant, causal=causal, v_head_dim=6)
    q, k, v = heads(module, 2, shape[0], keys=shape[1])
    got = module(q, k, v)
    for b in range(2):
        close(got[b], formula(module, q[b], k[b], v[b]))


def test_dense_mask_and_range():
    module = core("sinks")
    q, k, v = heads(module, 2, 6)
    mask = torch.rand(6, 6) < 0.6
    close(module(q, k, v, mask=mask[None, None])[1], formula(module, q[1], k[1], v[1], mask))
    start = torch.tensor([2, 0], dtype=torch.int32)
    k[0, :2], v[0, :2] = NAN, NAN
    with torch.no_grad():
        close(module(q, k, v, kv_start=start)[0, 2:], formula(module, q[0, 2:], k[0, 2:], v[0, 2:]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed(variant):
    module = core(variant)
    lengths, key_lengths = [3, 1, 5], [3, 4, 7]
    q, k, v = heads(module, 9, keys=14)
    got = module(q, k, v, cu_seqlens_q=cu(lengths), cu_seqlens_k=cu(key_lengths), max_seqlen_q=5, max_seqlen_k=7)
    parts = zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True)
    close(got, torch.cat([formula(module, *part) for part in parts]))
    q, k, v = heads(module, 9)
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    close(module(q, k, v, cu_seqlens_q=cu(lengths), max_seqlen_q=5), torch.cat([formula(module, *part) for part in parts]))


def step(module, cache, requests, counts, sequences, layer=0, pad=0):
    """Feed the next counts[i] tokens of each request's sequence; returns the output of each. With `pad`, NaN tokens follow."""
    starts = [cache.length(r) for r in requests]
    batch = cache.batch(requests, counts)
    slices = [[x[s : s + n] for x in sequences[r]] for r, s, n in zip(requests, starts, counts, strict=True)]
    q, k, v = (torch.cat([part[i] for part in slices]) for i in range(3))
    if pad:
        q, k, v = (torch.cat([x, x.new_full((pad, *x.shape[1:]), NAN)]) for x in (q, k, v))
        batch = padded(batch, pad)
    with torch.no_grad():
        out = module(q, k, v, batch=batch, k_pages=cache.k_pages[layer], v_pages=cache.v_pages[layer])
    if pad:
        assert out[-pad:].eq(0).all()
        out = out[:-pad]
    return out.split(counts)


def padded(batch, tokens, requests=2):
    """The step as a fixed-size graph runs it: more requests, of length 0, and more tokens, of nobody."""
    zeros = batch.seq_lens.new_zeros
    return dataclasses.replace(
        batch,
        page_table=torch.cat([batch.page_table, zeros(requests, batch.page_table.shape[1])]),
        seq_lens=torch.cat([batch.seq_lens, zeros(requests)]),
        cu_seqlens_q=torch.cat([batch.cu_seqlens_q, batch.cu_seqlens_q[-1:].expand(requests)]),
        slots=F.pad(batch.slots, (0, tokens), value=-1),
        positions=F.pad(batch.positions, (0, tokens)),
    )


# Requests of 17, 3 and 9 tokens come and go between steps: prefill, mixed, decode.
SCHEDULE = [([0], [5]), ([0, 1], [4, 1]), ([2, 0], [6, 1]), ([0, 1, 2], [1, 1, 1]), ([2, 1], [1, 1]), ([0, 2], [6, 1])]


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_paged_is_dense_over_the_whole_sequence(variant, page_size, pad):
    module = core(variant, v_head_dim=6)
    cache = cache_for(module, page_size)
    addresses = [t.data_ptr() for t in (cache.page_table, cache.seq_lens, *cache.k_pages, *cache.v_pages)]
    ids = [cache.alloc() for _ in range(3)]
    sequences = {r: heads(module, n) for r, n in zip(ids, (17, 3, 9), strict=True)}
    got: dict[int, list[torch.Tensor]] = {r: [] for r in ids}
    for who, counts in SCHEDULE:
        requests = [ids[i] for i in who]
        for r, out in zip(requests, step(module, cache, requests, counts, sequences, pad=pad), strict=True):
            got[r].append(out)
    for r in ids:
        close(torch.cat(got[r]), formula(module, *sequences[r]))
    owned = {p for r in ids for p in cache.page_table[cache.row(r)].tolist()} - {0}
    for pages in (*cache.k_pages, *cache.v_pages):
        for page in set(range(cache.num_pages)) - owned:
            assert pages[page].isnan().all(), "written, and nobody's"
    assert [t.data_ptr() for t in (cache.page_table, cache.seq_lens, *cache.k_pages, *cache.v_pages)] == addresses


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("variant", ["gqa", "all"])
def test_forks_and_rejected_tokens(variant, page_size):
    module = core(variant)
    cache = cache_for(module, page_size)
    a = cache.alloc()
    full = heads(module, 14)
    step(module, cache, [a], [6], {a: full})
    b, c = cache.fork(a), cache.fork(a)
    other = {r: [torch.cat([x[:6], y]) for x, y in zip(full, heads(module, 8), strict=True)] for r in (b, c)}
    got = step(module, cache, [a, b, c], [3, 1, 4], {a: full, **other})
    cache.free(c)
    cache.truncate(a, 7)  # two of three drafted tokens are rejected, and others come in their place
    redrawn = [torch.cat([x[:7], y]) for x, y in zip(full, heads(module, 5), strict=True)]
    again = step(module, cache, [b, a], [2, 5], {a: redrawn, **other})
    close(got[0], formula(module, *full)[6:9])
    close(torch.cat([got[1], again[0]]), formula(module, *other[b])[6:9])
    close(got[2], formula(module, *other[c])[6:10])
    close(again[1], formula(module, *redrawn)[7:12])


def test_freed_pages_serve_others():
    module = core()
    cache = cache_for(module, num_pages=4, poison=False)
    for _ in range(3):
        a = cache.alloc()
        sequence = heads(module, 10)
        close(step(module, cache, [a], [10], {a: sequence})[0], formula(module, *sequence))
        cache.free(a)
        for pool in (*cache.k_pages, *cache.v_pages):
            pool.fill_(NAN)


def test_paged_mask():
    module = core()
    cache = cache_for(module)
    a = cache.alloc()
    q, k, v = heads(module, 5)
    batch = cache.batch([a], 5)
    mask = torch.ones(5, cache.page_table.shape[1] * 4, dtype=torch.bool)
    mask[4, 1] = mask[3, 3] = False
    with torch.no_grad():
        got = module(q, k, v, batch=batch, k_pages=cache.k_pages[0], v_pages=cache.v_pages[0], mask=mask)
    close(got, formula(module, q, k, v, mask))


def test_float8_pages():
    module = core(dtype=torch.float32)
    cache = cache_for(module, dtype=torch.float8_e4m3fn, poison=False)
    a = cache.alloc()
    q, k, v = heads(module, 9, dtype=torch.float32)
    scales = {"k_scale": torch.tensor([0.02]), "v_scale": torch.tensor([0.01, 0.03])}
    with torch.no_grad():
        got = module(q, k, v, batch=cache.batch([a], 9), k_pages=cache.k_pages[0], v_pages=cache.v_pages[0], **scales)
    close(got, formula(module, q, k, v), tolerance=0.15)


def test_an_empty_step():
    module = core()
    cache = cache_for(module)
    a = cache.alloc()
    out = step(module, cache, [a], [0], {a: heads(module, 0)})
    assert out[0].shape == (0, HQ, D)


@pytest.mark.full
def test_sinks_start_neutral_and_learn():
    assert [p.tolist() for p in Attention(HQ, head_dim=D, sinks=True).parameters()] == [[0.0] * HQ]
    assert not list(Attention(HQ, head_dim=D).parameters())
    module = core("all")
    sinks = next(module.parameters())
    q, k, v = (x.requires_grad_() for x in heads(module, 2, 4))
    assert torch.autograd.gradcheck(lambda *a: module(*a[:3]), (q, k, v, sinks))
    q, k, v = (x.requires_grad_() for x in heads(module, 6))
    more = {"cu_seqlens_q": cu([2, 4]), "max_seqlen_q": 4}
    assert torch.autograd.gradcheck(lambda *a: module(*a[:3], **more), (q, k, v, sinks))


def test_the_repr_says_what_differs():
    assert repr(core("all", kernel="reference")) == (
        "Attention(4, 2, head_dim=8, window=(6, 0), softcap=5.0, sinks=True, kernel='reference')"
    )
    assert repr(RotaryEmbedding(8, scaling="linear", factor=2.0)).endswith("(8, theta=10000.0, scaling='linear', factor=2.0)")


# SelfAttention ------------------------------------------------------------------------------------------------------------


def turned(x, positions, theta, factor):
    """RoPE as multiplication by complex numbers. x `[T, H, D]`."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() / factor * theta ** (-torch.arange(half).double() / half)
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([z.real, z.imag], -1)


LAYERS: dict[str, dict[str, Any]] = {
    "bare": {},
    "rope": {"rope": (100.0, 1.0)},
    "linear": {"rope": (500.0, 4.0)},
    "llama": {"rope": (10000.0, 1.0), "num_kv_heads": 2},
    "qwen3": {"rope": (10000.0, 1.0), "num_kv_heads": 2, "qk_norm": True, "head_dim": 10},
    "gemma2": {"rope": (10000.0, 1.0), "num_kv_heads": 2, "softcap": 4.0, "window": (5, -1), "scale": 0.2},
    "gpt_oss": {"rope": (150000.0, 2.0), "num_kv_heads": 1, "sinks": True, "bias": True, "out_bias": True, "window": (3, 0)},
}


def layer(name="llama", dtype=torch.float64):
    built = dict(LAYERS[name])
    rope = built.pop("rope", None)
    head_dim = built.get("head_dim", E // HQ)
    if rope is not None:
        built["rope"] = RotaryEmbedding(head_dim, rope[0], scaling="linear" if rope[1] > 1 else "none", factor=rope[1])
    module = SelfAttention(E, HQ, **built, dtype=dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(std=0.4)
    return module


def layer_formula(module, hidden, positions=None):
    """`[S, E]` -> `[S, E]`."""
    positions = torch.arange(hidden.shape[0]) if positions is None else positions
    a = module.attention
    q = module.q_proj(hidden).view(-1, a.num_heads, a.head_dim)
    k = module.k_proj(hidden).view(-1, a.num_kv_heads, a.head_dim)
    v = module.v_proj(hidden).view(-1, a.num_kv_heads, a.head_dim)
    if module.q_norm is not None:
        q, k = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * n.weight for x, n in ((q, module.q_norm), (k, module.k_norm)))
    if module.rope is not None:
        q, k = (turned(x, positions, module.rope.theta, module.rope.factor) for x in (q, k))
    return module.o_proj(formula(a, q, k, v).flatten(1))


@pytest.mark.parametrize("name", LAYERS)
def test_layer_dense_packed_paged(name):
    module = layer(name)
    lengths = [7, 1, 4]
    hidden = torch.randn(12, E, dtype=torch.float64)
    with torch.no_grad():
        want = torch.cat([layer_formula(module, x) for x in hidden.split(lengths)])
        close(module(hidden[None, :7])[0], want[:7])
        close(module(hidden, cu_seqlens=cu(lengths), max_seqlen=7), want)
        cache = cache_for(module.attention)
        ids = [cache.alloc() for _ in lengths]
        pages = {"k_pages": cache.k_pages[0], "v_pages": cache.v_pages[0]}
        a, b, c = hidden.split(lengths)
        first = module(torch.cat([a[:5], c[:2]]), batch=cache.batch([ids[0], ids[2]], [5, 2]), **pages)
        second = module(torch.cat([a[5:6], b, c[2:3]]), batch=cache.batch(ids, 1), **pages)
        third = module(torch.cat([c[3:], a[6:]]), batch=cache.batch([ids[2], ids[0]], 1), **pages)
    close(torch.cat([first[:5], second[:1], third[1:]]), want[:7])
    close(second[1:2], want[7:8])
    close(torch.cat([first[5:], second[2:], third[:1]]), want[8:])


def test_positions():
    module = layer("rope")
    hidden = torch.randn(2, 5, E, dtype=torch.float64)
    at = torch.tensor([3, 4, 5, 9, 12])
    with torch.no_grad():
        close(module(hidden, positions=at)[1], layer_formula(module, hidden[1], at))
        close(module(hidden, positions=torch.stack([at, at + 1]))[1], layer_formula(module, hidden[1], at + 1))
        packed = {"cu_seqlens": cu([2, 3]), "max_seqlen": 3}
        close(module(hidden[0], positions=at.int(), **packed)[2:], layer_formula(module, hidden[0, 2:], at[2:]))


def test_packed_padding_does_not_leak():
    module = layer("qwen3")
    hidden = torch.randn(8, E, dtype=torch.float64)
    packed = {"cu_seqlens": cu([2, 3]), "max_seqlen": 3}
    with torch.no_grad():
        want = module(hidden[:5], **packed)
        hidden[5:] = NAN
        got = module(hidden, **packed)
    close(got[:5], want)
    assert got[5:].eq(0).all()


def test_rope_keeps_its_angles_in_half_precision():
    rope = RotaryEmbedding(D, 10000.0)
    assert not list(rope.buffers())
    q, k = torch.randn(1, HQ, D), torch.randn(1, HKV, D)
    far = torch.tensor([100_003])
    want = turned(q, far, 10000.0, 1.0)
    close(rope(q, k, far)[0].double(), want, tolerance=5e-2)  # float32 angles of 1e5 radians are good to 1e-2
    got = rope.to(torch.bfloat16)(q.bfloat16(), k.bfloat16(), far)[0]
    assert got.dtype == torch.bfloat16
    close(got.double(), want, tolerance=7e-2)


def test_weights_start_as_linears():
    torch.manual_seed(3)
    module = SelfAttention(E, HQ, HKV, qk_norm=True, bias=True, sinks=True)
    torch.manual_seed(3)
    for name, rows in (("q_proj", HQ * 6), ("k_proj", HKV * 6), ("v_proj", HKV * 6)):
        assert torch.equal(getattr(module, name).weight, nn.Linear(E, rows).weight)
    assert dict(module.named_parameters())["q_norm.weight"].eq(1).all()


def test_layer_gradients_agree():
    module = layer("gpt_oss")
    hidden = torch.randn(6, E, dtype=torch.float64)

    def grads(run):
        x = hidden.clone().requires_grad_()
        return torch.autograd.grad(run(x).square().sum(), [x, *module.parameters()])

    want = grads(lambda x: layer_formula(module, x))
    for got in (grads(lambda x: module(x[None])[0]), grads(lambda x: module(x, cu_seqlens=cu([6]), max_seqlen=6))):
        for g, w in zip(got, want, strict=True):
            close(g, w)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_autocast(name):
    module = layer(name, torch.float32)
    hidden = torch.randn(1, 6, E)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = module(hidden)
    close(got.float(), module(hidden), tolerance=0.25)


# Errors -------------------------------------------------------------------------------------------------------------------


def attend(*shapes, **kwargs):
    def call():
        module = Attention(HQ, HKV, head_dim=D)
        q, k, v = (torch.randn(s) for s in shapes) if shapes else heads(module, 2, 3, dtype=torch.float32)
        return module(q, k, v, **kwargs)

    return call


def attend_paged(**change):
    def call():
        module = Attention(HQ, HKV, head_dim=D)
        cache = cache_for(module, dtype=torch.float32)
        given = {"batch": cache.batch([cache.alloc()], 3), "k_pages": cache.k_pages[0], "v_pages": cache.v_pages[0]}
        given |= change
        with torch.no_grad():
            module(*heads(module, 3, dtype=torch.float32), **given)

    return call


def project(shape=(2, 3, E), **kwargs):
    return lambda: SelfAttention(E, HQ, HKV)(torch.randn(shape), **kwargs)


DENSE = ((2, 3, HQ, D), (2, 3, HKV, D), (2, 3, HKV, D))
PACKED = ((3, HQ, D), (3, HKV, D), (3, HKV, D))
BAD = [
    (lambda: Attention(0, head_dim=D), "num_heads", "0", "int >= 1"),
    (lambda: Attention(4.0, head_dim=D), "num_heads", "4.0", "int >= 1"),
    (lambda: Attention(4, 3, head_dim=D), "num_kv_heads", "3", "divisor of num_heads = 4"),
    (lambda: Attention(4, head_dim=0), "head_dim", "0", "int >= 1"),
    (lambda: Attention(4, head_dim=D, v_head_dim=True), "v_head_dim", "True", "int >= 1"),
    (lambda: Attention(4, head_dim=D, window=5), "window", "5", "(left, right)"),
    (lambda: Attention(4, head_dim=D, window=(-2, 0)), "window", "(-2, 0)", ">= -1"),
    (lambda: Attention(4, head_dim=D, softcap=-1.0), "softcap", "-1.0", ">= 0.0"),
    (lambda: Attention(4, head_dim=D, softcap=NAN), "softcap", "nan", ">= 0.0"),
    (lambda: Attention(4, head_dim=D, scale=float("inf")), "scale", "inf", "number"),
    (lambda: RotaryEmbedding(7), "head_dim", "7", "even"),
    (lambda: RotaryEmbedding(8, 0.5), "theta", "0.5", ">= 1.0"),
    (lambda: RotaryEmbedding(8, scaling="ntk"), "scaling", "'ntk'", "'none' | 'linear' | 'yarn'"),
    (lambda: RotaryEmbedding(8, scaling="linear", factor=0.5), "factor", "0.5", ">= 1.0"),
    (lambda: RotaryEmbedding(8, factor=2.0), "factor", "2.0", "scaling is 'none'"),
    (lambda: RotaryEmbedding(8)(torch.zeros(1, 1, 8), torch.zeros(1, 1, 6), torch.zeros(1)), "key.shape[2]", "6", "8"),
    (lambda: RotaryEmbedding(8)(torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), torch.zeros(1)), "positions.dtype", "float32", "int32"),
    (lambda: SelfAttention(0, HQ), "hidden_size", "0", "int >= 1"),
    (lambda: SelfAttention(10, 4), "head_dim", "None", "no multiple of 4 heads"),
    (lambda: SelfAttention(E, HQ, rope="yes"), "rope", "str", "RotaryEmbedding"),
    (lambda: SelfAttention(E, HQ, rope=RotaryEmbedding(4)), "rope.head_dim", "4", "6, the layer's"),
    (lambda: SelfAttention(E, HQ, qk_norm=True, norm_eps=-1), "norm_eps", "-1", ">= 0.0"),
    (attend(PACKED[0], *DENSE[1:]), "query", "(3, 4, 8)", "[B, S, H, D]"),
    (attend(DENSE[0], PACKED[1], DENSE[2]), "key", "(3, 2, 8)", "[B, S, H, D]"),
    (attend((2, 3, 5, D), *DENSE[1:]), "query.shape[2]", "5", "4, as the module was built"),
    (attend(DENSE[0], (2, 3, HKV, 7), DENSE[2]), "key.shape[3]", "7", "8, as the module was built"),
    (attend(DENSE[0], DENSE[1], (2, 3, 1, D)), "value.shape[2]", "1", "2, as the module was built"),
    (attend(*DENSE[:2], (2, 4, HKV, D)), "value.shape[1]", "4", "3"),
    (attend(max_seqlen_q=3), "max_seqlen_q", "3", "without cu_seqlens_q"),
    (attend(cu_seqlens_k=cu([3])), "cu_seqlens_k", "(2,)", "without cu_seqlens_q"),
    (attend(k_pages=torch.zeros(1)), "k_pages", "(1,)", "without batch"),
    (attend(k_scale=torch.ones(1)), "k_scale", "(1,)", "without batch"),
    (attend(*DENSE, cu_seqlens_q=cu([3]), max_seqlen_q=3), "query", "(2, 3, 4, 8)", "[T, H, D]"),
    (attend(*PACKED, cu_seqlens_q=cu([3])), "max_seqlen_q", "None", "an upper bound"),
    (attend(*PACKED, cu_seqlens_q=cu([3]), max_seqlen_q=3, cu_seqlens_k=cu([3])), "cu_seqlens_k, max_seqlen_k", "one", "both"),
    (attend(*PACKED, cu_seqlens_q=cu([3]).long(), max_seqlen_q=3), "cu_seqlens_q.dtype", "int64", "int32"),
    (attend(*PACKED, cu_seqlens_q=cu([3]), max_seqlen_q=3, kv_end=torch.ones(1)), "kv_end", "(1,)", "dense calls only"),
    (attend_paged(k_pages=None), "k_pages, v_pages", "None", "because batch is given"),
    (attend_paged(batch=(1, 2)), "batch", "tuple", "PagedBatch"),
    (attend_paged(cu_seqlens_q=cu([3])), "cu_seqlens_q", "(2,)", "with batch"),
    (attend_paged(k_pages=torch.zeros(64, 4, HKV, 6)), "k_pages.shape[3]", "6", "8 (D, as key.shape[2])"),
    (attend_paged(v_pages=torch.zeros(64, 4, HKV, D).half()), "v_pages.dtype", "float16", "float32"),
    (project((3, E)), "hidden", "(3, 24)", "[B, S, 24]"),
    (project((2, 3, E - 1)), "hidden.shape[2]", "23", "24"),
    (project(cu_seqlens=cu([3]), max_seqlen=3), "hidden", "(2, 3, 24)", "[T, 24]"),
    (lambda: layer("rope", torch.float32)(torch.randn(2, 3, E), positions=torch.arange(4)), "positions", "(4,)", "one a token"),
    (lambda: layer("rope", torch.float32)(torch.randn(2, 3, E), positions=torch.tensor(0)), "positions", "()", "[S] or [B, S]"),
    (lambda: SelfAttention(E, HQ)([1.0]), "hidden", "list", "a tensor"),
]


@pytest.mark.parametrize(("call", "field", "got", "want"), BAD, ids=[f"{i}-{b[1]}" for i, b in enumerate(BAD)])
def test_bad_inputs(call, field, got, want):
    refused(call, field, got, want)


def test_paged_refuses_gradients():
    module = core("sinks", dtype=torch.float32)
    cache = cache_for(module, dtype=torch.float32)
    batch = cache.batch([cache.alloc()], 3)
    with pytest.raises(NoGradient, match="no_grad"):
        module(*heads(module, 3, dtype=torch.float32), batch=batch, k_pages=cache.k_pages[0], v_pages=cache.v_pages[0])


def test_an_unknown_kernel_is_named():
    with pytest.raises(UnknownKernel, match="nobody"):
        core(kernel="nobody", dtype=torch.float32)(*heads(core(), 1, 3))


# Compiled -----------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two layers of everything but the vocabulary."""

    def __init__(self, name="qwen3"):
        super().__init__()
        self.layers = nn.ModuleList(layer(name, torch.float32) for _ in range(2))

    def forward(self, hidden, k_pages=(None, None), v_pages=(None, None), **form):
        for each, k, v in zip(self.layers, k_pages, v_pages, strict=True):
            hidden = hidden + each(hidden, k_pages=k, v_pages=v, **form)
        return hidden


def counted(model, **options):
    counter = CompileCounterWithBackend("aot_eager")
    return counter, torch.compile(model, backend=counter, fullgraph=True, **options)


@pytest.mark.full
def test_compiled_dense():
    model = Model()
    counter, compiled = counted(model)
    for shape in [(2, 5), (3, 7), (4, 6), (9, 2), (2, 11), (5, 5)]:
        x = torch.randn(*shape, E)
        close(compiled(x), model(x), tolerance=1e-5)
    assert counter.frame_count == 2


@pytest.mark.full
def test_compiled_packed():
    model = Model()
    counter, compiled = counted(model)
    for lengths in ([3, 5, 2], [4, 4, 9, 1], [7, 2], [1, 1, 3], [11, 2, 2, 2, 6]):
        form = {"cu_seqlens": cu(lengths), "max_seqlen": max(lengths)}
        x = torch.randn(sum(lengths), E)
        close(compiled(x, **form), model(x, **form), tolerance=1e-5)
    assert counter.frame_count == 2


@pytest.mark.sweep(4)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_compiled_paged(name, mode):
    """Prefill and decode are one graph each once the first change of shape has made them dynamic."""
    model = Model(name)
    counter, compiled = counted(model)
    cache, mirror = (cache_for(model.layers[0].attention, num_layers=2, dtype=torch.float32, length=64) for _ in range(2))
    addresses = [t.data_ptr() for t in (cache.page_table, cache.seq_lens, *cache.k_pages, *cache.v_pages)]

    def run(counts):
        x = torch.randn(sum(counts), E)
        outs = []
        for model_or_compiled, pool in ((compiled, cache), (model, mirror)):
            while len(pool.requests) < len(counts):
                pool.alloc()
            batch = pool.batch(pool.requests[: len(counts)], counts)
            outs.append(model_or_compiled(x, batch=batch, k_pages=pool.k_pages, v_pages=pool.v_pages))
        close(outs[0], outs[1], tolerance=1e-4)

    with mode():
        for counts in ([3, 5], [2, 4, 3]):  # the warm-up: extend, and extend of another shape
            run(counts)
        assert counter.frame_count == 2
        for counts in ([4, 2, 1, 1], [1, 7], [0, 3, 2], [2, 2, 2, 2]):
            run(counts)
        assert counter.frame_count == 2
        for counts in ([1, 1], [1, 1, 1]):  # the warm-up of decode
            run(counts)
        warm = counter.frame_count
        assert warm <= 4
        for counts in ([1, 1, 1, 1], [1, 1], [1] * 5, [2, 1, 3], [1, 1, 1]):
            run(counts)
        assert counter.frame_count == warm
    assert [t.data_ptr() for t in (cache.page_table, cache.seq_lens, *cache.k_pages, *cache.v_pages)] == addresses
    for pool, other in zip((*cache.k_pages, *cache.v_pages), (*mirror.k_pages, *mirror.v_pages), strict=True):
        torch.testing.assert_close(pool, other, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.full
def test_compiled_from_the_start_dynamic():
    model = Model()
    counter, compiled = counted(model, dynamic=True)
    cache = cache_for(model.layers[0].attention, num_layers=2, dtype=torch.float32)
    ids = [cache.alloc() for _ in range(5)]
    seen = []
    with torch.no_grad():
        for counts in ([3, 5], [2, 4, 3], [1, 2, 1, 4]):
            batch = cache.batch(ids[: len(counts)], counts)
            compiled(torch.randn(sum(counts), E), batch=batch, k_pages=cache.k_pages, v_pages=cache.v_pages)
            seen.append(counter.frame_count)
    assert seen[0] <= 2, "dynamic=True takes theta for symbolic at first, finds that it is not, and starts again"
    assert seen[0] == seen[-1]


def test_layers_share_one_graph():
    """Nothing of a layer but its weights' values enters its graph: compiled one by one, two layers are one."""
    model = Model()
    counter = CompileCounterWithBackend("aot_eager")
    cache, mirror = (cache_for(model.layers[0].attention, num_layers=2, dtype=torch.float32) for _ in range(2))
    x = torch.randn(5, E)
    with torch.no_grad():
        want = model(x, batch=mirror.batch([mirror.alloc(), mirror.alloc()], [2, 3]), k_pages=mirror.k_pages, v_pages=mirror.v_pages)
        for each in model.layers:
            each.compile(backend=counter, fullgraph=True)
        got = model(x, batch=cache.batch([cache.alloc(), cache.alloc()], [2, 3]), k_pages=cache.k_pages, v_pages=cache.v_pages)
    close(got, want, tolerance=1e-5)
    assert counter.frame_count == 1


@pytest.mark.full  # test_compiled_paged has the steps, and tests/lowering/test_choose.py a model over pages in Inductor
@pytest.mark.slow
def test_inductor_decode():
    model = Model("gpt_oss")
    cache, mirror = (cache_for(model.layers[0].attention, num_layers=2, dtype=torch.float32) for _ in range(2))
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        outs = []
        for pool, decode in ((cache, compiled), (mirror, model)):
            torch.manual_seed(7)
            ids = [pool.alloc() for _ in range(3)]
            x = torch.randn(9, E)
            model(x, batch=pool.batch(ids, [4, 2, 3]), k_pages=pool.k_pages, v_pages=pool.v_pages)
            outs.append([
                decode(torch.randn(3, E), batch=pool.batch(ids), k_pages=pool.k_pages, v_pages=pool.v_pages) for _ in range(5)
            ])  # fmt: skip
    for got, want in zip(*outs, strict=True):
        close(got, want, tolerance=1e-4)
    for pool, other in zip((*cache.k_pages, *cache.v_pages), (*mirror.k_pages, *mirror.v_pages), strict=True):
        torch.testing.assert_close(pool, other, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_export_paged():
    model = Model()
    cache, mirror = (cache_for(model.layers[0].attention, num_layers=2, dtype=torch.float32) for _ in range(2))
    x = torch.randn(7, E)
    with torch.no_grad():
        given = {"batch": cache.batch([cache.alloc(), cache.alloc()], [3, 4]), "k_pages": cache.k_pages, "v_pages": cache.v_pages}
        exported = torch.export.export(model, (x,), given).module()
        want = model(x, batch=mirror.batch([mirror.alloc(), mirror.alloc()], [3, 4]), k_pages=mirror.k_pages, v_pages=mirror.v_pages)
        close(exported(x, **given), want, tolerance=1e-5)
    for pool, other in zip((*cache.k_pages, *cache.v_pages), (*mirror.k_pages, *mirror.v_pages), strict=True):
        torch.testing.assert_close(pool, other, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_what_nn_offers():
    assert {"Attention", "SelfAttention", "MultiheadAttention", "RotaryEmbedding", "PagedCache", "PagedBatch"} <= set(dir(attnops.nn))
