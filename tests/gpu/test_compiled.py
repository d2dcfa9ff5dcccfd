"""Compiled models on a real GPU: gradients, and the chosen kernel in the code."""

import pytest
import torch

import attnops
from tests.helpers import fresh_process
from tests.lowering.models import HQ, D, Dense, compiled_code, kernel_calls


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
