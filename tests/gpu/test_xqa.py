"""XQA on a real GPU: the shapes it is built for, each built once; capture; what the glue costs; what FlashInfer's own choice gives."""

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.kernels.flashinfer import devices
from attnops.kernels.shared import memory
from attnops.testing import Call, Features, Pages, Source, allowance, check_kernel, equip, make_call, oracle, refusals

pytestmark = pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")

F16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
XQA = kernels_of("paged_attention")["xqa"]

# (page size, features): one module each, which takes 6 s to build.
BUILT: dict[str, tuple[int, Features]] = {
    "bf16_page16_d128_group4": (16, Features(dtype=BF16, head_dim=128, q_heads=8, kv_heads=2, causal=True)),
    "bf16_page64_d64_group8_window": (64, Features(dtype=BF16, head_dim=64, q_heads=8, kv_heads=1, causal=True, window=(127, -1))),
    "fp16_page32_d256_group1": (32, Features(dtype=F16, head_dim=256, q_heads=4, kv_heads=4, causal=True)),
    "bf16_page128_d128_group3": (128, Features(dtype=BF16, head_dim=128, q_heads=6, kv_heads=2, causal=True)),
    "bf16_fp8_page64_d128_group4": (
        64, Features(dtype=BF16, kv_dtype=E4M3, scale_per_head=False, head_dim=128, q_heads=8, kv_heads=2, causal=True)
    ),
    "fp16_fp8_page128_d64_group16": (
        128, Features(dtype=F16, kv_dtype=E4M3, scale_per_head=False, head_dim=64, q_heads=16, kv_heads=1, causal=True)
    ),
}  # fmt: skip

LENGTHS = (1, 300, 77, 2047, 16, 4096)


def decode(page: int, f: Features, lengths: tuple[int, ...] = LENGTHS, seed: int = 0, **more: Any) -> Call:
    more = {"q_lens": (1,) * len(lengths), "padding": 0} | more
    return make_call("paged_attention", Source(seed, "cuda"), k_lens=lengths, page=page, f=f, **more)


def plain(page: int, f: Features) -> Call:
    return decode(page, f)


CASES: dict[str, Callable[[int, Features], Call]] = {
    "plain": plain,
    "one": lambda page, f: decode(page, f, (5000,)),
    "many": lambda page, f: decode(page, f, tuple(37 * i % 700 for i in range(150))),
    "empty": lambda page, f: decode(page, f, (0, 300, 0, 513)),
    "all_empty": lambda page, f: decode(page, f, (0, 0)),
    "idle_and_padded": lambda page, f: decode(page, f, (9, 300, 513), q_lens=(1, 0, 1), padding=2),
    "sinks": lambda page, f: decode(page, replace(f, sinks=torch.float32), (0, 300, 77, 2047)),
    "sinks_of_the_dtype": lambda page, f: decode(page, replace(f, sinks=f.dtype), (0, 300, 77, 2047)),
    "loud": lambda page, f: decode(page, replace(f, loud=True)),
    "interleaved": lambda page, f: decode(page, f, pages=Pages(interleaved=True)),
    "scale": lambda page, f: decode(page, replace(f, scale=0.3)),
}


def load(page: int, f: Features) -> Any:
    """The module of a point, which builds it if need be."""
    from flashinfer.xqa import get_xqa_module

    return get_xqa_module(f.dtype, f.kv_dtype or f.dtype, page, f.head_dim, f.q_heads // f.kv_heads, f.window[0] >= 0, f.dtype, 1)


@pytest.fixture(scope="module")
def built() -> None:
    """All modules, built side by side."""
    if why := refusals(XQA, decode(*BUILT["bf16_page16_d128_group4"])):
        pytest.skip("; ".join(map(str, why)))

    with ThreadPoolExecutor(len(BUILT)) as pool:
        list(pool.map(lambda point: load(*point), BUILT.values()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("point", BUILT)
def test_numerics(built: None, point: str, case: str, found: dict[str, Any]) -> None:
    figures = check_kernel(XQA, CASES[case](*BUILT[point]))
    assert not figures.refused, figures
    found.setdefault("xqa", {}).setdefault("worst_share_of_budget", {})[f"{point}.{case}"] = round(figures.worst * XQA.tolerance.factor, 4)


@pytest.mark.parametrize("point", ["bf16_page16_d128_group4", "bf16_fp8_page64_d128_group4"])
def test_a_copy_of_the_library(built: None, point: str, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> None:
    """What each of several GPUs is given. The package's own loading is not asked."""
    monkeypatch.setattr(devices, "visible", lambda: 2)
    for case in ("plain", "sinks"):
        figures = check_kernel(XQA, CASES[case](*BUILT[point]))
        assert figures.worst <= 1.0
        found.setdefault("xqa", {}).setdefault("copies_share_of_budget", {})[f"{point}.{case}"] = round(figures.worst, 4)


@pytest.mark.parametrize("point", BUILT)
def test_counters_are_zero_again(built: None, point: str) -> None:
    call = equip(XQA, decode(*BUILT[point]))
    for _ in range(3):
        XQA.run(call.record)
    workspace = call.arguments["workspace"]
    assert workspace[memory.COUNTERS :].any(), "no request was split, so that nothing was counted"
    assert not workspace[: memory.COUNTERS].any()


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`run` in a CUDA graph, after a call that builds and loads what it needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("point", BUILT)
def test_replays_follow_lengths_tables_and_contents(built: None, point: str) -> None:
    page, f = BUILT[point]
    # Every batch fills a table of the same shape; the pool, the queries and the order of the pages differ.
    batches = [(2047, 300, 77, 1), (1500, 2047, 900, 16), (2047, 5, 200, 0), (1024, 1023, 2047, 700)]
    pages = max(sum(-(-n // page) for n in lengths) for lengths in batches) + 2
    calls = [
        decode(page, f, lengths, seed, pages=Pages(spare=pages - sum(-(-n // page) for n in lengths)), q_lens=(1, 1, 0, 1), padding=1)
        for seed, lengths in enumerate(batches)
    ]
    static = equip(XQA, calls[0])
    graph = captured(lambda: XQA.run(static.record))
    for call in (*calls[1:], calls[0]):
        for name, tensor in call.tensors().items():
            static.arguments[name].copy_(tensor)
        static.arguments["output"].fill_(float("nan"))
        graph.replay()
        want = oracle(call)["output"]
        limit = allowance(call, {"output": want})["output"]
        error = (static.arguments["output"].double() - want).abs().amax()
        assert error <= limit * XQA.tolerance.factor, (
            f"{point}: off by {float(error):.3e}, allowed {float(limit) * XQA.tolerance.factor:.3e}"
        )


def test_time_of_the_call_and_of_the_glue(built: None, found: dict[str, Any]) -> None:
    from flashinfer.utils import get_device_sm_count
    from flashinfer.xqa import get_xqa_module

    page, f = BUILT["bf16_page16_d128_group4"]
    call = equip(XQA, decode(page, f, (4096,) * 8))
    t = call.arguments
    counters, scratch = memory.split(t["workspace"], 0)
    module = get_xqa_module(f.dtype, f.dtype, page, f.head_dim, 4, False, f.dtype, 1)
    q, out, lens = t["query"][:, None], t["output"][:, None], t["seq_lens"].view(torch.uint32)[:, None]

    def raw() -> None:
        module.xqa(
            False, get_device_sm_count(q.device), f.kv_heads, 0, f.head_dim**0.5 * t["scale"], out, 1.0, q, None, t["k_pages"],
            t["v_pages"], None, None, t["page_table"], t["page_table"].shape[1] * page, lens, 8, 1.0, counters, scratch, True, 1,
            None, None,
        )  # fmt: skip

    times = {}
    for name, run in (("raw_us", raw), ("ours_us", lambda: XQA.run(call.record))):
        graph = captured(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(100):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times[name] = round(start.elapsed_time(end) * 10, 2)
    found.setdefault("xqa", {})["8x4096_heads_8_2_d128"] = times


@pytest.mark.parametrize("stale", [0.0, float("nan")])
def test_flashinfers_own_choice_for_float8(built: None, stale: float, found: dict[str, Any]) -> None:
    """Recorded, not judged: the reasons `xqa` gives for not taking the kernel that FlashInfer takes on SM90."""
    from flashinfer.xqa import xqa

    page, f = BUILT["bf16_fp8_page64_d128_group4"]
    call = equip(XQA, decode(page, f, (70, 300, 2047)))
    t = call.arguments
    counters, scratch = memory.split(t["workspace"], 0)
    pages = {n: t[n].view(torch.uint8).masked_fill(call.free[n], 0x7F if stale != stale else 0).view(E4M3) for n in ("k_pages", "v_pages")}
    scale = t["k_scale"] / t["v_scale"] * (t["scale"] * f.head_dim**0.5)
    xqa(
        t["query"][:, None], pages["k_pages"], pages["v_pages"], t["page_table"], t["seq_lens"].view(torch.uint32)[:, None],
        t["output"][:, None], scratch, counters, f.kv_heads, page, q_scale=scale, kv_scale=t["v_scale"],
    )  # fmt: skip
    clean = call.map(lambda n, x: x.view(torch.uint8).masked_fill(call.free[n], 0).view(x.dtype) if n in pages else x)
    want = oracle(clean)["output"]
    error = (t["output"].double() - want).abs().amax() / allowance(clean, {"output": want})["output"]
    name = "float8_vendor_choice_with_stale_nan" if stale != stale else "float8_vendor_choice_share_of_budget"
    found.setdefault("xqa", {})[name] = "nan" if bool(error.isnan()) else round(float(error), 2)


def test_signatures_are_those_the_stand_ins_have(built: None) -> None:
    from tests.standins.flashinfer_trtllm import SIGNATURES, XQA_SIGNATURE

    def bare(function: Any) -> str:
        found = inspect.signature(function)
        parameters = [p.replace(annotation=p.empty) for p in found.parameters.values()]
        return str(found.replace(parameters=parameters, return_annotation=found.empty)).replace("*, ", "")

    for path, text in SIGNATURES.items():
        module, name = path.split(".")
        assert bare(getattr(__import__(f"flashinfer.{module}", fromlist=[name]), name)) == f"({text})", path
    from flashinfer.xqa import get_xqa_module

    assert bare(get_xqa_module(BF16, BF16, 16, 128, 4, False, BF16, 1).xqa) == f"({XQA_SIGNATURE})"
