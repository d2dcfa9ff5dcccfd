"""Deterministic policies: one kernel whatever the sizes, and bits of a request that do not depend
on its mates."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from attnops.core.kernel import Invariant, all_kernels, extent_at_most, kernels_of
from attnops.core.problem import Extent, Problem, Target, altered
from attnops.core.record import changed
from attnops.core.select import Policy, select, select_by, without_sizes
from attnops.kernels.torch import aten_flash
from attnops.measured import in_force
from attnops.ops import OPS
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import CASES, Features, Source, check_kernel, make_call
from tests.mates import (
    POLICY,
    invariant,
    may_be_chosen,
    only,
    results,
    rows_of,
    same_bits,
    same_bits_in_any_page,
)

BF16, F32 = torch.bfloat16, torch.float32
DETERMINISTIC = Policy(deterministic=True)
INSTALLED = ("sgl_kernel", "flashinfer", "triton", "flash_attn.cute", "cutlass", "quack", "tvm_ffi")
H200 = Target("cuda", 90, INSTALLED, "NVIDIA H200")
TARGETS = [
    H200,
    Target("cuda", 90, ("triton",)),
    Target("cuda", 80, INSTALLED),
    Target("cuda", 100, INSTALLED),
    Target("cpu"),
]

# One choice ---------------------------------------------------------------------------------------

LLAMA = altered(Problem("", H200, BF16, BF16, 32, 8, 128, 128), causal=True)
LATENT = replace(LLAMA, q_heads=128, kv_heads=1, head_dim=576, v_head_dim=512, rope_dim=64)
CALLS = {
    "attention": LLAMA,
    "varlen_attention": LLAMA,
    "paged_attention": replace(LLAMA, page_size=16),
    "paged_attention_windowed": altered(
        LLAMA, page_size=64, window=(1023, -1), sinks=True, sinks_dtype=BF16
    ),
    "mla_attention": replace(LATENT, page_size=64),
    "merge_state": LLAMA,
    "merge_states": LLAMA,
}


def sized(p, batch, queries, context):
    tokens, requests, longest, keys = map(Extent.of, (batch * queries, batch, queries, context))
    return altered(
        p,
        tokens=tokens,
        batch=requests,
        queries=longest,
        context=keys,
        padded=bool(batch % 2),
        sizes_equal=queries == context,
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_no_size_and_no_time_reaches_the_choice(name, target):
    op = name.removesuffix("_windowed")
    problem = replace(CALLS[name], op=op, target=target)
    tables = [None, in_force(H200).table]
    sizes = list(product((1, 2, 8, 33, 500), (1, 3, 8, 9, 4096), (1, 700, 4096, 100_000)))
    chosen = {
        (d.kernel and d.kernel.name)
        for size in sizes
        for t in tables
        if (d := select_by(t, sized(problem, *size), DETERMINISTIC))
    }
    assert len(chosen) == 1, chosen
    if target.device == "cpu" or target is H200:
        [name] = chosen
        assert kernels_of(op)[name].invariant


def test_the_default_policy_looks_at_sizes():
    """Or the test above would prove nothing."""
    paged = replace(CALLS["paged_attention"], op="paged_attention")
    found = {select(sized(paged, batch, 1, 4096)).kernel.name for batch in (8, 32)}
    assert len(found) == 2


def test_a_kernel_of_few_queries_refuses_a_decode_step_too():
    triton = kernels_of("paged_attention")["triton"]
    few = replace(
        triton,
        name="few",
        needs=(extent_at_most("queries", 8),),
        packages=(),
        probe=None,
        invariant=Invariant(),
    )
    problem = sized(replace(CALLS["paged_attention"], op="paged_attention"), 8, 1, 4096)
    assert not few.refusals(problem)
    [refusal] = few.refusals(without_sizes(problem))
    assert refusal.field == "queries"


def test_a_kernel_that_is_missing_is_not_chosen():
    problem = sized(replace(LLAMA, op="varlen_attention"), 1, 9, 9)
    targets = H200, replace(H200, assume=("sgl_kernel", "triton")), TARGETS[1]
    found = [
        select(altered(problem, target=t, softcap=c), DETERMINISTIC)
        for t in targets
        for c in (False, True)
    ]
    assert [d.kernel and d.kernel.name for d in found] == [
        "fa4",
        "fa4",
        "fa3",
        "fa3",
        "aten_flash",
        "triton",
    ]
    assert "policy.deterministic" in str(found[5].refused["sdpa"])
    bare = replace(TARGETS[1], assume=())
    assert select(altered(problem, target=bare, softcap=True), DETERMINISTIC).kernel is None


@pytest.mark.parametrize("target", [t for t in TARGETS if t.device == "cuda"], ids=str)
@pytest.mark.parametrize(
    "change",
    [{}, {"window": (1023, -1)}, {"softcap": True}, {"kv_range": True}, {"lse_grad": True}],
    ids=str,
)
@pytest.mark.parametrize("op", ["attention_backward", "varlen_attention_backward"])
def test_gradients_have_a_kernel_on_every_gpu(op, change, target):
    if "kv_range" in change and op.startswith("varlen"):
        pytest.skip("packed calls have no ranges")
    problem = sized(altered(LLAMA, op=op, target=target, grad=True, **change), 2, 4096, 4096)
    # With a window fa4, which waits for turns and clears padding rows, is estimated to take as long
    # as triton.
    near = "window" in change and op.startswith("varlen")
    fa4 = target is H200 and "kv_range" not in change and not near
    assert select(problem, DETERMINISTIC).kernel is kernels_of(op)["fa4" if fa4 else "triton"]


def test_sparse_latents_have_a_kernel_where_no_token_is_split():
    problem = sized(
        altered(LATENT, op="sparse_mla_attention", page_size=64, causal=False), 8, 1, 2048
    )
    assert select(problem, DETERMINISTIC).kernel.name == "flashmla"
    packed = select(replace(problem, kv_dtype=torch.uint8), DETERMINISTIC)
    assert packed.kernel is None and "bfloat16 (policy.deterministic)" in str(packed)


def test_ranges_without_fa3_are_left_to_triton():
    problem = sized(altered(LLAMA, op="attention", kv_range=True), 2, 9, 90)
    found = select(replace(problem, target=TARGETS[1]), DETERMINISTIC)
    assert (select(problem, DETERMINISTIC).kernel.name, found.kernel.name) == ("fa3", "triton")
    assert [str(r) for r in found.refused["flex"]] == [
        "kv_range=True (wants no (policy.deterministic))"
    ]


@pytest.mark.parametrize("window", [-1, 3, 50])
def test_aten_flash_takes_dense_rows_as_requests(monkeypatch, window):
    """Its packed form splits no keys. A window reaches past no request's keys, and so keeps its
    tiles."""
    longest_keys = []

    def packed(call, lengths):
        *starts, max_q, max_k, right = lengths
        longest_keys.append(max_k)
        given = OPS["varlen_attention"].call(
            call.query,
            call.key,
            call.value,
            *starts,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            scale=call.scale,
            causal=call.causal,
            window_left=call.window_left,
            window_right=right,
            return_lse=True,
        )
        return OPS["varlen_attention"].reference(given)

    monkeypatch.setattr(aten_flash, "forward", packed)
    monkeypatch.setattr(aten_flash, "on_cpu", lambda x: False)
    call = make_call(
        "attention", Source(1), 3, 5, 9, replace(PLAIN, dtype=F32, window=(window, -1))
    )
    found = aten_flash.attention(changed(call.record, policy=POLICY))
    for got, want in zip(found, OPS["attention"].reference(call.record), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want)
    assert longest_keys[0] > window + 1


@pytest.mark.parametrize("op", sorted({k.op for k in all_kernels()}))
def test_every_op_has_a_kernel_on_a_cpu(op):
    for case in CASES[op][:3] if op in CASES else ():
        assert select(case.call().problem, DETERMINISTIC).kernel is not None, case


# The same bits ------------------------------------------------------------------------------------

PLAIN = Features(dtype=BF16, head_dim=64, q_heads=8, kv_heads=2, causal=True, lse=True)
EVERYTHING = replace(PLAIN, dtype=F32, window=(50, -1), softcap=20.0, sinks=F32, mask="additive")
ONES = (1,) * 12
TWELVE = (1, 1, 40, 1, 3, 1, 200, 1, 9, 1, 1, 7)
LENGTHS = (90, 17, 140, 400, 31, 1, 200, 260, 77, 129, 33, 7)
FOUR = (3, 1, 9, 7)
GROUPS = [FOUR, (0,), (5,), (6,), (6, 7), tuple(reversed(range(12)))]

BATCHES = {
    "attention": lambda f: make_call("attention", Source(4), 12, 3, 90, f),
    "attention_ranges": lambda f: make_call(
        "attention",
        Source(4),
        12,
        3,
        90,
        f,
        kv_start=range(12),
        kv_end=range(70, 82),
        index=torch.int32,
    ),
    "varlen_attention": lambda f: make_call("varlen_attention", Source(4), TWELVE, LENGTHS, f),
    "paged_attention": lambda f: make_call("paged_attention", Source(4), TWELVE, LENGTHS, 16, f),
}


@pytest.mark.parametrize("features", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("name", BATCHES)
def test_attention(name, features):
    same_bits(BATCHES[name](features), GROUPS)


LATENTS = replace(DEEPSEEK, head_dim=80, v_head_dim=64, q_heads=8, lse=True)
OTHERS = {
    "latents": make_call(
        "mla_attention", Source(4), TWELVE, LENGTHS, 16, replace(LATENTS, dtype=BF16)
    ),
    "float32 latents": make_call(
        "mla_attention", Source(4), TWELVE, LENGTHS, 16, replace(LATENTS, dtype=F32)
    ),
    "vertical slash": make_call(
        "vertical_slash_attention", Source(4), TWELVE, LENGTHS, replace(PLAIN, causal=False)
    ),
    "delta rule": make_call("gated_delta_rule", Source(4), TWELVE, 1, 2, 9, 7, F32, normalize=True),
    "scan": make_call("mamba2_scan", Source(4), TWELVE, 1, 2, 9, 7, F32, dt_softplus=True),
    "convolution": make_call("causal_conv1d", Source(4), TWELVE, 9, 4, BF16, activation="silu"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_attention(name):
    same_bits(OTHERS[name], GROUPS)


def test_ranges_do_not_follow_from_the_longest_mate():
    """The same keys behind paddings of several lengths, on the left as on the right."""
    source = Source(3)
    call = make_call(
        "attention", source, 1, 3, 50, PLAIN, kv_start=[0], kv_end=[50], index=torch.int32
    )
    found = []
    for before, after in ((0, 0), (7, 0), (13, 100), (0, 31)):
        keys = {
            n: F.pad(call.arguments[n], (0, 0, 0, 0, before, after), value=float("nan"))
            for n in ("key", "value")
        }
        ranges = {
            "kv_start": source.ints((before,), torch.int32),
            "kv_end": source.ints((before + 50,), torch.int32),
        }
        found.append(results(call.with_(**keys, **ranges)))
    for each in found:
        assert all(map(torch.equal, each, found[0]))


def test_gradients():
    forward = make_call(
        "varlen_attention", Source(4), TWELVE, LENGTHS, replace(PLAIN, lse=False), padding=(0, 0)
    )
    weight, grads = torch.linspace(-1, 1, 64 * 8, dtype=BF16).view(8, 64), []
    for call in (forward, only(forward, FOUR)):
        query = call.arguments["query"].clone().requires_grad_()
        out = torch.ops.attnops.varlen_attention.default(
            **call.arguments | {"query": query}, policy=POLICY
        )[0]
        grads += torch.autograd.grad((out * weight).sum(), query)
    assert torch.equal(grads[0][rows_of(forward, FOUR)], grads[1])


OF_TOKENS = ("linear", "rms_norm", "experts", "mxfp4_experts", "route")


@pytest.mark.parametrize("op", ["merge_state", "merge_states", "sparse_mla_attention", *OF_TOKENS])
def test_rows(op):
    for case in CASES[op] if op == "route" else CASES[op][:4]:
        call = case.call()
        tokens = next(iter(call.tensors().values())).shape[0]
        if tokens > 2:
            same_bits(call, [(1,), (0, 2), tuple(range(tokens))])


INVARIANT = [k for k in all_kernels() if k.op in BATCHES and k.invariant]


@pytest.mark.parametrize("kernel", INVARIANT, ids=lambda k: f"{k.op}.{k.name}")
def test_each_that_may_be_chosen(kernel):
    call = BATCHES[kernel.op](PLAIN)
    if not may_be_chosen(kernel, call):
        pytest.skip("refuses it here; see tests/gpu/test_deterministic.py")
    same_bits(call, GROUPS, kernel)


STEPS = {
    "paged_attention": lambda f: make_call("paged_attention", Source(4), ONES, LENGTHS, 64, f),
    "mla_attention": lambda f: make_call(
        "mla_attention", Source(4), ONES, LENGTHS, 64, replace(LATENTS, dtype=f.dtype)
    ),
    "decode_attention": lambda f: make_call(
        "decode_attention", Source(4), LENGTHS, 64, replace(f, lse=False)
    ),
}
MORE = replace(EVERYTHING, mask=PLAIN.mask)


@pytest.mark.parametrize("features", [PLAIN, MORE], ids=["plain", "more"])
@pytest.mark.parametrize("op", STEPS)
def test_the_size_of_pages(op, features):
    call = STEPS[op](features)
    assert select(call.problem, DETERMINISTIC).kernel.invariant.any_page
    same_bits_in_any_page(call)


MULTIPLY = [k for k in all_kernels() if k.name == "reference" and k.invariant.needs]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kernel", MULTIPLY, ids=lambda k: k.op)
def test_request_by_request_the_results_are_right(kernel):
    alone = invariant(kernel)
    for case in CASES[kernel.op][:: max(1, len(CASES[kernel.op]) // 12)]:
        check_kernel(alone, case.call())
