"""Compiled models on a real GPU: the chosen kernel in the code, and CUDA graphs that follow changing batches."""

import pytest
import torch

import attnops
from attnops.lowering.choose import install
from tests.helpers import fresh_process
from tests.lowering.models import HQ, PAGE, D, Dense, PagedModel, Step, compiled_code, kernel_calls


def step(seed: int) -> Step:
    """Of four requests, whose lengths and pages follow from the seed."""
    torch.manual_seed(seed)
    table = (torch.randperm(64).reshape(4, 64 // PAGE) + 1).int()
    lengths = torch.randint(1, 60, (4,), dtype=torch.int32)
    given = (torch.randn(4, HQ * D), table, lengths, torch.ones(4, dtype=torch.int32), (lengths - 1).long())
    return Step(*(x.cuda() for x in given), longest=1)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_paged_decode_follows_changed_lengths_and_tables(mode: str) -> None:
    install()
    model = PagedModel(3).cuda().eval()
    for layer in model.layers:
        layer.k_pages, layer.v_pages = (torch.randn(80, *x.shape[1:], device="cuda") for x in (layer.k_pages, layer.v_pages))
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    with torch.no_grad():
        for seed in range(6):
            given, before = step(seed), model.pages()
            want, after = model(*given), model.pages()
            for buffer, old in zip([p for layer in model.layers for p in (layer.k_pages, layer.v_pages)], before, strict=True):
                buffer.copy_(old)
            got = compiled(*given).clone()
            for a, b in zip((got, *model.pages()), (want, *after), strict=True):
                torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_dense_training_and_inference(dtype: torch.dtype, softcap: float) -> None:
    model = Dense(softcap).cuda().to(dtype)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(2, 128, HQ * D, device="cuda", dtype=dtype, requires_grad=True)
    want, got = (torch.autograd.grad(run(x).float().square().mean(), x)[0] for run in (model, compiled))
    torch.testing.assert_close(got, want, rtol=3e-2, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=3e-2, atol=3e-2)


def test_explain_here_agrees_with_the_code() -> None:
    model, x = Dense().cuda().half().eval(), torch.randn(2, 128, HQ * D, device="cuda").half()
    with torch.no_grad():
        _, code = compiled_code(lambda: torch.compile(model)(x))
        assert list(attnops.explain(model, x, quiet=True).chosen()) == kernel_calls(code)


def test_import_leaves_cuda_and_flashinfer_alone() -> None:
    code = "import sys, torch, attnops; attnops.ops.plan_sizes; print(torch.cuda.is_initialized(), 'flashinfer' in sys.modules)"
    assert fresh_process(code).strip() == "False False"
