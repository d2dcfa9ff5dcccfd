"""`triton` on a GPU, beyond what every kernel is asked: long calls, a request's bits whatever its mates, what is compiled and how fast."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.kernels.triton.launch import grids
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Features, Source, check_kernel, make_call
from tests.gpu.first_use import first_use

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
LLAMA = Features(dtype=BF16, head_dim=128, q_heads=32, kv_heads=8, causal=True, lse=True)
SMALL = Features(dtype=F16, head_dim=64, q_heads=8, kv_heads=2, causal=True, lse=True)

LONG = {
    "decode": lambda s: make_call("paged_attention", s, (1,) * 4, (8192, 1, 70, 3000), 16, LLAMA),
    "decode_page_64": lambda s: make_call("paged_attention", s, (1,), (20000,), 64, LLAMA, padding=0),
    "decode_page_1": lambda s: make_call("paged_attention", s, (1, 1), (900, 2000), 1, LLAMA),
    "verify": lambda s: make_call("paged_attention", s, (8, 5), (4000, 900), 16, LLAMA),
    "extend": lambda s: make_call("paged_attention", s, (700,), (3000,), 16, LLAMA),
    "mixed": lambda s: make_call("paged_attention", s, (700, 1, 1, 30, 0, 1), (900, 4000, 5, 31, 7, 600), 16, LLAMA, padding=90),
    "window": lambda s: make_call("paged_attention", s, (1, 300), (4000, 1500), 16, replace(LLAMA, window=(512, -1))),
    "chunk": lambda s: make_call("paged_attention", s, (1, 300), (4000, 1500), 16, replace(LLAMA, chunk=512)),
    "float8": lambda s: make_call("paged_attention", s, (1, 9), (3000, 200), 16, replace(LLAMA, kv_dtype=E4M3)),
    "d256_softcap": lambda s: make_call("paged_attention", s, (1, 100), (3000, 200), 16, replace(LLAMA, head_dim=256, softcap=30.0)),
    "tree": lambda s: make_call("paged_attention", s, (16, 60), (1500, 200), 16, replace(LLAMA, mask="bool")),
    "group_20": lambda s: make_call("paged_attention", s, (1, 70), (3000, 200), 16, replace(LLAMA, q_heads=20, kv_heads=1)),
    "mla": lambda s: make_call("mla_attention", s, (1, 1, 1), (8000, 70, 1), 64, DEEPSEEK),
    "mla_128_heads": lambda s: make_call("mla_attention", s, (1, 2), (4000, 70), 64, replace(DEEPSEEK, q_heads=128, lse=True)),
    "mla_verify": lambda s: make_call("mla_attention", s, (8, 5), (4000, 70), 64, replace(DEEPSEEK, window=(1000, -1), lse=True)),
    "mla_float8": lambda s: make_call("mla_attention", s, (1, 2), (4000, 70), 64, replace(DEEPSEEK, q_heads=128, kv_dtype=E4M3)),
}


@pytest.mark.parametrize("name", LONG)
def test_long(name: str, found: dict[str, Any]) -> None:
    call = LONG[name](Source(1, "cuda"))
    figures = check_kernel(kernels_of(call.op)["triton"], call)
    assert not figures.refused, figures
    found.setdefault("triton_long", {})[name] = round(figures.worst, 4)


@pytest.mark.parametrize("op", ["paged_attention", "mla_attention"])
def test_stages_that_overlap_give_what_stages_in_turn_give(op: str) -> None:
    """Stage two is launched while stage one runs and must wait for it: bit for bit, time and again, in a captured graph too."""
    from attnops.kernels.triton.launch.attention import attention

    call = {
        "paged_attention": lambda: make_call(
            "paged_attention", Source(2, "cuda"), (1,) * 8, (20000, 1, 70, 3000, 9000, 4096, 17, 0), 16, LLAMA
        ),
        "mla_attention": lambda: make_call(
            "mla_attention", Source(2, "cuda"), (1,) * 4, (20000, 70, 0, 5000), 64, replace(DEEPSEEK, lse=True)
        ),
    }[op]()
    for splits in (2, 7, 40):
        choice = grids.Choice(grids.Tile(16, 32, 4, 2), splits)
        attention(call.record, choice._replace(overlap=False))
        want = {n: call.arguments[n].clone() for n in ("output", "lse")}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attention(call.record, choice)
        for step in range(50):
            for n in want:
                call.arguments[n].fill_(float("nan"))
            graph.replay() if step % 2 else attention(call.record, choice)
            for n, x in want.items():
                how = "replayed" if step % 2 else "launched"
                assert torch.equal(call.arguments[n], x), f"{splits} splits, {how}, time {step}: {n} differs"


FIRST_USES = {n: lambda n=n: LONG[n](Source(1, "cuda")) for n in ("decode", "extend", "mla", "mla_128_heads")}


# The pages that ids name are found first. Attention has two stages, and one of a prompt.
LAUNCHED = {"decode": 3, "extend": 2, "mla": 3, "mla_128_heads": 3}


@pytest.mark.alone
def test_first_use_compiles_no_more_than_it_launches(found: dict[str, Any], tmp_path: Any) -> None:
    uses = first_use("tests.gpu.test_triton", tmp_path)
    found["triton_first_use_s"] = {name: use.seconds for name, use in uses.items()}
    assert {name: use.compiled for name, use in uses.items() if use.compiled > LAUNCHED[name]} == {}
    assert any(use.compiled for use in uses.values()), "no compiled kernel was found in Triton's cache"


def test_a_generate_run_compiles_few_kernels(found: dict[str, Any]) -> None:
    from attnops.kernels.triton.device.attend import attend
    from attnops.kernels.triton.device.merge import combine

    device = torch.cuda.current_device()

    def count(kernel: Any) -> int:
        return len(kernel.device_caches[device][0])

    before = count(attend), count(combine)
    f = Features(dtype=BF16, head_dim=96, q_heads=6, kv_heads=2, causal=True)
    for queries in (1, 2, 7, 8, 33, 65, 300):
        for requests in (1, 2, 5, 16):
            for keys in (300, 700, 1100, 4096):
                call = make_call("paged_attention", Source(0, "cuda"), (queries,) * requests, (keys,) * requests, 16, f)
                kernels_of("paged_attention")["triton"].run(call.record)
    found["triton_variants"] = {"attend": count(attend) - before[0], "combine": count(combine) - before[1]}
    assert count(attend) - before[0] <= 12
    assert count(combine) - before[1] <= 2
