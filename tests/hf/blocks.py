"""DFlash drafts of small models."""

import torch

from attnops.hf import tiny
from attnops.nn import DFlashHead
from tests.dflash import words_of

IDS, BLOCK = [1, 0], 6
"""Layers whose states a draft reads, and tokens of a block."""


def words(model, **more):
    """The config of a draft of this model."""
    width = model.config.get_text_config().hidden_size
    return words_of(
        hidden_size=width,
        intermediate_size=2 * width,
        head_dim=16,
        vocab_size=tiny.VOCAB,
        block_size=BLOCK,
        **{"dflash_config": {"target_layer_ids": IDS, "mask_token_id": 3}, **more},
    )


def draft_of(model, seed=5, **more):
    """A draft with random weights."""
    torch.manual_seed(seed)
    draft = DFlashHead(words(model, **more)).requires_grad_(False)
    draft.words = words(model, **more)
    return draft
