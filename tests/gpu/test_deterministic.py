"""Deterministic policies on a GPU: bits of requests alone, among mates, and beside a long prompt, for every kernel that may be chosen."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

import attnops
from attnops.core.errors import NoKernel
from attnops.core.kernel import Kernel, all_kernels, kernels_of
from attnops.core.record import changed
from attnops.core.select import select
from attnops.hf import tiny
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import CASES, Call, Features, Source, equip, make_call
from tests.hf.test_rows import IDS, called, same_bits as rows_alone, steps
from tests.mates import POLICY, may_be_chosen, only, results, rows_of, same_bits
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
GROUPS = [(3, 1, 9, 7), (0,), (5,), (7,), (6,), (7, 6), (4, 8, 11), (2, 10), tuple(reversed(range(12)))]
ROWS = [(3, 1, 9, 7), (0,), (11,), (5, 6)]


def source() -> Source:
    return Source(4, "cuda")


BATCHES: dict[str, Callable[[Features], Call]] = {
    "attention": lambda f: make_call("attention", source(), 12, 3, 900, f),
    "attention.decode": lambda f: make_call("attention", source(), 12, 1, 3000, f),
    "attention.square": lambda f: make_call("attention", source(), 12, 500, 500, f),
    "attention.ranges": lambda f: make_call(
        "attention", source(), 12, 3, 900, f, kv_start=range(12), kv_end=range(700, 712), index=torch.int32
    ),
    "varlen_attention": lambda f: make_call("varlen_attention", source(), QUERIES, LENGTHS, f),
    "varlen_attention.decode": lambda f: make_call("varlen_attention", source(), (1,) * 12, LENGTHS, f),
    "paged_attention": lambda f: make_call("paged_attention", source(), QUERIES, LENGTHS, 16, f),
    "paged_attention.page_64": lambda f: make_call("paged_attention", source(), QUERIES, LENGTHS, 64, f),
    "paged_attention.decode": lambda f: make_call("paged_attention", source(), (1,) * 12, LENGTHS, 64, f),
    "decode_attention": lambda f: equip(kernels_of("decode_attention")["triton"], make_call("decode_attention", source(), LENGTHS, 64, f)),
}
LATENTS: dict[str, Callable[[], Call]] = {
    "16 heads": lambda: make_call("mla_attention", source(), QUERIES, LENGTHS, 64, replace(DEEPSEEK, lse=True)),
    "128 heads": lambda: make_call("mla_attention", source(), QUERIES, LENGTHS, 64, replace(DEEPSEEK, q_heads=128)),
    "decode": lambda: make_call("mla_attention", source(), (1,) * 12, LENGTHS, 64, replace(DEEPSEEK, q_heads=128, lse=True)),
}
COMPILED_FOR: dict[str, tuple[str, ...]] = {"flex": ("llama", "mask"), "flashinfer": ("llama",), "fa4": ("llama", "d64", "d256", "window")}
INVARIANT = [k for k in all_kernels() if k.invariant]


def kernels(op: str) -> list[str | None]:
    """The automatic choice, and every kernel that it may fall on."""
    return [None, *(k.name for k in INVARIANT if k.op == op)]


def check(call: Call, groups: list[tuple[int, ...]], name: str | None) -> None:
    kernel = None if name is None else kernels_of(call.op)[name]
    if kernel is not None and not may_be_chosen(kernel, call):
        pytest.skip(f"{name} refuses it")
    if kernel is None and select(call.problem, "deterministic").kernel is None:
        pytest.skip("nothing takes it under a deterministic policy")
    same_bits(call, groups, kernel)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(("batch", "name"), [(b, n) for b in BATCHES for n in kernels(b.partition(".")[0])])
def test_attention(batch: str, name: str | None, features: str) -> None:
    call = BATCHES[batch](FEATURES[features])
    chosen = select(call.problem, POLICY).kernel
    name_of_it = name or (chosen.name if chosen else "")
    if features not in COMPILED_FOR.get(name_of_it, FEATURES):
        pytest.skip(f"{name_of_it} compiles for seconds or minutes")
    check(call, ROWS if call.op == "attention" else GROUPS, name)


@pytest.mark.parametrize("batch", LATENTS)
@pytest.mark.parametrize("name", kernels("mla_attention"))
def test_latents(name: str | None, batch: str) -> None:
    check(LATENTS[batch](), GROUPS, name)


@pytest.mark.parametrize("name", kernels("vertical_slash_attention"))
def test_vertical_slash(name: str | None) -> None:
    f = replace(LLAMA, q_heads=4, kv_heads=2, causal=False)
    check(make_call("vertical_slash_attention", source(), QUERIES, LENGTHS, f, verticals=40, slashes=10), GROUPS, name)


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_sparse_latents(heads: int, lengths: bool) -> None:
    """The automatic choice, over bfloat16 latents."""
    f = replace(DEEPSEEK, q_heads=heads, lse=True)
    call = make_call("sparse_mla_attention", source(), (200, 1, 128, 0, 256, 77, 256, 3), 256, (40, 64), f, lengths=lengths)
    check(call, [(0,), (4,), (7, 1), (2, 3, 5), tuple(reversed(range(8)))], None)


GRADIENTS = ("llama", "d64", "window", "softcap")
MORE = {
    "every head": replace(LLAMA, q_heads=8, kv_heads=8, sinks=BF16),
    "both sides": replace(LLAMA, causal=False, window=(200, 90), head_dim=64),
    "all keys": replace(LLAMA, causal=False),
}
STEPS = [(op, name) for op in ("attention", "varlen_attention") for name in kernels(f"{op}_backward") if name != "reference"]
RUNS = 5


def trained(op: str, features: Features) -> Call:
    f = replace(features, lse=False)
    return (
        make_call("attention", source(), 12, 300, 300, f)
        if op == "attention"
        else make_call("varlen_attention", source(), QUERIES, LENGTHS, f, padding=(0, 0))
    )


BY_FA4 = {("varlen_attention", "both sides")}
"""What `fa4` alone takes under the policy: see docs/kernels.md. Without it the forward has no kernel."""


def step(call: Call, name: str | None, may_lack: bool = False) -> dict[str, torch.Tensor]:
    """The gradients of all requests; skips what the kernel `name` refuses. may_lack: may nothing take the call?"""
    try:
        return gradients(call, range(12), name)
    except NoKernel as error:
        if name is None and not may_lack:
            raise
        pytest.skip(str(error).replace("\n", " ")[:300])


@pytest.mark.parametrize("features", GRADIENTS)
@pytest.mark.parametrize(("op", "name"), STEPS)
def test_gradients(op: str, name: str | None, features: str) -> None:
    """Forward and backward: a request alone, among mates, and beside a long prompt."""
    call, packed = trained(op, FEATURES[features]), op != "attention"
    whole = step(call, name)
    for chosen in ((5,), (6,), (6, 7), (3, 1, 9)):
        starts = call.arguments["cu_seqlens_k"].tolist() if packed else []
        keys = torch.cat([torch.arange(starts[b], starts[b + 1], device="cuda") for b in chosen]) if packed else rows_of(call, chosen)
        grads = gradients(call, chosen, name)
        for n, rows in {"query": rows_of(call, chosen), "key": keys, "value": keys}.items():
            assert not grads[n].isnan().any()
            assert torch.equal(whole[n][rows], grads[n]), f"gradients of the {n}s of requests {chosen} differ when they are alone"


@pytest.mark.parametrize("features", [*GRADIENTS, "d256", *MORE])
@pytest.mark.parametrize(("op", "name"), STEPS)
def test_gradients_of_every_run(op: str, name: str | None, features: str, found: dict[str, Any]) -> None:
    """Those of sinks included, which are sums over the whole batch."""
    call = trained(op, (FEATURES | MORE)[features])
    absent = bool(kernels_of(op)["fa4"].absences(call.problem.target))
    first = step(call, name, may_lack=absent and (op, features) in BY_FA4)
    assert not any(grad.isnan().any() for grad in first.values())
    for _ in range(RUNS - 1):
        for n, grad in gradients(call, range(12), name).items():
            assert torch.equal(grad, first[n]), f"the gradient of {n} differs from run to run"
    found.setdefault("deterministic_gradients", {})[f"{op}.{name or 'automatic'}, {features}"] = f"equal bits in {RUNS} runs"


# Torch's flag, without a policy -----------------------------------------------------------------------------------------


@pytest.fixture
def asked() -> Iterator[None]:
    """torch.use_deterministic_algorithms(True)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


BACKWARD = [
    (op, name)
    for op in ("attention", "varlen_attention")
    for name in (None, *(n for n in kernels_of(f"{op}_backward") if n != "reference"))  # its products want a setting of cuBLAS
]


@pytest.mark.parametrize("features", [*GRADIENTS, *MORE])
@pytest.mark.parametrize(("op", "name"), BACKWARD)
def test_gradients_where_torch_asks_for_equal_bits(op: str, name: str | None, features: str, asked: None, found: dict[str, Any]) -> None:
    """Every kernel that does not refuse, and the automatic choice."""
    call = trained(op, (FEATURES | MORE)[features])
    policy = "" if name is None else f"kernel={op}_backward:{name}"
    try:
        first = gradients(call, range(12), name, policy)
    except NoKernel as error:
        pytest.skip(str(error).replace("\n", " ")[:300])
    for _ in range(RUNS - 1):
        for n, grad in gradients(call, range(12), name, policy).items():
            assert torch.equal(grad, first[n]), f"the gradient of {n} differs from run to run"
    found.setdefault("torch_deterministic_gradients", {})[f"{op}.{name or 'automatic'}, {features}"] = f"equal bits in {RUNS} runs"


def test_a_long_causal_sequence_where_torch_asks_for_equal_bits(asked: None) -> None:
    """1x8192, 32/8 heads: cudnn, the fastest of some sizes, gave another dq in each of five runs."""
    call = make_call("attention", source(), 1, 8192, 8192, replace(LLAMA, lse=False))
    first = gradients(call, (0,), None, "")
    for _ in range(RUNS - 1):
        for n, grad in gradients(call, (0,), None, "").items():
            assert torch.equal(grad, first[n]), n


@pytest.mark.parametrize("kernel", [k for k in all_kernels() if k.name != "reference"], ids=lambda k: f"{k.op}.{k.name}")
def test_every_kernel_that_promises_equal_bits(kernel: Kernel, asked: None, found: dict[str, Any]) -> None:
    """The first cases of the grid that it takes, `RUNS` times each."""
    taken = 0
    for seed, case in enumerate(CASES[kernel.op]):
        call = equip(kernel, case.build(Source(seed, "cuda")))
        if kernel.refusals(call.problem):
            continue
        if not bitwise_equal([bits(kernel, call) for _ in range(RUNS)]):
            pytest.fail(f"{case} differs from run to run")
        if (taken := taken + 1) == 3:
            break
    if not taken:
        pytest.skip(f"{kernel.name} takes no case here")
    found.setdefault("equal_bits", {})[f"{kernel.op}.{kernel.name}"] = f"{taken} cases, {RUNS} runs"


def bits(kernel: Kernel, call: Call) -> list[torch.Tensor]:
    """The bytes of what the kernel returns and writes, from equal arguments."""
    given = call.map(lambda name, x: x.clone())
    returned = kernel.run(given.record)
    results = [] if returned is None else [returned] if isinstance(returned, torch.Tensor) else list(returned)
    names = [a.name for a in given.record.spec.args if a.written and a.name != "workspace"]
    written = [given.arguments.get(name) for name in names]
    return [x.contiguous().flatten().view(torch.uint8) for x in (*results, *written) if x is not None]


def bitwise_equal(runs: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def gradients(call: Call, chosen: Sequence[int], name: str | None, policy: str | None = None) -> dict[str, torch.Tensor]:
    """Of query, key, value and sinks, of these requests. name: the kernel of the gradient. Each query's output has a weight of its own.

    policy: None: a deterministic one.
    """
    given = only(call, list(chosen)).arguments
    inputs = {n: given[n].detach().requires_grad_() for n in ("query", "key", "value", "sinks") if n in given}
    if policy is None:
        policy = POLICY if name is None else f"kernel={call.op}_backward:{name};{POLICY}"
    output = getattr(torch.ops.attnops, call.op).default(**given | inputs, policy=policy)[0]
    weight = torch.sin(call.arguments["query"].sum(-1, keepdim=True).float())[rows_of(call, chosen)].to(output.dtype)
    return dict(zip(inputs, torch.autograd.grad(output, list(inputs.values()), weight.expand_as(output)), strict=True))


@pytest.mark.parametrize("queries", [1, 3, 300])
@pytest.mark.parametrize("features", ["llama", "d64", "window"])
def test_paddings_of_a_dense_batch(features: str, queries: int) -> None:
    """The same keys with nothing beside them, behind a padding, before one, or both."""
    given = make_call("attention", source(), 2, queries, 700, FEATURES[features])
    found = []
    for before, after in ((0, 0), (64, 0), (13, 100), (0, 500)):
        keys = {n: pad(given.arguments[n], (0, 0, 0, 0, before, after)) for n in ("key", "value")}
        end = {"kv_end": torch.full((2,), before + 700, dtype=torch.int32, device="cuda")} if after else {}
        start = {"kv_start": torch.full((2,), before, dtype=torch.int32, device="cuda")} if before else {}
        call = given.with_(**keys, **start, **end)
        if select(call.problem, POLICY).kernel is None:
            pytest.skip("nothing takes it under a deterministic policy")
        found.append((select(call.problem, POLICY).kernel, results(call)))
    for kernel, (output, lse) in found:
        assert kernel is found[0][0]
        assert torch.equal(output, found[0][1][0]) and torch.equal(lse, found[0][1][1])


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_whole_models(family: str) -> None:
    """A prompt, a step, and steps of generate() in graphs."""
    model = tiny.model(family, head_dim=64).to("cuda", BF16)
    with torch.no_grad(), attnops.patch(model) as handle, attnops.use(deterministic=True):
        try:
            for run in (called, steps):
                rows_alone(model, run, IDS.cuda())
        except NoKernel as error:
            pytest.skip(str(error).replace("\n", " ")[:300])
        assert handle.took is not None and handle.took.decode == "breakable", handle.took


@pytest.mark.parametrize("name", STEADY)
def test_where_a_tensor_lies(name: str) -> None:
    """Bits do not follow from an address, nor from how far rows are apart."""
    names, build = STEADY[name]
    call = build().map(lambda _, x: x.cuda())
    kernel = kernels_of(call.op)["triton"]

    def bits(given: Call) -> list[torch.Tensor]:
        given = equip(kernel, given.map(lambda n, x: x.clone() if n in given.mutated else x))
        found = kernel.run(changed(given.record, policy=POLICY))
        return [given.arguments[n] for n in given.mutated] if found is None else list(found)

    usual = bits(call)
    for argument in names:
        for layout in LAYOUTS.values():
            moved = bits(call.with_(**{argument: layout(call.arguments[argument])}))
            assert all(torch.equal(*both) for both in zip(usual, moved, strict=True)), argument


@pytest.mark.parametrize("op", ["merge_state", "merge_states"])
@pytest.mark.parametrize("name", sorted({k.name for k in INVARIANT if k.op.startswith("merge_state")}))
def test_merges(name: str, op: str) -> None:
    if name not in kernels_of(op) or not kernels_of(op)[name].invariant:
        pytest.skip(f"{op} has no such kernel")
    call = make_call(op, source(), (64, 32, 128) if op == "merge_state" else (64, 5, 32, 128), BF16)
    check(call, [(3,), (63,), (1, 5, 9), tuple(range(40))], name)
