"""`flashinfer` through stand-ins of the modules it calls: tables, plans, lse, padding, refusals,
and the code of a compiled model."""

import random
import re
from dataclasses import replace

import pytest
import torch

import attnops
from attnops.cache import PagedCache, Planner
from attnops.core.errors import InvalidInput
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, pretend
from attnops.core.record import changed
from attnops.core.select import Policy, select
from attnops.kernels.flashinfer import modules as fi
from attnops.kernels.shared.plan import FIRST, HEADER, MAGIC
from attnops.ops import paged_layers, plan_paged_attention, plan_sizes
from attnops.ops.pages.plan import statics_of, step_of
from attnops.testing import Features, Pages, Source, make_call, planned
from tests.checks import right
from tests.lowering.models import compiled_code
from tests.standins import flashinfer_modules as standin

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TARGETS = {arch: Target("cuda", arch, assume=("flashinfer",)) for arch in (80, 90, 100)}
KERNEL = kernels_of("paged_attention")["flashinfer"]
LLAMA = Features(dtype=BF16, head_dim=128, q_heads=8, causal=True)


@pytest.fixture
def sm90():
    with standin.installed() as record, pretend(TARGETS[90]):
        yield record


def paged(q_lens=(1, 4, 0, 2), seq_lens=(6, 4, 0, 21), page=16, f=LLAMA, seed=0, **more):
    return make_call("paged_attention", Source(seed), q_lens, seq_lens, page, f, **more)


VARLEN = kernels_of("varlen_attention")["flashinfer"]


def test_packed_prefill_of_deepseek_takes_fa3(sm90):
    f = replace(LLAMA, q_heads=4, kv_heads=4, head_dim=192, v_head_dim=128, lse=True)
    right(VARLEN, make_call("varlen_attention", Source(0), (200, 90), (70, 80), f))
    assert sm90 == ["fa3.plan", "fa3.ragged_run"]


def path(call, policy=""):
    made = planned(KERNEL, call, policy)
    return fi.NAMES[int(made.arguments["plan"][1])]


@pytest.mark.parametrize(
    ("arch", "q_lens", "change", "want"),
    [
        (90, (1, 1), {"kv_heads": 8}, "decode"),
        (90, (1, 1), {"kv_heads": 4}, "decode"),
        (90, (1, 1), {"kv_heads": 2}, "fa2"),  # four heads a key head: tensor cores
        (90, (1, 1), {"kv_heads": 8, "sinks": BF16}, "fa2"),
        (90, (1, 1), {"kv_heads": 8, "head_dim": 192, "v_head_dim": 128}, "fa2"),
        (90, (16, 1), {"kv_heads": 2}, "fa2"),
        (90, (17, 1), {"kv_heads": 2}, "fa3"),
        (90, (170, 1), {"kv_heads": 2, "sinks": BF16}, "fa3"),
        (90, (170, 1), {"kv_heads": 2, "head_dim": 192, "v_head_dim": 128}, "fa2"),
        (80, (170, 1), {"kv_heads": 2}, "fa2"),
        (100, (170, 1), {"kv_heads": 2}, "fa2"),
    ],
)
def test_path(arch, q_lens, change, want):
    with standin.installed() as record, pretend(TARGETS[arch]):
        assert path(paged(q_lens, (200, 9), f=replace(LLAMA, **change))) == want
        assert record[-1] == f"{want}.plan"


def test_deterministic_calls_take_one_path_and_one_tile_and_split_no_keys():
    for arch, want in ((90, "fa3"), (80, "fa2")):
        ints = set()
        with standin.installed(), pretend(TARGETS[arch]):
            for q_lens in ((1, 1, 1), (5, 1, 1), (300, 1, 1), (0, 1, 0)):
                made = planned(KERNEL, paged(q_lens, (400, 9, 70)), "deterministic")
                plan = made.arguments["plan"].tolist()
                assert fi.NAMES[plan[1]] == want
                info = plan[FIRST + plan[2] :][: plan[3]]
                if want == "fa2":
                    assert info[-1] == 0  # split_kv
                    ints.add(info[3])  # cta_tile_q
                KERNEL.run(changed(made.record, policy="deterministic"))
            assert (
                select(made.problem, Policy(kernel=("flashinfer",), deterministic=True)).kernel
                is KERNEL
            )
        assert ints in ({128}, set())


def test_sizes_serve_every_smaller_call(sm90):
    rng = random.Random(0)
    for _ in range(60):
        kv = rng.choice((1, 2, 8))
        f = Features(
            dtype=BF16,
            head_dim=rng.choice((64, 128)),
            q_heads=kv * rng.choice((1, 2, 4, 8)),
            kv_heads=kv,
            causal=rng.random() < 0.7,
            window=rng.choice(((-1, -1), (33, -1))),
            sinks=rng.choice((None, BF16)),
        )
        page = rng.choice((1, 16, 64))
        requests = rng.randint(1, 40)
        longest = rng.choice((1, 3, 60))
        q_lens = [rng.randint(0, longest) for _ in range(requests)]
        lens = [n + rng.randint(0, 400) for n in q_lens]
        padding, extra = rng.randint(1, 40), rng.randint(0, 30)
        call = paged(q_lens, lens, page, f, padding=padding)
        spec = paged_layers(
            f.q_heads, kv, f.head_dim, page, BF16, causal=f.causal, window=f.window, sinks=f.sinks
        )
        sizes = {
            "max_tokens": sum(q_lens) + padding,
            "max_requests": requests,
            "max_pages": call.arguments["page_table"].shape[1],
        }
        numbers, size = plan_sizes(spec, **{n: most + extra for n, most in sizes.items()})
        planned(
            KERNEL,
            call,
            buffers=(torch.zeros(numbers, dtype=torch.int64), torch.zeros(size, dtype=torch.uint8)),
        )


def test_the_workspace_of_a_large_server_is_small(monkeypatch):
    monkeypatch.setattr(fi, "sm_count", lambda device: 132)
    statics = statics_of(paged_layers(32, 8, 128, 16, BF16))
    numbers, size = kernels_of("plan_paged_attention")["flashinfer"].plan.sizes(
        **statics, max_tokens=8192, max_requests=256, max_pages=8192, device=torch.device("cpu")
    )
    assert numbers * 8 < 4 << 20 and size < 40 << 20


@pytest.mark.parametrize(
    ("q_lens", "lens"),
    [((1, 1, 1), ((5, 60, 0), (40, 7, 33))), ((70, 1, 9), ((70, 60, 9), (90, 1, 9)))],
)
def test_replans_change_what_lies_in_the_workspace_and_nothing_else(sm90, q_lens, lens):
    first, later = (
        paged(q_lens, each, pages=Pages(wider=8 - -(-max(each) // 16))) for each in lens
    )
    made = planned(KERNEL, first).arguments
    header = made["plan"][:HEADER].clone()
    for call in (first, later):
        KERNEL.run(planned(KERNEL, call, buffers=(made["plan"], made["workspace"])).record)
        assert made["plan"][FIRST:HEADER].equal(header[FIRST:])


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"window_left": 7}, r"plan\.window_left: got -1, want 7, as in this call"),
        ({"softcap": 2.0}, r"plan\.softcap: got 0, want 1"),
        ({"causal": False}, r"plan\.causal: got 1, want 0"),
        ({"max_seqlen_q": 1}, r"plan\.decode: got 0, want 1"),
        (
            {"max_seqlen_q": 400},
            r"plan\.path: got fa2, want fa3: the plan was made for .*another max_seqlen_q",
        ),
        ({"sinks": torch.zeros(8)}, r"plan\.sinks: got 0, want 1"),
        (
            {"plan": torch.zeros(512, dtype=torch.int64)},
            r"plan: got int64 \(512,\) with no header, want .*plan_paged_attention made",
        ),
        (
            {"plan": torch.ones(512, dtype=torch.int64)},
            r"plan: got int64 \(512,\) with another header",
        ),
        ({"plan": torch.zeros(3, dtype=torch.int64)}, r"plan: got int64 \(3,\) with no header"),
        ({"workspace": None}, "workspace: got None"),
        (paged(f=replace(LLAMA, dtype=F16)), "plan.dtype: got bfloat16, want float16"),
        (paged(f=replace(LLAMA, q_heads=4)), "plan.q_heads: got 8, want 4"),
        (paged(page=4), "plan.max_pages: got 3, want 7"),
        (paged(padding=7), "plan.num_tokens: got 9, want 14"),
        (paged((1, 4, 0, 2, 1), (6, 4, 0, 21, 3), padding=1), "plan.requests: got 4, want 5"),
    ],
)
def test_a_plan_of_another_call_is_refused(sm90, change, want):
    given = planned(KERNEL, paged())
    buffers = {n: given.arguments[n] for n in ("plan", "workspace")}
    other = given.with_(**change) if isinstance(change, dict) else change.with_(**buffers)
    with pytest.raises(InvalidInput, match=f"^{want}"):
        KERNEL.run(other.record)


def test_another_policy_needs_another_plan(sm90):
    with pytest.raises(InvalidInput, match=r"plan\.deterministic: got 0, want 1"):
        KERNEL.run(changed(planned(KERNEL, paged()).record, policy="deterministic"))


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"seq_lens": [6, 4, 0, 70]}, r"seq_lens: got \[6, 4, 0, 70\], want 0 <= each <= 48"),
        ({"seq_lens": [6, 4, -1, 2]}, "seq_lens: got .* want 0 <= each"),
        (
            {"seq_lens": [6, 3, 0, 21]},
            r"seq_lens: got .* no key, or at least as many as new tokens \[1, 4, 0, 2\]",
        ),
        (
            {"cu_seqlens_q": [0, 1, 5, 5, 10]},
            r"lengths of cu_seqlens_q: got \[1, 4, 0, 5\], want 0 <= each <= 4",
        ),
        (
            {"cu_seqlens_q": [0, 1, 5, 8, 10]},
            r"cu_seqlens_q\[-1\]: got \[10\], want 0 <= each <= 9",
        ),
    ],
)
def test_lengths_that_would_be_read_past_the_tables_are_refused(sm90, change, want):
    call = paged().with_(**{n: torch.tensor(v, dtype=torch.int32) for n, v in change.items()})
    with pytest.raises(InvalidInput, match=f"^{want}"):
        planned(KERNEL, call)


def test_the_plan_loads_what_unlike_strides_need(sm90):
    call = planned(KERNEL, paged(f=replace(LLAMA, head_dim=192, v_head_dim=128)))
    assert sm90 == ["fa2.prewarm", "fa2.plan"]
    KERNEL.run(call.record)
    assert sm90[2:] == ["fa2.paged_run"]


def test_the_module_of_a_call_is_the_one_that_is_built(sm90):
    for call in (
        paged(),
        paged((1, 1), (4, 4)),
        paged((170,), (200,)),
        make_call("varlen_attention", Source(0), (30, 3), (30, 40), LLAMA),
    ):
        kernel = kernels_of(call.op)["flashinfer"]
        standin.forget()
        made = planned(kernel, call)
        kernel.run(made.record)
        [(backend, dtype, _, d, dv, *flags)] = [(b[0], *b[1:7]) for b in standin.BUILT]
        assert fi.module_of(call.problem, call.arguments["max_seqlen_q"]) == (
            {n: p for p, n in fi.NAMES.items()}[backend],
            dtype,
            d,
            dv,
            *flags,
            False,
        )


SPEC = paged_layers(8, 2, 64, 16, BF16)


def new_batch(*lengths):
    cache = PagedCache(
        1, 40, 16, 2, 64, max_requests=4, max_pages_per_request=8, dtype=BF16, device="cpu"
    )
    return cache, cache.batch([cache.alloc() for _ in lengths], list(lengths))


def test_the_planner_plans_only_for_a_kernel_that_wants_it(sm90):
    _, batch = new_batch(5)
    free = Planner(SPEC, max_tokens=64, max_requests=4, max_pages=8, device="cpu")
    with attnops.use(deny=("flashinfer",)):
        assert free(batch).plan is None
    with attnops.use(allow=("flashinfer",)):
        given = free(batch)
    assert given.plan is free.plan and int(given.plan[0]) == MAGIC
    with attnops.use(kernel="reference"):
        assert free(given).plan is None
    # None chooses it here: sgl_kernel is not assumed, flashinfer is, and it beats what is left.
    assert (free(batch).plan is not None) == (
        select(step_of(SPEC, TARGETS[90], 5, 1, 8, 5)).kernel is KERNEL
    )


@pytest.mark.full
def test_the_plan_enters_no_cuda_graph(sm90, monkeypatch):
    """Inductor would record a copy of the CPU tensor and write to it after it is freed; split
    around the call, it never sees it."""
    import torch._inductor.scheduler as scheduler
    import torch._inductor.utils as inductor

    def model(query, pages, batch):
        for _ in range(2):
            query = query + attnops.paged_attention(
                query,
                *pages,
                batch.page_table,
                batch.seq_lens,
                batch.cu_seqlens_q,
                max_seqlen_q=batch.max_seqlen_q,
                plan=batch.plan,
                workspace=batch.workspace,
                holes=batch.holes,
                kernel="flashinfer",
            )
        return query

    monkeypatch.setattr(scheduler.BaseSchedulerNode, "is_gpu", lambda self: True)
    inductor.set_customized_partition_wrappers(lambda fn, metadata: fn)
    try:
        cache, batch = new_batch(3, 9)
        given = Planner(
            SPEC, max_tokens=64, max_requests=4, max_pages=8, device="cpu", kernel="flashinfer"
        )(batch)
        pages, query = (cache.k_pages[0], cache.v_pages[0]), torch.randn(12, 8, 64, dtype=BF16)
        with (
            torch.no_grad(),
            torch._inductor.config.patch(graph_partition=True, force_disable_caches=True),
        ):
            _, code = compiled_code(
                lambda: torch.compile(model, fullgraph=True)(query, pages, given)
            )
    finally:
        inductor.set_customized_partition_wrappers(None)
    runs = re.findall(
        r"paged_attention\.flashinfer\.run\(.*, (\w+), max_seqlen_q=.*workspace=(\w+)\b", code
    )
    inputs = re.findall(r"partition\d+_args = \[(.*)\]", code)
    assert len(runs) == 2 and inputs
    [buffers] = set(runs)
    assert not [args for args in inputs if set(buffers) & set(args.split(", "))]


@pytest.mark.parametrize("short", ["plan", "workspace"])
def test_a_short_buffer_is_named(sm90, short):
    given, spec = planned(KERNEL, paged()).arguments, paged_layers(8, 2, 128, 16, BF16)
    names = ("page_table", "seq_lens", "cu_seqlens_q", "plan", "workspace")
    buffers = {n: given[n] for n in names} | {short: given[short][:128]}
    with pytest.raises(InvalidInput, match=rf"^{short}: got \d+ bytes, want >= \d+"):
        plan_paged_attention(spec, **buffers, num_tokens=9, max_seqlen_q=4, kernel="flashinfer")
