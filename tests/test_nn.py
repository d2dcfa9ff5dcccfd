"""Attention and SelfAttention: the three forms agree, what nobody owns is never read, bad calls
name what is wrong."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnops.cache import PagedCache
from attnops.core.errors import InvalidInput, UnknownKernel
from attnops.nn import Attention, RotaryEmbedding, SelfAttention
from tests.formula import plain
from tests.modules import NAN, close, cu, padded, pages_of, poisoned, refused, turned

E, HQ, HKV, D = 24, 4, 2, 8
VARIANTS = {
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
    """`[S, Hq, D]`, `[K, Hkv, D]`, `[K, Hkv, Dv]` -> `[S, Hq, Dv]`."""
    left, right = module.window
    rules = {
        "scale": module.scale,
        "causal": module.causal,
        "window_left": left,
        "window_right": right,
    }
    rules |= {"softcap": module.softcap, "attention_chunk": module.attention_chunk}
    return plain(q, k, v, mask, module.sinks, rules)[0]


def core(variant="gqa", dtype=torch.float64, **more):
    module = Attention(
        HQ, **{"num_kv_heads": HKV, "head_dim": D, "dtype": dtype, **VARIANTS[variant], **more}
    )
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


def cache_for(module, page_size=4, num_layers=1, num_pages=64, dtype=torch.float64, length=24):
    sizes = (
        num_layers,
        num_pages,
        page_size,
        module.num_kv_heads,
        module.head_dim,
        module.v_head_dim,
    )
    columns = -(-length // page_size)
    return poisoned(
        PagedCache(*sizes, max_requests=6, max_pages_per_request=columns, dtype=dtype, device="cpu")
    )


# The three forms of Attention ---------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_cache_with_windows_gives_the_same(page_size):
    """Layers that see 5 tokens, from a cache that keeps no more pages than they need: forks, texts
    of any length, drafts taken back."""
    module, rng = core("window"), random.Random(page_size)
    sizes = {
        "max_requests": 4,
        "max_pages_per_request": 40,
        "max_new_tokens": 6,
        "dtype": torch.float64,
        "device": "cpu",
    }
    whole, some = (
        poisoned(PagedCache(2, 99, page_size, HKV, D, windows=windows, **sizes))
        for windows in (None, (0, 5))
    )
    assert (
        some.k_pages[1].shape[0] < some.k_pages[0].shape[0]
        and some.tables[1].shape[1] < some.tables[0].shape[1]
    )
    live = [(whole.alloc(), some.alloc())]
    for turn in range(12):
        if turn in (3, 5):
            live.append((whole.fork(live[0][0]), some.fork(live[0][1])))
        counts = [rng.randint(1, 6 if turn % 2 else 1) for _ in live]
        of_whole, of_some = (
            cache.batch(ids, counts)
            for cache, ids in zip((whole, some), zip(*live, strict=True), strict=True)
        )
        q, k, v = heads(module, sum(counts))
        with torch.no_grad():
            want = module(q, k, v, batch=of_whole, **pages_of(whole))
            for layer in (0, 1):
                close(
                    module(
                        q, k, v, batch=of_some.of(some.table_of[layer]), **pages_of(some, layer)
                    ),
                    want,
                )
        for pair in live if turn % 3 == 2 else ():
            back = rng.randint(0, counts[0] if len(live) == 1 else min(counts))
            for cache, request in zip((whole, some), pair, strict=True):
                cache.truncate(request, cache.length(request) - back)
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
    close(module(q, k, v, mask=mask[None, None])[1], formula(module, q[1], k[1], v[1], mask[None]))
    start = torch.tensor([2, 0], dtype=torch.int32)
    k[0, :2], v[0, :2] = NAN, NAN
    with torch.no_grad():
        close(module(q, k, v, kv_start=start)[0, 2:], formula(module, q[0, 2:], k[0, 2:], v[0, 2:]))


@pytest.mark.parametrize("key_lengths", [None, (3, 4, 7)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed(variant, key_lengths):
    module, lengths = core(variant), (3, 1, 5)
    q, k, v = heads(module, 9, keys=sum(key_lengths or lengths))
    more = {"cu_seqlens_k": cu(key_lengths), "max_seqlen_k": 7} if key_lengths else {}
    parts = zip(
        q.split(lengths),
        k.split(key_lengths or lengths),
        v.split(key_lengths or lengths),
        strict=True,
    )
    got = module(q, k, v, cu_seqlens_q=cu(lengths), max_seqlen_q=5, **more)
    close(got, torch.cat([formula(module, *part) for part in parts]))


# Requests of 17, 3 and 9 tokens come and go between steps: prefill, mixed, nothing, decode.
SCHEDULE = [
    ([0], [5]),
    ([0, 1], [4, 1]),
    ([2, 0], [6, 1]),
    ([1], [0]),
    ([0, 1, 2], [1, 1, 1]),
    ([2, 1], [1, 1]),
    ([0, 2], [6, 1]),
]


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_paged_is_dense_over_the_whole_sequence(variant, page_size, pad):
    """With `pad`, NaN tokens of nobody follow. Pages that no request owns are not written."""
    module = core(variant, v_head_dim=6)
    cache = cache_for(module, page_size)
    ids = [cache.alloc() for _ in range(3)]
    sequences = {r: heads(module, n) for r, n in zip(ids, (17, 3, 9), strict=True)}
    got = {r: [] for r in ids}
    for who, counts in SCHEDULE:
        requests = [ids[i] for i in who]
        ranges = [
            (r, cache.length(r), cache.length(r) + n) for r, n in zip(requests, counts, strict=True)
        ]
        new = (
            torch.cat([sequences[r][i][start:stop] for r, start, stop in ranges]) for i in range(3)
        )
        query, key, value = (F.pad(x, (0, 0, 0, 0, 0, pad), value=NAN) for x in new)
        batch = cache.batch(requests, counts)
        with torch.no_grad():
            out = module(
                query, key, value, batch=padded(batch, pad) if pad else batch, **pages_of(cache)
            )
        *parts, rest = out.split([*counts, pad])
        assert rest.eq(0).all()
        for r, part in zip(requests, parts, strict=True):
            got[r].append(part)
    for r in ids:
        close(torch.cat(got[r]), formula(module, *sequences[r]))
    owned = {p for r in ids for p in cache.page_table[cache.row(r)].tolist()} - {0}
    for pages in (*cache.k_pages, *cache.v_pages):
        for page in set(range(cache.num_pages)) - owned:
            assert pages[page].isnan().all(), "written, and nobody's"


def test_what_a_paged_call_is_given():
    """A mask of the columns of the page table, and scales of float8 pages."""
    module = core(dtype=torch.float32)
    mask = torch.ones(5, 24, dtype=torch.bool)
    mask[4, 1] = mask[3, 3] = False
    scales = {"k_scale": torch.tensor([0.02]), "v_scale": torch.tensor([0.01, 0.03])}
    q, k, v = heads(module, 5, dtype=torch.float32)
    for dtype, tolerance, more in ((torch.float32, 1e-5, {}), (torch.float8_e4m3fn, 0.15, scales)):
        cache = cache_for(module, dtype=dtype)
        with torch.no_grad():
            got = module(
                q, k, v, batch=cache.batch([cache.alloc()], 5), **pages_of(cache), mask=mask, **more
            )
        close(got, formula(module, q, k, v, mask[None, :, :5]), tolerance)


# SelfAttention ------------------------------------------------------------------------------------


LAYERS = {
    "bare": {},
    "rope": {"rope": (100.0, 1.0)},
    "linear": {"rope": (500.0, 4.0)},
    "llama": {"rope": (10000.0, 1.0), "num_kv_heads": 2},
    "qwen3": {"rope": (10000.0, 1.0), "num_kv_heads": 2, "qk_norm": True, "head_dim": 10},
    "gemma2": {
        "rope": (10000.0, 1.0),
        "num_kv_heads": 2,
        "softcap": 4.0,
        "window": (5, -1),
        "scale": 0.2,
    },
    "gpt_oss": {
        "rope": (150000.0, 2.0),
        "num_kv_heads": 1,
        "sinks": True,
        "bias": True,
        "out_bias": True,
        "window": (3, 0),
    },
}


def layer(name="llama", dtype=torch.float64):
    built = dict(LAYERS[name])
    rope = built.pop("rope", None)
    head_dim = built.get("head_dim", E // HQ)
    if rope is not None:
        built["rope"] = RotaryEmbedding(
            head_dim, rope[0], scaling="linear" if rope[1] > 1 else "none", factor=rope[1]
        )
    module = SelfAttention(E, HQ, **built, dtype=dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(std=0.4)
    return module


def turns(rope):
    half = rope.head_dim // 2
    return rope.theta ** (-torch.arange(half).double() / half) / rope.factor


def layer_formula(module, hidden, positions=None):
    """`[S, E]` -> `[S, E]`."""
    positions = torch.arange(hidden.shape[0]) if positions is None else positions
    a = module.attention
    q = module.q_proj(hidden).view(-1, a.num_heads, a.head_dim)
    k = module.k_proj(hidden).view(-1, a.num_kv_heads, a.head_dim)
    v = module.v_proj(hidden).view(-1, a.num_kv_heads, a.head_dim)
    if module.q_norm is not None:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * n.weight
            for x, n in ((q, module.q_norm), (k, module.k_norm))
        )
    if module.rope is not None:
        q, k = (turned(x, positions, turns(module.rope)) for x in (q, k))
    return module.o_proj(formula(a, q, k, v).flatten(1))


@pytest.mark.parametrize("name", LAYERS)
def test_layer_dense_packed_paged(name):
    module, lengths = layer(name), (7, 1, 4)
    hidden = torch.randn(12, E, dtype=torch.float64)
    with torch.no_grad():
        want = torch.cat([layer_formula(module, x) for x in hidden.split(lengths)])
        close(module(hidden[None, :7])[0], want[:7])
        close(module(hidden, cu_seqlens=cu(lengths), max_seqlen=7), want)
        cache = cache_for(module.attention)
        ids = [cache.alloc() for _ in lengths]
        # The tokens of hidden that come in each step, and how many they are of each request.
        for rows, counts in (
            ([*range(5), 8, 9], (5, 0, 2)),
            ([5, 7, 10], (1, 1, 1)),
            ([6, 11], (1, 0, 1)),
        ):
            close(
                module(hidden[rows], batch=cache.batch(ids, counts), **pages_of(cache)), want[rows]
            )


def test_positions():
    module = layer("rope")
    hidden, at = torch.randn(2, 5, E, dtype=torch.float64), torch.tensor([3, 4, 5, 9, 12])
    shifted = torch.stack([at, at + 1])
    want = [layer_formula(module, *given) for given in zip(hidden, shifted, strict=True)]
    with torch.no_grad():
        close(module(hidden, positions=at)[0], want[0])
        close(module(hidden, positions=shifted), torch.stack(want))
        packed = {"cu_seqlens": cu([2, 3]), "max_seqlen": 3}
        close(
            module(hidden[0], positions=at.int(), **packed)[2:],
            layer_formula(module, hidden[0, 2:], at[2:]),
        )


def test_rope_keeps_its_angles_in_half_precision():
    rope = RotaryEmbedding(D, 10000.0)
    assert not list(rope.buffers())
    q, far = torch.randn(1, HQ, D), torch.tensor([100_003])
    want = turned(q, far, turns(rope))
    close(
        rope(q, q, far)[0].double(), want, tolerance=5e-2
    )  # float32 angles of 1e5 radians are good to 1e-2
    got = rope.to(torch.bfloat16)(q.bfloat16(), q.bfloat16(), far)[1]
    assert got.dtype == torch.bfloat16
    close(got.double(), want, tolerance=7e-2)


def test_weights_start_as_linears():
    torch.manual_seed(3)
    module = SelfAttention(E, HQ, HKV, qk_norm=True, bias=True, sinks=True)
    torch.manual_seed(3)
    for linear in (module.q_proj, module.k_proj, module.v_proj):
        assert torch.equal(linear.weight, nn.Linear(E, linear.out_features).weight)
    assert module.q_norm.weight.eq(1).all() and module.attention.sinks.eq(0).all()


def test_layer_gradients_agree():
    module = layer("gpt_oss")
    x = torch.randn(6, E, dtype=torch.float64, requires_grad=True)
    outs = layer_formula(module, x), module(x[None])[0], module(x, cu_seqlens=cu([6]), max_seqlen=6)
    want, *found = (
        torch.autograd.grad(out.square().sum(), [x, *module.parameters()]) for out in outs
    )
    for got in found:
        close(got, want)


def exact(module):
    module.q_norm.eps = module.k_norm.eps = 0.0


def shifted(module):
    module.q_norm = nn.LayerNorm(D)
    nn.init.normal_(module.q_norm.bias)


class Backwards(RotaryEmbedding):
    """Turns the other way."""

    def forward(self, query, key, positions):
        return super().forward(query, key, -positions)


PARTS = {
    "epsilon 0": exact,
    "a rotation of its own": lambda module: setattr(module, "rope", Backwards(D)),
    "another epsilon": lambda module: setattr(module.k_norm, "eps", 0.5),
    "one": lambda module: setattr(module, "q_norm", None),
    "no weight": lambda module: setattr(module, "q_norm", nn.RMSNorm(D, elementwise_affine=False)),
    "another class": shifted,
    "hook": lambda module: module.k_norm.register_forward_hook(lambda m, given, out: 2 * out),
    "attention": lambda module: module.attention.register_forward_hook(lambda m, given, out: -out),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_over_pages_are_those_of_the_layer(name):
    """One op norms, rotates and writes where the layer's parts are those that it knows."""
    module = SelfAttention(E, HQ, HKV, D, qk_norm=True, rope=RotaryEmbedding(D))
    with torch.no_grad():
        for each in (module.q_proj, module.k_proj):
            each.weight.mul_(1e-3)
    PARTS[name](module)
    hidden, cache = torch.randn(5, E), cache_for(module.attention, dtype=torch.float32)
    with torch.no_grad():
        got = module(hidden, batch=cache.batch([cache.alloc()], 5), **pages_of(cache))
        close(got, module(hidden[None])[0])


# Errors -------------------------------------------------------------------------------------------


def attend(*shapes, **kwargs):
    return lambda: Attention(HQ, HKV, head_dim=D)(*map(torch.randn, shapes), **kwargs)


def attend_paged(**change):
    def call():
        module = Attention(HQ, HKV, head_dim=D)
        cache = cache_for(module, dtype=torch.float32)
        given = {"batch": cache.batch([cache.alloc()], 3), **pages_of(cache), **change}
        with torch.no_grad():
            module(*heads(module, 3, dtype=torch.float32), **given)

    return call


def project_paged(**change):
    def call():
        module = SelfAttention(E, HQ, HKV, D, rope=RotaryEmbedding(D), dropout=0.1)
        module.train("dropout" in change)
        cache = cache_for(module.attention, dtype=torch.float32)
        given = {"batch": cache.batch([cache.alloc()], 3), **pages_of(cache), **change}
        given.pop("dropout", None)
        with torch.no_grad():
            module(torch.randn(3, E), **given)

    return call


def project(shape=(2, 3, E), **kwargs):
    return lambda: SelfAttention(E, HQ, HKV, rope=RotaryEmbedding(6))(torch.randn(shape), **kwargs)


def rotate(head_dim, positions):
    return lambda: RotaryEmbedding(8)(torch.zeros(1, 1, 8), torch.zeros(1, 1, head_dim), positions)


DENSE = ((2, 3, HQ, D), (2, 3, HKV, D), (2, 3, HKV, D))
PACKED = ((3, HQ, D), (3, HKV, D), (3, HKV, D))
LENGTHS = {"cu_seqlens_q": cu([3]), "max_seqlen_q": 3}
BAD = {
    "key.shape[2]: got 6, want 8": rotate(6, torch.zeros(1)),
    "positions.dtype: got torch.float32, want int32": rotate(8, torch.zeros(1)),
    "query: got shape (3, 4, 8), want [B, S, H, D]": attend(PACKED[0], *DENSE[1:]),
    "query.shape[2]: got 5, want 4, as the module was built": attend((2, 3, 5, D), *DENSE[1:]),
    "key.shape[3]: got 7, want 8, as the module was built": attend(
        DENSE[0], (2, 3, HKV, 7), DENSE[2]
    ),
    "value.shape[2]: got 1, want 2, as the module was built": attend(*DENSE[:2], (2, 3, 1, D)),
    "max_seqlen_q: got 3, want None without cu_seqlens_q": attend(*DENSE, max_seqlen_q=3),
    "cu_seqlens_k: got shape (2,), want None without cu_seqlens_q": attend(
        *DENSE, cu_seqlens_k=cu([3])
    ),
    "k_pages: got shape (1,), want None without batch": attend(*DENSE, k_pages=torch.zeros(1)),
    "k_scale: got shape (1,), want None without batch": attend(*DENSE, k_scale=torch.ones(1)),
    "query: got shape (2, 3, 4, 8), want [T, H, D]": attend(*DENSE, **LENGTHS),
    "max_seqlen_q: got None, want an upper bound": attend(*PACKED, cu_seqlens_q=cu([3])),
    "cu_seqlens_k, max_seqlen_k: got one of them, want both": attend(
        *PACKED, **LENGTHS, cu_seqlens_k=cu([3])
    ),
    "kv_end: got shape (1,), want None (dense calls only)": attend(
        *PACKED, **LENGTHS, kv_end=torch.ones(1)
    ),
    "k_pages, v_pages: got None, want this layer's pages": attend_paged(k_pages=None),
    "batch: got tuple, want a PagedBatch": attend_paged(batch=(1, 2)),
    "cu_seqlens_q: got shape (2,), want None with batch": attend_paged(cu_seqlens_q=cu([3])),
    "kv_start: got shape (1,), want None (dense calls only)": project_paged(kv_start=cu([])),
    "batch: got a batch, want None, because dropout": project_paged(dropout=True),
    "v_pages.dtype: got float16, want float32": attend_paged(
        v_pages=torch.zeros(64, 4, HKV, D).half()
    ),
    "hidden: got shape (3, 24), want [B, S, 24]": project((3, E)),
    "hidden.shape[2]: got 23, want 24": project((2, 3, E - 1)),
    "hidden: got shape (2, 3, 24), want [T, 24]": project(cu_seqlens=cu([3]), max_seqlen=3),
    "positions: got shape (4,), want one a token": project(positions=torch.arange(4)),
    "positions: got shape (), want [S] or [B, S]": project(positions=torch.tensor(0)),
    "hidden: got list, want a tensor": lambda: SelfAttention(E, HQ)([1.0]),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_calls(text):
    refused(BAD[text], text)


def test_an_unknown_kernel_is_named():
    with pytest.raises(UnknownKernel, match="nobody"):
        core(kernel="nobody")(*heads(core(), 1, 3))
