"""The chosen kernel stands in the generated code, once a call, with no copy of the pages and with
the metadata made once."""

import re

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.codegen.common import custom_backend_passes
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.lowering import lowerings

import attnops
from attnops.core.errors import InvalidInput
from attnops.lowering.choose import install
from attnops.ops import request_starts, varlen_attention
from tests.helpers import torch_process
from tests.lowering.models import (
    HQ,
    D,
    Dense,
    PagedModel,
    Passing,
    code_of,
    compiled_code,
    decode,
    kernel_calls,
    prefill,
)


@pytest.mark.parametrize("step", [prefill, decode])
def test_a_paged_model(step):
    """As eager, with its kernels by name, with no copy of the pages and with the metadata made once
    for all layers."""
    model, given = PagedModel().eval(), step()
    model(*given)
    pages = model.pages()
    model.clear()
    code = code_of(model, *given)
    torch.testing.assert_close(model.pages(), pages)
    assert kernel_calls(code) == ["paged_attention.sdpa"] * 3
    shape = ", ".join(map(str, pages[0].shape))
    assert not re.search(rf"empty_strided\w*\(\(({shape})", code), (
        "a buffer of the pages' size is allocated"
    )
    assert not re.search(r"cpp_fused\w*(copy|clone)", code), re.findall(r"cpp_fused\w+", code)
    # Each name shows in the fused kernels' definitions of one place only.
    defined = set(re.findall(r"^(cpp_fused\w+) =", code, re.M))
    assert [sum(name in each for each in defined) for name in ("cu_seqlens", "slot_mapping")] == [
        1,
        1,
    ]


def test_equal_calls_whose_size_the_data_decide_stay_two():
    """Each has a size of its own in the graph."""

    def model(x, begins):
        both = request_starts(begins), request_starts(begins)
        return sum(
            varlen_attention(n * x, x, x, s, s, max_seqlen_q=6, max_seqlen_k=6, causal=True)
            for n, s in enumerate(both)
        )

    x, begins = torch.randn(6, 2, 8), torch.tensor([[True, False, False, True, False, True]])
    calls = kernel_calls(code_of(model, x, begins))
    assert sum(call.startswith("request_starts") for call in calls) == 2


@pytest.mark.parametrize(
    ("softcap", "mode", "kernel"),
    [
        (0.0, "default", "sdpa"),
        (5.0, "default", "reference"),
        (0.0, "reduce-overhead", "sdpa"),
        (0.0, "max-autotune", "sdpa"),
    ],
)
def test_the_choice_follows_the_problem(softcap, mode, kernel):
    code = code_of(Dense(softcap).eval(), torch.randn(2, 8, HQ * D), mode=mode)
    assert kernel_calls(code) == [f"attention.{kernel}"]


def test_a_region_forces_the_kernel_and_its_end_is_noticed():
    model, x, found = Dense().eval(), torch.randn(2, 8, HQ * D), []
    compiled = torch.compile(model, fullgraph=True)
    for policy in ({"kernel": "reference"}, {}):
        with attnops.use(**policy):
            found += kernel_calls(compiled_code(lambda: compiled(x))[1])
    assert found == ["attention.reference", "attention.sdpa"]


def test_an_impossible_forced_kernel_fails_to_compile_with_every_reason():
    def call(q):
        return attnops.attention(q, q, q, softcap=2.0, sinks=q[0, 0, :, 0], kernel="sdpa")

    with pytest.raises(
        Exception, match=r"(?s)NoKernel.*softcap=True \(wants no\).*sinks=True \(wants no\)"
    ):
        torch.compile(call)(torch.randn(1, 4, 2, 8))


def test_identical_layers_give_one_piece_and_others_their_own():
    pieces, model, given = Passing(lambda gm: None), PagedModel(8).eval(), decode()
    want = model(*given)
    model.clear()
    names = attnops.compile_layers(model, backend=pieces, fullgraph=True)
    torch.testing.assert_close(model(*given), want)
    model.clear()
    model(*prefill())
    assert list(names) == [f"layers.{i}" for i in range(8)] and len(pieces.graphs) <= 5
    pieces, layers = Passing(lambda gm: None), nn.ModuleList([Dense(0.0), Dense(0.0), Dense(3.0)])
    attnops.compile_layers(nn.ModuleDict({"layers": layers}), backend=pieces)
    for layer in layers:
        layer(torch.randn(2, 8, HQ * D))
    assert len(pieces.graphs) == 2
    with pytest.raises(
        InvalidInput, match=r"model: got Linear, want a module with an nn.ModuleList"
    ):
        attnops.compile_layers(nn.Linear(2, 2))


class CountPass(CustomGraphPass):
    def __init__(self):
        self.seen: list[int] = []

    def __call__(self, graph):
        self.seen.append(sum("attnops" in str(n.target) for n in graph.nodes))

    def uuid(self):
        return "a user's pass"


def test_passes_and_lowerings_of_a_user_stay():
    """A pass of a user runs in every slot, and ours are registered once."""
    model, x, before, after = Dense().eval(), torch.randn(2, 8, HQ * D), CountPass(), CountPass()
    with inductor.patch(
        post_grad_custom_pre_pass=before,
        post_grad_custom_post_pass=after,
        force_disable_caches=True,
    ):
        torch.compile(model, fullgraph=True)(x)
    assert before.seen == after.seen == [1]
    known = dict(lowerings)
    install()
    assert lowerings == known and list(custom_backend_passes).count("attnops") == 1


def test_eager_calls_do_not_load_the_compiler():
    out = torch_process(
        "import sys, torch, attnops\n"
        "q = torch.randn(1, 3, 2, 8)\n"
        "attnops.attention(q, q, q)\n"
        "print([m for m in sys.modules if m.startswith(('torch._inductor', 'torch._dynamo', "
        "'attnops.lowering'))])"
    )
    assert out.strip() == "[]"
