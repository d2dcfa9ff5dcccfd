"""Latent attention on a real GPU: a compiled call beside the foreign one, and a schedule in a
captured graph."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.kernels.sgl import sources
from attnops.kernels.sgl.flashmla import split
from attnops.ops import decode_rows, mla_attention
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Source, make_call
from tests.checks import right
from tests.gpu.helpers import captured, kernels_in, need
from tests.lowering.models import compiled_code, kernel_calls

SCALE = 192**-0.5


def batch(heads: int, requests: int = 64, length: int = 8192) -> Any:
    call = make_call(
        "mla_attention",
        Source(0, "cuda"),
        (1,) * requests,
        (64,) * requests,
        64,
        replace(DEEPSEEK, q_heads=heads),
        padding=0,
    )
    pages = torch.randn(requests * length // 64, 64, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pages.shape[0], device="cuda").int().view(requests, -1)
    lens = torch.full((requests,), length, dtype=torch.int32, device="cuda")
    # What may hold anything was said of the pages that are gone; of these every one is read.
    return replace(call.with_(latent_pages=pages, page_table=table, seq_lens=lens), free={})


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_flashmla_compiled_is_the_foreign_call(heads: int, scheduled: bool) -> None:
    """With a plan of pages alone, and with a schedule, which is the metadata that the foreign call
    is given."""
    call = batch(heads)
    need(kernels_of("mla_attention")["flashmla"], call)
    t = call.arguments
    # Requests of other lengths than one another, and one without keys: a schedule of equal ones
    # could be right by chance.
    lens = torch.linspace(0, 8192, 64, device="cuda").int().flip(0)
    query, cache = torch.cat([t["q_nope"], t["q_pe"]], -1), t["latent_pages"][:, :, None]
    tables = {**{n: t[n] for n in ("latent_pages", "page_table", "cu_seqlens_q")}, "seq_lens": lens}
    plan = decode_rows(
        t["page_table"], lens, t["cu_seqlens_q"], num_tokens=64, q_heads=heads if scheduled else 0
    )
    raw = sources.op("dense_decode_fwd")
    tiles, splits = (
        sources.op("get_mla_decoding_metadata")(lens, heads, 1, heads, False, None)
        if scheduled
        else (None, None)
    )

    def layer(query: torch.Tensor) -> torch.Tensor:
        q_nope, q_pe = query[..., :512], query[..., 512:]
        return mla_attention(
            q_nope,
            q_pe,
            **tables,
            plan=plan,
            holes=False,
            max_seqlen_q=1,
            scale=SCALE,
            kernel="flashmla",
        )

    def direct() -> Any:
        return raw(query[:, None], cache, 512, lens, t["page_table"], SCALE, False, tiles, splits)

    with torch.no_grad():
        out = direct()[0]
        if scheduled:
            # The kernel computes this schedule from the lengths by itself. The padding of an entry
            # is not written.
            _, _, own_tiles, own_splits = raw(
                query[:, None], cache, 512, lens, t["page_table"], SCALE, False, None, None
            )
            words = plan.shape[0] - 64 * (1 + t["page_table"].shape[1])
            given_tiles, given_splits = split(plan[:words], 64, heads)
            assert given_tiles.shape == own_tiles.shape == tiles.shape
            assert torch.equal(given_tiles[:, :7], own_tiles[:, :7]) and torch.equal(
                given_splits, own_splits
            )
        compiled = torch.compile(layer, fullgraph=True)
        got, code = compiled_code(lambda: compiled(query))
        assert kernel_calls(code) == ["mla_attention.flashmla"]
        near = 0.0 if scheduled else 2e-2
        torch.testing.assert_close(got, out[:, 0], rtol=near, atol=near)
        assert sorted(kernels_in(lambda: compiled(query))) == sorted(kernels_in(direct))


def test_a_schedule_made_in_a_captured_graph_follows_the_lengths() -> None:
    call, kernel = batch(16, requests=8, length=1024), kernels_of("mla_attention")["flashmla"]
    need(kernel, call)
    t = call.arguments

    def step() -> None:
        plan = decode_rows(
            t["page_table"], t["seq_lens"], t["cu_seqlens_q"], num_tokens=8, q_heads=16
        )
        kernel.run(call.with_(holes=False, plan=plan).record)

    with torch.no_grad():
        graph, _ = captured(step)
        t["seq_lens"].copy_(torch.tensor([5, 1024, 0, 64, 65, 700, 1, 900]))
        graph.replay()
        torch.cuda.synchronize()
        got = t["output"].clone()
    kernel.run(call.record)
    torch.testing.assert_close(got, t["output"], rtol=0, atol=0)
    right(kernel, call)
