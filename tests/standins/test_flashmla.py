"""What is left of a `flashmla` call in compiled code: the foreign op, and nothing that the layout
or a plan makes needless."""

import re
from dataclasses import replace

import pytest
import torch

from attnops.core.errors import InvalidInput, NoKernel
from attnops.core.kernel import kernels_of
from attnops.core.problem import Target, altered, pretend, problem_of
from attnops.core.select import select, use
from attnops.kernels.sgl import flashmla
from attnops.kernels.shared import tokens
from attnops.measured import Grid, Table, costs
from attnops.ops import OPS, decode_rows, mla_attention
from attnops.ops.latent.cases import DEEPSEEK
from attnops.ops.latent.timed import MLA
from attnops.ops.sweeps import decoding
from attnops.testing import check_kernel
from attnops.testing.pool import Pool
from attnops.testing.timed_calls import build
from attnops.tune.run import Stopwatch, runner
from tests.lowering.models import compiled_code
from tests.standins import sgl_kernel_mla as standin
from tests.standins.calls import latents
from tests.standins.vendors import VENDORS

KERNELS = kernels_of("mla_attention")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SCALE = 192**-0.5


@pytest.fixture(autouse=True)
def loaded():
    with VENDORS["flashmla"].running(), torch.no_grad():
        yield


def rows(call, **more):
    t = call.arguments
    return decode_rows(
        t["page_table"], t["seq_lens"], t["cu_seqlens_q"], num_tokens=t["q_nope"].shape[0], **more
    )


def scheduled(call, **more):
    """With a schedule for the heads of the call."""
    query = call.arguments["q_nope"]
    return rows(call, q_heads=query.shape[1], float8=query.dtype == E4M3, **more)


TABLES = ("page_table", "seq_lens", "cu_seqlens_q")
PLANS = {"no plan": lambda call: None, "rows": rows, "schedule": scheduled}


class Layers(torch.nn.Module):
    """Two layers as DeepSeek's: W_UK before, W_UV after, the query's rotated part made by pointwise
    ops."""

    def __init__(self, joined):
        super().__init__()
        self.joined = joined
        self.up, self.down = (
            torch.nn.Parameter(torch.randn(16, *s, dtype=BF16) * 0.05)
            for s in ((128, 512), (512, 128))
        )

    def forward(self, x, angle, **batch):
        for _ in range(2):
            q_nope = torch.bmm(x.transpose(0, 1), self.up).transpose(0, 1)
            q_pe = x[..., :64] * angle
            if self.joined:
                query = torch.cat([q_nope, q_pe], -1)
                q_nope, q_pe = query[..., :512], query[..., 512:]
            out = mla_attention(
                q_nope, q_pe, **batch, max_seqlen_q=1, scale=SCALE, holes=False, kernel="flashmla"
            )
            x = torch.bmm(out.transpose(0, 1), self.down).transpose(0, 1)
        return x


def body(code):
    """What `call` does, a line an operation that a GPU would run."""
    lines = code[code.index("def call(") :].split("return (")[0].splitlines()
    lines = [line for line in map(str.strip, lines) if not line.startswith(("#", "assert_"))]
    return [line for line in lines if re.search(r"cpp_fused|extern_kernels|torch\.ops", line)]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("planned", PLANS)
def test_what_is_left_in_compiled_code(joined, planned):
    call, model = latents(), Layers(joined)
    given = {
        n: call.arguments[n] for n in ("latent_pages", "page_table", "seq_lens", "cu_seqlens_q")
    }
    given["plan"] = PLANS[planned](call)
    x, angle = torch.randn(3, 16, 128, dtype=BF16), torch.randn(3, 1, 64, dtype=BF16)
    got, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(x, angle, **given))
    torch.testing.assert_close(got, model(x, angle, **given), rtol=2e-2, atol=2e-2)
    ops = body(code)
    kinds = [re.search(r"cpp_fused|bmm|flashmla|searchsorted", line)[0] for line in ops]
    assert kinds.count("flashmla") == 2 and kinds.count("bmm") == 4
    # No copy of the output: what comes out of the foreign op is what the next matmul reads.
    for i, kind in enumerate(kinds):
        assert kind != "flashmla" or kinds[i + 1] == "bmm", code
    # A layer joins the parts of its query in one pass, which is the rotation's; the batch by token
    # is the plan's, or made here.
    if planned == "no plan":
        assert kinds.count("cpp_fused") <= 3 and "searchsorted" not in kinds
    else:
        assert kinds == ["bmm", "cpp_fused", "flashmla", "bmm"] * 2
    assert set(standin.CALLS) - {"dense_decode_fwd"} == (
        {"get_mla_decoding_metadata"} if planned == "schedule" else set()
    )
    assert standin.CALLS.count("get_mla_decoding_metadata") == (planned == "schedule")


def test_parts_that_the_compiler_joins_are_joined_once(monkeypatch):
    """On a GPU Inductor makes an expression of a `cat`, and a buffer of its own of each view that
    an op wants in memory."""
    call, model, apart = latents(), Layers(joined=False), []

    def spied(q_nope, q_pe):
        apart.append(q_pe is not None and not tokens.side_by_side(q_nope, q_pe))
        return tokens.whole(q_nope, q_pe)

    monkeypatch.setattr(flashmla, "whole", spied)
    given = {
        n: call.arguments[n] for n in ("latent_pages", "page_table", "seq_lens", "cu_seqlens_q")
    } | {"plan": PLANS["schedule"](call)}
    x, angle = torch.randn(3, 16, 128, dtype=BF16), torch.randn(3, 1, 64, dtype=BF16)
    with torch._inductor.config.patch(force_pointwise_cat=True):
        got = torch.compile(model, fullgraph=True)(x, angle, **given)
    assert apart == [False] * 2
    torch.testing.assert_close(got, model(x, angle, **given), rtol=2e-2, atol=2e-2)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ["flashmla", "flashmla_fp8"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_lens", [(1, 1, 1), (2, 0, 3), (1, 0, 0)])
def test_a_plan_says_the_same(name, q_lens, causal, heads):
    float8 = E4M3 if name == "flashmla_fp8" else None
    f = replace(DEEPSEEK, lse=True, q_dtype=float8, kv_dtype=float8, causal=causal, q_heads=heads)
    call = latents(q_lens, f=f, padding=2)
    calls = [
        call,
        *(call.with_(holes=False, plan=make(call, causal=causal)) for make in (rows, scheduled)),
    ]
    assert all(check_kernel(KERNELS[name], c).worst <= 1.0 for c in calls[1:])
    outs = []
    for c in calls:
        KERNELS[name].run(c.record)
        outs.append([c.arguments[n].clone() for n in ("output", "lse")])
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=0)


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize(
    ("heads", "parts", "room"),
    [(1, 132, 144), (64, 132, 144), (65, 66, 72), (128, 66, 72), (64 * 200, 1, 1)],
)
def test_where_the_schedule_lies(heads, parts, room, float8):
    call = latents((2, 0, 1), (70, 9, 130), padding=1)
    if float8 and heads > 64 * 132:
        pytest.skip("the op would make no part at all")
    plan, plain = rows(call, q_heads=heads, float8=float8), rows(call)
    words = 8 * (room + float8) + 4 + 1
    assert plan.shape[0] == plain.shape[0] + words and torch.equal(plan[words:], plain)
    lens = torch.tensor([69, 70, 130, int(float8)], dtype=torch.int32)
    tiles, splits = flashmla.split(plan[:words], 4, heads)
    assert tiles.shape == (parts, 8) and {
        x.untyped_storage().data_ptr() for x in (tiles, splits)
    } == {plan.untyped_storage().data_ptr()}
    standin.follows(lens, tiles, splits, float8)
    assert not tiles[:, 5 if float8 else 7 :].any() and not plan[8 * parts : words - 5].any(), (
        "what nobody writes is 0"
    )


def test_a_schedule_for_others_is_refused():
    call = latents()
    wide, float8 = rows(call, q_heads=128), rows(call, q_heads=16, float8=True)
    said = (
        r"^plan: got int32 \(\d+,\), want \[15\] or \[1171\]: the result of decode_rows for "
        r"this batch, .* for 16 heads"
    )
    for plan in (wide, float8, torch.zeros(7, dtype=torch.int32)):
        with pytest.raises(InvalidInput, match=said):
            KERNELS["flashmla"].run(call.with_(holes=False, plan=plan).record)
    whole = scheduled(call)
    moved = torch.zeros(whole.numel() + 1, dtype=torch.int32)[1:].copy_(whole)
    with pytest.raises(
        InvalidInput, match="to begin at a multiple of 32 bytes, as decode_rows made it"
    ):
        KERNELS["flashmla"].run(call.with_(holes=False, plan=moved).record)


def test_kernels_that_read_rows_pass_over_a_schedule():
    call = latents((2, 0, 1), (70, 9, 130), padding=1)
    want = tokens.batch_by_token(call.record)
    for plan in (rows(call), scheduled(call), rows(call, q_heads=16, float8=True)):
        got = tokens.batch_by_token(call.with_(plan=plan).record)
        assert all(map(torch.equal, got[:2], want[:2]))


def test_without_the_wheel_a_schedule_is_zeros_and_with_it_none_is_made_but_its_own():
    call = latents()
    with pretend(Target("cuda", 90, assume=())):
        assert not scheduled(call)[:-15].any()
    with pytest.raises(NoKernel, match=r"q_heads=16 \(wants 0 where flashmla is"):
        rows(call, q_heads=16, kernel="reference")
    assert torch.equal(rows(call, kernel="reference"), rows(call))
    with use("flashmla"):
        assert torch.equal(rows(call), rows(call, kernel="reference"))
    assert (
        select(
            problem_of(OPS["decode_rows"].call(*(call.arguments[n] for n in TABLES), num_tokens=3))
        ).kernel.name
        == "reference"
    )


def test_more_tokens_than_a_float8_schedule_holds_get_zeros():
    """Who plans every step plans prefills too, which other kernels attend."""
    t = latents().arguments
    found = decode_rows(
        t["page_table"], t["seq_lens"], t["cu_seqlens_q"], num_tokens=3000, q_heads=16, float8=True
    )
    assert not found[: found.shape[0] - 3000 * (1 + t["page_table"].shape[1])].any()


def test_measured_times_are_those_with_a_plan():
    """A call of no plan is taken to need as much longer as the kernel says; whoever plans on the
    host plans for the kernel chosen."""
    bare = latents().problem
    shape = altered(decoding(MLA), q_heads=16)
    times = {"flashmla": (30.0,), "reference": (90.0,)}
    table = Table(
        "x",
        "sm90",
        {f"mla_attention.{n}": "" for n in times},
        (Grid(shape, (3.0,), (1.0,), (192.0,), times),),
    )
    us = {
        kind: costs(altered(bare, plan=kind), [KERNELS[n] for n in times], table)
        for kind in ("none", "host", "device")
    }
    assert us["host"] == us["device"] and us["none"]["reference"] == us["host"]["reference"]
    more = us["none"]["flashmla"].us - us["host"]["flashmla"].us
    assert more == pytest.approx(flashmla.rows_us(bare)) and more > 10


def test_it_is_timed_with_its_plan():
    call = build(altered(decoding(MLA), q_heads=16), [1] * 3, [70] * 3, Pool("cpu"))
    found = {
        k.name: (given, plan_us) for k, given, plan_us in Stopwatch(lambda *_: 1.0).candidates(call)
    }
    given, plan_us = found["flashmla"]
    assert torch.equal(given.arguments["plan"], scheduled(call)) and plan_us is None
    before = list(standin.CALLS)
    out = runner(KERNELS["flashmla"], given)()
    assert (
        standin.CALLS[len(before) :] == ["dense_decode_fwd"]
        and out.shape == call.arguments["output"].shape
    )


def test_parts_that_only_seem_to_lie_side_by_side():
    query, other = torch.randn(3, 4, 600)[..., :576], torch.randn(3, 4, 576)
    for a, b in (
        (query[..., :512], other[..., 512:]),
        (query[..., 64:], query[..., :64]),
        (query[..., :512], query[..., 511:575]),
    ):
        assert torch.equal(tokens.whole(a, b), torch.cat([a, b], -1))
