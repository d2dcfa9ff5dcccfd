"""What a model over pages says of itself: options that are refused, kernels, its report and what
`explain` finds."""

import json
from typing import Any

import pytest
import torch

import attnops
from attnops.core.errors import InvalidInput, PageSizeConflict, PatchError, UnknownKernel
from attnops.core.problem import Target, pretend
from attnops.hf import tiny
from attnops.hf.cache.names import named
from attnops.lowering.explain import packages_of_kernels
from tests.hf.helpers import gives_eagers_tokens, paged, tokens


def test_kernels_and_options():
    model = tiny.model("llama")
    wrong: Any = "elsewhere"
    with pytest.raises(InvalidInput, match="cache"):
        attnops.patch(model, cache=wrong)
    with pytest.raises(UnknownKernel, match="mla_attention"):
        paged(model, kernel="varlen")
    with pytest.raises(UnknownKernel, match="op paged_attention"):
        paged(model, kernel="flashmla")
    with paged(model, kernel="reference") as handle:
        assert paged(model, kernel="reference") is handle
        with pytest.raises(PatchError, match="unpatch"):
            attnops.patch(model)
        gives_eagers_tokens(model, "llama")
        assert handle.new_cache(3, 20).state.pages.choice.takes.keys() == {"reference"}
    with attnops.patch(model) as handle, pytest.raises(PatchError, match="without pages"):
        handle.new_cache(3, 20)
    model = tiny.model("llama", head_dim=64).to(torch.bfloat16)
    with paged(model, kernel="xqa") as handle:
        assert handle.new_cache(2, 100).state.pages.page_size in (16, 32, 64, 128)
        with pytest.raises(PageSizeConflict):
            handle.new_cache(2, 100, page_size=1)
    # Made as another machine's kernels want them, after a look at the model that runs here.
    with paged(model) as handle, pretend(Target.parse("sm90", packages_of_kernels())):
        choice = handle.new_cache(2, 100).state.pages.choice
    assert choice.target.arch == 90 and "triton" in choice.takes


WINDOW = "behind the window of 8 are used again"
REPORTS = {
    "gemma3": ("decode and every later token over pages", [WINDOW, WINDOW, "over pages"], 0, ""),
    "kimi_linear": (
        "decode and every later token absorbed",
        ["absorbed"] * 2,
        2,
        "expanded in prefill and decode",
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_report(name):
    model, (said, ends, skipped, plain) = tiny.model(name), REPORTS[name]
    with paged(model) as handle:
        report = handle.report()
        assert len(report.skipped) == skipped, "states of linear attention stay as they are"
        for row, end in zip(report.patched, ends, strict=True):
            assert said in row.phases and row.phases.endswith(end)
        assert json.loads(json.dumps(report.to_dict()))["cache"] == "paged"
        assert "patched: prefill into an empty cache" in str(report) and "cache=paged" in str(
            report
        )
    with attnops.patch(model) as handle:
        assert {row.phases for row in handle.report().patched} == {plain}


@pytest.mark.parametrize(
    ("name", "attention", "write"),
    [("mistral", "paged_attention", "write_kv"), ("minicpm3", "mla_attention", "write_latent")],
)
def test_explain(name, attention, write):
    model = tiny.model(name)
    with paged(model) as handle:
        cache = handle.new_cache(3, 100, page_size=4)
        prefill = attnops.explain(model, tokens(), **named(cache), quiet=True)
        decode = attnops.explain(model, tokens()[:, :1], **named(cache), target="sm90", quiet=True)
        assert {site.decision.problem.op for site in prefill.sites} >= {"attention", write}
        ops = {site.decision.problem.op: site for site in decode.sites}
        assert ops[attention].count == ops[write].count == model.config.num_hidden_layers
        assert ops["slot_mapping"].count == 1, "metadata are made once a step"
        assert name != "mistral" or ops[attention].decision.problem.rules.window == (7, -1)
        assert int(cache.get_seq_length()) == 0, "nothing has run"


def test_a_kernel_that_reads_a_plan_gets_one():
    """FlashMLA's schedule, which every layer would work out for itself, is made once a step, and
    only for decode."""
    model = tiny.model("minicpm3", kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=3).to(
        torch.bfloat16
    )
    with paged(model, kernel="flashmla") as handle:
        with pretend(Target.parse("sm90", packages_of_kernels())):
            cache = handle.new_cache(2, 100)
        assert cache.state.pages.page_size == 64
        for tokens_now, planned in ((1, 1), (4, 1), (9, 0)):
            cache.state.filled = True
            sites = attnops.explain(
                model, tokens(2, tokens_now), **named(cache), target="sm90", quiet=True
            ).sites
            calls = {site.decision.problem.op: site for site in sites}
            assert (
                sum(site.count for site in sites if site.decision.problem.op == "decode_rows")
                == planned
            )
            assert calls["mla_attention"].decision.problem.step.plan == (
                "device" if planned else "none"
            )
            assert calls["mla_attention"].count == 3
