"""What is left of a `flashmla` call in compiled code: the foreign op, and nothing that the layout or a plan makes needless."""

import re
from dataclasses import replace

import pytest
import torch

from attnops.errors import InvalidInput
from attnops.kernel import kernels_of
from attnops.kernels import _decode, _sgl
from attnops.ops import decode_rows, mla_attention
from attnops.problem import Target, pretend
from attnops.select import select
from attnops.testing import Source, check_kernel, latent
from attnops.testing.latent import DEEPSEEK
from attnops.tune import Pool, build, shapes
from attnops.tune.timing import runner
from tests.lowering.models import compiled_code
from tests.standins import sgl_kernel_mla as standin

SM90 = Target("cuda", 90, assume=("sgl_kernel",))
KERNELS = kernels_of("mla_attention")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SCALE = 192**-0.5


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    monkeypatch.setattr(_sgl, "load", lambda op, pattern: None)
    standin.CALLS.clear()
    with pretend(SM90), torch.no_grad():
        yield


def batch(q_lens=(1, 1, 1), seq_lens=(70, 3, 130), f=DEEPSEEK, padding=0, **more):
    return latent.mla(Source(0), q_lens, seq_lens, 64, f, padding, **more)


def rows(call, causal=True):
    t = call.arguments
    return decode_rows(t["page_table"], t["seq_lens"], t["cu_seqlens_q"], num_tokens=t["q_nope"].shape[0], causal=causal)


class Layers(torch.nn.Module):
    """Two layers as DeepSeek's: W_UK before, W_UV after, the query's rotated part made by pointwise ops."""

    def __init__(self, joined):
        super().__init__()
        self.joined = joined
        self.up, self.down = (torch.nn.Parameter(torch.randn(16, *s, dtype=BF16) * 0.05) for s in ((128, 512), (512, 128)))

    def forward(self, x, angle, **batch):
        for _ in range(2):
            q_nope = torch.bmm(x.transpose(0, 1), self.up).transpose(0, 1)
            q_pe = x[..., :64] * angle
            if self.joined:
                query = torch.cat([q_nope, q_pe], -1)
                q_nope, q_pe = query[..., :512], query[..., 512:]
            out = mla_attention(q_nope, q_pe, **batch, max_seqlen_q=1, scale=SCALE, kernel="flashmla")
            x = torch.bmm(out.transpose(0, 1), self.down).transpose(0, 1)
        return x


def body(code):
    """What `call` does, a line an operation that a GPU would run."""
    lines = code[code.index("def call(") :].split("return (")[0].splitlines()
    lines = [line for line in map(str.strip, lines) if not line.startswith(("#", "assert_"))]
    return [line for line in lines if re.search(r"cpp_fused|extern_kernels|torch\.ops", line)]


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("planned", [True, False])
def test_what_is_left_in_compiled_code(joined, planned):
    call, model = batch(), Layers(joined)
    given = {n: call.arguments[n] for n in ("latent_pages", "page_table", "seq_lens", "cu_seqlens_q")}
    given |= {"plan": rows(call)} if planned else {}
    x, angle = torch.randn(3, 16, 128, dtype=BF16), torch.randn(3, 1, 64, dtype=BF16)
    got, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(x, angle, **given))
    torch.testing.assert_close(got, model(x, angle, **given), rtol=2e-2, atol=2e-2)
    ops = body(code)
    kinds = [re.search(r"cpp_fused|bmm|flashmla|searchsorted", line)[0] for line in ops]
    assert kinds.count("flashmla") == 2 and kinds.count("bmm") == 4
    # No copy of the output: what comes out of the foreign op is what the next matmul reads.
    for i, kind in enumerate(kinds):
        assert kind != "flashmla" or kinds[i + 1] == "bmm", code
    # A layer joins the parts of its query in one pass, which is the rotation's; the batch by token is the plan's, or made here.
    if planned:
        assert kinds == ["bmm", "cpp_fused", "flashmla", "bmm"] * 2
    else:
        assert kinds.count("cpp_fused") <= 5


def test_a_query_in_one_piece_is_not_copied():
    call = batch()
    query = torch.cat([call.arguments["q_nope"], call.arguments["q_pe"]], -1)
    given = {n: call.arguments[n] for n in ("latent_pages", "page_table", "seq_lens", "cu_seqlens_q")} | {"plan": rows(call)}

    def run(query):
        return mla_attention(query[..., :512], query[..., 512:], **given, max_seqlen_q=1, scale=SCALE, kernel="flashmla")

    got, code = compiled_code(lambda: torch.compile(run, fullgraph=True)(query))
    assert [line for line in body(code) if "flashmla" not in line] == []
    torch.testing.assert_close(got, run(query))


def test_dynamic_sizes():
    def run(**tensors):
        return mla_attention(**tensors, max_seqlen_q=1, scale=SCALE, kernel="flashmla") * 2

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for lens in ((70, 3, 130), (5, 64, 1, 80), (9, 3)):
        given = {n: t for n, t in batch((1,) * len(lens), lens).tensors().items() if n != "output"}
        torch.testing.assert_close(compiled(**given), run(**given))


def test_an_output_of_the_caller_is_written():
    call = batch((1, 0, 1), padding=1)
    given = {n: t for n, t in call.tensors().items() if n != "output"}
    flat = torch.full((3, 2, 16, 512), float("nan"), dtype=BF16)

    def run(flat, lse):
        mla_attention(**given, max_seqlen_q=1, scale=SCALE, kernel="flashmla", output=flat[:, 1], lse=lse)

    lse = torch.empty(3, 16)
    torch.compile(run, fullgraph=True)(flat, lse)
    want, z = torch.empty(3, 16, 512, dtype=BF16), torch.empty(3, 16)
    mla_attention(**given, max_seqlen_q=1, scale=SCALE, kernel="flashmla", output=want, lse=z)
    assert flat[:, 0].isnan().all() and (lse[2] == float("-inf")).all()
    torch.testing.assert_close((flat[:, 1], lse), (want, z))


@pytest.mark.parametrize("name", ["flashmla", "flashmla_fp8"])
@pytest.mark.parametrize("q_lens", [(1, 1, 1), (2, 0, 3), (1, 0, 0)])
def test_a_plan_says_the_same(name, q_lens):
    f = replace(DEEPSEEK, lse=True, kv_dtype=E4M3 if name == "flashmla_fp8" else None)
    call = batch(q_lens, f=f, padding=2, q_dtype=E4M3 if name == "flashmla_fp8" else None)
    planned = call.with_(plan=rows(call))
    assert check_kernel(KERNELS[name], planned).worst <= 1.0
    outs = []
    for c in (call, planned):
        KERNELS[name].run(*c.args, **c.kwargs)
        outs.append([c.arguments[n].clone() for n in ("output", "lse")])
    torch.testing.assert_close(*outs, rtol=0, atol=0)


def test_another_batchs_plan_is_refused():
    call = batch().with_(plan=torch.zeros(7, dtype=torch.int32))
    with pytest.raises(InvalidInput, match=r"^plan: got int32 \(7,\), want \[15\]: what decode_rows returned for this batch"):
        KERNELS["flashmla"].run(*call.args, **call.kwargs)


def test_a_plan_makes_it_cheaper():
    call = batch()
    assert KERNELS["flashmla"].cost_us(call.with_(plan=rows(call)).problem) < KERNELS["flashmla"].cost_us(call.problem)
    assert select(call.with_(plan=rows(call)).problem).kernel.name == "flashmla"


def test_parts_that_lie_side_by_side():
    query = torch.randn(3, 4, 600)[..., :576]
    assert _decode.side_by_side(query[..., :512], query[..., 512:])
    assert _decode.whole(query[..., :512], query[..., 512:]).data_ptr() == query.data_ptr()
    other = torch.randn(3, 4, 576)
    for a, b in ((query[..., :512], other[..., 512:]), (query[..., 64:], query[..., :64]), (query[..., :512], query[..., 511:575])):
        assert not _decode.side_by_side(a, b)
        torch.testing.assert_close(_decode.whole(a, b), torch.cat([a, b], -1))


def test_tune_times_it_compiled_with_its_bound_known():
    """A bound on the queries that became symbolic would be refused, for the rows of a token are its own."""
    shape = replace(shapes.MLA, q_heads=16, decode=True)
    for requests in (1, 3):
        call = build(shape, [1] * requests, [70] * requests, Pool("cpu"))
        runner(KERNELS["flashmla"], call)()
    assert len(standin.CALLS) == 2
