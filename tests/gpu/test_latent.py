"""Latent attention on a real GPU: what a compiled call costs beside the foreign one, and plans under a captured graph."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.kernels.sgl import sources
from attnops.kernels.sgl.flashmla import split
from attnops.ops import decode_rows, mla_attention
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Pages, Source, check_kernel, make_call, planned, refusals
from tests.lowering.models import compiled_code, kernel_calls

SCALE = 192**-0.5


def batch(heads: int, requests: int = 64, length: int = 8192) -> Any:
    call = make_call("mla_attention", Source(0, "cuda"), (1,) * requests, (64,) * requests, 64, replace(DEEPSEEK, q_heads=heads), padding=0)
    pages = torch.randn(requests * length // 64, 64, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(pages.shape[0], device="cuda").int().view(requests, -1)
    lens = torch.full((requests,), length, dtype=torch.int32, device="cuda")
    # What may hold anything was said of the pages that are gone; of these every one is read.
    return replace(call.with_(latent_pages=pages, page_table=table, seq_lens=lens), free={})


def usable(name: str, call: Any) -> Any:
    kernel = kernels_of("mla_attention")[name]
    if found := list(refusals(kernel, planned(kernel, call))):
        pytest.skip(f"{name}: {'; '.join(map(str, found))}")
    return kernel


def device_kernels(call: Callable[[], Any]) -> Counter[str]:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return Counter(e.name for e in profile.events() if str(e.device_type).endswith("CUDA"))


def graph_us(calls: list[Callable[[], Any]]) -> list[float]:
    """Median microseconds of a replay of ten of each call, taken in turns."""
    graphs = []
    for call in calls:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                call()
        graphs.append(graph)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(40):
        for graph, out in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            out.append(start.elapsed_time(end) * 100)
    return [sorted(t)[len(t) // 2] for t in times]


@pytest.mark.alone
@pytest.mark.parametrize("heads", [16, 128])
def test_flashmla_compiled_is_the_foreign_call(heads: int, found: dict[str, Any]) -> None:
    call = batch(heads)
    usable("flashmla", call)
    t = call.arguments
    query = torch.cat([t["q_nope"], t["q_pe"]], -1)
    tables = {n: t[n] for n in ("latent_pages", "page_table", "seq_lens", "cu_seqlens_q")}
    plan = decode_rows(t["page_table"], t["seq_lens"], t["cu_seqlens_q"], num_tokens=query.shape[0])

    def layer(query: torch.Tensor, plan: torch.Tensor | None) -> torch.Tensor:
        q_nope, q_pe = query[..., :512], query[..., 512:]
        return mla_attention(q_nope, q_pe, **tables, plan=plan, holes=False, max_seqlen_q=1, scale=SCALE, kernel="flashmla")

    def direct() -> torch.Tensor:
        out: torch.Tensor = sources.op("dense_decode_fwd")(
            query[:, None], t["latent_pages"][:, :, None], 512, t["seq_lens"], t["page_table"], SCALE, False, None, None
        )[0]
        return out[:, 0]

    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True)
        got, code = compiled_code(lambda: compiled(query, plan))
        assert kernel_calls(code) == ["mla_attention.flashmla"]
        torch.testing.assert_close(got, direct(), rtol=2e-2, atol=2e-2)
        assert device_kernels(lambda: compiled(query, plan)) == device_kernels(direct)
        unplanned = device_kernels(lambda: compiled(query, None))
        ours, theirs, alone = graph_us([lambda: compiled(query, plan), direct, lambda: compiled(query, None)])
    found.setdefault("overhead", {})[f"flashmla_{heads}_heads"] = {
        "compiled_us": ours / 10, "direct_us": theirs / 10, "without_plan_us": alone / 10,
        "device_kernels_without_plan": sum(unplanned.values()),
    }  # fmt: skip


@pytest.mark.alone
@pytest.mark.parametrize("heads", [16, 128])
def test_flashmla_with_a_schedule_is_the_foreign_call_given_metadata(heads: int, found: dict[str, Any]) -> None:
    call = batch(heads)
    usable("flashmla", call)
    t = call.arguments
    # Requests of other lengths than one another, and one without keys: a schedule of equal ones could be right by chance.
    lens = torch.linspace(0, 8192, 64, device="cuda").int().flip(0)
    query, cache = torch.cat([t["q_nope"], t["q_pe"]], -1), t["latent_pages"][:, :, None]
    tables = {**{n: t[n] for n in ("latent_pages", "page_table", "cu_seqlens_q")}, "seq_lens": lens}
    plan = decode_rows(t["page_table"], lens, t["cu_seqlens_q"], num_tokens=64, q_heads=heads)
    raw = sources.op("dense_decode_fwd")
    tiles, splits = sources.op("get_mla_decoding_metadata")(lens, heads, 1, heads, False, None)

    def layer(query: torch.Tensor, plan: torch.Tensor | None) -> torch.Tensor:
        q_nope, q_pe = query[..., :512], query[..., 512:]
        return mla_attention(q_nope, q_pe, **tables, plan=plan, holes=False, max_seqlen_q=1, scale=SCALE, kernel="flashmla")

    def direct() -> torch.Tensor:
        out: torch.Tensor = raw(query[:, None], cache, 512, lens, t["page_table"], SCALE, False, tiles, splits)[0]
        return out[:, 0]

    with torch.no_grad():
        # What decode makes of the lengths for itself, but for the padding of an entry, which nobody writes.
        _, _, own_tiles, own_splits = raw(query[:, None], cache, 512, lens, t["page_table"], SCALE, False, None, None)
        words = plan.shape[0] - 64 * (1 + t["page_table"].shape[1])
        given_tiles, given_splits = split(plan[:words], 64, heads)
        assert given_tiles.shape == own_tiles.shape == tiles.shape
        assert torch.equal(given_tiles[:, :7], own_tiles[:, :7]) and torch.equal(given_splits, own_splits)
        compiled = torch.compile(layer, fullgraph=True)
        got, code = compiled_code(lambda: compiled(query, plan))
        assert kernel_calls(code) == ["mla_attention.flashmla"]
        torch.testing.assert_close(got, direct(), rtol=0, atol=0)
        assert device_kernels(lambda: compiled(query, plan)) == device_kernels(direct)
        made = device_kernels(lambda: decode_rows(t["page_table"], lens, t["cu_seqlens_q"], num_tokens=64, q_heads=heads))
        alone = device_kernels(lambda: compiled(query, None))
        times = graph_us([lambda: compiled(query, plan), direct, lambda: compiled(query, None)])
    ours, theirs, bare = (us / 10 for us in times)
    found.setdefault("overhead", {})[f"flashmla_{heads}_heads_scheduled"] = {
        "compiled_us": ours, "direct_us": theirs, "without_plan_us": bare, "device_kernels_without_plan": sum(alone.values()),
        "device_kernels_of_the_plan_eager": sum(made.values()),
    }  # fmt: skip


def test_a_schedule_made_in_a_captured_graph_follows_the_lengths() -> None:
    call = batch(16, requests=8, length=1024)
    kernel = usable("flashmla", call)
    t = call.arguments
    lens = t["seq_lens"]

    def step() -> None:
        plan = decode_rows(t["page_table"], lens, t["cu_seqlens_q"], num_tokens=8, q_heads=16)
        kernel.run(call.with_(holes=False, plan=plan).record)

    with torch.no_grad():
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        lens.copy_(torch.tensor([5, 1024, 0, 64, 65, 700, 1, 900]))
        graph.replay()
        torch.cuda.synchronize()
        got = t["output"].clone()
    kernel.run(call.record)
    torch.testing.assert_close(got, t["output"], rtol=0, atol=0)
    assert check_kernel(kernel, call).worst <= 1.0


@pytest.mark.parametrize("name", ["flashinfer_mla_fa2", "flashinfer_mla_fa3"])
def test_a_later_plan_reaches_a_captured_graph(name: str, found: dict[str, Any]) -> None:
    lens = ((1, 1, 1), (700, 5, 90)), ((1, 0, 1), (90, 700, 5))
    calls = [
        make_call("mla_attention", Source(i, "cuda"), q, k, 64, DEEPSEEK, 3 - sum(q), pages=Pages(wider=4)) for i, (q, k) in enumerate(lens)
    ]
    kernel = usable(name, calls[0])
    first = planned(kernel, calls[0])
    plan, workspace = first.arguments["plan"].pin_memory(), first.arguments["workspace"]
    first = planned(kernel, calls[0], buffers=(plan, workspace))
    with torch.no_grad():
        kernel.run(first.record)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel.run(first.record)
        for n, tensor in calls[0].tensors().items():
            tensor.copy_(calls[1].tensors()[n])
        planned(kernel, calls[0], buffers=(plan, workspace))
        graph.replay()
        torch.cuda.synchronize()
        got = calls[0].arguments["output"].clone()
    again = planned(kernel, calls[1])
    kernel.run(again.record)
    torch.testing.assert_close(got, calls[1].arguments["output"], rtol=0, atol=0)
    assert check_kernel(kernel, calls[1]).worst <= 1.0
    found.setdefault("replay_of_plans", {})[name] = True
