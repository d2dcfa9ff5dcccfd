"""Drafts under a deterministic policy: the logits of a token that is verified have the bits of a
plain step over it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import attnops
from attnops.core.kernel import kernels_of
from attnops.hf import tiny
from attnops.hf.attention import over_pages
from tests.hf import hybrids
from tests.hf.drafting import Branches, Oracle, Verified, asked, patched, worth

ONE_LAUNCH = {"decode_attention": "reference"}
WINDOWS = ("mistral", "gpt_oss")
KINDS = [
    ("llama", Oracle, None),
    ("mistral", Branches, None),
    ("mistral", Oracle, ONE_LAUNCH),
    ("qwen3_moe", Oracle, None),
    ("llama", Branches, ONE_LAUNCH),
    ("gpt_oss", Branches, None),
    ("deepseek_v3", Oracle, None),
    ("deepseek_v3", Branches, None),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("kind", "drafts", "kernel"), KINDS)
def test_logits_are_those_of_plain_decoding(monkeypatch, small_pages, kind, drafts, kernel):
    """Of chains and trees, in batches whose rows keep different numbers of drafts. Windows whose
    pages are used in turn, and steps of one launch."""
    model, draft, found = tiny.model(kind), drafts(7, wrong=0.2), Verified(monkeypatch)
    queries, run = set(), over_pages._in_one_launch

    def noted(step):
        queries.add(step.query.shape[1])
        return run(step)

    monkeypatch.setattr(over_pages, "_in_one_launch", noted)
    plain, _ = patched(model, None)
    ours, handle = patched(model, draft)
    for rows in (1, 3):
        given = {**asked(rows), "max_new_tokens": 40 if kind in WINDOWS else 16}
        with attnops.use(kernel, deterministic=True):
            want = plain.generate(**given, output_logits=True, return_dict_in_generate=True)
            draft.texts = want.sequences
            assert torch.equal(ours.generate(**given), want.sequences)
        assert worth(handle) > 2 and handle.took.decode == "breakable"
        for row, logits in zip(found.logits(), torch.stack(want.logits, 1), strict=True):
            assert torch.equal(torch.stack(row), logits)
    assert (8 in queries) == (kernel is ONE_LAUNCH)
    assert any(small_pages[-1].windows) == (kind in WINDOWS)


def of_states(*_):
    """Nothing changes."""


def added(ours, handle, monkeypatch):
    ours.model.layers[0].mlp.up_proj = nn.Linear(64, 96, bias=False)


def captured(ours, handle, monkeypatch):
    handle._paged.decoder().at_once = True


def by_pages(ours, handle, monkeypatch):
    kernel = kernels_of("paged_attention")["reference"]
    other = replace(kernel.invariant, any_page=False)
    monkeypatch.setitem(vars(kernel), "invariant", other)


NONE = {
    of_states: "causal_conv1d, gated_delta_rule may give a token other bits",
    added: "may follow from each other in 1 modules: they were added after patch()",
    captured: "those of handle.capture() are",
    by_pages: "reference of paged_attention gives its nodes other bits",
}


@pytest.mark.parametrize("why", NONE)
def test_calls_without_drafts_say_why(monkeypatch, why):
    model = hybrids.model("qwen3_next") if why is of_states else tiny.model("llama")
    draft, given = Oracle(3), {**asked(1), "max_new_tokens": 4}
    ours, handle = patched(model, draft)
    draft.texts = model.generate(**given)
    ours.generate(**given)
    why(ours, handle, monkeypatch)
    with attnops.use(deterministic=True):
        ours.generate(**given)
    assert NONE[why] in handle.took.rounds
