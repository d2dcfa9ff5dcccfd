"""The chosen kernel stands in the generated code, once a call, with no copy of the pages and with the metadata made once."""

import re
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import attnops
from attnops.ops import request_starts, varlen_attention
from tests.lowering.models import HQ, D, Dense, PagedModel, compiled_code, decode, kernel_calls, prefill


@pytest.mark.sweep(2)
@pytest.mark.parametrize("step", [prefill, decode], ids=["prefill", "decode"])
def test_paged_model_equals_eager_and_names_its_kernels(step):
    model, given = PagedModel().eval(), step()
    with torch.no_grad():
        want = model(*given)
        pages = model.pages()
        model.clear()
        got, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(*given))
    torch.testing.assert_close(got, want)
    for after, before in zip(model.pages(), pages, strict=True):
        torch.testing.assert_close(after, before)
    assert_expected_inline("\n".join(kernel_calls(code)), "paged_attention.sdpa\npaged_attention.sdpa\npaged_attention.sdpa")


def test_no_page_buffer_is_copied_and_metadata_are_made_once():
    model = PagedModel().eval()
    given = prefill()
    with torch.no_grad():
        _, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(*given))
    pages = tuple(model.layers[0].k_pages.shape)
    allocated = [m for m in re.findall(r"empty_strided\w*\(\(([\d, ]+)\)", code) if tuple(map(int, re.findall(r"\d+", m))) == pages]
    assert not allocated, "a buffer of the pages' size is allocated"
    assert not re.search(r"cpp_fused\w*(copy|clone)", code), re.findall(r"cpp_fused\w+", code)
    # Three layers, one set of metadata: each name shows in the fused kernels' definitions of one place only.
    defined = set(re.findall(r"^(cpp_fused\w+) =", code, re.M))
    assert sum("cu_seqlens" in name for name in defined) == 1
    assert sum("slot_mapping" in name for name in defined) == 1


def test_equal_calls_whose_size_the_data_decide_stay_two():
    """Each has a size of its own in the graph."""

    def model(x, begins):
        both = request_starts(begins), request_starts(begins)
        return sum(varlen_attention(n * x, x, x, s, s, max_seqlen_q=6, max_seqlen_k=6, causal=True) for n, s in enumerate(both))

    x, begins = torch.randn(6, 2, 8), torch.tensor([[True, False, False, True, False, True]])
    got, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(x, begins))
    torch.testing.assert_close(got, model(x, begins))
    assert sum(call.startswith("request_starts") for call in kernel_calls(code)) == 2


def test_the_graph_before_lowering_says_the_op_not_the_kernel():
    seen = []

    def backend(gm, inputs):
        seen.append([str(n.target) for n in gm.graph.nodes if "attnops" in str(n.target)])
        return gm.forward

    model, given = PagedModel(2).eval(), decode()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*given)
    assert_expected_inline(
        "\n".join(seen[0]),
        """\
attnops.cu_seqlens.default
attnops.token_rows.default
attnops.slot_mapping.default
attnops.write_kv.default
attnops.named_pages.default
attnops.paged_attention.default
attnops.write_kv.default
attnops.named_pages.default
attnops.paged_attention.default""",
    )


@pytest.mark.parametrize("softcap, kernel", [(0.0, "sdpa"), (5.0, "reference")])
def test_the_choice_follows_the_problem(softcap, kernel):
    model, x = Dense(softcap).eval(), torch.randn(2, 8, HQ * D)
    with torch.no_grad():
        got, code = compiled_code(lambda: torch.compile(model, fullgraph=True)(x))
        torch.testing.assert_close(got, model(x))
    assert kernel_calls(code) == [f"attention.{kernel}"]


def test_a_region_forces_the_kernel_and_its_end_is_noticed():
    model, x = Dense().eval(), torch.randn(2, 8, HQ * D)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        with attnops.use(kernel="reference"):
            _, code = compiled_code(lambda: compiled(x))
        assert kernel_calls(code) == ["attention.reference"]
        _, code = compiled_code(lambda: compiled(x))
        assert kernel_calls(code) == ["attention.sdpa"]


def test_an_impossible_forced_kernel_fails_to_compile_with_every_reason():
    def call(q):
        return attnops.attention(q, q, q, softcap=2.0, sinks=q[0, 0, :, 0], kernel="sdpa")

    with pytest.raises(Exception) as caught:
        torch.compile(call)(torch.randn(1, 4, 2, 8))
    text = str(caught.value)
    assert "softcap=True (wants no)" in text and "sinks=True (wants no)" in text and "NoKernel" in text


def test_only_lowering_knows_inductor():
    root = Path(attnops.__file__).parent
    knows = [str(f.relative_to(root)) for f in root.rglob("*.py") if "torch._inductor" in f.read_text() and f.parts[-2] != "lowering"]
    assert all(name.startswith(("lowering", "graphs", "cli", "hf", "bench", "tune")) for name in knows), knows
