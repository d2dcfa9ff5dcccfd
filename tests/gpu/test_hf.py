"""Patched HuggingFace models on a real GPU: greedy tokens equal eager's, through generate's own compilation with CUDA graphs."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

FAMILIES = ("llama", "qwen3", "gpt_oss", "gemma2", "mistral", "deepseek_v3")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_equals_eager(family: str, cache: str, found: dict[str, Any]) -> None:
    import attnops
    from attnops.hf import tiny

    model = tiny.model(family).cuda().eval()
    ids = torch.randint(2, 100, (3, 14), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    if cache == "static":
        options["cache_implementation"] = "static"
    want = model.generate(ids, **options)
    with attnops.patch(model):
        got = model.generate(ids, **options)
        again = model.generate(ids, **options)
    assert torch.equal(got, want) and torch.equal(again, want)
    found.setdefault("hf_tokens_equal", {})[f"{family}.{cache}"] = True
