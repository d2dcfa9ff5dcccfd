"""Launches of a round of speculation. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.kernels.shared.launch.gpu import launch
from attnops.kernels.shared.sizes import power
from attnops.kernels.triton.device import speculation as device

if TYPE_CHECKING:
    from attnops.ops.speculation.record import Accept, LookupDrafts

MOST_AT_ONCE = 4096
"""Tokens of a text that a program compares at once."""


def lookup_drafts(call: LookupDrafts) -> tuple[Tensor, Tensor]:
    tokens, lengths, count = call.tokens, call.seq_lens, call.num_drafts
    batch, most = tokens.shape
    drafts, counts = tokens.new_empty(batch, count), lengths.new_empty(batch)
    block = min(power(most), MOST_AT_ONCE)
    if batch:
        launch(
            device.lookup_drafts,
            (batch,),
            {"NGRAM": call.max_ngram, "K": count, "KP": power(count), "BLOCK": block},
            (tokens, lengths, drafts, counts, most, *tokens.stride(), lengths.stride(0)),
            warps=8,
        )
    return drafts, counts


def accept(call: Accept) -> tuple[Tensor, Tensor, Tensor]:
    tokens, target, parents = call.tokens, call.target, call.parents
    batch, nodes = tokens.shape
    path = tokens.new_empty(batch, nodes, dtype=torch.int32)
    accepted, following = path.new_empty(batch), tokens.new_empty(batch)
    before = (0, 0) if parents is None else parents.stride()
    strides = (*tokens.stride(), *target.stride(), *before)
    if batch:
        launch(
            device.accept,
            (batch,),
            {"N": nodes, "NP": power(nodes)},
            (tokens, target, parents, path, accepted, following, *strides),
            warps=1,
        )
    return path, accepted, following
