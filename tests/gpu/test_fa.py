"""FlashAttention-3 and 4 on a real SM90: captures, and what is spent beside the vendor's kernel."""

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch

import attnops
from attnops.core.errors import NotCompiled
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target
from attnops.kernels.flash_attn4 import fa4
from attnops.kernels.sgl import fa3
from attnops.testing import Call, Features, Source, check_kernel, make_call

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LLAMA = Features(dtype=BF16, head_dim=128, q_heads=32, kv_heads=8, causal=True)
FLOAT8 = replace(LLAMA, q_dtype=E4M3, kv_dtype=E4M3)


def usable(name: str) -> bool:
    kernel = kernels_of("paged_attention")[name]
    here = Target.of(torch.device("cuda")) if torch.cuda.is_available() else Target()
    return here.arch == 90 and not kernel.absences(here)


needs_fa3 = pytest.mark.skipif(not usable("fa3"), reason="no sgl_kernel with FlashAttention-3 on SM90")
needs_fa4 = pytest.mark.skipif(not usable("fa4"), reason="no flash-attn-4 on SM90")


def paged(q_lens: Any, seq_lens: Any, page: int = 16, f: Features = LLAMA, seed: int = 0, **more: Any) -> Call:
    return make_call("paged_attention", Source(seed, "cuda"), q_lens, seq_lens, page, f, **{"padding": None, **more})


SHAPES: dict[str, Callable[[], Call]] = {
    "decode": lambda: paged((1,) * 8, (8192, 100, 1, 4000, 17, 640, 8000, 3)),
    "one": lambda: paged((1,), (8192,)),
    "extend": lambda: paged((200, 1, 64), (1000, 4000, 64), 64),
    "prefill": lambda: paged((2048, 1000), (2048, 1000), 128),
    "window": lambda: paged((1, 1), (5000, 700), f=replace(LLAMA, window=(1023, -1))),
    "chunk": lambda: paged((1, 300), (5000, 700), f=replace(LLAMA, chunk=256)),
    "float8": lambda: paged((1, 1, 5), (5000, 700, 90), 64, FLOAT8),
    "idle": lambda: paged((0, 1, 0, 1), (0, 700, 33, 90), 64),
}


# What is spent beside the kernel --------------------------------------------------------------------------------------


def raw_call(call: Call) -> Callable[[], Any]:
    """The wheel's op called directly for a paged call."""
    t, (fwd, tail), none = call.arguments, fa3.raw_op(), None
    args = (
        t["query"], t["k_pages"], t["v_pages"], none, none, none, t["output"], t["cu_seqlens_q"], none, none, none, t["seq_lens"],
        t["max_seqlen_q"], none, t["page_table"], none, none, none, none, none, none, none, none, t["scale"], True, -1, -1, 0, 0.0, False,
        none, 0, none, 0, none, *tail,
    )  # fmt: skip
    return lambda: fwd(*args)


def function_call(call: Call) -> Callable[[], Any]:
    t = call.arguments
    names = ("query", "k_pages", "v_pages", "page_table", "seq_lens", "cu_seqlens_q")
    given = [t[n] for n in names]
    return lambda: attnops.paged_attention(
        *given, max_seqlen_q=t["max_seqlen_q"], scale=t["scale"], output=t["output"], padded=False, holes=False, kernel="fa3"
    )


def kernels_in(run: Callable[[], Any]) -> list[str]:
    """The names of the device's kernels, memsets and copies of one call."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() or () if str(e.device_type).endswith("CUDA")]


def graph_us(run: Callable[[], Any], calls: int = 20) -> Callable[[], float]:
    """What measures the device microseconds of one call, `calls` of them in a CUDA graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    return once


COMPARED = {
    "decode_8x4096": lambda: paged((1,) * 8, (4096,) * 8),
    "decode_1x8192": lambda: paged((1,), (8192,)),
    "decode_64x1024": lambda: paged((1,) * 64, (1024,) * 64),
    "prefill_1x4096": lambda: paged((4096,), (4096,)),
}


@needs_fa3
@pytest.mark.alone
@pytest.mark.parametrize("name", COMPARED)
def test_no_kernel_beside_the_vendors(name: str, found: dict[str, Any]) -> None:
    call = COMPARED[name]()
    with torch.no_grad():
        raw, ours = raw_call(call), function_call(call)
        direct = kernels_in(raw)
        if not direct:
            pytest.skip("the profiler sees no device here")
        assert kernels_in(ours) == direct
        timers = {"raw": graph_us(raw), "ours": graph_us(ours)}
        taken: dict[str, list[float]] = {n: [] for n in timers}
        for _ in range(25):
            for n, once in timers.items():
                taken[n].append(once())
    us = {n: round(median(v), 2) for n, v in taken.items()}
    found.setdefault("fa3_device_us", {})[name] = {**us, "over_raw": round(us["ours"] / us["raw"] - 1, 4)}


@needs_fa3
def test_a_compiled_step_adds_no_kernel(found: dict[str, Any]) -> None:
    call = paged((1,) * 8, (4096,) * 8)
    t = call.arguments
    names = ("k_pages", "v_pages", "page_table", "seq_lens", "cu_seqlens_q")
    given = [t[n] for n in names]

    def layers(query: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            query = attnops.paged_attention(query, *given, max_seqlen_q=1, padded=False, holes=False, kernel="fa3")
        return query

    with torch.no_grad():
        compiled = torch.compile(layers, fullgraph=True)
        ours, direct = kernels_in(lambda: compiled(t["query"])), kernels_in(raw_call(call))
    found.setdefault("compiled", {})["fa3_kernels_of_4_layers"] = len(ours)
    assert sorted(ours) == sorted(direct * 4)


@needs_fa3
@pytest.mark.parametrize("f", [LLAMA, FLOAT8, replace(LLAMA, lse=True)], ids=["bfloat16", "float8", "lse"])
def test_a_static_caches_decode(f: Features) -> None:
    kernel = kernels_of("attention")["fa3"]
    for start in (None, (3, 0, 700)):
        call = make_call("attention", Source(0, "cuda"), 3, 1, 1000, f, kv_start=start, kv_end=(9, 1000, 733), index=torch.int32)
        assert check_kernel(kernel, call).worst <= 1.0
        assert not any("copy" in name.lower() for name in kernels_in(lambda c=call: kernel.run(c.record))) or f.lse


@needs_fa3
def test_chunks_over_many_tiles() -> None:
    f = replace(LLAMA, chunk=200, lse=True)
    source = Source(0, "cuda")
    for call in (
        make_call("attention", source, 2, 700, 700, f),
        make_call("attention", source, 2, 3, 1100, f),
        make_call("varlen_attention", source, (300, 1), (900, 513), f),
        make_call("paged_attention", source, (300, 1), (900, 513), 16, f),
        make_call("paged_attention", source, (300, 1), (900, 513), 128, replace(f, window=(150, -1))),
    ):
        assert check_kernel(kernels_of(call.op)["fa3"], call).worst <= 1.0


# FlashAttention-4 -----------------------------------------------------------------------------------------------------


@needs_fa4
def test_fa4_says_what_a_capture_wants_and_runs_after_it() -> None:
    kernel = kernels_of("paged_attention")["fa4"]
    f = replace(LLAMA, head_dim=112)  # of no other test, so not compiled yet
    call = paged((1, 1), (300, 20), f=f)
    fa4._kinds().clear()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotCompiled, match="while a CUDA graph is captured"), torch.cuda.graph(graph):
        kernel.run(call.record)
    torch.cuda.synchronize()
    kernel.run(call.record)
    want = call.arguments["output"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(call.record)
    call.arguments["output"].fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(call.arguments["output"], want)


@needs_fa4
def test_fa4_in_cuda_graph_trees() -> None:
    call = paged((1,) * 4, (300, 20, 64, 1))
    t = call.arguments
    given = [t[n] for n in ("k_pages", "v_pages", "page_table", "seq_lens", "cu_seqlens_q")]

    def layers(query: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            query = attnops.paged_attention(query, *given, max_seqlen_q=1, padded=False, holes=False, kernel="fa4")
        return query

    with torch.no_grad():
        want = layers(t["query"])
        compiled = torch.compile(layers, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(t["query"]).clone(), want, rtol=2e-2, atol=2e-2)


@needs_fa4
@pytest.mark.parametrize("page", [1, 64, 256])
def test_fa4_with_stale_pages(page: int) -> None:
    f = replace(LLAMA, lse=True)
    call = make_call("paged_attention", Source(1, "cuda"), (130, 1, 40), (300, 129, 40), page, f)
    assert check_kernel(kernels_of("paged_attention")["fa4"], call).worst <= 1.0
