"""Deterministic policies on a GPU: bits of requests alone, among mates, and beside a long prompt,
for every kernel that may be chosen."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves

import attnops
from attnops.core.errors import NoKernel
from attnops.core.kernel import Kernel, all_kernels, kernels_of
from attnops.core.select import select
from attnops.hf import tiny
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import CASES, Call, Features, Source, equip, make_call, refusals
from tests.hf.drafting import Branches, Oracle, Verified, asked, worth
from tests.hf.test_rows import IDS, called, same_bits as rows_alone, steps
from tests.mates import (
    POLICY,
    invariant,
    may_be_chosen,
    only,
    results,
    rows_of,
    same_bits,
    same_bits_in_any_page,
    within,
)
from tests.triton.test_steady import CALLS as STEADY, LAYOUTS

BF16, F16 = torch.bfloat16, torch.float16
LLAMA = Features(dtype=BF16, head_dim=128, q_heads=32, kv_heads=8, causal=True, lse=True)
FEATURES = {
    "llama": LLAMA,
    "float16": replace(LLAMA, dtype=F16),
    "d64": replace(LLAMA, head_dim=64, dtype=F16),
    "d96": replace(LLAMA, head_dim=96),
    "d256": replace(LLAMA, head_dim=256, q_heads=16, kv_heads=4),
    "window": replace(LLAMA, window=(1000, -1), sinks=BF16),
    "softcap": replace(LLAMA, softcap=30.0, window=(300, -1)),
    "mask": replace(LLAMA, q_heads=8, kv_heads=2, mask="bool"),
}
QUERIES = (1, 1, 300, 1, 3, 1, 2100, 1, 9, 65, 1, 7)
LENGTHS = (900, 17, 1400, 4000, 31, 1, 2100, 5000, 777, 129, 513, 7)
GROUPS = [
    (3, 1, 9, 7),
    (0,),
    (5,),
    (7,),
    (6,),
    (7, 6),
    (4, 8, 11),
    (2, 10),
    tuple(reversed(range(12))),
]
ROWS = [(3, 1, 9, 7), (0,), (11,), (5, 6)]


def source() -> Source:
    return Source(4, "cuda")


ONES = (1,) * 12
BATCHES: dict[str, tuple[Any, ...]] = {
    "attention": (12, 3, 900),
    "attention.decode": (12, 1, 3000),
    "attention.square": (12, 500, 500),
    "attention.ranges": (12, 3, 900),
    "varlen_attention": (QUERIES, LENGTHS),
    "varlen_attention.decode": (ONES, LENGTHS),
    "paged_attention": (QUERIES, LENGTHS, 16),
    "paged_attention.page_64": (QUERIES, LENGTHS, 64),
    "paged_attention.decode": (ONES, LENGTHS, 64),
    "decode_attention": (LENGTHS, 64),
}
STEPS_OF: dict[str, tuple[Any, ...]] = {
    "paged_attention": (ONES, LENGTHS, 64),
    "mla_attention": (ONES, LENGTHS, 64),
    "decode_attention": (LENGTHS, 64),
}
ROUNDS = ("llama", "qwen3", "mistral", "gpt_oss", "qwen3_moe", "deepseek_v3")
RANGES = {"kv_start": range(12), "kv_end": range(700, 712), "index": torch.int32}
LATENT, SLASHED = replace(DEEPSEEK, lse=True), replace(LLAMA, q_heads=4, kv_heads=2, causal=False)
MERGED = [(3,), (63,), (1, 5, 9), tuple(range(40))]
GROUPS_OF = {
    "merge_state": MERGED,
    "merge_states": MERGED,
    "sparse_mla_attention": [(0,), (4,), (7, 1), (2, 3, 5), tuple(range(8))[::-1]],
}
LISTED = ((200, 1, 128, 0, 256, 77, 256, 3), 256, (40, 64))
OTHERS: dict[str, tuple[Any, ...]] = {
    "mla_attention.16 heads": (QUERIES, LENGTHS, 64, LATENT),
    "mla_attention.128 heads": (QUERIES, LENGTHS, 64, replace(DEEPSEEK, q_heads=128)),
    "mla_attention.decode": (ONES, LENGTHS, 64, replace(LATENT, q_heads=128)),
    "vertical_slash_attention": (QUERIES, LENGTHS, SLASHED),
    "sparse_mla_attention.16 heads": (*LISTED, LATENT),
    "sparse_mla_attention.128 heads": (*LISTED, replace(LATENT, q_heads=128)),
    "merge_state": ((64, 32, 128), BF16),
    "merge_states": ((64, 5, 32, 128), BF16),
}
GIVEN: dict[str, dict[str, Any]] = {
    "vertical_slash_attention": {"verticals": 40, "slashes": 10},
    "sparse_mla_attention.128 heads": {"lengths": True},
}
COMPILED_FOR: dict[str, tuple[str, ...]] = {
    "flex": ("llama", "mask"),
    "flashinfer": ("llama",),
    "fa4": ("llama", "d64", "d256", "window"),
}


def check(call: Call, groups: list[tuple[int, ...]], name: str | None) -> None:
    kernel = None if name is None else kernels_of(call.op)[name]
    if kernel is not None and not may_be_chosen(kernel, call):
        pytest.skip(f"{name} refuses it")
    if kernel is None and select(call.problem, "deterministic").kernel is None:
        pytest.skip("nothing takes it under a deterministic policy")
    same_bits(call, groups, kernel)


def by_kernel(batches: Iterable[str]) -> list[tuple[str, str, str | None]]:
    """Of each batch, its op and the kernels that it is run by: the automatic choice, and every one
    that it may fall on."""
    found: list[tuple[str, str, str | None]] = []
    for batch in batches:
        op = batch.partition(".")[0]
        found += [
            (batch, op, name)
            for name in (None, *(k.name for k in all_kernels() if k.invariant and k.op == op))
        ]
    return found


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(("batch", "op", "name"), by_kernel(BATCHES))
def test_attention(batch: str, op: str, name: str | None, features: str) -> None:
    more = RANGES if batch == "attention.ranges" else {}
    call = make_call(op, source(), *BATCHES[batch], FEATURES[features], **more)
    if op == "decode_attention":
        call = equip(kernels_of(op)["triton"], call)
    chosen = select(call.problem, POLICY).kernel
    name_of_it = name or (chosen.name if chosen else "")
    if features not in COMPILED_FOR.get(name_of_it, FEATURES):
        pytest.skip(f"{name_of_it} compiles for seconds or minutes")
    check(call, ROWS if op == "attention" else GROUPS, name)


@pytest.mark.parametrize(("batch", "op", "name"), by_kernel(OTHERS))
def test_other_ops(batch: str, op: str, name: str | None) -> None:
    check(
        make_call(op, source(), *OTHERS[batch], **GIVEN.get(batch, {})),
        GROUPS_OF.get(op, GROUPS),
        name,
    )


GRADIENTS = ("llama", "d64", "window", "softcap")
MORE = {
    "every head": replace(LLAMA, q_heads=8, kv_heads=8, sinks=BF16),
    "both sides": replace(LLAMA, causal=False, window=(200, 90), head_dim=64),
    "all keys": replace(LLAMA, causal=False),
}
BACKWARD = [
    (op, name)
    for op in ("attention", "varlen_attention")
    for name in (
        None,
        *(n for n in kernels_of(f"{op}_backward") if n != "reference"),
    )  # its products want a setting of cuBLAS
]
RUNS = 5
BY_FA4 = {("varlen_attention", "both sides")}
"""What `fa4` alone takes under the policy: see docs/kernels.md. Without it the forward has no
kernel."""


def trained(op: str, features: Features) -> Call:
    f = replace(features, lse=False)
    if op == "attention":
        return make_call(op, source(), 12, 300, 300, f)
    return make_call(op, source(), QUERIES, LENGTHS, f, padding=(0, 0))


def gradients(
    call: Call, chosen: Sequence[int], name: str | None, policy: str = POLICY
) -> dict[str, torch.Tensor]:
    """Of query, key, value and sinks, of these requests. name: the kernel of the gradient. Each
    query's output has a weight of its own."""
    given = only(call, list(chosen)).arguments
    inputs = {
        n: given[n].detach().requires_grad_()
        for n in ("query", "key", "value", "sinks")
        if n in given
    }
    if name is not None:
        policy = ";".join(filter(None, (f"kernel={call.op}_backward:{name}", policy)))
    output = getattr(torch.ops.attnops, call.op).default(**given | inputs, policy=policy)[0]
    weight = torch.sin(call.arguments["query"].sum(-1, keepdim=True).float())[
        rows_of(call, chosen)
    ].to(output.dtype)
    return dict(
        zip(
            inputs,
            torch.autograd.grad(output, list(inputs.values()), weight.expand_as(output)),
            strict=True,
        )
    )


@contextmanager
def skipping(may_lack: bool) -> Iterator[None]:
    """Skip where no kernel takes the call. may_lack: is that no failure?"""
    try:
        yield
    except NoKernel as error:
        if not may_lack:
            raise
        pytest.skip(str(error).replace("\n", " ")[:300])


@pytest.mark.parametrize("features", GRADIENTS)
@pytest.mark.parametrize(("op", "name"), BACKWARD)
def test_gradients(op: str, name: str | None, features: str) -> None:
    """Forward and backward: a request alone, among mates, and beside a long prompt."""
    call = trained(op, FEATURES[features])
    with skipping(name is not None):
        whole = gradients(call, range(12), name)
    for chosen in ((5,), (6,), (6, 7), (3, 1, 9)):
        keys = (
            rows_of(call, chosen)
            if op == "attention"
            else within(call.arguments["cu_seqlens_k"], chosen)
        )
        grads = gradients(call, chosen, name)
        for n, rows in {"query": rows_of(call, chosen), "key": keys, "value": keys}.items():
            assert not grads[n].isnan().any()
            assert torch.equal(whole[n][rows], grads[n]), (
                f"gradients of the {n}s of requests {chosen} differ when they are alone"
            )


@pytest.fixture
def flag(request: pytest.FixtureRequest) -> Iterator[bool]:
    """torch.use_deterministic_algorithms."""
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


FLAGS = [
    *((False, f) for f in (*GRADIENTS, "d256", *MORE)),
    *((True, f) for f in (*GRADIENTS, *MORE)),
]


@pytest.mark.parametrize(("flag", "features"), FLAGS, indirect=["flag"])
@pytest.mark.parametrize(("op", "name"), BACKWARD)
def test_gradients_of_every_run(op: str, name: str | None, features: str, flag: bool) -> None:
    """Under a policy, and where torch asks for equal bits; those of sinks included, which are sums
    over the whole batch."""
    call = trained(op, (FEATURES | MORE)[features])
    absent = bool(kernels_of(op)["fa4"].absences(call.problem.target))
    with skipping(flag or name is not None or (absent and (op, features) in BY_FA4)):
        every_run(call, range(12), name, "" if flag else POLICY)


def every_run(call: Call, chosen: Sequence[int], name: str | None, policy: str) -> None:
    """Gradients have the same bits in each of some runs."""
    first = gradients(call, chosen, name, policy)
    assert not any(grad.isnan().any() for grad in first.values())
    for _ in range(RUNS - 1):
        for n, grad in gradients(call, chosen, name, policy).items():
            assert torch.equal(grad, first[n]), f"the gradient of {n} differs from run to run"


@pytest.mark.parametrize("flag", [True], indirect=True)
def test_a_long_causal_sequence_where_torch_asks_for_equal_bits(flag: bool) -> None:
    """1x8192, 32/8 heads: cudnn, the fastest of some sizes, gave another dq in each of five
    runs."""
    every_run(
        make_call("attention", source(), 1, 8192, 8192, replace(LLAMA, lse=False)), (0,), None, ""
    )


def bits(kernel: Kernel, given: Call) -> list[torch.Tensor]:
    """The bytes of what the kernel returns and writes."""
    call = equip(kernel, given.map(lambda n, x: x.clone() if n in given.mutated else x))
    returned = kernel.run(call.record)
    results = tree_leaves((returned, [call.arguments[n] for n in call.mutated if n != "workspace"]))
    return [
        x.contiguous().flatten().view(torch.uint8) for x in results if isinstance(x, torch.Tensor)
    ]


@pytest.mark.parametrize("flag", [True], indirect=True)
@pytest.mark.parametrize(
    "kernel", [k for k in all_kernels() if k.name != "reference"], ids=lambda k: f"{k.op}.{k.name}"
)
def test_every_kernel_that_promises_equal_bits(kernel: Kernel, flag: bool) -> None:
    """The first cases of the grid that it takes, `RUNS` times each."""
    cases = (case.build(Source(seed, "cuda")) for seed, case in enumerate(CASES[kernel.op]))
    taken = [*islice((call for call in cases if not refusals(kernel, call)), 3)]
    if not taken:
        pytest.skip(f"{kernel.name} takes no case here")
    for call in taken:
        first, *others = (bits(kernel, call) for _ in range(RUNS))
        for other in others:
            assert all(torch.equal(*both) for both in zip(first, other, strict=True)), call.problem


@pytest.mark.parametrize("queries", [1, 3, 300])
@pytest.mark.parametrize("features", ["llama", "d64", "window"])
def test_paddings_of_a_dense_batch(features: str, queries: int) -> None:
    """The same keys with nothing beside them, behind a padding, before one, or both."""
    given = make_call("attention", source(), 2, queries, 700, FEATURES[features])
    found = []
    for before, after in ((0, 0), (64, 0), (13, 100), (0, 500)):
        changed = {
            n: pad(given.arguments[n], (0, 0, 0, 0, before, after)) for n in ("key", "value")
        }
        if after:
            changed["kv_end"] = torch.full((2,), before + 700, dtype=torch.int32, device="cuda")
        if before:
            changed["kv_start"] = torch.full((2,), before, dtype=torch.int32, device="cuda")
        call = given.with_(**changed)
        chosen = select(call.problem, POLICY).kernel
        if chosen is None:
            pytest.skip("nothing takes it under a deterministic policy")
        found.append((chosen, *results(call)))
    first, *others = found
    for kernel, output, lse in others:
        assert kernel is first[0] and torch.equal(output, first[1]) and torch.equal(lse, first[2])


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_whole_models(family: str) -> None:
    """A prompt, a step, and steps of generate() in graphs."""
    model = tiny.model(family, head_dim=64).to("cuda", BF16)
    with torch.no_grad(), attnops.patch(model) as handle, attnops.use(deterministic=True):
        with skipping(True):
            for run in (called, steps):
                rows_alone(model, run, IDS.cuda())
        assert handle.took is not None and handle.took.decode == "breakable", handle.took


ANY_PAGE = [k for k in all_kernels() if k.invariant and k.invariant.any_page and k.op in STEPS_OF]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("kernel", ANY_PAGE, ids=lambda k: f"{k.op}.{k.name}")
def test_the_size_of_pages(kernel: Kernel, features: str) -> None:
    """A request of one token has the same bits over pages of 64 tokens and of one."""
    f = LATENT if kernel.op == "mla_attention" else replace(FEATURES[features], mask="none")
    call = make_call(kernel.op, source(), *STEPS_OF[kernel.op], f)
    if not may_be_chosen(kernel, call):
        pytest.skip(f"{kernel.name} refuses it")
    same_bits_in_any_page(call, kernel)


SHAPES = [
    *((family, drafts, 7) for family in ROUNDS for drafts in (Oracle, Branches)),
    *(("llama", drafts, most) for drafts in (Oracle, Branches) for most in (1, 31, 63)),
]


@pytest.mark.parametrize(("family", "drafts", "most"), SHAPES)
def test_tokens_that_are_verified(
    monkeypatch: pytest.MonkeyPatch, family: str, drafts: Any, most: int
) -> None:
    """The logits of 2 to 64 tokens of a row, chains and trees, have the bits of plain steps."""
    sizes = {} if family == "deepseek_v3" else {"head_dim": 64}
    model = tiny.model(family, **sizes).to("cuda", BF16)
    plain, draft, found = copy.deepcopy(model), drafts(most, wrong=0.1), Verified(monkeypatch)
    with attnops.patch(plain), attnops.patch(model, speculate=draft) as handle:
        for rows in (1, 3):
            on_gpu = {n: x.cuda() if hasattr(x, "cuda") else x for n, x in asked(rows).items()}
            given = {**on_gpu, "max_new_tokens": 90}
            with attnops.use(deterministic=True), skipping(True):
                want = plain.generate(**given, output_logits=True, return_dict_in_generate=True)
                draft.texts = want.sequences
                assert torch.equal(model.generate(**given), want.sequences)
            assert worth(handle) > 1.5
            for row, logits in zip(found.logits(), torch.stack(want.logits, 1), strict=True):
                assert torch.equal(torch.stack(row), logits.to(row[0].dtype))


@pytest.mark.parametrize("name", STEADY)
def test_where_a_tensor_lies(name: str) -> None:
    """Bits do not follow from an address, nor from how far rows are apart."""
    names, build = STEADY[name]
    call = build().map(lambda _, x: x.cuda())
    kernel = invariant(kernels_of(call.op)["triton"])
    usual = bits(kernel, call)
    for argument in names:
        for layout in LAYOUTS.values():
            moved = bits(kernel, call.with_(**{argument: layout(call.arguments[argument])}))
            assert all(torch.equal(*both) for both in zip(usual, moved, strict=True)), argument
