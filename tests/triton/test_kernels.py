"""`triton` among the others: promises about batch mates, opcheck, compiled graphs, selection, what is refused, what is compiled."""

from dataclasses import replace

import pytest
import torch

import attnops
from attnops.core.errors import InvalidInput
from attnops.core.problem import Extent, Problem, Target, altered, pretend
from attnops.core.select import Policy, select
from attnops.ops import OPS
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Features, Source, make_call
from tests.lowering.models import PagedModel, compiled_code, kernel_calls, prefill
from tests.mates import same_bits
from tests.triton.checks import SM90, mode, triton
from tests.triton.process import interpreted, needs_triton
from tests.triton.test_compile import OPTIONS
from tests.triton.test_numerics import ran

BF16, F16, F32, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
OURS = ("paged_attention", "mla_attention", "merge_state", "merge_states", "attention", "varlen_attention")


# Promises about batch mates -------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("op", OURS[:2])
@interpreted
def test_a_request_does_not_see_its_mates(op):
    f = Features(dtype=F16, head_dim=32, q_heads=8, kv_heads=2, causal=True, window=(250, -1), sinks=F32, lse=True)
    small = replace(DEEPSEEK, dtype=F16, head_dim=80, v_head_dim=64, lse=True)
    q_lens, lens = (1, 20, 1, 7, 1), (400, 130, 90, 300, 17)
    call = {
        "paged_attention": lambda: make_call("paged_attention", Source(4), q_lens, lens, 16, f),
        "mla_attention": lambda: make_call("mla_attention", Source(4), q_lens, lens, 16, small),
    }[op]()
    with mode("deterministic"):
        assert select(call.problem, Policy(deterministic=True)).kernel is triton(op)
        same_bits(call, [(0,), (1,), (2,), (3, 0), (4, 2), (4, 1, 0)])


@pytest.mark.parametrize("op", OURS[4:])
@interpreted
def test_a_request_without_pages_does_not_see_its_mates(op):
    f = Features(dtype=F16, head_dim=24, q_heads=6, kv_heads=2, causal=True, window=(250, -1), sinks=F32, lse=True, mask="bool")
    call = {
        "attention": lambda: make_call(
            "attention", Source(4), 4, 20, 300, f, kv_start=(0, 40, 290, 0), kv_end=(300, 280, 300, 7), index=torch.int32
        ),
        "varlen_attention": lambda: make_call("varlen_attention", Source(4), (1, 20, 1, 7), (400, 130, 90, 300), f),
    }[op]()
    with mode("deterministic"):
        assert not triton(op).refusals(call.problem) and not triton(op).varies(call.problem)
        same_bits(call, [(0,), (1,), (2,), (3, 0), (3, 2, 1)], triton(op))


@pytest.mark.full
@pytest.mark.parametrize("op", OURS[:2])
@interpreted
def test_parts_are_bounded(op):
    """Requests that take turns give the bits of requests served at once, padding tokens too."""
    from attnops.kernels.triton.launch import attention as host

    f = Features(dtype=F16, head_dim=32, q_heads=4, kv_heads=2, causal=True, lse=True)
    small = replace(DEEPSEEK, dtype=F16, head_dim=80, v_head_dim=64, lse=True)
    before = host.MOST_PARTS_BYTES
    for q_lens in ((1, 1, 0, 1, 1), (1, 20, 2, 7, 1)):
        call = {
            "paged_attention": lambda q=q_lens: make_call("paged_attention", Source(4), q, (270, 130, 90, 140, 17), 16, f, padding=3),
            "mla_attention": lambda q=q_lens: make_call("mla_attention", Source(4), q, (270, 130, 90, 140, 17), 16, small, padding=3),
        }[op]()
        results = []
        try:
            for most in (1 << 30, 1 << 15, 1):
                host.MOST_PARTS_BYTES = most
                for n in ("output", "lse"):
                    call.arguments[n].fill_(float("nan"))
                ran(call, "deterministic")
                results.append([call.arguments[n].clone() for n in ("output", "lse")])
        finally:
            host.MOST_PARTS_BYTES = before
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
        assert not any(x.isnan().any() for x in results[0])


@interpreted
def test_heads_may_lie_far_apart():
    """Query and output with the heads first, of so many tokens that 32 bits do not hold a head's offset. Untouched memory is none."""
    call = make_call(
        "paged_attention", Source(0), (1, 2), (20, 7), 16, Features(dtype=F16, head_dim=16, q_heads=3, kv_heads=1, causal=True), padding=0
    )
    far = {n: torch.empty((1 << 31) + 4096, dtype=F16).as_strided((3, 3, 16), (16, 1 << 30, 1)) for n in ("query", "output")}
    far["query"].copy_(call.arguments["query"])
    given = call.with_(**far)
    for c in (call, given):
        triton("paged_attention").run(c.record)
    assert torch.equal(far["output"], call.arguments["output"])


@interpreted
def test_a_page_of_far_keys_is_refused():
    """Before any launch: the pages are no memory at all."""
    call = make_call("paged_attention", Source(0), (1,), (20,), 16, Features(dtype=F16, head_dim=16, causal=True), padding=0)
    far = torch.empty_strided(call.arguments["k_pages"].shape, (1, 1 << 28, 1, 1), dtype=F16, device="meta")
    given = call.with_(k_pages=far)
    with pytest.raises(InvalidInput, match=r"k_pages.stride\(1\): got 268435456, want < 2\*\*31 / 16"):
        triton("paged_attention").run(given.record)


def test_a_deterministic_policy_takes_it():
    assert select(LLAMA, Policy(deterministic=True)).kernel.name == "triton"


# In graphs ------------------------------------------------------------------------------------------------------------


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


# Selection ------------------------------------------------------------------------------------------------------------

LLAMA = Problem.of(
    "paged_attention", SM90, dtype=BF16, kv_dtype=BF16, q_heads=32, kv_heads=8, head_dim=128, v_head_dim=128, page_size=16, causal=True,
    tokens=Extent.of(8), batch=Extent.of(8), queries=Extent.of(1), context=Extent.of(4096),
)  # fmt: skip


def test_it_runs_where_no_vendor_does():
    many = Extent.of(2048)
    for problem in (LLAMA, altered(LLAMA, tokens=many, queries=many, batch=Extent.of(1)), altered(LLAMA, kv_dtype=E4M3, kv_scales=True)):
        assert select(problem).kernel.name == "triton", "whose rivals here are sdpa and the reference"
        assert "triton missing" in str(select(replace(problem, target=Target("cuda", 90, assume=()))).refused["triton"][0])
    assert select(replace(LLAMA, target=Target("cpu", 0, assume=("triton",)))).kernel.name != "triton"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"target": Target("cpu", 0, ("triton",))}, "target"),
        ({"target": Target("cuda", 75, ("triton",))}, "target"),
        ({"dtype": torch.float64, "kv_dtype": torch.float64}, "dtype"),
        ({"kv_dtype": E4M3, "kv_scales": True, "target": Target("cuda", 80, ("triton",))}, "kv_dtype"),
        ({"dtype": E4M3, "kv_dtype": E4M3, "kv_scales": True, "target": Target("cuda", 80, ("triton",))}, "dtype"),
        ({"head_dim": 640, "v_head_dim": 128}, "head_dim"),
        ({"v_head_dim": 576}, "v_head_dim"),
        ({"head_dim": 288, "dtype": F32, "kv_dtype": F32}, "dtype"),
        ({"last_dim_contiguous": False}, "last_dim_contiguous"),
    ],
)
def test_refusals(change, field):
    assert field in [r.field for r in triton("paged_attention").refusals(altered(LLAMA, **change))]


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 1}, {"page_size": 48}, {"head_dim": 40, "v_head_dim": 200}, {"mask": "bool"}, {"sinks": True, "sinks_dtype": F32},
        {"softcap": True, "lse": True, "window": (9, 3)}, {"target": Target("cuda", 120, ("triton",))}, {"plan": "host"},
        {"kv_dtype": E5M2, "kv_scales": True, "target": Target("cuda", 80, ("triton",))}, {"q_heads": 56}, {"dtype": F32, "kv_dtype": F32},
        {"head_dim": 288}, {"head_dim": 576, "v_head_dim": 512}, {"dtype": E4M3, "kv_dtype": E4M3, "kv_scales": True, "head_dim": 40},
    ],
)  # fmt: skip
def test_taken(change):
    assert not triton("paged_attention").refusals(altered(LLAMA, **change))


# What is compiled -----------------------------------------------------------------------------------------------------


def kind_of(x, varying):
    """By what Triton tells one compiled kernel from another: see JITFunction in triton/runtime/jit.py."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int) and not isinstance(x, bool):
        return ("i64" if x >= 2**31 else "i32",) if varying else (x == 1, x % 16 == 0)
    return (type(x),)


@interpreted
def test_a_generate_run_compiles_few_kernels():
    """Every length of prompt, batch and context of one model. The bound is in docs/triton.md."""
    from attnops.kernels.shared.launch import gpu
    from attnops.kernels.triton.device import attend, merge
    from attnops.kernels.triton.launch import attention as host

    seen = {"attend": set(), "combine": set()}

    def recorded(kernel, grid, given, args=(), warps=4):
        name, module = ("attend", attend) if kernel is host.attend else ("combine", merge)
        key = {n: x if n.isupper() or n in OPTIONS else kind_of(x, n in module.VARYING) for n, x in (given | {"num_warps": warps}).items()}
        seen[name].add(tuple(sorted(key.items(), key=lambda item: item[0])))

    before = host.launch, gpu.INTERPRETED
    host.launch, gpu.INTERPRETED = recorded, gpu.Gpu(132, 227 * 1024, True, True)
    try:
        for batch in (1, 2, 3, 8, 17, 64):
            for queries in (1, 2, 5, 8, 17, 64, 100, 1000, 4097):
                for pages in (1, 3, 16, 37, 256, 2000):
                    tokens = batch * queries
                    q = torch.empty(1, 32, 128, dtype=BF16).expand(tokens, -1, -1)
                    kv = torch.empty(16 * 8 * 128, dtype=BF16).view(1, 16, 8, 128)
                    table = torch.empty(batch, pages, dtype=torch.int32)
                    lens, cu = torch.empty(batch, dtype=torch.int32), torch.empty(batch + 1, dtype=torch.int32)
                    host.attention(OPS["paged_attention"].call(q, kv, kv, table, lens, cu, max_seqlen_q=queries, scale=0.1, output=q))
    finally:
        host.launch, gpu.INTERPRETED = before
    print({n: len(found) for n, found in seen.items()})
    assert len(seen["attend"]) <= 12
    assert len(seen["combine"]) <= 2


@needs_triton
def test_versions_that_are_too_old_are_named(monkeypatch):
    kernel = triton("merge_state")
    monkeypatch.setattr(type(kernel.packages[0]), "version", lambda self: "3.1.0")
    assert "triton 3.1.0" in str(kernel.absences(Target("cuda", 90))[0])
