"""FlashInfer on a real GPU, beyond the grid: signatures, long contexts, and captured graphs that
follow new plans.

Build the modules first, side by side: `python3 -m tests.gpu.flashinfer_modules`.
"""

import copy
import inspect
import re
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import attnops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, altered
from attnops.hf.cache.model_pages import ModelPages
from attnops.hf.cache.step_plans import Held
from attnops.kernels.flashinfer import libraries, modules as fi
from attnops.ops.latent.cases import DEEPSEEK
from attnops.testing import Features, Pages, Source, make_call, planned
from tests.checks import right
from tests.gpu.helpers import captured, need
from tests.hf import test_host_plans as models
from tests.hf.test_latent_plans import FA2, FA3, deepseek
from tests.standins import flashinfer_modules as standin, flashinfer_planners as planners

pytestmark = pytest.mark.skipif(
    find_spec("flashinfer") is None, reason="flashinfer is not installed"
)

BF16 = torch.bfloat16
PAGED = kernels_of("paged_attention")["flashinfer"]
D64 = Features(dtype=BF16, head_dim=64, q_heads=8, kv_heads=2, causal=True, lse=True)
D128 = Features(dtype=BF16, head_dim=128, q_heads=8, kv_heads=4, causal=True, lse=True)
SINKS = replace(D64, window=(31, -1), sinks=torch.float32)
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="FA3 needs SM90",
)


@pytest.fixture(autouse=True)
def usable():
    if refused := PAGED.refusals(altered(paged(D64).problem, plan="host")):
        pytest.skip("; ".join(map(str, refused)))


def paged(f, q_lens=(1, 4, 0, 2), seq_lens=(6, 4, 0, 21), page=16, seed=0, **more):
    return make_call("paged_attention", Source(seed, "cuda"), q_lens, seq_lens, page, f, **more)


# The truth about the foreign functions ------------------------------------------------------------


def parameters(function: Any) -> list[str]:
    return [n for n in inspect.signature(function).parameters if n != "module"]


def cpp_parameters(file: str, name: str) -> list[str]:
    """Names of the parameters of a C++ function as FlashInfer ships its source."""
    package = import_module("flashinfer")
    text = (Path(package.__file__).parent / "data" / "csrc" / file).read_text()
    found = re.search(rf"\b{name}\(([^;{{]*?)\)\s*\{{", text, re.DOTALL)
    assert found is not None, f"{file} defines no {name}"
    return [re.sub(r"\s*=.*", "", p).split()[-1] for p in found[1].split(",")]


@pytest.mark.parametrize(
    ("file", "name", "ours"),
    [
        ("batch_decode.cu", "BatchDecodeWithPagedKVCachePlan", planners.decode_plan),
        ("batch_prefill.cu", "BatchPrefillWithKVCachePlan", planners.fa2_plan),
        ("batch_prefill_sm90.cu", "BatchPrefillWithKVCacheSM90Plan", planners.fa3_plan),
        ("batch_prefill_paged.cuh", "BatchPrefillWithPagedKVCacheRun", standin.sink_paged_run),
        ("batch_prefill.cu", "BatchPrefillWithRaggedKVCacheRun", standin.sink_ragged_run),
        ("batch_prefill_sm90.cu", "BatchPrefillWithPagedKVCacheSM90Run", standin.sink_paged_run),
        ("batch_prefill_sm90.cu", "BatchPrefillWithRaggedKVCacheSM90Run", standin.sink_ragged_run),
    ],
)
def test_the_planners_take_what_the_standins_take(file, name, ours):
    want = cpp_parameters(file, name)
    if (
        want[-1] == "ADDITIONAL_FUNC_PARAMS"
    ):  # a macro after enable_pdl: the variant's own, here those of the sink
        want[-1:] = ["enable_pdl", "sink", "sm_scale"]
    assert parameters(ours) == want


@pytest.mark.parametrize("path", fi.NAMES)
def test_a_module_is_where_attnops_looks_for_it(path):
    if path == fi.FA3 and Target.of(torch.device("cuda", 0)).arch != 90:
        pytest.skip("FA3 needs SM90")
    library = fi.library_of(fi.Module(path, BF16, 128, 128))
    library.load()
    assert libraries.PACKAGE.version() and not libraries.unbuilt((library,))


def test_the_modules_functions_take_what_the_standins_take():
    decode, prefill = (fi.load(fi.Module(path, BF16, 128, 128)) for path in (fi.DECODE, fi.FA2))
    assert parameters(decode.run) == parameters(standin.decode_run)
    assert parameters(prefill.paged_run) == parameters(standin.paged_run)
    assert parameters(prefill.ragged_run) == parameters(standin.ragged_run)
    sink = import_module("flashinfer.jit.attention.modules").gen_batch_prefill_attention_sink_module
    assert parameters(sink) == parameters(standin.gen_batch_prefill_attention_sink_module)
    for name in ("get_batch_decode_module", "get_batch_prefill_module"):
        real = getattr(import_module(f"flashinfer.{name.split('_')[2]}"), name)
        assert str(inspect.signature(inspect.unwrap(real))) == str(
            inspect.signature(inspect.unwrap(getattr(standin, name)))
        )


# Numerics -----------------------------------------------------------------------------------------


@hopper
@pytest.mark.parametrize("f", [D128, D64], ids=["decode", "fa2"])
def test_a_long_context_among_idle_requests_and_padding(f):
    # More rows without keys than with: the planner of the CUDA-core kernel must leave blocks for
    # them.
    right(PAGED, paged(f, (1,) * 20 + (1, 0, 1), [0] * 20 + [30000, 5, 8191], 16, padding=30))


PATHS = {
    "decode": ((1, 1, 1, 1), D128, "decode"),
    "decode_tensor_cores": ((1, 1, 1, 1), D64, "fa2"),
    "decode_sinks": ((1, 1, 1, 1), SINKS, "fa2"),
    "few": ((3, 1, 0, 4), D64, "fa2"),
    "few_sinks": ((3, 1, 0, 4), SINKS, "fa2"),
    "many": ((130, 1, 0, 260), D64, "fa3"),
    "many_sinks": ((130, 1, 0, 260), SINKS, "fa3"),
    "all_keys": ((130, 1, 0, 260), replace(D64, causal=False), "fa3"),
}


@hopper
@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("name", PATHS)
def test_every_path(name, page):
    q_lens, f, path = PATHS[name]
    call = planned(PAGED, paged(f, q_lens, (1000, 37, 0, 261), page, padding=3))
    assert fi.NAMES[int(call.arguments["plan"][1])] == path
    right(PAGED, call)


# Plans and graphs ---------------------------------------------------------------------------------

STEPS = {
    "decode": (
        D128,
        [((1,) * 4, lens) for lens in ((5, 700, 1, 33), (900, 1, 64, 0), (1000, 1000, 1000, 1000))],
    ),
    "decode_tensor_cores": (
        D64,
        [
            ((1, 1, 0, 1), (5, 700, 1, 33)),
            ((1, 1, 1, 0), (900, 1, 64, 0)),
            ((0, 1, 1, 1), (1000,) * 4),
        ],
    ),
    "few": (
        D64,
        [
            ((3, 1, 0, 4), (5, 700, 1, 33)),
            ((1, 1, 1, 1), (900, 1, 64, 3)),
            ((0, 4, 2, 2), (1000,) * 4),
        ],
    ),
    "many": (
        D64,
        [
            ((130, 1, 0, 69), (500, 700, 1, 99)),
            ((1, 1, 1, 197), (900, 1, 64, 197)),
            ((50,) * 4, (1000,) * 4),
        ],
    ),
    "many_sinks": (
        SINKS,
        [
            ((130, 1, 0, 69), (500, 700, 1, 99)),
            ((1, 1, 1, 197), (900, 1, 64, 197)),
            ((50,) * 4, (1000,) * 4),
        ],
    ),
}


def steps(name: str) -> list[Any]:
    """Calls of equal shapes: 260 pages, 64 a request, as many tokens, one bound on the queries."""
    f, points = STEPS[name]
    tokens, longest = max(sum(q) for q, _ in points) + 2, max(max(q) for q, _ in points)
    out = []
    for seed, (q_lens, lens) in enumerate(points):
        counts = [-(-n // 16) for n in lens]
        pages = Pages(spare=260 - sum(counts), wider=64 - max(counts))
        out.append(
            paged(f, q_lens, lens, 16, seed, padding=tokens - sum(q_lens), pages=pages).with_(
                max_seqlen_q=longest
            )
        )
    return out


def run_alone(kernel, call):
    """Its results, by a plan of its own."""
    mine = planned(
        kernel, call.with_(**{n: torch.empty_like(call.arguments[n]) for n in call.writes})
    )
    kernel.run(mine.record)
    return [mine.arguments[n] for n in call.writes]


def latents() -> list[Any]:
    """As `steps`, of latent attention."""
    points, pages = (((1, 1, 1), (700, 5, 90), 0), ((1, 0, 1), (90, 700, 5), 1)), Pages(wider=4)
    return [
        make_call("mla_attention", Source(more, "cuda"), q, k, 64, DEEPSEEK, more, pages=pages)
        for q, k, more in points
    ]


REPLAYED = [
    *(("paged_attention.flashinfer", name) for name in STEPS),
    *((f"mla_attention.flashinfer_mla_fa{n}", "") for n in (2, 3)),
]


@hopper
@pytest.mark.parametrize(("of", "name"), REPLAYED)
def test_a_captured_run_follows_new_plans(of, name):
    """Capture one call by hand; for every later step change lengths, tables and contents, plan
    again, replay, compare with eager."""
    op, _, by = of.partition(".")
    kernel, calls = kernels_of(op)[by], steps(name) if name else latents()
    need(kernel, calls[0])
    made = planned(kernel, calls[0]).arguments
    buffers = made["plan"].pin_memory(), made["workspace"]
    held = planned(kernel, calls[0].map(lambda _, t: t.clone()), buffers=buffers)
    graph, _ = captured(lambda: kernel.run(held.record))
    for call in [*calls[1:], calls[0]]:
        right(kernel, call)
        want = run_alone(kernel, call)
        for n, tensor in call.tensors().items():
            held.arguments[n].copy_(tensor)
        planned(kernel, held.with_(plan=None, workspace=None), buffers=buffers)
        for n in call.writes:
            held.arguments[n].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for n, each in zip(call.writes, want, strict=True):
            assert torch.equal(held.arguments[n], each), n


@hopper
def test_plans_in_a_row_do_not_overtake_the_work_that_reads_them():
    calls = steps("decode_tensor_cores")
    first = planned(PAGED, calls[0])
    buffers = first.arguments["plan"].pin_memory(), first.arguments["workspace"]
    want = [run_alone(PAGED, call)[0] for call in calls]
    busy = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    got = []
    for call in calls * 4:
        mine = planned(
            PAGED, call.with_(output=torch.empty_like(call.arguments["output"])), buffers=buffers
        )
        for _ in range(4):
            busy = torch.nn.functional.normalize(busy @ busy)
        PAGED.run(mine.record)
        got.append(mine.arguments["output"])
    for a, b in zip(got, want * 4, strict=True):
        assert torch.equal(a, b)


# Patched models -----------------------------------------------------------------------------------


def logits(model: Any, rows: int, length: int, new: int) -> torch.Tensor:
    """Of each step, of tokens that do not hang on them."""
    ids = torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(rows)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    found = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        logits_processor=[models.Forced()],
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(found.logits).float()


def distance(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest of a step and row, relative to the exact logits."""
    off = (logits - exact).norm(dim=-1) / exact.norm(dim=-1)
    return off.max().item()


@pytest.fixture
def no_waits(monkeypatch):
    """How many steps were planned from lengths that the host knows. A wait in one is an error."""
    planned_steps, plan_step, stepped = [], ModelPages.plan_step, Held.stepped

    def watched(self, plans, rows, live):
        known = self.lengths is not None and live > 0
        planned_steps.append(known)
        torch.cuda.set_sync_debug_mode("error" if known else "default")
        try:
            plan_step(self, plans, rows, live)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def without_waits(self):
        # A wait ends the plan of the next step, which then meets it itself.
        torch.cuda.set_sync_debug_mode("error")
        try:
            stepped(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(ModelPages, "plan_step", watched)
    monkeypatch.setattr(Held, "stepped", without_waits)
    return planned_steps


@pytest.mark.parametrize("mode", ["breakable", "piecewise"])
@pytest.mark.parametrize("make", [models.llama, lambda: models.llama(8), models.gemma3])
def test_steps_of_a_patched_model_in_graphs(make, mode, no_waits):
    """`kernel="flashinfer"`: no further from the logits in float32 than twice eager's, one graph a
    step, and no wait."""
    steps_in_graphs(make().cuda(), "flashinfer", mode, no_waits)


@pytest.mark.parametrize("mode", ["breakable", "piecewise"])
@pytest.mark.parametrize("heads", [4, 128])
@pytest.mark.parametrize("kernel", [FA2, pytest.param(FA3, marks=hopper)])
def test_steps_over_latents_in_graphs(kernel, heads, mode, no_waits):
    """As `test_steps_of_a_patched_model_in_graphs`."""
    steps_in_graphs(deepseek(heads).cuda(), kernel, mode, no_waits)


def steps_in_graphs(model, kernel, mode, no_waits):
    """Logits, graphs and waits of a patched model."""
    eager = [logits(model, *call) for call in models.CALLS]
    exact = copy.deepcopy(model).float()
    want = [logits(exact, *call) for call in models.CALLS]
    with attnops.patch(model, cache="paged", kernel=kernel, decode=mode) as handle:
        for call, near, right_ones in zip(models.CALLS, eager, want, strict=True):
            got = logits(model, *call)
            assert distance(got, right_ones) < 2 * distance(near, right_ones), call
        assert all(row.graphs == 1 and not row.breaks for row in handle.graphs.report().rows)
    steps_after_the_first = sum(new - 2 for *_, new in models.CALLS)
    assert sum(no_waits) == steps_after_the_first
