"""LatentAttention on a real GPU: every kernel under it, both forms, captured decodes, a shared
prefix, float8, no waiting."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnops
from attnops.cache import LatentCache, PagedBatch, Planner
from attnops.core.errors import NoKernel, PageSizeConflict
from attnops.core.kernel import kernels_of
from attnops.graphs import Buckets, breakable
from attnops.nn import LatentAttention, RotaryEmbedding
from attnops.ops import latent_layers
from tests.gpu.helpers import captured
from tests.lowering.models import compiled_code, kernel_calls

DEVICE, E = "cuda", 512
NEAR = 0.02
"""Norm of the difference over the norm, bfloat16."""
FAR = 0.15
"""The same of float8: query and latents are rounded by 0.03 in the root of the mean square, and
scores, of which a softmax is made, are sums of their products with a spread of some units."""
FIRST, STEPS = (700, 65, 1, 300), ((1, 1, 1, 1), (1, 1, 1, 1), (4, 1, 2, 8))


KERNELS = [None, *kernels_of("mla_attention")]


def layer(heads: int, kernel: str | None = None, **more: Any) -> LatentAttention:
    torch.manual_seed(3)
    rope = RotaryEmbedding(
        64,
        10000.0,
        scaling="yarn",
        factor=40.0,
        original_max_position=4096,
        mscale_all_dim=1.0,
        interleaved=True,
    )
    made = LatentAttention(
        E,
        heads,
        q_lora_rank=256,
        rope=rope,
        kernel=kernel,
        device=DEVICE,
        dtype=torch.bfloat16,
        **more,
    )
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return made.eval().requires_grad_(False)


def cache_for(heads: int, **more: Any) -> LatentCache:
    """Its pages are NaN where nobody wrote."""
    cache = LatentCache(
        1,
        16384,
        max_requests=8,
        max_tokens_per_request=2048,
        q_heads=heads,
        device=DEVICE,
        **{"dtype": torch.bfloat16} | more,
    )
    if cache.latent_pages[0].dtype == torch.bfloat16:
        cache.latent_pages[0].fill_(float("nan"))
    return cache


def planner_for(
    cache: LatentCache, heads: int, kernel: str | None = None, query: torch.dtype = torch.bfloat16
) -> Planner:
    stored = cache.latent_pages[0].dtype
    spec = latent_layers(
        heads, cache.page_size, query, kv_dtype=None if stored == query else stored
    )
    return Planner(
        spec,
        max_tokens=2048,
        max_requests=8,
        max_pages=cache.page_table.shape[1],
        device=DEVICE,
        kernel=kernel,
    )


def exact(module: LatentAttention, texts: list[Tensor], counts: tuple[int, ...]) -> Tensor:
    """The layer's result for the last tokens of each text, in float32, dense."""
    wide = copy.deepcopy(module).float()
    wide.kernel = "reference"
    return torch.cat(
        [
            wide(text.float()[None])[0, len(text) - n :]
            for text, n in zip(texts, counts, strict=True)
            if n
        ]
    )


def off(got: Tensor, want: Tensor) -> float:
    assert torch.isfinite(got).all()
    return float((got.double() - want.double()).norm() / want.double().norm())


@contextmanager
def skipping(kernel: str | None) -> Iterator[None]:
    """A kernel that cannot run here, or not on this call, is told of; one that is chosen can always
    run."""
    try:
        yield
    except (NoKernel, PageSizeConflict) as error:
        if kernel is None:
            raise
        pytest.skip(f"{kernel}: {str(error)[:300]}")


def new(counts: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(n, E, device=DEVICE, dtype=torch.bfloat16) for n in counts]


class Served:
    """A layer over a cache in which some requests have their prompts, the same for layers of as
    many heads."""

    def __init__(
        self, heads: int, kernel: str | None = None, prompts: tuple[int, ...] = FIRST, **more: Any
    ) -> None:
        self.module = layer(heads, kernel, **more)
        self.cache = cache_for(heads, kernels=kernel and (kernel,))
        self.planner = planner_for(self.cache, heads, kernel)
        self.ids, self.texts = [self.cache.alloc() for _ in prompts], new(prompts)
        self.result = self.run(self.texts, self.planner(self.cache.batch(self.ids, prompts)))

    def run(self, rows: list[Tensor], batch: PagedBatch) -> Any:
        return self.module(torch.cat(rows), batch=batch, latent_pages=self.cache.latent_pages[0])

    def in_graphs(self, **more: Any) -> Any:
        """The layer in graphs, captured for 4 requests of 4 drafts at most."""
        return breakable(
            self.module,
            Buckets(decode=(2, 4), verify=(4,)),
            tokens=("hidden",),
            cache=self.cache,
            **more,
        )


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_request_from_prefill_to_drafts(kernel: str | None, heads: int) -> None:
    with skipping(kernel):
        one = Served(heads, kernel)
        assert off(one.result, exact(one.module, one.texts, FIRST)) < NEAR
        # Batches that say what was before may be unfolded, and then no kernel over latents is
        # asked.
        for counts, how in (
            *((counts, {}) for counts in STEPS),
            ((40, 0, 3, 5), {"prefix_tokens": 500}),
        ):
            rows = new(counts)
            one.texts = [torch.cat(pair) for pair in zip(one.texts, rows, strict=True)]
            got = one.run(rows, one.planner(one.cache.batch(one.ids, counts, **how)))
            assert off(got, exact(one.module, one.texts, counts)) < NEAR


@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_decode_follows_lengths_and_tables(heads: int) -> None:
    """Compiled, captured, replayed with what another step brings; the result is that of an eager
    step."""
    one = Served(heads)
    cache, ids, pages = one.cache, one.ids, one.cache.latent_pages[0]
    step = torch.compile(one.module, fullgraph=True, dynamic=False)
    batch = cache.batch(ids, 1)
    fixed = {
        name: getattr(batch, name).clone()
        for name in ("page_table", "seq_lens", "cu_seqlens_q", "slots", "positions")
    }
    [hidden] = new((len(ids),))
    held = PagedBatch(**fixed, max_seqlen_q=1, padded=False)
    graph, out = captured(lambda: step(hidden, batch=held, latent_pages=pages))
    cache.free(ids[1])
    ids[1] = cache.alloc()
    one.run(new((900,)), cache.batch([ids[1]], 900))
    for _ in range(2):
        batch = cache.batch(ids, 1)
        hidden.normal_()
        for name, tensor in fixed.items():
            tensor.copy_(getattr(batch, name))
        graph.replay()
        assert off(out, one.run([hidden], batch)) < NEAR


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_and_verify_in_graphs(kernel: str | None, heads: int) -> None:
    """Replayed on other lengths, fewer drafts and fewer requests."""
    with skipping(kernel):
        one = Served(heads, kernel)
        step = one.in_graphs(prepare=one.planner)
        for counts in ((4, 4, 4, 4), (1, 4, 2, 3), (1, 1, 1), (4, 2), (0, 1, 0, 4), (1, 1, 1, 1)):
            batch, rows = one.cache.batch(one.ids[: len(counts)], counts), new(counts)
            got = step(torch.cat(rows), batch=batch, latent_pages=one.cache.latent_pages[0]).clone()
            # Eager writes the same latents into the same slots again.
            assert off(got, one.run(rows, one.planner(batch))) < NEAR


@pytest.mark.parametrize("heads", [16, 128])
def test_a_cache_brings_the_plan(heads: int) -> None:
    """No Planner: in eager out of the batch, in graphs made inside of them."""
    with skipping("flashmla"), attnops.use(kernel={"mla_attention": "flashmla"}):
        one = Served(heads, "flashmla")
        step = one.in_graphs()
        for counts in ((1, 1, 1, 1), (1, 4, 2, 3), (1, 1, 1), (4, 2), (1, 1, 1, 1)):
            batch, rows = one.cache.batch(one.ids[: len(counts)], counts), new(counts)
            assert batch.plan is not None
            bare = replace(batch, plan=None)
            assert torch.equal(batch.plan, one.planner(bare).plan)
            want = one.run(rows, bare)
            assert off(one.run(rows, batch), want) < NEAR
            assert (
                off(
                    step(
                        torch.cat(rows), batch=batch, latent_pages=one.cache.latent_pages[0]
                    ).clone(),
                    want,
                )
                < NEAR
            )


@pytest.mark.parametrize("kernel", [None, "flashmla", "fa3", "triton"])
def test_a_shared_prefix(kernel: str | None) -> None:
    rows, results = new((1, 1, 3)), []
    for share in (False, True):
        with skipping(kernel):
            one = Served(16, kernel, prompts=(1000,))
            [first] = one.ids
            batch = one.cache.batch(
                [first, one.cache.fork(first), one.cache.fork(first)],
                [len(r) for r in rows],
                share=share,
            )
            assert (batch.shared is not None) == share
            results.append(one.run(rows, batch))
    assert off(results[1], results[0]) < NEAR


@pytest.mark.parametrize("kernel", [None, "flashmla", "fa3", "triton"])
def test_a_shared_prefix_in_graphs(kernel: str | None) -> None:
    """Replayed on other numbers of requests and drafts. A step without has other graphs."""
    with skipping(kernel):
        one = Served(16, kernel, prompts=(1000,))
        [first] = one.ids
        ids, step = [first, *(one.cache.fork(first) for _ in range(3))], one.in_graphs()
        pages = one.cache.latent_pages[0]
        for counts in ((1, 1, 1), (1, 1, 1, 1), (2, 4, 1), (1, 1), (3, 1, 2, 4), (1, 1, 1)):
            for share in (True, False):
                batch = one.cache.batch(ids[: len(counts)], counts, share=share)
                assert (batch.shared is not None) == share
                rows = new(counts)
                got = step(torch.cat(rows), batch=batch, latent_pages=pages).clone()
                # Eager writes the same latents into the same slots again.
                assert off(got, one.run(rows, batch)) < NEAR
        assert {row.bucket.shared for row in step.report().rows} == {True, False}


@pytest.mark.parametrize("heads", [16, 128])
def test_float8(heads: int) -> None:
    """Pages of float8, with queries as they are and quantised, through whichever kernel is
    chosen."""
    module, scale = layer(heads), 1 / 32
    texts = new((700, 65))
    for query, how in (
        (torch.bfloat16, {"kv_scale": torch.full((1,), scale, device=DEVICE)}),
        (torch.float8_e4m3fn, {"float8_scales": (scale, scale)}),
    ):
        cache = cache_for(heads, dtype=torch.float8_e4m3fn)
        planner, ids = planner_for(cache, heads, query=query), [cache.alloc() for _ in texts]
        pages, so_far = cache.latent_pages[0], texts
        module(
            torch.cat(texts),
            batch=cache.batch(ids, [len(t) for t in texts]),
            latent_pages=pages,
            **how,
        )
        for counts in ((1, 1), (1, 1), (3, 1)):
            rows = new(counts)
            so_far = [torch.cat(pair) for pair in zip(so_far, rows, strict=True)]
            got = module(
                torch.cat(rows), batch=planner(cache.batch(ids, counts)), latent_pages=pages, **how
            )
            assert off(got, exact(module, so_far, counts)) < FAR, query


def test_the_compiled_layer_copies_no_pages_and_no_weight() -> None:
    heads = 128
    module, cache = layer(heads), cache_for(heads)
    ids = [cache.alloc(64), cache.alloc(64)]
    batch = cache.batch(ids, 1)
    hidden = torch.cat(new((2,)))
    _, code = compiled_code(
        lambda: torch.compile(module, dynamic=False)(
            hidden, batch=batch, latent_pages=cache.latent_pages[0]
        )
    )
    assert any("mla_attention." in call for call in kernel_calls(code))
    made = re.findall(r"empty_strided\w*\(\(([\d, ]*)\)", code)
    weights = [f"{heads * 256}, 512", f"{heads}, 128, 512", f"{heads}, 512, 128"]
    assert not [
        size for size in made if size.startswith(f"{cache.num_pages}, ") or size in weights
    ], made


def test_a_batch_is_described_without_waiting() -> None:
    cache = cache_for(16)
    first = cache.alloc(500)
    ids = [first, cache.fork(first)]
    cache.batch(ids, 1)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.batch(ids, 1)
        cache.batch(ids, 7, prefix_tokens=100, share=True)
    finally:
        torch.cuda.set_sync_debug_mode(before)
