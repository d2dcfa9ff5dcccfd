"""Plans of steps over latents: one a step however many layers, by the host or on the device, for
the kernel that then answers.

A `Planner` makes them, or the cache that a batch comes from. Over stand-ins: not the kernels.
"""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from attnops.cache import LatentCache, Planner
from attnops.core.errors import NoKernel
from attnops.core.problem import Target, pretend
from attnops.core.select import use
from attnops.graphs import Buckets, breakable, piecewise
from attnops.kernels.shared.plan import MAGIC
from attnops.nn import LatentAttention
from attnops.ops import latent_layers, mla_attention
from tests.graphs.standin import StandIn
from tests.standins import flashinfer_mla, flashinfer_trtllm_mla, sgl_kernel_mla

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, SCALE = 16, 192**-0.5
SPEC = latent_layers(HEADS, 64, BF16)
WORKSPACE = 1 << 27
RUNS = {
    "flashmla": (90, "sgl_kernel", "dense_decode_fwd", "get_mla_decoding_metadata"),
    "flashmla_fp8": (
        90,
        "sgl_kernel",
        "fwd_kvcache_mla_fp8",
        "get_mla_decoding_metadata_dense_fp8",
    ),
    "flashinfer_mla_fa2": (80, "flashinfer", "fa2.run", "fa2.plan"),
    "flashinfer_mla_fa3": (90, "flashinfer", "fa3.run", "fa3.plan"),
    "trtllm_mla": (100, "flashinfer", "trtllm_batch_decode_with_kv_cache_mla", ""),
}
"""Architecture and package of a kernel, and the foreign functions that run it and plan for it."""


@pytest.fixture(autouse=True)
def record():
    """What the stand-ins were called for since, by name."""
    with (
        flashinfer_mla.installed() as planned,
        flashinfer_trtllm_mla.installed() as generated,
        sgl_kernel_mla.installed() as called,
        torch.no_grad(),
    ):
        yield lambda: Counter([*called, *planned, *(name for name, _ in generated)])


def target(arch, *packages):
    return pretend(Target("cuda", arch, assume=packages))


@pytest.fixture
def sm90():
    """FlashMLA is there; fa3 has no stand-in here."""
    with target(90, "sgl_kernel"), use(deny=("fa3",)):
        yield


def cache(dtype=BF16, **more):
    given = {"max_requests": 4, "max_tokens_per_request": 200, "page_size": 64}
    made = LatentCache(1, 1000, **{**given, **more}, dtype=dtype, device="cpu")
    for pages in made.latent_pages:
        pages.copy_((torch.randn(pages.shape) * 0.3).to(dtype))
        pages[0] = 0
    return made


def planner(spec=SPEC, **more):
    return Planner(spec, max_tokens=64, max_requests=4, max_pages=4, device="cpu", **more)


class Layers(nn.Module):
    """Three calls of attention a step."""

    def forward(self, q_nope, q_pe, batch, pages, scale=None):
        for _ in range(3):
            out = mla_attention(
                q_nope,
                q_pe,
                pages,
                batch.page_table,
                batch.seq_lens,
                batch.cu_seqlens_q,
                max_seqlen_q=batch.max_seqlen_q,
                scale=SCALE,
                plan=batch.plan,
                workspace=batch.workspace,
                holes=batch.holes,
                q_scale=scale,
                kv_scale=scale,
            )
        return out


def query(batch, dtype=BF16):
    return [torch.randn(batch.slots.shape[0], HEADS, n).to(dtype) for n in (512, 64)]


def reference(q, batch, pages, scale=None):
    with use(kernel="reference"):
        return Layers()(*q, replace(batch, plan=None), pages, scale)


@pytest.mark.parametrize(
    ("kernel", "own"), [*((k, False) for k in RUNS), ("flashmla", True), ("flashmla_fp8", True)]
)
def test_one_plan_a_step_however_many_layers(record, kernel, own):
    """own: the plan is the cache's."""
    arch, package, run, plan = RUNS[kernel]
    dtype, scale = (E4M3, torch.ones(1)) if kernel == "flashmla_fp8" else (BF16, None)
    mine = cache(
        dtype, workspace_bytes=WORKSPACE * (kernel == "trtllm_mla"), q_heads=HEADS if own else None
    )
    ids = [mine.alloc(n) for n in (70, 3, 130)]
    with target(arch, package), use(allow=(kernel, "mla_attention:reference")):
        plans = planner(latent_layers(HEADS, 64, dtype))
        for step, new in enumerate((1, 1, [4, 1, 2], 1), 1):
            batch = mine.batch(ids, new)
            given = batch if own else plans(batch)
            host = kernel.startswith("flashinfer")
            assert (
                given.plan is not None
                and (given.plan is plans.plan) == (given.workspace is plans.workspace) == host
            )
            q = query(batch, dtype)
            got = Layers()(*q, given, mine.latent_pages[0], scale)
            assert record() == Counter({run: 3 * step} | ({plan: step} if plan else {})), (
                "a plan a step, and a call a layer"
            )
            near = 0.1 if scale is not None else 2e-2
            torch.testing.assert_close(
                got.float(),
                reference(q, batch, mine.latent_pages[0], scale).float(),
                rtol=near,
                atol=near,
            )


def test_which_batches_bring_one(sm90):
    mine = cache(q_heads=HEADS)
    ids = [mine.alloc(100)]
    ids += [mine.fork(ids[0]), mine.alloc(3)]
    planner = Planner(
        latent_layers(HEADS, 64, BF16), max_tokens=64, max_requests=4, max_pages=4, device="cpu"
    )
    batch = mine.batch(ids)
    assert torch.equal(batch.plan, planner(replace(batch, plan=None)).plan)
    assert mine.batch(ids, [8, 1, 0]).plan is not None
    assert mine.batch(ids, [9, 1, 1]).plan is None, "FlashMLA takes 8 tokens of a request"
    assert mine.batch(ids, 0).plan is None
    assert mine.batch(ids, 1, prefix_tokens=64).plan is None, "its latents may be unfolded"
    assert mine.batch(ids[:2], 1, share=True).plan is None, "its parts have tables of their own"
    with use(kernel="reference"):
        assert mine.batch(ids).plan is None
    with use(deterministic=True):
        assert mine.batch(ids).plan is None
    with pretend(None):
        assert mine.batch(ids).plan is None, "on this machine"
    for other in (cache(), cache(q_heads=HEADS, page_size=16)):
        assert other.batch([other.alloc(3)]).plan is None
        assert other.batch(other.requests).plan is None


def test_a_layer_needs_no_planner(sm90, record):
    layer = LatentAttention(32, HEADS, dtype=BF16).eval()
    mine = cache(q_heads=HEADS)
    ids = [mine.alloc(), mine.alloc()]
    for new in ([5, 70], 1, [3, 1]):
        batch = mine.batch(ids, new)
        layer(
            torch.randn(batch.slots.shape[0], 32).to(BF16),
            batch=batch,
            latent_pages=mine.latent_pages[0],
        )
    assert record() == {"dense_decode_fwd": 2, "get_mla_decoding_metadata": 2}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mode", [piecewise, breakable])
def test_graphs_make_it_once_a_step_of_the_lengths_at_hand(sm90, mode):
    mine = cache(q_heads=HEADS)
    more = {"inner": "eager"} if mode is piecewise else {}
    device = StandIn()
    buckets = Buckets(decode=(2, 4), tokens=(64,), verify=(3,))
    step = mode(Layers(), buckets, tokens=("q_nope", "q_pe"), cache=mine, graphs=device, **more)
    ids = [mine.alloc(n) for n in (70, 3, 130, 20)]
    pages = mine.latent_pages[0]
    for who, new in ((4, 1), (3, 1), (4, 3), (4, [1, 3, 0, 2]), (2, 1), (4, 1), (1, 20)):
        batch = mine.batch(ids[:who], new)
        q = query(batch)
        want = reference(q, batch, pages)
        torch.testing.assert_close(step(*q, batch=batch, pages=pages), want, rtol=2e-2, atol=2e-2)
    rows = {str(r.bucket): r for r in step.report().rows}
    assert set(rows) == {"decode x4", "verify 3 x4", "decode x2", "mixed 64 tokens x4"}
    names = {
        str(e.bucket): Counter(n for g in e.recorded.graphs for n, _ in g.log)
        for e in step._entries.values()
    }
    for bucket, ops in names.items():
        schedules = sum(n for name, n in ops.items() if "decode_rows" in name and "__" not in name)
        assert schedules == (0 if bucket.startswith("mixed") else 1), (bucket, ops)
    assert not any(r.breaks for r in rows.values())


def test_a_prepare_of_the_callers_own_is_the_plan(sm90, record):
    mine, seen = cache(q_heads=HEADS), []

    def prepare(batch):
        seen.append(batch.plan)
        return batch

    step = breakable(
        Layers(),
        Buckets(decode=(2,)),
        tokens=("q_nope", "q_pe"),
        cache=mine,
        prepare=prepare,
        graphs=StandIn(),
    )
    batch = mine.batch([mine.alloc(3), mine.alloc(4)])
    step(*query(batch), batch=batch, pages=mine.latent_pages[0])
    assert seen and seen[0] is None and record()["get_mla_decoding_metadata"] == 1, (
        "the batch's own"
    )


def test_compiled_steps_of_any_size_read_it(sm90, record):
    mine = cache(q_heads=HEADS)
    ids = [mine.alloc(n) for n in (70, 3, 130, 20)]
    compiled = torch.compile(Layers(), fullgraph=True)
    for step, count in enumerate((2, 3, 4, 3), 1):
        batch = mine.batch(ids[:count])
        q = query(batch)
        want = reference(q, batch, mine.latent_pages[0])
        torch.testing.assert_close(
            compiled(*q, batch, mine.latent_pages[0]), want, rtol=2e-2, atol=2e-2
        )
        # The results of all layers but the last are not used, so that the compiler drops them.
        assert record() == {"dense_decode_fwd": step, "get_mla_decoding_metadata": step}


def test_a_step_that_no_planning_kernel_takes_gets_no_plan(record):
    mine = cache()
    ids = [mine.alloc(), mine.alloc(70)]
    with target(90, "flashinfer"):
        known = mine.batch(ids, [1, 9], prefix_tokens=64)
        assert planner(kernel="flashinfer_mla_fa3")(known).plan is None, (
            "its latents may be unfolded, and the plan would be in vain"
        )
    with target(90, "sgl_kernel"):
        plans = planner()
        assert plans.plan.numel() == plans.workspace.numel() == 0, "nobody here plans on the host"
        with use(deny=("fa3",)):
            assert plans(mine.batch(ids, [20, 9])).plan is None, (
                "FlashMLA takes 8 tokens of a request"
            )
            assert plans(mine.batch(ids, 1)).plan is not None
        with use(kernel="reference"):
            assert plans(mine.batch(ids, 1)).plan is None
        with use(kernel="fa3"):
            assert plans(mine.batch(ids, 1)).plan is None
    assert planner()(mine.batch(ids, 1)).plan is None, "on this CPU"
    assert set(record()) == {"get_mla_decoding_metadata"}


def test_the_faster_kernel_gets_its_plan(record, all_have_run):
    """Kernels that a host's plan shuts out are weighed against those that need one."""
    small, large = cache(), cache(workspace_bytes=WORKSPACE)
    with target(100, "flashinfer"):
        plans = planner()
        for mine, kind in ((small, torch.int64), (large, torch.int32)):
            assert plans(mine.batch([mine.alloc(70)], 1)).plan.dtype == kind, (
                "trtllm_mla runs where there is a workspace for it"
            )
        batch = large.batch([large.alloc(70)], 1)
        for policy, kind in (
            (use(prefer=("flashinfer_mla_fa2",)), torch.int64),
            (use(prefer=("trtllm_mla",)), torch.int32),
            (use(deny=("trtllm_mla",)), torch.int64),
            (use(allow=("trtllm_mla",)), torch.int32),
            (nullcontext(), torch.int32),
        ):
            with policy:
                assert plans(batch).plan.dtype == kind
    with target(90, "flashinfer", "sgl_kernel"):
        wide = LatentCache(
            1,
            1000,
            max_requests=15,
            max_tokens_per_request=8192,
            page_size=64,
            dtype=BF16,
            device="cpu",
        )
        batch = wide.batch([wide.alloc(1) for _ in range(15)], 1)
        with use(allow=("flashinfer_mla_fa3", "flashmla")):
            for heads, kind in ((16, torch.int64), (128, torch.int32)):
                assert planner(latent_layers(heads, 64, BF16))(batch).plan.dtype == kind, (
                    "as measured: flashmla is faster with many heads"
                )


def test_a_kernel_that_cannot_run_says_why(record):
    mine = cache()
    batch = mine.batch([mine.alloc(5)], 1)
    for arch, kernel, why in (
        (100, "flashmla", r"target=sm100 \(wants sm90\)"),
        (100, "flashinfer_mla_fa3", r"not flashinfer_mla_fa3: target=sm100 \(wants sm90\)$"),
        (100, "trtllm_mla", r"not trtllm_mla: workspace=0 bytes"),
        (90, "flashmla_fp8", r"not flashmla_fp8: dtype=bfloat16 \(wants float8_e4m3fn\);"),
    ):
        with target(arch, "sgl_kernel", "flashinfer"):
            with pytest.raises(NoKernel, match=f"(?m){why}"):
                planner(kernel=kernel)(batch)
            with pytest.raises(NoKernel, match=f"(?m){why}"), use(kernel=kernel):
                planner()(batch)
    with target(90, "flashinfer"):
        found = planner(kernel="flashinfer_mla_fa3")(batch)
        assert int(found.plan[0]) == MAGIC and record() == {"fa3.plan": 1}


def test_plans_made_in_inference_mode_serve_outside_of_it(record):
    mine = cache()
    with target(90, "sgl_kernel"), use(allow=("flashmla",)), torch.inference_mode():
        assert not planner()(mine.batch([mine.alloc(5)], 1)).plan.is_inference()
