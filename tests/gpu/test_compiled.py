"""On a real GPU: what `explain` says is what a compiled model runs, and an import does not touch
the device."""

import torch

import attnops
from tests.helpers import fresh_process
from tests.lowering.models import HQ, D, Dense, compiled_code, kernel_calls


def test_explain_here_agrees_with_the_code() -> None:
    model, x = Dense().cuda().half().eval(), torch.randn(2, 128, HQ * D, device="cuda").half()
    with torch.no_grad():
        _, code = compiled_code(lambda: torch.compile(model)(x))
        assert list(attnops.explain(model, x, quiet=True).chosen()) == kernel_calls(code)


def test_import_leaves_cuda_and_flashinfer_alone() -> None:
    code = (
        "import sys, torch, attnops; attnops.ops.plan_sizes; "
        "print(torch.cuda.is_initialized(), 'flashinfer' in sys.modules)"
    )
    assert fresh_process(code).strip() == "False False"
