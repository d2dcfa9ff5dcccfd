"""`fa3` through a stand-in of the op it wraps: layouts, lse, padding, refusals, and the code that a compiled model gets."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import attnops
from attnops.kernel import kernels_of
from attnops.kernels import _fa3, _sgl
from attnops.ops import OPS
from attnops.problem import Extent, Problem, Target, pretend
from attnops.select import Policy, select
from attnops.testing import CASES, Features, Source, builders, check_kernel
from tests.lowering.models import PagedModel, compiled_code, decode, kernel_calls, prefill
from tests.standins.sgl_kernel_fa3 import SCHEMA, SCHEMA_37, installed

ATTENTION = ("attention", "varlen_attention", "paged_attention")
SM90 = Target("cuda", 90, assume=("sgl_kernel",))
BF16, F16 = torch.bfloat16, torch.float16
WIDE = (torch.float32, torch.float64)


@pytest.fixture
def standin():
    if find_spec("sgl_kernel"):
        pytest.skip("sgl_kernel is installed, and a stand-in under its name would hide it")
    with installed() as calls, pretend(SM90):
        yield calls


def fa3(op):
    return kernels_of(op)["fa3"]


def test_the_schema_is_the_wheels_as_read(standin):
    schema = torch.ops.sgl_kernel.fwd.default._schema
    assert str(schema) == str(torch._C.parse_schema(f"sgl_kernel::{SCHEMA}"))
    assert len(schema.arguments) == 35 and [a.name for a in schema.arguments if a.alias_info is not None] == ["out"]


def half(call, dtype=BF16):
    """The same call in `dtype`, sinks and masks too; lse and scales are float32 in every call."""
    return call.map(lambda n, t: t.to(dtype) if n not in ("lse", "k_scale", "v_scale") and t.dtype in WIDE else t)


GRID = [pytest.param(case, id=str(case)) for op in ATTENTION for case in CASES[op]]


@pytest.mark.parametrize("change", [lambda c: c, half], ids=["as_is", "bfloat16"])
@pytest.mark.parametrize("case", GRID)
def test_grid(standin, case, change):
    figures = check_kernel(fa3(case.op), change(case.call()))
    if figures.refused:
        pytest.skip(str(figures))
    assert figures.worst <= 1.0, figures


def test_most_of_the_grid_is_taken(standin):
    for op in ATTENTION:
        calls = [half(c.call()) for c in CASES[op] if "mask" not in c.label and "8" not in c.label]
        refused = [str(r) for c in calls for r in fa3(op).refusals(c.problem)]
        assert len(refused) <= len(calls) // 4, refused


@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])
def test_stale_pages_and_long_extends(standin, page_size):
    f = Features(dtype=BF16, head_dim=128, q_heads=8, kv_heads=1, causal=True, lse=True)
    call = builders.paged(Source(1), (130, 1, 40), (300, 129, 40), page_size, f)
    assert check_kernel(fa3("paged_attention"), call).worst <= 1.0


@pytest.mark.parametrize("op", ATTENTION)
def test_blind_queries_have_the_sinks_lse(standin, op):
    f = Features(dtype=BF16, causal=True, sinks=BF16, lse=True)
    source = Source(2)
    call = {
        "attention": lambda: builders.dense(source, 2, 7, 4, f),
        "varlen_attention": lambda: builders.varlen(source, (5, 3, 2), (2, 0, 4), f),
        "paged_attention": lambda: builders.paged(source, (3, 1), (3, 0), 4, f),
    }[op]()
    assert check_kernel(fa3(op), call).worst <= 1.0
    assert standin


@pytest.mark.parametrize("given", [torch.float32, F16])
def test_wider_sinks_are_rounded_unless_lse_is_asked_for(standin, given):
    f = Features(dtype=BF16, causal=True, sinks=given)
    assert check_kernel(fa3("attention"), builders.dense(Source(3), 2, 5, 9, f)).worst <= 1.0
    figures = check_kernel(fa3("attention"), builders.dense(Source(3), 2, 5, 9, replace(f, lse=True)))
    assert [r.field for r in figures.refused] == ["sinks_dtype"]


def test_the_output_is_written_in_place_and_other_layouts_are_taken(standin):
    call = builders.paged(Source(4), (1, 3), (9, 3), 4, Features(dtype=BF16, causal=True))
    check_kernel(fa3("paged_attention"), call)
    assert standin[-1]["out"] is not None and standin[-1]["max_seqlen_k"] is None
    odd = call.with_(
        output=torch.empty(call.arguments["output"].transpose(1, 2).shape, dtype=BF16).transpose(1, 2),
        page_table=call.arguments["page_table"].t().contiguous().t(),
        seq_lens=call.arguments["seq_lens"].repeat_interleave(2)[::2],
    )
    assert check_kernel(fa3("paged_attention"), odd).worst <= 1.0


def test_one_split_under_a_deterministic_policy(standin):
    call = builders.paged(Source(5), (1, 1), (9, 30), 4, Features(dtype=BF16, causal=True), padding=0)
    for policy, splits in (("", 0), ("deterministic", 1), ("kernel=fa3;deterministic", 1), ("prefer=fa3", 0)):
        fa3("paged_attention").run(*call.args, **call.kwargs, policy=policy)
        assert standin[-1]["num_splits"] == splits
    assert select(call.problem, Policy(deterministic=True)).kernel.name == "fa3"


def test_the_longer_schema_gets_its_two_arguments():
    if find_spec("sgl_kernel"):
        pytest.skip("sgl_kernel is installed, and a stand-in under its name would hide it")
    case = builders.varlen(Source(6), (3, 1), (5, 4), Features(dtype=F16, causal=True))
    with installed(SCHEMA_37) as calls, pretend(SM90):
        assert check_kernel(fa3("varlen_attention"), case).worst <= 1.0
        assert calls[-1]["sparse_mask_fine"] is None and calls[-1]["only_qv"] is False
    strange = SCHEMA.replace(", Tensor? sinks)", ")")
    with installed(strange), pretend(SM90), pytest.raises(RuntimeError, match="got 34 arguments, want 35"):
        check_kernel(fa3("varlen_attention"), case)


@pytest.mark.parametrize("op", ATTENTION)
def test_opcheck(standin, op):
    done = 0
    for label in ("bfloat16_lse", "float16_d128", "bfloat16_d64_window_sinks"):
        call = next(c for c in CASES[op] if c.label == label).call()
        checked = torch.library.opcheck(OPS[op].packet.fa3, call.args, call.kwargs)
        assert set(checked.values()) == {"SUCCESS"}
        done += 1
    assert done == 3 and standin


@pytest.mark.parametrize("step", [prefill, decode], ids=["prefill", "decode"])
def test_a_compiled_model_calls_it(standin, step):
    model, given = PagedModel(2).to(BF16).eval(), step()
    given = given._replace(x=given.x.to(BF16))
    with torch.no_grad():
        want, pages = model(*given), model.pages()
        model.clear()
        got, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(*given))
    assert kernel_calls(code) == ["paged_attention.fa3"] * 2
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    for after, before in zip(model.pages(), pages, strict=True):
        torch.testing.assert_close(after, before, rtol=2e-2, atol=2e-2)


LLAMA = Problem(
    "paged_attention", SM90, BF16, BF16, 32, 8, 128, 128, page_size=16, causal=True,
    tokens=Extent.of(8), batch=Extent.of(8), queries=Extent.of(1), context=Extent.of(4096),
)  # fmt: skip


def test_explain_names_it():
    def dense(tokens, keys):
        q, k = torch.empty(1, tokens, 32, 128, dtype=BF16), torch.empty(1, keys, 8, 128, dtype=BF16)
        return attnops.explain(lambda: attnops.attention(q, k, k, causal=True), target="sm90", assume=("sgl_kernel",), quiet=True)

    assert dense(512, 512).chosen() == dense(1, 4096).chosen() == ("attention.fa3",)
    many = Extent.of(2048)
    for problem in (LLAMA, replace(LLAMA, tokens=many, queries=many, batch=Extent.of(1))):
        assert select(problem).kernel.name == "fa3"
        absent = replace(problem, target=Target("cuda", 90, assume=()))
        assert "sgl_kernel missing" in str(select(absent).refused["fa3"][0])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"target": Target("cuda", 100, ("sgl_kernel",))}, "target"),
        ({"target": Target("cpu", 0, ("sgl_kernel",))}, "target"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "dtype"),
        ({"kv_dtype": torch.float8_e4m3fn, "kv_scales": True}, "kv_dtype"),
        ({"head_dim": 100, "v_head_dim": 100}, "head_dim"),
        ({"head_dim": 512, "v_head_dim": 512}, "head_dim"),
        ({"v_head_dim": 64}, "v_head_dim"),
        ({"target": Target("cuda", 80, ("sgl_kernel",)), "head_dim": 192}, "v_head_dim"),
        ({"mask": "bool"}, "mask"),
        ({"last_dim_contiguous": False}, "last_dim_contiguous"),
        ({"dtype": F16, "kv_dtype": F16, "sinks": True, "sinks_dtype": BF16}, "dtype"),
    ],
)
def test_refusals(change, field):
    assert field in [r.field for r in fa3("paged_attention").refusals(replace(LLAMA, **change))]


@pytest.mark.parametrize("change", [{"head_dim": 192}, {"head_dim": 64, "v_head_dim": 512}, {"page_size": 1}, {"q_heads": 24}])
def test_taken(change):
    assert not fa3("paged_attention").refusals(replace(LLAMA, **change))


def test_a_package_without_the_library_is_named(monkeypatch):
    monkeypatch.setattr(_sgl, "library", lambda pattern: None)
    assert _fa3.missing(SM90) is None, "what is assumed is not looked for"
    assert "without flash_ops.abi3.so" in str(_fa3.missing(Target("cuda", 90)))


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("sgl_kernel") is None, reason="sgl_kernel is not installed, so its schema cannot be compared")
def test_the_stand_in_has_the_wheels_schema():
    fwd, tail = _fa3.raw_op()
    with_tail = SCHEMA_37 if tail else SCHEMA
    assert str(fwd._schema) == str(torch._C.parse_schema(f"sgl_kernel::{with_tail}"))
