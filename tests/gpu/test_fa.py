"""FlashAttention-3 and 4 on a real SM90, beyond the grid: what runs beside the vendor's kernel, and
captures of what compiles itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import attnops
from attnops.core.errors import NotCompiled
from attnops.core.kernel import Kernel, kernels_of
from attnops.core.problem import Target
from attnops.kernels.flash_attn4 import fa4 as made
from attnops.kernels.sgl import fa3 as wheel
from attnops.testing import Call, Features, Source, make_call
from tests.checks import right
from tests.gpu.helpers import captured, kernels_in, need

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LLAMA = Features(dtype=BF16, head_dim=128, q_heads=32, kv_heads=8, causal=True)
COMPARED = {"decode_8x4096": ((1,) * 8, (4096,) * 8), "prefill_1x4096": ((4096,), (4096,))}


def usable(name: str) -> Kernel:
    kernel = kernels_of("paged_attention")[name]
    need(kernel)
    if Target.of(torch.device("cuda")).arch != 90:
        pytest.skip("held to what SM90 does")
    return kernel


@pytest.fixture
def fa3() -> Kernel:
    return usable("fa3")


@pytest.fixture
def fa4() -> Kernel:
    return usable("fa4")


def paged(q_lens: Any, seq_lens: Any, f: Features = LLAMA) -> Call:
    return make_call("paged_attention", Source(0, "cuda"), q_lens, seq_lens, 16, f, padding=None)


def vendors(call: Call) -> Callable[[], Any]:
    """The wheel's op called directly for a paged call."""
    t, (fwd, tail), none = call.arguments, wheel.raw_op(), None
    args = (
        t["query"],
        t["k_pages"],
        t["v_pages"],
        none,
        none,
        none,
        t["output"],
        t["cu_seqlens_q"],
        none,
        none,
        none,
        t["seq_lens"],
        t["max_seqlen_q"],
        none,
        t["page_table"],
        none,
        none,
        none,
        none,
        none,
        none,
        none,
        none,
        t["scale"],
        True,
        -1,
        -1,
        0,
        0.0,
        False,
        none,
        0,
        none,
        0,
        none,
        *tail,
    )
    return lambda: fwd(*args)


def layers_of(call: Call, kernel: str, count: int) -> Callable[..., torch.Tensor]:
    """As many calls in a row as a model has layers."""
    t = call.arguments
    given = [t[n] for n in ("k_pages", "v_pages", "page_table", "seq_lens", "cu_seqlens_q")]
    more: dict[str, Any] = {
        "max_seqlen_q": t["max_seqlen_q"],
        "scale": t["scale"],
        "padded": False,
        "holes": False,
        "kernel": kernel,
    }

    def layers(query: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        for _ in range(count):
            query = attnops.paged_attention(query, *given, output=output, **more)
        return query

    return layers


@pytest.mark.parametrize("name", COMPARED)
def test_no_kernel_beside_the_vendors(fa3: Kernel, name: str) -> None:
    call = paged(*COMPARED[name])
    ours, t = layers_of(call, "fa3", 1), call.arguments
    with torch.no_grad():
        assert kernels_in(lambda: ours(t["query"], t["output"])) == kernels_in(vendors(call))


def test_a_compiled_step_adds_no_kernel(fa3: Kernel) -> None:
    call = paged(*COMPARED["decode_8x4096"])
    with torch.no_grad():
        compiled = torch.compile(layers_of(call, "fa3", 4), fullgraph=True)
        ours = kernels_in(lambda: compiled(call.arguments["query"]))
        direct = kernels_in(vendors(call))
    assert sorted(ours) == sorted(direct * 4)


def test_fa4_says_what_a_capture_wants_and_runs_after_it(fa4: Kernel) -> None:
    call = paged(
        (1, 1), (300, 20), replace(LLAMA, head_dim=112)
    )  # of no other test, so not compiled yet
    made._kinds().clear()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(NotCompiled, match="while a CUDA graph is captured"),
        torch.cuda.graph(graph),
    ):
        fa4.run(call.record)
    torch.cuda.synchronize()
    graph, _ = captured(lambda: fa4.run(call.record))
    want = call.arguments["output"].clone()
    call.arguments["output"].fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(call.arguments["output"], want)


def test_fa4_in_cuda_graph_trees(fa4: Kernel) -> None:
    call = paged((1,) * 4, (300, 20, 64, 1))
    query, layers = call.arguments["query"], layers_of(call, "fa4", 2)
    with torch.no_grad():
        want = layers(query)
        compiled = torch.compile(layers, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(query).clone(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "f",
    [LLAMA, replace(LLAMA, q_dtype=E4M3, kv_dtype=E4M3), replace(LLAMA, lse=True)],
    ids=["bfloat16", "float8", "lse"],
)
def test_a_static_caches_decode(fa3: Kernel, f: Features) -> None:
    kernel, ends = kernels_of("attention")["fa3"], {"kv_end": (9, 1000, 733), "index": torch.int32}
    for start in (None, (3, 0, 700)):
        call = make_call("attention", Source(0, "cuda"), 3, 1, 1000, f, kv_start=start, **ends)
        right(kernel, call)
        ran = kernels_in(lambda c=call: kernel.run(c.record))
        assert f.lse or not any("copy" in name.lower() for name in ran)
