"""LatentAttention: its forms agree, dense, packed and paged, absorbed and expanded; bad calls name
what is wrong."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from attnops.cache import LatentCache
from attnops.core.errors import AttnopsError, UnknownKernel
from attnops.nn import (
    LatentAttention,
    LatentDims,
    NewTokens,
    RotaryEmbedding,
    attend_absorbed,
    attend_expanded,
    attend_latents,
)
from attnops.nn.latent import absorbed_weights, gathered
from attnops.ops import tree_mask
from tests.formula import plain
from tests.modules import close, cu, pages_of, poisoned, refused

F32, F64 = torch.float32, torch.float64
E, H, NOPE, ROPE, V, DC = 24, 4, 16, 8, 12, 32
DIMS = LatentDims(NOPE, ROPE, DC, V)


def layer(dtype=F64, interleaved=True, **more):
    torch.manual_seed(5)
    rope = RotaryEmbedding(
        ROPE,
        500.0,
        scaling="yarn",
        factor=4.0,
        original_max_position=64,
        mscale=1.0,
        mscale_all_dim=0.7,
        interleaved=interleaved,
    )
    given = {
        "q_lora_rank": 20,
        "kv_lora_rank": DC,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V,
        "rope": rope,
    }
    module = LatentAttention(E, H, **given | {"bias": True, "dtype": dtype} | more)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2.0)
    return module


def cache_for(dtype=F64, page_size=4, layers=1):
    sizes = {
        "latent_dim": DC,
        "rope_dim": ROPE,
        "max_requests": 6,
        "max_tokens_per_request": 64,
        "page_size": page_size,
    }
    return poisoned(LatentCache(layers, 160, **sizes, dtype=dtype, device="cpu"))


def dense(module, sequences):
    """The layer's outputs over whole sequences, without a cache: what tests/hf holds against
    DeepSeek's own."""
    with torch.no_grad():
        return [module(x[None])[0] for x in sequences]


def feed(module, cache, ids, counts, sequences, **how):
    """The next counts[i] tokens of each request's sequence."""
    starts = [cache.length(r) for r in ids]
    x = torch.cat([s[a : a + n] for s, a, n in zip(sequences, starts, counts, strict=True)])
    batch = cache.batch(ids, counts, **how)
    with torch.no_grad():
        return module(x, batch=batch, **pages_of(cache)).split(list(counts))


# The forms ----------------------------------------------------------------------------------------


def test_left_padding():
    module = layer()
    x, start = torch.randn(2, 9, E, dtype=F64), torch.tensor([3, 0], dtype=torch.int32)
    at = (torch.arange(9) - start[:, None]).clamp(min=0)
    with torch.no_grad():
        got = module(x, kv_start=start, positions=at)
        close(got[0, 3:], dense(module, [x[0, 3:]])[0])
        mask = torch.arange(9)[None] >= start[:, None]
        close(module(x, mask=mask[:, None, None], positions=at)[:, 3:], got[:, 3:])


# What the three requests have before, and the steps that bring it there: prefill, mixed, then q_len
# new tokens of each.
BEFORE = (9, 0, 5)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("absorb", [0, 99], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("prefix_tokens", [1, 3, 6, 100, None])
@pytest.mark.parametrize("page_size", [1, 4])
def test_extends_of_0_to_8_tokens(page_size, prefix_tokens, absorb):
    module = layer(absorb=absorb)
    sequences = [torch.randn(n + 8, E, dtype=F64) for n in BEFORE]
    want = dense(module, sequences)
    cache = cache_for(page_size=page_size)
    ids = [cache.alloc() for _ in BEFORE]
    close(
        feed(module, cache, [ids[0]], [4], sequences[:1], prefix_tokens=prefix_tokens)[0],
        want[0][:4],
    )
    got = feed(
        module,
        cache,
        [ids[2], ids[0]],
        [5, 5],
        [sequences[2], sequences[0]],
        prefix_tokens=prefix_tokens,
    )
    close(got[0], want[2][:5])
    close(got[1], want[0][4:9])
    for q_len in range(9):
        counts = [q_len, max(q_len - 2, 0), min(q_len, 1)]
        got = feed(module, cache, ids, counts, sequences, prefix_tokens=prefix_tokens)
        for part, whole, start, n in zip(got, want, BEFORE, counts, strict=True):
            close(part, whole[start : start + n])
        for request, length in zip(ids, BEFORE, strict=True):
            cache.truncate(request, length)


def test_no_more_than_a_chunk_is_unfolded_at_a_time():
    module, cache = layer(absorb=0), cache_for()
    x, seen = torch.randn(40, E, dtype=F64), []
    a = cache.alloc()
    feed(module, cache, [a], [36], [x])
    module.kv_b_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[0]))
    close(feed(module, cache, [a], [4], [x], prefix_tokens=6)[0], dense(module, [x])[0][36:])
    assert seen[:7] == [4, *[6] * 6]


class Adapted(nn.Module):
    """A projection with something around it."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_absorbed_form_follows_the_weights(compiled):
    """Of another projection, and after a prompt even writes that change no version."""
    module = layer(F32, absorb=5)
    run = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    x, seen = torch.randn(7, E), []
    for around in (False, True):
        if around:
            module.kv_b_proj = Adapted(module.kv_b_proj)
        for _ in range(2):
            cache = cache_for(F32)
            a = cache.alloc()
            feed(module, cache, [a], [6], [x])
            with torch.no_grad():
                seen.append(run(x[6:], batch=cache.batch([a], 1), **pages_of(cache)))
            close(seen[-1], dense(module, [x])[0][6:], 1e-4)
            (module.kv_b_proj.base if around else module.kv_b_proj).weight.data.mul_(-1.5)
    assert not any(torch.allclose(a, b) for a, b in itertools.pairwise(seen))


STEPS = {torch.int8: 0.05, torch.float8_e4m3fn: 0.02}


@pytest.mark.parametrize("dtype", STEPS)
def test_quantised_pages(dtype):
    """Latents that the stored dtype can hold are the same in both forms; those it rounds are off by
    no more than the rounding."""
    scale = torch.tensor([STEPS[dtype]])
    module, cache = layer(F32), cache_for(dtype)
    ids = [cache.alloc() for _ in BEFORE]
    exact = torch.randint(-8, 9, (40, DC + ROPE)).to(F32) * scale
    q = torch.randn(40, H, NOPE + ROPE)

    def run(tokens, batch, absorb, latents):
        return attend_latents(
            DIMS,
            NewTokens(
                q[:tokens, :, :NOPE],
                q[:tokens, :, NOPE:],
                latents[:tokens, :DC],
                latents[:tokens, DC:],
            ),
            module.kv_b_proj,
            cache.latent_pages[0],
            batch,
            scale=0.2,
            kv_scale=scale,
            absorb_up_to=absorb,
        )

    with torch.no_grad():
        run(14, cache.batch(ids, BEFORE), 99, exact)
        batch = cache.batch(ids, [3, 2, 1], prefix_tokens=4)
        chunk = batch.prefix[0]
        latent, k_pe = gathered(DIMS, cache.latent_pages[0], chunk, scale, F32)
        want = exact[: chunk.slots.shape[0]]
        close(torch.cat([latent, k_pe], -1), want)
        close(run(6, batch, 0, exact), run(6, batch, 99, exact), 1e-5)
        rough = torch.randn(40, DC + ROPE) * 16 * scale
        apart = (run(6, batch, 0, rough) - run(6, batch, 99, rough)).abs().max()
        assert 0 < apart < 0.5 * 16 * scale


def test_a_scale_of_pages_that_need_none():
    """What is written is divided by it, whatever the dtype, so both forms multiply by it."""
    x, scale = torch.randn(1, 8, E, dtype=F64), torch.full((1,), 2.0)
    for absorb in (0, 99):
        module, cache = layer(absorb=absorb), cache_for()
        request, given = cache.alloc(), {"latent_pages": cache.latent_pages[0], "kv_scale": scale}
        with torch.no_grad():
            module(x[0, :5], batch=cache.batch([request], 5), **given)
            got = module(x[0, 5:], batch=cache.batch([request], 3, prefix_tokens=3), **given)
            close(got, module(x)[0, 5:])


@pytest.mark.parametrize("absorb", [0, 99])
def test_a_tree_of_tokens(absorb):
    """A node has what its branch alone gives it."""
    module, cache, parents = layer(absorb=absorb), cache_for(), [-1, 0, 0, 1, 2]
    first, nodes = torch.randn(6, E, dtype=F64), torch.randn(5, E, dtype=F64)
    request = cache.alloc()
    feed(module, cache, [request], [6], [first])
    batch = cache.batch([request], 5)
    tree = torch.tensor([parents], dtype=torch.int32)
    mask = tree_mask(tree, batch.seq_lens, num_keys=batch.page_table.shape[1] * cache.page_size)
    where = {**pages_of(cache), "mask": mask, "positions": mask.sum(1) - 1}
    with torch.no_grad():
        got = module(nodes, batch=batch, **where)
    for node, branch in enumerate(([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4])):
        [want] = dense(module, [torch.cat([first, nodes[branch]])])
        close(got[node], want[-1])


def test_a_cascade_is_the_plain_batch():
    module, cache = layer(F32), cache_for(F32)
    first = torch.randn(8, E)  # two whole pages
    a = cache.alloc()
    feed(module, cache, [a], [8], [first])
    ids = [a, *(cache.fork(a) for _ in range(3))]
    sequences = [torch.cat([first, torch.randn(6, E)]) for _ in ids]
    want = dense(module, sequences)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    # The last request has nothing beyond the pages it shares, and brings nothing.
    for counts in ([2, 1, 3, 0], [1, 1, 1, 0], [1, 4, 2, 0]):
        starts = [cache.length(r) for r in ids]
        x = torch.cat([s[i : i + n] for s, i, n in zip(sequences, starts, counts, strict=True)])
        batch = cache.batch(ids, counts, share=True)
        assert batch.shared is not None
        with torch.no_grad():
            got = compiled(x, batch=batch, **pages_of(cache))
            close(module(x, batch=batch, **pages_of(cache)), got, 1e-6)
            plain = module(x, batch=dataclasses.replace(batch, shared=None), **pages_of(cache))
        close(got, plain, 1e-5)
        close(
            got,
            torch.cat([w[i : i + n] for w, i, n in zip(want, starts, counts, strict=True)]),
            1e-5,
        )


RULES = {
    "softcap": {"softcap": 2.0},
    "window": {"window_left": 3},
    "mask": {"mask": torch.arange(128) % 3 < torch.tensor([[2], [1]])},
}


@pytest.mark.parametrize("more", RULES.values(), ids=RULES)
def test_a_cascade_has_the_rules_of_the_plain_batch(more):
    """Or there is none, as with a window."""
    module, cache = layer(F32), cache_for(F32)
    a = cache.alloc()
    feed(module, cache, [a], [8], [torch.randn(8, E)])
    batch = cache.batch([a, cache.fork(a)], 1, share=True)
    cache.latent_pages[0][batch.page_table[:, 2].long()] = 0.3
    with torch.no_grad():
        weights = absorbed_weights(module.kv_b_proj, NOPE, V, torch.zeros(1, DC))
        given = (
            DIMS,
            torch.randn(2, H, NOPE),
            torch.randn(2, H, ROPE),
            weights,
            cache.latent_pages[0],
        )
        both = (
            attend_absorbed(*given, step, scale=0.2, **more)
            for step in (batch, dataclasses.replace(batch, shared=None))
        )
        close(*both, 1e-5)


# Gradients ----------------------------------------------------------------------------------------


def formula(module, x):
    """`[S, E]` -> `[S, E]`, section 2.1 of DeepSeek-V2 written down once more, in torch operators
    that autograd knows."""
    steps = ("q_a_proj", "q_a_layernorm", "q_b_proj") if module.q_lora_rank else ("q_proj",)
    q = x
    for name in steps:
        q = getattr(module, name)(q)
    q_nope, q_pe = q.unflatten(-1, (H, NOPE + ROPE)).split([NOPE, ROPE], -1)
    latent, k_pe = module.kv_a_proj_with_mqa(x).split([DC, ROPE], -1)
    k_nope, v = (
        module.kv_b_proj(module.kv_a_layernorm(latent))
        .unflatten(-1, (H, NOPE + V))
        .split([NOPE, V], -1)
    )
    if module.rope is not None:
        q_pe, k_pe = module.rope(q_pe, k_pe[:, None], torch.arange(len(x)))
        k_pe = k_pe[:, 0]
    k = torch.cat([k_nope, k_pe[:, None].expand(-1, H, -1)], -1)
    attended, _ = plain(
        torch.cat([q_nope, q_pe], -1), k, v, None, None, {"scale": module.scale, "causal": True}
    )
    return module.o_proj(attended.flatten(1))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("more", "compiled"),
    [
        ({}, False),
        ({"q_lora_rank": None, "bias": False}, False),
        ({"rope": None}, False),
        ({}, True),
    ],
    ids=["low rank", "full rank", "no rope", "compiled"],
)
def test_gradients_are_those_of_the_formula(more, compiled):
    """Of the input and of every parameter."""
    module, lengths = layer(**more), [2, 5]
    x = torch.randn(7, E, dtype=F64, requires_grad=True)
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module

    def grads(out):
        return torch.autograd.grad(out.square().sum(), [x, *module.parameters()])

    want = grads(torch.cat([formula(module, part) for part in x.split(lengths)]))
    assert all(g.abs().max() > 1e-3 for g in want)
    dense_ = grads(torch.cat([run(part[None])[0] for part in x.split(lengths)]))
    for found in (dense_, grads(run(x, cu_seqlens=cu(lengths), max_seqlen=5))):
        for got, right in zip(found, want, strict=True):
            close(got, right, 1e-6)


# Errors -------------------------------------------------------------------------------------------


def called(*shape, **more):
    return lambda: layer(F32)(torch.randn(shape or (2, 3, E)), **more)


def paged(which=None, of_batch=None, **change):
    """A call over pages of the layer, or of a function under it, with one argument changed."""

    def call():
        module, cache = layer(F32), cache_for(F32)
        batch = dataclasses.replace(cache.batch([cache.alloc()], 3), **of_batch or {})
        over = {"batch": batch, **pages_of(cache)}
        new = NewTokens(
            torch.randn(3, H, NOPE),
            torch.randn(3, H, ROPE),
            torch.randn(3, DC),
            torch.randn(3, ROPE),
        )
        new = new._replace(
            **{name: change.pop(name) for name in NewTokens._fields if name in change}
        )
        with torch.no_grad():
            if which is None:
                module(torch.randn(3, E), **over | change)
            elif which is attend_absorbed:
                weights = absorbed_weights(module.kv_b_proj, NOPE, V, new.latent)
                given = {
                    "dims": DIMS,
                    "q_nope": new.q_nope,
                    "q_pe": new.q_pe,
                    "weights": weights,
                    "scale": 0.2,
                }
                which(**given | over | change)
            else:
                which(
                    **{"dims": DIMS, "new": new, "kv_b": module.kv_b_proj, "scale": 0.2}
                    | over
                    | change
                )

    return call


def projection(rows, bias=False):
    return {"kv_b": nn.Linear(DC, rows, bias=bias)}


INT8 = torch.zeros(3, 4, 40, dtype=torch.int8)
BAD = {
    "max_seqlen: got 3, want None without cu_seqlens": called(max_seqlen=3),
    "latent_pages: got shape (1,), want None without batch": called(latent_pages=torch.zeros(1)),
    "kv_scale: got shape (1,), want None without batch": called(kv_scale=torch.ones(1)),
    "float8_scales: got (1.0, 1.0), want None without batch": called(float8_scales=(1.0, 1.0)),
    "kv_start: got shape (1,), want None (dense": called(
        3, E, cu_seqlens=cu([3]), max_seqlen=3, kv_start=torch.zeros(1)
    ),
    "latent_pages: got None, want this layer's pages": paged(latent_pages=None),
    "latent_pages: got shape (3, 4, 5, 6), want [P, page, Dc + Dr]": paged(
        latent_pages=torch.zeros(3, 4, 5, 6)
    ),
    "mask: got shape (3, 3), want None with float8_scales": paged(
        mask=torch.ones(3, 3), float8_scales=(1.0, 1.0)
    ),
    "q_nope.shape[2]: got 17, want 16": paged(attend_latents, q_nope=torch.randn(3, H, NOPE + 1)),
    "q_pe: got shape (4, 8), want [T, H, Dr]": paged(attend_latents, q_pe=torch.randn(H, ROPE)),
    "latent_pages.shape[2]: got 40, want 41": paged(attend_latents, latent=torch.randn(3, DC + 1)),
    "absorb_up_to: got -1, want an int >= 0": paged(attend_latents, absorb_up_to=-1),
    "kv_b(latent).shape[-1]: got 56, want 4 * (16 + 12)": paged(
        attend_latents, **projection(2 * (NOPE + V)), absorb_up_to=0
    ),
    "w_uk.shape[0]: got 2, want 4": paged(
        attend_latents, **projection(2 * (NOPE + V)), absorb_up_to=9
    ),
    "kv_b.weight.shape[0]: got 50, want a multiple": paged(
        attend_latents, **projection(50), absorb_up_to=9
    ),
    "kv_b.bias: got a bias, want None": paged(
        attend_latents, **projection(H * (NOPE + V), bias=True), absorb_up_to=9
    ),
    "w_uk.shape[2]: got 33, want 32": paged(
        attend_absorbed, weights=(torch.randn(H, NOPE, DC + 1),)
    ),
    "w_uk: got shape (4, 32), want [H, nope, Dc]": paged(
        attend_absorbed, weights=(torch.randn(H, DC),)
    ),
    "kv_scale: got None, want a scale": paged(attend_expanded, latent_pages=INT8),
    "latent_pages.dtype: got float16, want float32 | float8": paged(
        attend_expanded, latent_pages=torch.zeros(9, 4, 40).half()
    ),
    "latent_pages.shape[2]: got 41, want 32 + 8": paged(
        attend_expanded, latent_pages=torch.zeros(9, 4, 41)
    ),
    "kv_scale: got torch.float32 (2,), want float32 [1]": paged(
        attend_expanded, kv_scale=torch.ones(2)
    ),
    "batch.prefix: got None, want chunks": paged(attend_expanded, of_batch={"prefix": None}),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_calls(text):
    refused(BAD[text], text)


def test_a_kernel_is_asked_of_the_ops_that_have_it():
    for given in (
        {"hidden": torch.randn(1, 3, E)},
        {"hidden": torch.randn(3, E), "cu_seqlens": cu([3]), "max_seqlen": 3},
    ):
        layer(F32, kernel="flashmla")(**given)  # of mla_attention alone
        with pytest.raises(UnknownKernel, match="nobody"):
            layer(F32, kernel="nobody")(**given)
    cache = cache_for(F32)
    with pytest.raises(AttnopsError, match="flashmla"), torch.no_grad():
        layer(F32, kernel="flashmla")(
            torch.randn(3, E),
            batch=dataclasses.replace(cache.batch([cache.alloc()], 3), prefix=None),
            **pages_of(cache),
        )
