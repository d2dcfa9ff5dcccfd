"""Compiled models on a real GPU: the chosen kernel in the code, and CUDA graphs that follow changing batches."""

from typing import Any

import pytest
import torch

from tests.lowering.models import HQ, PAGE, D, Dense, PagedModel, Step, compiled_code, kernel_calls


def step(batch: int, length: int, seed: int) -> Step:
    torch.manual_seed(seed)
    pages = -(-64 // PAGE)
    table = (torch.randperm(batch * pages)[: batch * pages].reshape(batch, pages) + 1).to(torch.int32)
    lengths = torch.randint(1, length, (batch,), dtype=torch.int32)
    return Step(
        torch.randn(batch, HQ * D, device="cuda"), table.cuda(), lengths.cuda(), torch.ones(batch, dtype=torch.int32).cuda(),
        (lengths - 1).long().cuda(), 1,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_paged_decode_follows_changed_lengths_and_tables(mode: str, found: dict[str, Any]) -> None:
    from attnops.lowering.choose import install

    install()
    model = PagedModel(3).cuda().eval()
    for layer in model.layers:
        layer.k_pages = torch.randn(80, *layer.k_pages.shape[1:], device="cuda")
        layer.v_pages = torch.randn(80, *layer.v_pages.shape[1:], device="cuda")
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    with torch.no_grad():
        for seed in range(6):
            given = step(4, 60, seed)
            before = model.pages()
            want, after = model(*given), model.pages()
            for buffer, old in zip([p for layer in model.layers for p in (layer.k_pages, layer.v_pages)], before, strict=True):
                buffer.copy_(old)
            got = compiled(*given).clone()
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
            for a, b in zip(model.pages(), after, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
    found.setdefault("compiled", {})[f"paged_decode_{mode}"] = "equal over 6 batches"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_dense_training_and_inference(dtype: torch.dtype, softcap: float, found: dict[str, Any]) -> None:
    model = Dense(softcap).cuda().to(dtype)
    x = torch.randn(2, 128, HQ * D, device="cuda", dtype=dtype, requires_grad=True)
    (want,) = torch.autograd.grad(model(x).float().square().mean(), x)
    compiled = torch.compile(model, fullgraph=True)
    grads = []
    _, code = compiled_code(lambda: grads.append(torch.autograd.grad(compiled(x).float().square().mean(), x)[0]))
    torch.testing.assert_close(grads[0], want, rtol=3e-2, atol=1e-4)
    with torch.no_grad():
        y, inference = compiled_code(lambda: torch.compile(model, fullgraph=True)(x))
        torch.testing.assert_close(y, model(x), rtol=3e-2, atol=3e-2)
    found.setdefault("compiled", {})[f"dense_{str(dtype)[6:]}_softcap_{softcap}"] = {
        "training": kernel_calls(code), "inference": kernel_calls(inference)
    }  # fmt: skip


def test_explain_here_agrees_with_the_code() -> None:
    import attnops

    model, x = Dense().cuda().half().eval(), torch.randn(2, 128, HQ * D, device="cuda").half()
    with torch.no_grad():
        _, code = compiled_code(lambda: torch.compile(model)(x))
        assert list(attnops.explain(model, x, quiet=True).chosen()) == kernel_calls(code)


def test_import_leaves_cuda_alone() -> None:
    from tests.helpers import fresh_process

    out = fresh_process("import torch, attnops; print(torch.cuda.is_initialized())")
    assert out.strip() == "False"
