"""A small model of latent attention as an SM100 would run it: LatentCache, layers and compiler
whole, over stand-ins: not the kernels."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import attnops
from attnops.cache import LatentCache
from attnops.core.errors import NoKernel
from attnops.core.problem import Target, pretend
from attnops.kernels.flashinfer import trtllm
from attnops.kernels.sgl import cutlass_mla
from attnops.nn import LatentAttention, PagedBatch, RotaryEmbedding
from tests.standins import flashinfer_rope, flashinfer_trtllm_mla, sgl_kernel_mla as sgl

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
E, H, NOPE, DR, V, DC = 64, 2, 16, 64, 16, 512
LAYERS = 2
SCALES = (2.0**-5, 2.0**-5)
"""Of queries and latents that are about 1 in size: 448 / 32 = 14 of their standard deviations fit,
and nothing is saturated."""


@dataclass(frozen=True)
class Way:
    """A kernel, the package it comes with, and the pages it takes."""

    kernel: str
    package: str
    page: int
    pages: torch.dtype = BF16

    @property
    def target(self) -> Target:
        return Target("cuda", 100, assume=(self.package,))

    @property
    def foreign(self) -> Counter[str]:
        """What a step calls of each function: but for the prefill, which writes and attends
        otherwise."""
        functions = [
            "cutlass_mla_decode"
            if self.kernel == "cutlass_mla"
            else "trtllm_batch_decode_with_kv_cache_mla"
        ]
        functions += ["mla_rope_quantize_fp8"] * (self.pages == E4M3)
        return Counter(functions * LAYERS)

    @property
    def scales(self) -> tuple[float, float] | None:
        return SCALES if self.pages == E4M3 else None


CUTLASS = Way("cutlass_mla", "sgl_kernel", 128)
TRTLLM = Way("trtllm_mla", "flashinfer", 64)
FLOAT8 = replace(TRTLLM, pages=E4M3)
WAYS = {
    "cutlass": CUTLASS,
    "cutlass_page_16": replace(CUTLASS, page=16),
    "trtllm": TRTLLM,
    "trtllm_page_32": replace(TRTLLM, page=32),
    "float8": FLOAT8,
}


class Model(nn.Module):
    def __init__(self, kernel: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        rope = RotaryEmbedding(DR, interleaved=True)
        dims = {
            "kv_lora_rank": DC,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": DR,
            "v_head_dim": V,
        }
        self.layers = nn.ModuleList(
            LatentAttention(E, H, **dims, rope=rope, kernel=kernel, dtype=BF16)
            for _ in range(LAYERS)
        )
        self.eval().requires_grad_(False)

    def forward(
        self,
        x: Tensor,
        pages: tuple[Tensor, ...],
        batch: PagedBatch,
        scales: tuple[float, float] | None = None,
    ) -> Tensor:
        for layer, latent_pages in zip(self.layers, pages, strict=True):
            x = x + layer(x, batch=batch, latent_pages=latent_pages, float8_scales=scales)
        return x


def cache_for(way: Way, workspace_bytes: int = 0) -> LatentCache:
    return LatentCache(
        LAYERS,
        640,
        max_requests=4,
        max_tokens_per_request=200,
        page_size=way.page,
        q_heads=H,
        kernels=(way.kernel,),
        dtype=way.pages,
        device="cpu",
        workspace_bytes=workspace_bytes,
        max_new_tokens=8,
    )


@contextmanager
def machine(way: Way) -> Iterator[Counter[str]]:
    """An SM100 with the kernel's package. Yields how often each foreign function was called, as is
    known in the end."""
    calls: Counter[str] = Counter()
    if way.package == "sgl_kernel":
        with pretend(way.target), sgl.installed() as called:
            yield calls
            calls.update(called)
        return
    with (
        pretend(way.target),
        flashinfer_rope.installed() as turned,
        flashinfer_trtllm_mla.installed() as seen,
    ):
        yield calls
        calls.update([name for name, _ in seen] + ["mla_rope_quantize_fp8"] * len(turned))


STEPS = ((40, 3, 17), (1, 1, 1), (3, 8, 1), (1, 1, 1))
"""New tokens of three requests: a prefill, a decode step, drafts to verify, and on."""


def steps(
    way: Way, cache: LatentCache
) -> Iterator[tuple[Tensor, tuple[Tensor, ...], PagedBatch, tuple[float, float] | None]]:
    """What the model is called with, step by step."""
    generator = torch.Generator().manual_seed(7)
    ids = [cache.alloc() for _ in range(3)]
    for counts in STEPS:
        x = torch.randn(sum(counts), E, generator=generator).to(BF16)
        yield x, cache.latent_pages, cache.batch(ids, counts), way.scales


def scratch(way: Way) -> int:
    """The workspace that a decode step wants, as `explain` says it on any machine."""
    *_, step = steps(way, cache_for(way))
    return attnops.explain(Model(), *step, target=way.target, quiet=True).workspace_bytes


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_a_request_from_prefill_to_drafts(way):
    """The kernel answers every step but the prefill, which unfolds its latents; and as the
    reference would.

    It pads no table in any layer, for the cache's rows are whole tiles, though 200 tokens are no
    whole number of them.
    """
    cache, twin = cache_for(way, scratch(way)), cache_for(way)
    assert cache.page_size == way.page and cache.page_table.shape[1] * way.page == 256
    module = cutlass_mla if way.kernel == "cutlass_mla" else trtllm
    model, plain = Model(), Model("reference")
    for i, (step, other) in enumerate(zip(steps(way, cache), steps(way, twin), strict=True)):
        with torch.no_grad():
            with machine(way) as calls, patch.object(module, "pad", wraps=module.pad) as pad:
                got = model(*step)
            want = plain(*other)
        if i == 0:
            assert not calls, "prefill"
        else:
            assert calls == way.foreign, i
            assert [by for (_, by), _ in pad.call_args_list] == [(0, 0)] * LAYERS
        # One more rounding of weights and queries to bfloat16, or of weights to float8.
        torch.testing.assert_close(
            got, want, rtol=2**-5, atol=2**-5 if way.scales is None else 2**-3
        )
    written = [pages.view(torch.uint8) for pages in cache.latent_pages]
    assert all(pages.any() for pages in written)


def test_without_the_workspace_that_explain_asks_for():
    """The kernel asked for by name says what is missing, in bytes; what `explain` says is enough,
    and one byte less is not."""
    size = scratch(TRTLLM)
    assert size > 8 << 20 and scratch(FLOAT8) == size
    for short in (0, size - 1):
        cache = cache_for(TRTLLM, short)
        *_, step = steps(TRTLLM, cache)
        with (
            machine(TRTLLM),
            torch.no_grad(),
            pytest.raises(NoKernel, match=rf"workspace={short} bytes \(wants >= {size} bytes"),
        ):
            Model("trtllm_mla")(*step)
