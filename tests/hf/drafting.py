"""What the tests of drafts share: calls, and models that are patched with them."""

import copy

import torch

import attnops
from attnops.hf import tiny
from tests.hf.decoding import auto


def asked(rows, length=9):
    torch.manual_seed(rows)
    ids = torch.randint(3, tiny.VOCAB, (rows, length))
    mask = torch.ones_like(ids)
    mask[1::2, :3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "do_sample": False}


def patched(model, speculate):
    ours = copy.deepcopy(model)
    return ours, attnops.patch(ours, decode=auto(compile_after=None), speculate=speculate)


def worth(handle):
    """Tokens of a row a round."""
    assert handle.took.rounds.startswith(f"{handle.took.tokens_a_round:.2f} tokens")
    return handle.took.tokens_a_round


def assistant(mode="auto"):
    """A model that drafts, and its handle."""
    other = tiny.model("llama", seed=3)
    return other, attnops.patch(other, decode=auto(mode, compile_after=None))
