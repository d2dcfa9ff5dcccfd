"""FlashInfer's two kernels for latents through stand-ins of their module: rows, plans, lse,
padding, refusals, compiled code."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attnops.core.errors import InvalidInput
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target
from attnops.core.select import select
from attnops.kernels.flashinfer import mla as fm
from attnops.kernels.shared.plan import FIRST, HEADER
from attnops.ops import latent_layers, plan_mla_attention, plan_sizes
from attnops.ops.latent.cases import DEEPSEEK
from attnops.ops.pages.plan import step_of
from attnops.testing import Pages, planned
from tests.checks import right
from tests.standins import flashinfer_mla as standin
from tests.standins.calls import Ops, latents

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
NAMES = ("flashinfer_mla_fa2", "flashinfer_mla_fa3")
SM90 = Target("cuda", 90, assume=("flashinfer",))
KERNELS = {n: kernels_of("mla_attention")[n] for n in NAMES}
NAME = NAMES[1]
FA3 = KERNELS["flashinfer_mla_fa3"]


@pytest.fixture(params=NAMES)
def kernel(request, calls):
    return KERNELS[request.param]


def call(q_lens=(1, 4, 0, 2), seq_lens=(70, 4, 9, 130), **more):
    return latents(q_lens, seq_lens, **{"padding": 2, **more})


def test_float8_scales_cost_a_launch_a_tensor(calls, monkeypatch):
    """And no float32 copy of query or output."""
    given = planned(FA3, call(f=replace(DEEPSEEK, kv_dtype=E4M3)))
    monkeypatch.setattr(fm, "load", lambda *_: SimpleNamespace(run=lambda *_: None))
    with Ops() as ops, torch.no_grad():
        FA3.run(given.record)
    assert [op for op in ops.work if "mul" in op or "copy" in op] == ["aten::mul"] * 3


def test_lengths_that_would_be_read_past_the_tables_are_refused(calls):
    with pytest.raises(InvalidInput, match=r"^seq_lens: got .*, want 0 <= each <= 256"):
        planned(FA3, call().with_(seq_lens=torch.tensor([257, 4, 9, 130], dtype=torch.int32)))


def test_float8_latents(kernel):
    """Any scale, on the device; a module of its own, planned by itself; the query is left alone."""
    f = replace(DEEPSEEK, kv_dtype=E4M3)
    for q_lens, seq_lens in (((1, 4, 0, 2), (70, 4, 9, 130)), ((1, 1, 1), (300, 0, 65))):
        given = call(q_lens, seq_lens, f=f)
        right(kernel, given)
    assert set(standin.BUILT) == {(kernel.name[-3:], BF16, E4M3)}


@pytest.mark.parametrize("causal", [True, False])
def test_queries_without_keys(kernel, causal):
    f = replace(DEEPSEEK, causal=causal, lse=True)
    for q_lens, seq_lens in (((100, 3, 2), (70, 0, 9)), ((5, 5), (0, 0))):
        right(kernel, call(q_lens, seq_lens, f=f))


def test_queries_without_keys_name_no_page():
    lens, starts = (torch.tensor(x, dtype=torch.int32) for x in ((3, 0), (0, 4, 6)))
    rows = fm.rows_of_plan(fm.Shape(6, 4, 16, 64, BF16, False), lens, starts)
    assert [x.tolist() for x in rows] == [[0, 4, 6], [0, 0, 0], [3, 0]]


def test_the_bound_on_works_holds_what_the_planner_makes(calls):
    generator = torch.Generator().manual_seed(3)
    for trial in range(40):
        n = int(torch.randint(1, 9, (1,), generator=generator))
        keys = torch.randint(0, 3000, (n,), generator=generator).int()
        q_lens = torch.minimum(
            torch.randint(1, 60, (n,), generator=generator).int(), keys.clamp(min=1)
        )
        heads, causal = (1, 16, 64, 128)[trial % 4], bool(trial // 4 % 2)
        starts = torch.nn.functional.pad(q_lens.cumsum(0, dtype=torch.int32), (1, 0))
        bound = fm.works(
            fm.Shape(int(starts[-1]), 50, heads, 64, BF16, causal), starts, keys, standin.SMS
        )
        ints, locked, floats = (torch.zeros(1 << 22, dtype=torch.uint8) for _ in range(3))
        info, _ = standin.Module("fa3", BF16, BF16).plan_with_staged_workspace_bytes(
            floats,
            ints,
            locked,
            starts,
            torch.zeros(n + 1, dtype=torch.int32),
            keys,
            heads,
            512,
            causal,
        )
        assert int(standin.ints_at(ints, info[15], 2)[1]) <= bound


def test_more_work_than_a_plan_has_room_for_is_refused(calls):
    spec = latent_layers(128, 64, BF16)
    tables = {
        "page_table": torch.zeros(1, 300, dtype=torch.int32),
        "seq_lens": torch.tensor([17000], dtype=torch.int32),
    }
    tables["cu_seqlens_q"] = torch.tensor([0, 17000], dtype=torch.int32)
    numbers, size = plan_sizes(spec, max_tokens=1, max_requests=1, max_pages=1)
    buffers = {
        "plan": torch.zeros(numbers, dtype=torch.int64),
        "workspace": torch.zeros(size, dtype=torch.uint8),
    }
    with pytest.raises(InvalidInput, match=r"^work of a plan: got up to \d+ pieces, want <= 16384"):
        plan_mla_attention(
            spec, **tables, num_tokens=17000, max_seqlen_q=17000, kernel=FA3.name, **buffers
        )


def test_the_buffers_are_as_large_as_they_need_to_be(calls):
    spec = latent_layers(16, 64, BF16)
    given = call((1, 1), (70, 130), padding=0)
    tables = {n: given.arguments[n] for n in ("page_table", "seq_lens", "cu_seqlens_q")}
    numbers, size = plan_sizes(spec, max_tokens=2, max_requests=2, max_pages=4)
    for short in ("plan", "workspace"):
        buffers = {
            "plan": torch.zeros(numbers, dtype=torch.int64),
            "workspace": torch.zeros(size, dtype=torch.uint8),
        }
        assert (
            plan_mla_attention(
                spec, **tables, num_tokens=2, max_seqlen_q=1, kernel=FA3.name, **buffers
            )
            == FA3.name
        )
        buffers[short] = buffers[short][: -8 if short == "workspace" else -2]
        with pytest.raises(InvalidInput, match=rf"^{short}: got \d+ bytes, want >= \d+"):
            plan_mla_attention(
                spec, **tables, num_tokens=2, max_seqlen_q=1, kernel=FA3.name, **buffers
            )


def test_replans_of_a_decode_change_what_lies_in_the_workspace_and_nothing_else(kernel):
    first, *others = (
        call(q_lens, lens, padding=3 - sum(q_lens), pages=Pages(wider=4 - -(-max(lens) // 64)))
        for q_lens, lens in (
            ((1, 1, 0), (5, 60, 9)),
            ((1, 1, 1), (150, 1, 130)),
            ((0, 0, 1), (150, 1, 130)),
        )
    )
    made = planned(kernel, first).arguments
    header = made["plan"][:HEADER].clone()
    for later in others:
        right(kernel, planned(kernel, later, buffers=(made["plan"], made["workspace"])))
        assert made["plan"][FIRST:HEADER].equal(header[FIRST:])


@pytest.mark.parametrize(
    ("other", "want"),
    [
        (call().with_(max_seqlen_q=1), r"plan\.causal: got 1, want 0"),
        (call().with_(causal=False), r"plan\.causal: got 1, want 0"),
        (call(page=128), "plan.max_pages: got 4, want 3|plan.page_size: got 64, want 128"),
        (call(padding=7), "plan.num_tokens: got 9, want 14"),
        (call(f=replace(DEEPSEEK, dtype=F16)), "plan.dtype: got bfloat16, want float16"),
        (call(f=replace(DEEPSEEK, q_heads=8)), "plan.q_heads: got 16, want 8"),
    ],
)
def test_a_plan_of_another_call_is_refused(kernel, other, want):
    given = planned(kernel, call()).arguments
    with pytest.raises(InvalidInput, match=f"^{want}"):
        kernel.run(other.with_(plan=given["plan"], workspace=given["workspace"]).record)


def test_a_plan_of_the_other_kernel_is_refused(calls):
    with pytest.raises(
        InvalidInput, match=r"^plan\.path: got fa3, want fa2: the plan was made for another kernel"
    ):
        KERNELS["flashinfer_mla_fa2"].run(planned(FA3, call()).record)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("heads", [3, 20, 96, 192])
def test_heads_that_divide_no_tile_may_decode_and_see_all_keys(kernel, heads):
    # More rows a request than a tile either way
    f, long = replace(DEEPSEEK, q_heads=heads, lse=True), 70 if heads == 3 else 25
    right(kernel, call((1, 1, 1), (64, 65, 200), f=f))
    right(kernel, call((9, long, 2), (64, 129, 200), f=replace(f, causal=False)))


def test_the_bug_that_is_refused_is_in_the_stand_in():
    # 20 heads in tiles of 64: the first tile ends amid query 3, whose last key 64 begins a tile of
    # keys.
    assert standin.lost(4, 20, 65, 64)[3, 0, 64] and not standin.lost(4, 16, 65, 64)[3, 0, 64]


def decode_of(heads, target):
    """64 requests of 8192 keys, planned for."""
    return step_of(latent_layers(heads, 64, BF16), target, 64, 64, 128, 1)


def test_both_can_be_chosen():
    few, many = decode_of(16, SM90), decode_of(128, SM90)
    assert select(few).kernel is select(many).kernel is FA3
    assert (
        select(decode_of(16, Target("cuda", 80, assume=("flashinfer",)))).kernel.name
        == "flashinfer_mla_fa2"
    )
    assert select(few, "kernel=flashinfer_mla_fa2").kernel.name == "flashinfer_mla_fa2"
