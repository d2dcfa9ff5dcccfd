"""LatentAttention: its forms agree, dense, packed and paged, absorbed and expanded, eager and compiled; bad arguments name themselves."""

import dataclasses
import itertools
import re

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.nn.utils import parametrize

from attnops.cache import LatentCache, PrefixChunk
from attnops.core.errors import AttnopsError, NoGradient, UnknownKernel
from attnops.core.kernel import kernels_of
from attnops.nn import LatentAttention, LatentDims, NewTokens, RotaryEmbedding, attend_absorbed, attend_expanded, attend_latents
from attnops.nn.absorb import absorbed_weights
from attnops.nn.latent import gathered
from tests.lowering.models import compiled_code, kernel_calls
from tests.test_nn import close, cu, refused

F32, F64 = torch.float32, torch.float64
E, H, NOPE, ROPE, V, DC = 24, 4, 16, 8, 12, 32
DIMS = LatentDims(NOPE, ROPE, DC, V)
NAN = float("nan")


def layer(dtype=F64, interleaved=True, **more):
    torch.manual_seed(5)
    rope = RotaryEmbedding(
        ROPE, 500.0, scaling="yarn", factor=4.0, original_max_position=64, mscale=1.0, mscale_all_dim=0.7, interleaved=interleaved
    )
    given = {"q_lora_rank": 20, "kv_lora_rank": DC, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V, "rope": rope}
    module = LatentAttention(E, H, **given | {"bias": True, "dtype": dtype} | more)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2.0)
    return module


def cache_for(dtype=F64, page_size=4, layers=1, tokens=160, requests=6):
    cache = LatentCache(
        layers, tokens, latent_dim=DC, rope_dim=ROPE, max_requests=requests, max_tokens_per_request=64, page_size=page_size,
        dtype=dtype, device="cpu",
    )  # fmt: skip
    if dtype.is_floating_point and dtype.itemsize > 1:
        for pages in cache.latent_pages:
            pages.fill_(NAN)
    return cache


def dense(module, sequences):
    """The layer's outputs over whole sequences, without a cache: what tests/hf holds against DeepSeek's own."""
    with torch.no_grad():
        return [module(x[None])[0] for x in sequences]


def feed(module, cache, ids, counts, sequences, **how):
    """The next counts[i] tokens of each request's sequence."""
    starts = [cache.length(r) for r in ids]
    x = torch.cat([s[a : a + n] for s, a, n in zip(sequences, starts, counts, strict=True)])
    batch = cache.batch(ids, counts, **how)
    with torch.no_grad():
        return module(x, batch=batch, latent_pages=cache.latent_pages[0]).split(list(counts))


# The forms ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"q_lora_rank": None, "bias": False}, {"rope": None}], ids=["low rank", "full rank", "no rope"])
def test_packed_is_dense(more):
    module, lengths = layer(**more), [7, 1, 4]
    x = torch.randn(12, E, dtype=F64)
    with torch.no_grad():
        close(module(x, cu_seqlens=cu(lengths), max_seqlen=7), torch.cat(dense(module, x.split(lengths))))
        padded = F.pad(x, (0, 0, 0, 2), value=NAN)
        got = module(padded, cu_seqlens=cu(lengths), max_seqlen=9)
    close(got[:12], torch.cat(dense(module, x.split(lengths))))


def test_left_padding():
    module = layer()
    x, start = torch.randn(2, 9, E, dtype=F64), torch.tensor([3, 0], dtype=torch.int32)
    at = (torch.arange(9) - start[:, None]).clamp(min=0)
    with torch.no_grad():
        got = module(x, kv_start=start, positions=at)
        close(got[0, 3:], dense(module, [x[0, 3:]])[0])
        mask = torch.arange(9)[None] >= start[:, None]
        close(module(x, mask=mask[:, None, None], positions=at)[:, 3:], got[:, 3:])


# What the three requests have before, and the steps that bring it there: prefill, mixed, then q_len new tokens of each.
BEFORE = (9, 0, 5)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("absorb", [0, 99], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("prefix_tokens", [1, 3, 6, 100, None])
@pytest.mark.parametrize("page_size", [1, 4])
def test_extends_of_1_to_8_tokens(page_size, prefix_tokens, absorb):
    module = layer(absorb=absorb)
    sequences = [torch.randn(n + 8, E, dtype=F64) for n in BEFORE]
    want = dense(module, sequences)
    cache = cache_for(page_size=page_size)
    ids = [cache.alloc() for _ in BEFORE]
    close(feed(module, cache, [ids[0]], [4], sequences[:1], prefix_tokens=prefix_tokens)[0], want[0][:4])
    got = feed(module, cache, [ids[2], ids[0]], [5, 5], [sequences[2], sequences[0]], prefix_tokens=prefix_tokens)
    close(got[0], want[2][:5])
    close(got[1], want[0][4:9])
    for q_len in range(1, 9):
        counts = [q_len, max(q_len - 2, 0), 1]
        got = feed(module, cache, ids, counts, sequences, prefix_tokens=prefix_tokens)
        for part, whole, start, n in zip(got, want, BEFORE, counts, strict=True):
            close(part, whole[start : start + n])
        for request, length in zip(ids, BEFORE, strict=True):
            cache.truncate(request, length)


def test_chunks_made_by_hand():
    """A request may be absent from a chunk, or split over several, whatever the order of its tokens."""
    module, cache = layer(), cache_for()
    sequences = [torch.randn(n, E, dtype=F64) for n in (9, 6, 3)]
    ids = [cache.alloc() for _ in sequences]
    feed(module, cache, ids, [7, 5, 0], sequences)
    batch = cache.batch(ids, [2, 1, 3])

    def chunk(*ranges):
        slots = [cache.slots(r, start, stop) for r, (start, stop) in zip(ids, ranges, strict=True)]
        return PrefixChunk(torch.cat(slots), cu([s.numel() for s in slots]), max(s.numel() for s in slots))

    prefix = (chunk((2, 5), (0, 0), (0, 0)), chunk((0, 2), (4, 5), (0, 0)), chunk((5, 7), (0, 4), (0, 0)))
    x = torch.cat([sequences[0][7:], sequences[1][5:], sequences[2]])
    with torch.no_grad():
        module.absorb_up_to = 0
        got = module(x, batch=dataclasses.replace(batch, prefix=prefix), latent_pages=cache.latent_pages[0])
    want = dense(module, sequences)
    close(got, torch.cat([want[0][7:], want[1][5:], want[2]]))


def padded(batch, tokens):
    """The step as a fixed-size graph runs it: one more request, of length 0, and tokens of nobody."""
    zeros = batch.seq_lens.new_zeros
    again = [dataclasses.replace(c, cu_seqlens_k=torch.cat([c.cu_seqlens_k, c.cu_seqlens_k[-1:]])) for c in batch.prefix or ()]
    return dataclasses.replace(
        batch,
        page_table=torch.cat([batch.page_table, zeros(1, batch.page_table.shape[1])]),
        seq_lens=torch.cat([batch.seq_lens, zeros(1)]),
        cu_seqlens_q=torch.cat([batch.cu_seqlens_q, batch.cu_seqlens_q[-1:]]),
        slots=F.pad(batch.slots, (0, tokens), value=-1),
        positions=F.pad(batch.positions, (0, tokens)),
        padded=True,
        prefix=None if batch.prefix is None else tuple(again),
    )


def test_no_more_than_a_chunk_is_unfolded_at_a_time():
    module, cache = layer(absorb=0), cache_for()
    x, seen = torch.randn(40, E, dtype=F64), []
    a = cache.alloc()
    feed(module, cache, [a], [36], [x])
    module.kv_b_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[0]))
    close(feed(module, cache, [a], [4], [x], prefix_tokens=6)[0], dense(module, [x])[0][36:])
    assert seen[:7] == [4, *[6] * 6]


class Adapted(nn.Module):
    """A projection with an adapter of low rank around it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base, 1.0
        self.a, self.b = nn.Linear(DC, 2, bias=False), nn.Linear(2, H * (NOPE + V), bias=False)

    def forward(self, x):
        return self.base(x) + self.scale * self.b(self.a(x))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_absorbed_form_follows_the_weights(compiled):
    module = layer(F32, absorb=99)
    run = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    x = torch.randn(7, E)

    def follows():
        cache = cache_for(F32)
        a = cache.alloc()
        feed(module, cache, [a], [6], [x])
        with torch.no_grad():
            got = run(x[6:], batch=cache.batch([a], 1), latent_pages=cache.latent_pages[0])
        close(got, dense(module, [x])[0][6:], 1e-4)
        return got

    seen = [follows()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(x[None]).square().mean().backward()
    optimizer.step()
    seen.append(follows())
    module.load_state_dict({n: torch.randn_like(p) * 0.3 for n, p in module.state_dict().items()})
    seen.append(follows())
    module.kv_b_proj = Adapted(module.kv_b_proj)
    seen.append(follows())
    module.kv_b_proj.scale = 3.0
    seen.append(follows())
    module.kv_b_proj = module.kv_b_proj.base
    parametrize.register_parametrization(module.kv_b_proj, "weight", nn.Tanh())
    seen.append(follows())
    assert not any(torch.allclose(a, b) for a, b in itertools.pairwise(seen))


@pytest.mark.parametrize("absorb", [0, 99])
def test_tokens_of_nobody(absorb):
    module, cache = layer(absorb=absorb, bias=False), cache_for()
    x = torch.randn(9, E, dtype=F64)
    a = cache.alloc()
    for start, stop in ((0, 6), (6, 9)):
        batch = padded(cache.batch([a], stop - start, prefix_tokens=4), 2)
        with torch.no_grad():
            got = module(F.pad(x[start:stop], (0, 0, 0, 2), value=NAN), batch=batch, latent_pages=cache.latent_pages[0])
        close(got[:-2], dense(module, [x])[0][start:stop])
        assert got[-2:].eq(0).all()


def test_an_empty_step():
    module, cache = layer(), cache_for()
    assert feed(module, cache, [cache.alloc()], [0], [torch.zeros(0, E, dtype=F64)])[0].shape == (0, E)


STEPS = {torch.int8: 0.05, torch.float8_e4m3fn: 0.02}


@pytest.mark.parametrize("dtype", STEPS)
def test_quantised_pages(dtype):
    """Latents that the stored dtype can hold are the same in both forms; those it rounds are off by no more than the rounding."""
    scale = torch.tensor([STEPS[dtype]])
    module, cache = layer(F32), cache_for(dtype)
    ids = [cache.alloc() for _ in BEFORE]
    exact = torch.randint(-8, 9, (40, DC + ROPE)).to(F32) * scale
    q = torch.randn(40, H, NOPE + ROPE)

    def run(tokens, batch, absorb, latents):
        return attend_latents(
            DIMS, NewTokens(q[:tokens, :, :NOPE], q[:tokens, :, NOPE:], latents[:tokens, :DC], latents[:tokens, DC:]), module.kv_b_proj,
            cache.latent_pages[0], batch, scale=0.2, kv_scale=scale, absorb_up_to=absorb,
        )  # fmt: skip

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
            got = compiled(x, batch=batch, latent_pages=cache.latent_pages[0])
            close(module(x, batch=batch, latent_pages=cache.latent_pages[0]), got, 1e-6)
            plain = module(x, batch=dataclasses.replace(batch, shared=None), latent_pages=cache.latent_pages[0])
        close(got, plain, 1e-5)
        close(got, torch.cat([w[i : i + n] for w, i, n in zip(want, starts, counts, strict=True)]), 1e-5)


def test_a_cascade_looks_at_the_shared_pages_once_and_knows_no_window():
    module, cache = layer(F32), cache_for(F32)
    a = cache.alloc()
    feed(module, cache, [a], [8], [torch.randn(8, E)])
    batch = cache.batch([a, cache.fork(a)], 1, share=True)
    cache.latent_pages[0][batch.page_table[:, 2].long()] = 0.3
    q = torch.randn(2, H, NOPE + ROPE)
    with torch.no_grad():
        weights = absorbed_weights(module.kv_b_proj, NOPE, V, torch.zeros(1, DC))
        rest = (q[..., :NOPE], q[..., NOPE:], weights, cache.latent_pages[0])
        for more in ({"softcap": 2.0}, {"window_left": 3}):
            plain = attend_absorbed(DIMS, *rest, dataclasses.replace(batch, shared=None), scale=0.2, **more)
            close(attend_absorbed(DIMS, *rest, batch, scale=0.2, **more), plain, 1e-5)


# Gradients ----------------------------------------------------------------------------------------------------------------


def test_gradients_flow_through_dense_and_packed():
    module = layer(q_lora_rank=None)
    x = torch.randn(5, E, dtype=F64, requires_grad=True)

    def grads(out):
        return torch.autograd.grad(out.square().sum(), [x, *module.parameters()])

    packed = module(x, cu_seqlens=cu([2, 3]), max_seqlen=3)
    both = torch.cat([module(part[None])[0] for part in x.split([2, 3])])
    for got, want in zip(grads(packed), grads(both), strict=True):
        close(got, want, 1e-8)
    assert torch.autograd.gradcheck(lambda y: module(y, cu_seqlens=cu([2, 3]), max_seqlen=3), x)


def formula(module, x):
    """`[S, E]` -> `[S, E]`, section 2.1 of DeepSeek-V2 written down once more, in torch operators that autograd knows."""
    steps = ("q_a_proj", "q_a_layernorm", "q_b_proj") if module.q_lora_rank else ("q_proj",)
    q = x
    for name in steps:
        q = getattr(module, name)(q)
    q_nope, q_pe = q.unflatten(-1, (H, NOPE + ROPE)).split([NOPE, ROPE], -1)
    latent, k_pe = module.kv_a_proj_with_mqa(x).split([DC, ROPE], -1)
    k_nope, v = module.kv_b_proj(module.kv_a_layernorm(latent)).unflatten(-1, (H, NOPE + V)).split([NOPE, V], -1)
    if module.rope is not None:
        q_pe, k_pe = module.rope(q_pe, k_pe[:, None], torch.arange(len(x)))
        k_pe = k_pe[:, 0]
    logits = torch.einsum("shd,thd->hst", q_nope, k_nope) + torch.einsum("shd,td->hst", q_pe, k_pe)
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    weights = (logits * module.scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return module.o_proj(torch.einsum("hst,thd->shd", weights, v).flatten(1))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("more", "compiled"), [({}, False), ({"q_lora_rank": None, "bias": False}, False), ({"rope": None}, False), ({}, True)],
    ids=["low rank", "full rank", "no rope", "compiled"],
)  # fmt: skip
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


@pytest.mark.parametrize("absorb", [0, 99])
def test_paged_refuses_gradients(absorb):
    module, cache = layer(absorb=absorb), cache_for()
    with pytest.raises(NoGradient, match="no_grad"):
        module(torch.randn(3, E, dtype=F64), batch=cache.batch([cache.alloc()], 3), latent_pages=cache.latent_pages[0])


def test_autocast():
    module, x = layer(F32), torch.randn(1, 6, E)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = module(x)
        cache = cache_for(torch.bfloat16)
        paged = module(x[0], batch=cache.batch([cache.alloc()], 6), latent_pages=cache.latent_pages[0])
    close(got.float(), module(x), 0.25)
    close(paged, got[0], 0.1)


# Compiled -----------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Layers of everything but the vocabulary."""

    def __init__(self, layers=1, **more):
        super().__init__()
        self.layers = nn.ModuleList(layer(F32, **more) for _ in range(layers))

    def forward(self, hidden, latent_pages=(None,), **form):
        for each, pages in zip(self.layers, latent_pages, strict=True):
            hidden = hidden + each(hidden, latent_pages=pages, **form)
        return hidden


def both(runs, caches, counts, **how):
    """One step of as many requests as counts, by each of runs on its own cache; they agree. Missing requests are allocated."""
    x, outs = torch.randn(sum(counts), E), []
    for run, cache in zip(runs, caches, strict=True):
        while len(cache.requests) < len(counts):
            cache.alloc()
        batch = cache.batch(cache.requests[: len(counts)], counts, **how)
        outs.append(run(x, batch=batch, latent_pages=cache.latent_pages))
    close(*outs, 1e-4)
    return batch


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("absorb", "backend"), [(0, "eager"), (6, "aot_eager")], ids=["expanded", "both"])
def test_one_graph_a_kind_of_step(absorb, backend):
    """Prefill, extend and decode are a graph each, whatever their batch and lengths, once the first change has made them dynamic."""
    model = Model(absorb=absorb)
    counter = CompileCounterWithBackend(backend)
    runs, caches = (torch.compile(model, backend=counter, fullgraph=True), model), [cache_for(F32) for _ in range(2)]

    def steps(*all_counts, fresh=False, chunks=None):
        for counts in all_counts:
            for cache in caches:
                cache.reset() if fresh else None
            before = sum(caches[0].length(r) for r in caches[0].requests[: len(counts)])
            batch = both(runs, caches, counts, **({} if chunks is None else {"prefix_tokens": -(-before // chunks)}))
            assert fresh or chunks == (None if batch.prefix is None else len(batch.prefix))
        return counter.frame_count

    with torch.no_grad():
        assert (prefill := steps([9, 8], [7, 12, 8], fresh=True)) <= 2
        assert steps([8, 9, 10, 7], [11, 8], fresh=True) == prefill
        assert (extend := steps([7, 8, 9], [9, 7], chunks=2)) <= prefill + 2
        assert steps([8, 7], [7, 9, 8], chunks=2) == extend
        steps([9, 8, 7, 12], fresh=True)
        assert (decode := steps([1, 1], [1, 1, 1])) <= extend + 2
        assert steps([1, 1, 1, 1], [1, 1], [1, 1, 1]) == decode
        # Short extends are absorbed: another graph where the comparison says so, and the same one where it does not.
        assert (short := steps([2, 3], [4, 2, 2], chunks=2)) <= decode + 2 * (absorb > 0)
        assert steps([3, 2], [2, 2, 3], chunks=2) == short


def test_layers_share_one_graph():
    model, plain = Model(2), Model(2)
    counter = CompileCounterWithBackend("aot_eager")
    for each in model.layers:
        each.compile(backend=counter, fullgraph=True)
    with torch.no_grad():
        both((model, plain), [cache_for(F32, layers=2) for _ in range(2)], [2, 3])
    assert counter.frame_count == 1


@pytest.mark.full
def test_compiled_dense_and_packed():
    model = layer(F32)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for shape in ((2, 5), (3, 7), (4, 6)):
            x = torch.randn(*shape, E)
            close(compiled(x), model(x), 1e-5)
        assert counter.frame_count == 2
        for lengths in ([3, 5, 2], [4, 4, 9, 1], [7, 2]):
            x, form = torch.randn(sum(lengths), E), {"cu_seqlens": cu(lengths), "max_seqlen": max(lengths)}
            close(compiled(x, **form), model(x, **form), 1e-5)
        assert counter.frame_count == 4


@pytest.mark.full
@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_generated_code(kind):
    """What Inductor writes names the kernels, and copies neither the pages nor the weight whose halves are absorbed."""
    model, caches = Model(absorb=2), [cache_for(F32) for _ in range(2)]
    counts, op, calls, how = {
        "decode": ([1, 1], "mla_attention", 1, {}),
        "extend": ([4, 3], "varlen_attention", 2, {"prefix_tokens": 99}),
    }[kind]
    with torch.no_grad():
        both((model, model), caches, [6, 5])
        _, code = compiled_code(lambda: both((torch.compile(model, fullgraph=True), model), caches, counts, **how))
    found = [call.split(".") for call in kernel_calls(code)]
    attends = [kernel for name, kernel in found if name == op]
    assert len(attends) == calls and set(attends) <= set(kernels_of(op)), found
    assert not {"mla_attention", "varlen_attention"} - {op} & {name for name, _ in found}
    made = re.findall(r"empty_strided\w*\(\(([\d, ]*)\)", code)
    assert f"{sum(counts)}, {E}" in made, "the pattern finds what is made"
    weights = [f"{H * (NOPE + V)}, {DC}", *(f"{H}, {a}, {b}" for n in (NOPE, V) for a, b in ((n, DC), (DC, n)))]
    assert not [size for size in made if size.startswith(f"{caches[0].num_pages}, ") or size in weights], made


# Errors -------------------------------------------------------------------------------------------------------------------


def paged(change=None, **batch_change):
    def call():
        module, cache = layer(F32), cache_for(F32)
        batch = dataclasses.replace(cache.batch([cache.alloc()], 3), **batch_change)
        given = {"batch": batch, "latent_pages": cache.latent_pages[0], **(change or {})}
        with torch.no_grad():
            module(torch.randn(3, E), **given)

    return call


def built(**more):
    return lambda: LatentAttention(E, H, **{"qk_rope_head_dim": ROPE, **more})


def called(shape=(2, 3, E), **more):
    return lambda: layer(F32)(torch.randn(shape), **more)


def functional(which=attend_latents, **change):
    def call():
        cache = cache_for(F32)
        batch = cache.batch([cache.alloc()], 3)
        given = {
            "dims": DIMS, "q_nope": torch.randn(3, H, NOPE), "q_pe": torch.randn(3, H, ROPE), "latent": torch.randn(3, DC),
            "k_pe": torch.randn(3, ROPE), "kv_b": nn.Linear(DC, H * (NOPE + V), bias=False), "latent_pages": cache.latent_pages[0],
            "batch": batch, "scale": 0.2, "w_uk": torch.randn(H, NOPE, DC), "w_uv": torch.randn(H, V, DC),
        }  # fmt: skip
        change_batch = change.pop("of_batch", {})
        given |= {"batch": dataclasses.replace(batch, **change_batch)} | change
        new, weights = NewTokens(*map(given.pop, NewTokens._fields)), (given.pop("w_uk"), given.pop("w_uv"))
        if which is attend_absorbed:
            del given["kv_b"]
            given |= {"q_nope": new.q_nope, "q_pe": new.q_pe, "weights": weights}
        else:
            given["new"] = new
        with torch.no_grad():
            which(**given)

    return call


BAD = [
    (lambda: LatentAttention(0, H), "hidden_size", "0", "int >= 1"),
    (lambda: LatentAttention(E, 0), "num_heads", "0", "int >= 1"),
    (lambda: LatentAttention(E, 2.0), "num_heads", "2.0", "int >= 1"),
    (built(q_lora_rank=0), "q_lora_rank", "0", "int >= 1"),
    (built(kv_lora_rank=-1), "kv_lora_rank", "-1", "int >= 1"),
    (built(qk_nope_head_dim=True), "qk_nope_head_dim", "True", "int >= 1"),
    (built(qk_rope_head_dim=0), "qk_rope_head_dim", "0", "int >= 1"),
    (built(v_head_dim=None), "v_head_dim", "None", "int >= 1"),
    (built(rope="yarn"), "rope", "str", "RotaryEmbedding"),
    (built(rope=RotaryEmbedding(4)), "rope.head_dim", "4", "8, the layer's"),
    (built(norm_eps=-1.0), "norm_eps", "-1.0", ">= 0.0"),
    (built(scale=NAN), "scale", "nan", "number"),
    (built(absorb="never"), "absorb", "'never'", "'auto' or an int"),
    (built(absorb=-1), "absorb", "-1", "int >= 0"),
    (built(absorb=True), "absorb", "True", "int >= 0"),
    (called((3, E)), "hidden", "(3, 24)", "[B, S, 24]"),
    (called((2, 3, E - 1)), "hidden.shape[2]", "23", "24"),
    (called(cu_seqlens=cu([3]), max_seqlen=3), "hidden", "(2, 3, 24)", "[T, 24]"),
    (called((3, E), cu_seqlens=cu([3])), "max_seqlen", "None", "upper bound"),
    (called(max_seqlen=3), "max_seqlen", "3", "without cu_seqlens"),
    (called(latent_pages=torch.zeros(1)), "latent_pages", "(1,)", "without batch"),
    (called(kv_scale=torch.ones(1)), "kv_scale", "(1,)", "without batch"),
    (called(positions=torch.arange(4)), "positions", "(4,)", "one a token"),
    (called(positions=torch.zeros(3)), "positions.dtype", "float32", "int32"),
    (called((3, E), cu_seqlens=cu([3]), max_seqlen=3, kv_start=torch.zeros(1)), "kv_start", "(1,)", "dense calls only"),
    (paged({"latent_pages": None}), "latent_pages", "None", "because batch is given"),
    (paged({"latent_pages": torch.zeros(3, 4, 5, 6)}), "latent_pages", "(3, 4, 5, 6)", "[P, page, Dc + Dr]"),
    (paged({"latent_pages": torch.zeros(3, 4, 41)}), "latent_pages.shape[2]", "41", "40"),
    (paged({"latent_pages": torch.zeros(3, 4, 40).half()}), "latent_pages.dtype", "float16", "float32"),
    (paged({"latent_pages": torch.zeros(3, 4, 40, dtype=torch.int8)}), "kv_scale", "None", "a scale"),
    (paged({"batch": 3}), "batch", "int", "PagedBatch"),
    (paged({"mask": torch.ones(3, 3)}), "mask", "(3, 3)", "with batch"),
    (paged({"cu_seqlens": cu([3]), "max_seqlen": 3}), "cu_seqlens", "(2,)", "with batch"),
    (paged({"kv_end": torch.zeros(1)}), "kv_end", "(1,)", "dense calls only"),
    (functional(q_nope=torch.randn(3, H, NOPE + 1)), "q_nope.shape[2]", "17", "16"),
    (functional(q_pe=torch.randn(H, ROPE)), "q_pe", "(4, 8)", "[T, H, Dr]"),
    (functional(latent=torch.randn(3, DC + 1)), "latent_pages.shape[2]", "40", "41"),
    (functional(absorb_up_to=-1), "absorb_up_to", "-1", "int >= 0"),
    (functional(absorb_up_to="auto"), "absorb_up_to", "'auto'", "int >= 0"),
    (functional(kv_b=nn.Linear(DC, 2 * (NOPE + V), bias=False), absorb_up_to=0), "kv_b(latent).shape[-1]", "56", "4 * (16 + 12)"),
    (functional(kv_b=nn.Linear(DC, 2 * (NOPE + V), bias=False), absorb_up_to=9), "w_uk.shape[0]", "2", "4"),
    (functional(kv_b=nn.Linear(DC, 50, bias=False), absorb_up_to=9), "kv_b.weight.shape[0]", "50", "a multiple of 16 + 12"),
    (functional(kv_b=nn.Linear(DC, H * (NOPE + V)), absorb_up_to=9), "kv_b.bias", "a bias", "None"),
    (functional(attend_absorbed, w_uk=torch.randn(H, NOPE, DC + 1)), "w_uk.shape[2]", "33", "32"),
    (functional(attend_absorbed, w_uv=torch.randn(H, DC)), "w_uv", "(4, 32)", "[H, v, Dc]"),
    (functional(attend_expanded, latent_pages=torch.zeros(9, 4, 40, dtype=torch.int8)), "kv_scale", "None", "a scale"),
    (functional(attend_expanded, latent_pages=torch.zeros(9, 4, 40).half()), "latent_pages.dtype", "float16", "float32"),
    (functional(attend_expanded, latent_pages=torch.zeros(9, 4, 41)), "latent_pages.shape[2]", "41", "32 + 8"),
    (functional(attend_expanded, kv_scale=torch.ones(2)), "kv_scale", "(2,)", "float32 [1]"),
    (functional(attend_expanded, of_batch={"prefix": None}), "batch.prefix", "None", "prefix_tokens="),
]


@pytest.mark.parametrize(("call", "field", "got", "want"), BAD, ids=[f"{i}-{b[1]}" for i, b in enumerate(BAD)])
def test_bad_inputs(call, field, got, want):
    refused(call, field, got, want)


def test_a_kernel_is_asked_of_the_ops_that_have_it():
    for call in (lambda m: m(torch.randn(1, 3, E)), lambda m: m(torch.randn(3, E), cu_seqlens=cu([3]), max_seqlen=3)):
        call(layer(F32, kernel="flashmla"))  # of mla_attention alone
        with pytest.raises(UnknownKernel, match="nobody"):
            call(layer(F32, kernel="nobody"))
    with pytest.raises(AttnopsError, match="flashmla"), torch.no_grad():
        cache = cache_for(F32)
        module, batch = layer(F32, kernel="flashmla", absorb=9), cache.batch([cache.alloc()], 3)
        module(torch.randn(3, E), batch=batch, latent_pages=cache.latent_pages[0])


def test_the_repr_says_what_differs():
    assert repr(layer(absorb=3, kernel="reference")).splitlines()[1].strip() == (
        "24, 4, q_lora_rank=20, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, absorb=3, kernel='reference'"
    )
