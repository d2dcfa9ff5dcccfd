"""`Planner` over `latent_layers`: one plan a step however many layers, by the host or on the device, for the kernel that then answers."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

from attnops.cache import LatentCache, Planner
from attnops.core.errors import NoKernel
from attnops.core.problem import Target, pretend
from attnops.core.select import use
from attnops.kernels.shared.plan import MAGIC
from attnops.ops import latent_layers, mla_attention
from tests.standins import flashinfer_mla, flashinfer_trtllm_mla, sgl_kernel_mla as sgl

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, DC, DR = 16, 512, 64
SCALE = 192**-0.5
SPEC = latent_layers(HEADS, 64, BF16)
WORKSPACE = 1 << 27
RUNS = {
    "flashmla": ("dense_decode_fwd", "get_mla_decoding_metadata"),
    "flashmla_fp8": ("fwd_kvcache_mla_fp8", "get_mla_decoding_metadata_dense_fp8"),
    "flashinfer_mla_fa2": ("fa2.run", "fa2.plan"),
    "flashinfer_mla_fa3": ("fa3.run", "fa3.plan"),
    "trtllm_mla": ("trtllm_batch_decode_with_kv_cache_mla", None),
}


@pytest.fixture(autouse=True)
def record():
    """What the stand-ins were called for since, by name."""
    # The package holds both kinds of kernels, each faked by a stand-in that puts its own modules in place.
    with flashinfer_mla.installed() as planned, flashinfer_trtllm_mla.installed() as generated, sgl.installed() as called, torch.no_grad():
        yield lambda: Counter([*called, *planned, *(name for name, _ in generated)])


def target(arch, *packages):
    return pretend(Target("cuda", arch, assume=packages))


def cache(dtype=BF16, **more):
    made = LatentCache(1, 1000, max_requests=4, max_tokens_per_request=200, page_size=64, dtype=dtype, device="cpu", **more)
    for pages in made.latent_pages:
        data = torch.randn(pages.shape) * 0.3
        pages.copy_(data.to(dtype))
        pages[0] = 0
    return made


def planner(spec=SPEC, **more):
    return Planner(spec, max_tokens=64, max_requests=4, max_pages=4, device="cpu", **more)


def model(pages, batch, q_nope, q_pe, layers, kernel=None, **scales):
    for _ in range(layers):
        out = mla_attention(
            q_nope, q_pe, pages, batch.page_table, batch.seq_lens, batch.cu_seqlens_q, max_seqlen_q=batch.max_seqlen_q, scale=SCALE,
            plan=batch.plan, workspace=batch.workspace, holes=batch.holes, kernel=kernel, **scales,
        )  # fmt: skip
    return out


def query(batch, dtype=BF16):
    tokens = batch.slots.shape[0]
    return [torch.randn(tokens, HEADS, n).to(dtype) for n in (DC, DR)]


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize(
    ("arch", "packages", "kernel"),
    [
        (90, ("sgl_kernel",), "flashmla"),
        (90, ("sgl_kernel",), "flashmla_fp8"),
        (90, ("flashinfer",), "flashinfer_mla_fa3"),
        (80, ("flashinfer",), "flashinfer_mla_fa2"),
        (100, ("flashinfer",), "trtllm_mla"),
    ],
    ids=lambda v: str(v),
)
def test_one_plan_a_step_however_many_layers(record, arch, packages, kernel, layers):
    dtype = E4M3 if kernel == "flashmla_fp8" else BF16
    scales = {"q_scale": torch.ones(1), "kv_scale": torch.ones(1)} if dtype == E4M3 else {}
    mine = cache(dtype, workspace_bytes=WORKSPACE if kernel == "trtllm_mla" else 0)
    ids = [mine.alloc(n) for n in (70, 3, 130)]
    run, plan = RUNS[kernel]
    with target(arch, *packages), use(allow=(kernel, "mla_attention:reference")):
        plans = planner(latent_layers(HEADS, 64, dtype))
        for steps, new in enumerate((1, 1, [4, 1, 2], 1), 1):
            batch = mine.batch(ids, new)
            given = plans(batch)
            host = kernel.startswith("flashinfer")
            assert given.plan is not None and given.plan.dtype == (torch.int64 if host else torch.int32)
            assert (given.workspace is plans.workspace) == host and (given.plan is plans.plan) == host
            q = query(batch, dtype)
            got = model(mine.latent_pages[0], given, *q, layers, **scales)
            assert record() == {run: steps * layers, **({plan: steps} if plan else {})}, "a plan a step, and a call a layer"
            want = model(mine.latent_pages[0], batch, *q, 1, "reference", **scales)
            torch.testing.assert_close(got.float(), want.float(), rtol=0.1 if scales else 2e-2, atol=0.1 if scales else 2e-2)


def test_steps_of_a_compiled_model_follow_their_plans(record):
    mine = cache()
    ids = [mine.alloc(n) for n in (70, 3)]
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with target(90, "sgl_kernel"), use(deny=("fa3",)):
        plans = planner()
        for step in range(1, 5):
            given = plans(mine.batch(ids, 1))
            q = query(given)
            torch.testing.assert_close(
                compiled(mine.latent_pages[0], given, *q, 3), model(mine.latent_pages[0], given, *q, 1, "reference"), rtol=2e-2, atol=2e-2
            )
            assert record() == {"dense_decode_fwd": 3 * step, "get_mla_decoding_metadata": step}
    assert len(backend.graphs) == 1


def test_a_step_that_no_planning_kernel_takes_gets_no_plan(record):
    mine = cache()
    ids = [mine.alloc(), mine.alloc()]
    with target(90, "sgl_kernel"):
        plans = planner()
        assert plans.plan.numel() == plans.workspace.numel() == 0, "nobody here plans on the host"
        with use(deny=("fa3",)):
            assert plans(mine.batch(ids, [20, 9])).plan is None, "FlashMLA takes 8 tokens of a request"
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
            assert plans(mine.batch([mine.alloc(70)], 1)).plan.dtype == kind, "trtllm_mla runs where there is a workspace for it"
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
        wide = LatentCache(1, 1000, max_requests=15, max_tokens_per_request=8192, page_size=64, dtype=BF16, device="cpu")
        batch = wide.batch([wide.alloc(1) for _ in range(15)], 1)
        with use(allow=("flashinfer_mla_fa3", "flashmla")):
            for heads, kind in ((16, torch.int64), (128, torch.int32)):
                assert planner(latent_layers(heads, 64, BF16))(batch).plan.dtype == kind, "as measured: flashmla is faster with many heads"


def test_a_shared_prefix_gets_no_plan(record):
    mine = cache()
    a = mine.alloc(70)
    b = mine.fork(a)
    with target(90, "sgl_kernel"), use(allow=("flashmla",)):
        plans = planner()
        batch = plans(mine.batch([a, b], 1, share=True))
        assert batch.shared is not None and batch.plan is None
        assert plans(mine.batch([a, b], 1)).plan is not None
        c = mine.alloc(3)
        assert plans(mine.batch([a, c], 1, share=True)).plan is not None, "nothing is shared"


def test_a_batch_that_says_what_was_before_gets_no_plan(record):
    """Its latents may be unfolded, and then the plan would be in vain."""
    mine = cache()
    a = mine.alloc(70)
    with target(90, "flashinfer"):
        plans = planner(kernel="flashinfer_mla_fa3")
        for batch in (mine.batch([a], 9, prefix_tokens=64), mine.batch([mine.alloc()], 9)):
            assert batch.prefix is not None and plans(batch).plan is None
        assert record() == {} and plans(mine.batch([a], 9)).plan is not None


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
