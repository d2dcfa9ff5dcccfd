"""`triton` among the others: promises about batch mates, opcheck, compiled graphs, selection, what
is refused, what is compiled."""

from collections import defaultdict
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch

import attnops
from attnops.core.problem import Extent, Problem, Target, altered, pretend
from attnops.core.select import select
from attnops.ops import OPS
from attnops.ops.case_data import BF16, E4M3, E5M2, F16, F32
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Features, Source, make_call
from tests.lowering.models import PagedModel, compiled_code, kernel_calls, prefill
from tests.triton.checks import SM90, triton
from tests.triton.compiling import OPTIONS, recorded
from tests.triton.process import compiled, interpreted, needs_triton
from tests.triton.test_numerics import ran

# Turns --------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("op", ["paged_attention", "mla_attention"])
@interpreted
def test_parts_are_bounded(op):
    """Requests that take turns give the bits of requests served at once, padding tokens too."""
    from attnops.kernels.triton.launch import attention as host

    f = Features(dtype=F16, head_dim=32, q_heads=4, kv_heads=2, causal=True, lse=True)
    f = (
        replace(DEEPSEEK, dtype=F16, head_dim=80, v_head_dim=64, lse=True)
        if op == "mla_attention"
        else f
    )
    for q_lens in ((1, 1, 0, 1, 1), (1, 20, 2, 7, 1)):
        call = make_call(op, Source(4), q_lens, (270, 130, 90, 140, 17), 16, f, padding=3)
        results = []
        for most in (1 << 30, 1 << 15, 1):
            given = call.map(
                lambda n, t: torch.full_like(t, float("nan")) if n in ("output", "lse") else t
            )
            with patch.object(host, "MOST_PARTS_BYTES", most):
                ran(given, "deterministic")
            results.append([given.arguments[n] for n in ("output", "lse")])
        for other in results:
            assert all(map(torch.equal, results[0], other))


# In graphs ----------------------------------------------------------------------------------------


@interpreted
def test_a_compiled_model_calls_it():
    model, given = PagedModel(2).eval(), prefill()
    with torch.no_grad():
        with attnops.use("reference"):
            want, pages = model(*given), model.pages()
        model.clear()
        with pretend(SM90), attnops.use({"paged_attention": "triton"}):
            got, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(*given))
    assert kernel_calls(code) == ["write_kv.triton", "paged_attention.triton"] * 2
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for after, before in zip(model.pages(), pages, strict=True):
        torch.testing.assert_close(after, before)


# Selection ----------------------------------------------------------------------------------------

LLAMA = Problem.of(
    "paged_attention",
    SM90,
    dtype=BF16,
    kv_dtype=BF16,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    page_size=16,
    causal=True,
    tokens=Extent.of(8),
    batch=Extent.of(8),
    queries=Extent.of(1),
    context=Extent.of(4096),
)


def test_it_runs_where_no_vendor_does():
    many = Extent.of(2048)
    for problem in (
        LLAMA,
        altered(LLAMA, tokens=many, queries=many, batch=Extent.of(1)),
        altered(LLAMA, kv_dtype=E4M3, kv_scales=True),
    ):
        assert select(problem).kernel.name == "triton", (
            "whose rivals here are sdpa and the reference"
        )
        assert "triton missing" in str(
            select(replace(problem, target=Target("cuda", 90, assume=()))).refused["triton"][0]
        )
    assert (
        select(replace(LLAMA, target=Target("cpu", 0, assume=("triton",)))).kernel.name != "triton"
    )


REFUSED = {
    "target": {"target": Target("cuda", 75, ("triton",))},
    "kv_dtype": {"kv_dtype": E4M3, "kv_scales": True, "target": Target("cuda", 80, ("triton",))},
    "head_dim": {"head_dim": 640, "v_head_dim": 128},
    "v_head_dim": {"v_head_dim": 576},
    "dtype": {"head_dim": 288, "dtype": F32, "kv_dtype": F32},
    "last_dim_contiguous": {"last_dim_contiguous": False},
}
TAKEN = {
    "pages": {"page_size": 48},
    "dims": {"head_dim": 40, "v_head_dim": 200},
    "float32": {"dtype": F32, "kv_dtype": F32},
    "rules": {
        "softcap": True,
        "lse": True,
        "window": (9, 3),
        "sinks": True,
        "sinks_dtype": F32,
        "mask": "bool",
    },
    "plan": {"plan": "host"},
    "e5m2": {"kv_dtype": E5M2, "kv_scales": True, "target": Target("cuda", 80, ("triton",))},
    "wide": {"head_dim": 576, "v_head_dim": 512},
    "float8": {"dtype": E4M3, "kv_dtype": E4M3, "kv_scales": True, "head_dim": 40},
    "sm120": {"target": Target("cuda", 120, ("triton",))},
}


@pytest.mark.parametrize("name", [*REFUSED, *TAKEN])
def test_what_is_taken(name):
    refused = triton("paged_attention").refusals(altered(LLAMA, **(REFUSED | TAKEN)[name]))
    assert (name in [r.field for r in refused]) if name in REFUSED else not refused


# What is compiled ---------------------------------------------------------------------------------


def kind_of(x, varying):
    """By what Triton tells one compiled kernel from another: see JITFunction in
    triton/runtime/jit.py."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int) and not isinstance(x, bool):
        return ("i64" if x >= 2**31 else "i32",) if varying else (x == 1, x % 16 == 0)
    return (type(x),)


def kinds_of(found):
    """The kernels that Triton would compile for these launches, by their device functions'
    names."""
    seen = defaultdict(set)
    for kernel, given in found:
        varying = {p.name for p in kernel.params if p.do_not_specialize}
        key = {
            n: x if n.isupper() or n in OPTIONS else kind_of(x, n in varying)
            for n, x in given.items()
        }
        seen[kernel.__name__].add(tuple(sorted(key.items(), key=lambda item: item[0])))
    return seen


@compiled
def test_a_generate_run_compiles_few_kernels():
    """Every length of prompt, batch and context of one model, and every number of tokens written.
    The bounds are in docs/triton.md."""
    from attnops.kernels.shared.launch import gpu
    from attnops.kernels.triton.launch import attention, data

    big, one = gpu.Gpu(132, 227 * 1024, True, True), torch.empty(16 * 8 * 128, dtype=BF16)
    pages = one.view(1, 16, 8, 128)
    with recorded(attention, big) as found:
        for batch, queries, width in product(
            (1, 2, 3, 8, 17, 64), (1, 2, 5, 8, 17, 64, 100, 1000, 4097), (1, 3, 16, 37, 256, 2000)
        ):
            q = torch.empty(1, 32, 128, dtype=BF16).expand(batch * queries, -1, -1)
            table, lens, cu = (
                torch.empty(*shape, dtype=torch.int32)
                for shape in ((batch, width), (batch,), (batch + 1,))
            )
            attention.attention(
                OPS["paged_attention"].call(
                    q, pages, pages, table, lens, cu, max_seqlen_q=queries, scale=0.1, output=q
                )
            )
    seen = kinds_of(found)
    assert len(seen["attend"]) <= 12 and len(seen["combine"]) <= 2, {
        n: len(kinds) for n, kinds in seen.items()
    }
    with recorded(data, big) as found:
        for tokens in (*range(1, 70), 500, 512, 1000, 1024, 2000, 4096, 9999, 16384):
            new = torch.empty(1, 8, 128, dtype=BF16).expand(tokens, -1, -1)
            triton("write_kv").run(
                OPS["write_kv"].call(new, new, pages, pages, torch.empty(tokens, dtype=torch.int64))
            )
    assert [len(kinds) for kinds in kinds_of(found).values()] == [3]


@needs_triton
def test_versions_that_are_too_old_are_named(monkeypatch):
    kernel = triton("merge_state")
    monkeypatch.setattr(type(kernel.packages[0]), "version", lambda self: "3.1.0")
    assert "triton 3.1.0" in str(kernel.absences(Target("cuda", 90))[0])
