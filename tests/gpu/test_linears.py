"""Greedy tokens of patched models in float32, whose linears and experts run attnops' own kernels, for every form that is recognised."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

from tests.gpu.test_hf_paged import asked

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "gemma2", "gemma3", "glm4", "granite", "olmo2", "cohere2", "starcoder2",
    "gpt_oss", "deepseek_v3", "qwen3_moe", "mixtral",
)  # fmt: skip
CALLS = ((1, 30, 12), (3, 14, 12))
OWN = {"linear": "triton", "experts": "triton"}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_by_own_linears_and_experts_equal_eagers(family: str, found: dict[str, Any]) -> None:
    import attnops
    from attnops.hf import tiny

    torch._dynamo.reset()
    model = tiny.model(family).cuda().eval()
    want = [model.generate(ids, **more) for ids, more in (asked(*call) for call in CALLS)]
    with attnops.use(kernel=OWN), attnops.patch(model, cache="paged", decode="piecewise") as handle:
        for call, tokens in zip(CALLS, want, strict=True):
            ids, more = asked(*call)
            assert torch.equal(model.generate(ids, **more), tokens), call
        assert handle.plain_steps == 0
        [linears] = [note for note in str(handle.report()).splitlines() if "linears of compiled layers" in note]
        ours, seen = linears.count("by triton"), linears.partition(" layers, ")[2].partition(" recognised")[0]
        assert ours and "by aten" not in linears, linears
    found.setdefault("hf_own_linears", {})[family] = seen
