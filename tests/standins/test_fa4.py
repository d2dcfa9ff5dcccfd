"""`fa4` through a stand-in of the function it wraps: layouts, lse, padding, refusals, warming, and the code of a compiled model."""

import inspect
import sys
from dataclasses import replace

import pytest
import torch

import attnops
from attnops.core.errors import NotCompiled
from attnops.core.kernel import Package, kernels_of
from attnops.core.needs import _installed
from attnops.core.problem import Target, altered, pretend
from attnops.core.record import changed
from attnops.core.select import select
from attnops.kernels.flash_attn4 import fa4 as kernel
from attnops.kernels.flash_attn4.fa4 import tile as tile_of
from attnops.testing import CASES, Features, Mismatch, Source, check_kernel, make_call
from tests.helpers import torch_process
from tests.lowering.models import PagedModel, compiled_code, decode, kernel_calls
from tests.mates import POLICY
from tests.standins import flash_attn_cute, test_fa3
from tests.standins.flash_attn_cute import PARAMETERS, installed
from tests.standins.test_fa3 import ATTENTION, blind
from tests.standins.vendors import VENDORS

NAME = "fa4"
SM90, SM100 = (VENDORS[NAME].on(arch) for arch in (90, 100))
BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def fa4(op):
    return kernels_of(op)["fa4"]


NOT_ON_SM100 = {
    "float8_query_int8": "kv_dtype",
    "float8_query_d40": "head_dim",
    "float8_query_mask": "mask",
}
"""Cases of a float8 query that the kernel refuses, and the field of its reason."""


@pytest.mark.parametrize("case", [c for op in ATTENTION for c in CASES[op] if "float8_query" in c.label], ids=str)
def test_float8_on_sm100(case):
    with installed(100) as calls, pretend(SM100):
        figures = check_kernel(fa4(case.op), case.call())
        assert figures.refused or (figures.worst <= 1.0 and calls[-1]["q_descale"].is_contiguous())
        field = NOT_ON_SM100.get(case.label)
        assert field in {r.field for r in figures.refused} if field else not figures.refused


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_stale_pages_and_long_extends(standin, page_size):
    f = Features(dtype=BF16, head_dim=128, q_heads=8, kv_heads=1, causal=True, lse=True)
    call = make_call("paged_attention", Source(1), (130, 1, 40), (300, 129, 40), page_size, f)
    assert check_kernel(fa4("paged_attention"), call).worst <= 1.0


def test_a_page_that_is_a_tile_is_refused_for_a_reason(standin):
    f = Features(dtype=BF16, head_dim=128, causal=True)
    call = make_call("paged_attention", Source(1), (1, 1), (300, 129), 128, f)
    assert [str(r) for r in fa4("paged_attention").refusals(call.problem)] == ["page_size=128 (wants not 128, a tile)"]
    with pytest.raises(Mismatch, match="got nan"):
        check_kernel(replace(fa4("paged_attention"), needs=()), call)


@pytest.mark.parametrize(
    ("change", "tile"),
    [
        ({}, 128), ({"head_dim": 64}, 128), ({"head_dim": 96}, 128), ({"head_dim": 96, "causal": False}, 144),
        ({"head_dim": 192, "v_head_dim": 128}, 128), ({"head_dim": 192, "v_head_dim": 192}, 112), ({"head_dim": 256}, 80),
        ({"head_dim": 192, "window": (100, -1)}, 96), ({"head_dim": 256, "window": (100, -1)}, 64),
        ({"target": SM100, "head_dim": 256}, 128),
    ],
)  # fmt: skip
def test_tiles(change, tile):
    assert tile_of(altered(LLAMA, **change)) == tile


@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize("sinks", [torch.float32, torch.float64, BF16])
def test_blind_queries_have_the_sinks_lse(standin, op, sinks):
    f = Features(dtype=BF16, causal=True, sinks=sinks, lse=True)
    assert check_kernel(fa4(op), blind(op, f)).worst <= 1.0
    assert standin


def test_arguments_are_as_it_wants_them(standin):
    f = Features(dtype=BF16, causal=False, window=(3, -1))
    check_kernel(fa4("attention"), make_call("attention", Source(3), 2, 5, 9, f))
    last = standin[-1]
    assert (last["window_size_left"], last["window_size_right"], last["softcap"], last["lse"]) == (3, None, None, None)
    assert last["num_splits"] == 1 and set(last) - {"q", "k", "v"} <= set(PARAMETERS)


def test_the_output_is_written_in_place(standin):
    call = make_call("paged_attention", Source(4), (1, 3), (9, 3), 4, Features(dtype=BF16, causal=True))
    fa4("paged_attention").run(call.record)
    assert standin[-1]["out"] is call.arguments["output"]


def test_training_gives_it_plain_tensors(standin):
    q, k, v = (torch.randn(1, 5, 2, 16, dtype=BF16).requires_grad_() for _ in range(3))
    sinks = torch.zeros(2, dtype=BF16).requires_grad_()
    # The kernel that this target would choose for the gradient does not run on a CPU.
    with attnops.use(kernel={"attention": "fa4", "attention_backward": "reference"}):
        out = attnops.attention(q, k, v, causal=True, sinks=sinks)
    out.float().sum().backward()
    assert q.grad is not None and standin[-1]["lse"] is not None and not standin[-1]["learnable_sink"].requires_grad


@pytest.mark.full
def test_a_compiled_model_calls_it(standin):
    model, given = PagedModel(2).to(BF16).eval(), decode()
    given = given._replace(x=given.x.to(BF16))
    with torch.no_grad(), attnops.use(kernel={"paged_attention": "fa4"}):
        want = model(*given)
        model.clear()
        got, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(*given))
    assert kernel_calls(code) == ["paged_attention.fa4"] * 2
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


# Warming --------------------------------------------------------------------------------------------------------------


class Capturing:
    """As if the tensors lay on a GPU whose stream is captured; switched on by hand."""

    def __init__(self, monkeypatch):
        self.on = False
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.on)


def test_a_new_kind_is_refused_in_a_capture(standin, monkeypatch):
    capture = Capturing(monkeypatch)
    kernel._kinds().clear()
    f = Features(dtype=BF16, causal=True)

    def run(page=16, f=f, lens=(9, 30), q_lens=(1, 1)):
        call = make_call("paged_attention", Source(5), q_lens, lens, page, f, padding=0)
        fa4("paged_attention").run(call.record)

    capture.on = True
    with pytest.raises(NotCompiled, match=r"fa4: got a kind of call not yet compiled .* want one such call before"):
        run()
    assert not standin
    capture.on = False
    run()
    capture.on = True
    run(lens=(50, 2))  # other lengths are no other kind
    run(f=replace(f, scale=0.3))
    for other in (
        {"page": 64}, {"f": replace(f, dtype=F16)}, {"f": replace(f, softcap=1.0)}, {"f": replace(f, lse=True)}, {"q_lens": (90, 1)},
        {"f": replace(f, sinks=BF16)}, {"f": replace(f, window=(3, -1))}, {"f": replace(f, head_dim=32)}, {"f": replace(f, kv_heads=4)},
    ):  # fmt: skip
        with pytest.raises(NotCompiled):
            run(**{"lens": (90, 2), **other})


def test_one_kernel_takes_short_and_long_requests_under_a_deterministic_policy(standin):
    kernel._kinds().clear()
    for lengths in ((1, 3), (9, 30), (9, 140), (300, 1)):
        call = make_call("varlen_attention", Source(5), lengths, lengths, Features(dtype=BF16, causal=True), padding=None)
        fa4(call.op).run(changed(call.record, policy=POLICY))
    assert len(kernel._kinds()) == 1
    assert {call["max_seqlen_q"] for call in standin} == {257, 300}
    assert {call["num_splits"] for call in standin} == {1}


# The choice -----------------------------------------------------------------------------------------------------------

LLAMA = replace(test_fa3.LLAMA, target=SM90)


def test_it_is_chosen_where_fa3_is_not_there_and_not_before_it():
    both = replace(LLAMA, target=Target("cuda", 90, (*SM90.assume, "sgl_kernel")))
    assert select(both).kernel.name == "fa3" and "fa4" in select(both).passed_over
    assert select(LLAMA).kernel.name == "fa4"
    assert "flash_attn.cute missing" in str(select(replace(LLAMA, target=Target("cuda", 90, ()))).refused["fa4"][0])


def test_a_finder_that_knows_no_specs_hides_no_package(monkeypatch):
    _installed.cache_clear()
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert _installed("this") and not _installed("that_is_nowhere")


def test_a_submodule_is_looked_for_without_importing_its_parent(tmp_path):
    package = tmp_path / "flash_attn"
    (package / "cute").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemError('imported')")
    (package / "cute" / "__init__.py").write_text("")
    modules = ["flash_attn.cute", "flash_attn.cutie", "torch.nn", "flash_x.y"]
    code = f"from attnops.core.needs import _installed; print(*map(_installed, {modules}))"
    path = f"{tmp_path}:{':'.join(filter(None, sys.path))}"
    assert torch_process(code, env={"PYTHONPATH": path}).split() == ["True", "False", "True", "False"]


@pytest.mark.parametrize(("version", "old"), [("4.0.0b36", False), ("4.0.0b19", True), ("4.0.0", False), ("4.1.2", False)])
def test_betas_before_the_one_that_was_read_are_refused(monkeypatch, version, old):
    monkeypatch.setattr(Package, "version", lambda self: version)
    monkeypatch.setattr("attnops.core.needs._installed", lambda module: True)
    assert bool(kernel.PACKAGES[0].missing(Target("cuda", 90))) == old
    assert kernel.PACKAGES[0].missing(SM90) is None


def test_what_is_used_is_in_the_signature():
    assert set(kernel.USED) <= set(PARAMETERS)


@pytest.mark.gpu
@pytest.mark.skipif(not _installed("flash_attn.cute"), reason="flash-attn-4 is not installed, so its signature cannot be compared")
def test_the_stand_in_has_the_packages_signature():
    real = inspect.signature(kernel.interface())
    assert list(real.parameters) == list(PARAMETERS)
    mine = inspect.signature(flash_attn_cute._flash_attn_fwd)
    assert {n: p.default for n, p in real.parameters.items()} == {n: p.default for n, p in mine.parameters.items()}
