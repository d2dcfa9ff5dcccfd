"""Launches of a round of speculation. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.kernels.shared.launch.gpu import launch
from attnops.kernels.shared.sizes import power
from attnops.kernels.triton.device import rows, speculation as device, tree

if TYPE_CHECKING:
    from attnops.ops.speculation.record import Accept, LookupDrafts
    from attnops.ops.speculation.rows import AdvanceRows, NextInputs
    from attnops.ops.speculation.sampled import AcceptSampled
    from attnops.ops.speculation.tree import BuildTree, TreeMask

MOST_AT_ONCE = 4096
"""Tokens of a text, words of a vocabulary or keys of a mask that a program has at once."""
COMPARED = 64
"""Candidates of a tree that a program compares with as many others at once."""


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
    results, constants = _of_nodes(call)
    if call.tokens.shape[0]:
        strides = (*call.tokens.stride(), *call.target.stride(), *_before(call))
        args = (call.tokens, call.target, call.parents, *results, *strides)
        launch(device.accept, call.tokens.shape[:1], constants, args, warps=1)
    return results


def advance_rows(call: AdvanceRows) -> None:
    batch, nodes = call.drafts.shape
    if not batch:
        return
    texts = call.tokens, call.seq_lens, call.stored, call.position, call.unfinished
    written = (*texts, call.accepted, call.news)
    given = call.drafts, call.target, call.eos
    strides = (*_strides(*given), *_before(call), *_strides(*written))
    args = (*given, call.most, call.parents, *written, len(call.eos), call.tokens.shape[1])
    constants = {"N": nodes, "NP": power(nodes)}
    launch(rows.advance_rows, (batch,), constants, (*args, *strides), warps=1)


def next_inputs(call: NextInputs) -> None:
    batch, nodes = call.drafts.shape
    if not batch:
        return
    given = call.found, call.tokens, call.seq_lens, call.position, call.last_position
    written = call.drafts, call.next_ids, call.positions, call.offered
    args = (*given, *written, call.tokens.shape[1], call.words)
    constants = {"K": call.found.shape[1], "N": nodes, "NP": power(nodes)}
    strides = _strides(*given, *written)
    launch(rows.next_inputs, (batch,), constants, (*args, *strides), warps=1)


def accept_sampled(call: AcceptSampled) -> tuple[Tensor, Tensor, Tensor]:
    results, constants = _of_nodes(call)
    batch, _, words = call.target_probs.shape
    if batch:
        given = (call.tokens, call.target_probs, call.draft_probs, call.noise)
        strides = _strides(*given)
        rest = call.noise.new_empty(batch, words)
        constants["BLOCK"] = min(power(words), MOST_AT_ONCE)
        args = (*given, call.parents, rest, *results, words, *strides, *_before(call))
        launch(device.accept_sampled, (batch,), constants, args, warps=16)
    return results


def _of_nodes(
    call: Accept | AcceptSampled,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, int]]:
    """(the results of an acceptance, its sizes)."""
    batch, nodes = call.tokens.shape
    path = call.tokens.new_empty(batch, nodes, dtype=torch.int32)
    results = path, path.new_empty(batch), call.tokens.new_empty(batch)
    return results, {"N": nodes, "NP": power(nodes)}


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()]


def _before(call: Accept | AcceptSampled | AdvanceRows) -> tuple[int, ...]:
    return (0, 0) if call.parents is None else call.parents.stride()


def build_tree(call: BuildTree) -> tuple[Tensor, ...]:
    given = call.tokens, call.scores, call.parents, call.root
    (batch, most), nodes = call.tokens.shape, call.num_nodes
    found = call.tokens.new_empty(batch, nodes)
    results = (found, *(torch.empty_like(found, dtype=torch.int32) for _ in range(3)))
    if batch:
        strides = _strides(*given)
        sizes = {"M": most, "N": nodes, "NP": power(nodes), "BLOCK": min(power(most), COMPARED)}
        launch(tree.build_tree, (batch,), sizes, (*given, *results, *strides), warps=8)
    return results


def tree_mask(call: TreeMask) -> Tensor:
    parents, lengths, keys = call.parents, call.seq_lens, call.num_keys
    batch, nodes = parents.shape
    mask = parents.new_empty(batch * nodes, keys, dtype=torch.bool)
    if mask.numel():
        block = min(power(keys), MOST_AT_ONCE)
        args = (parents, lengths, mask.view(torch.uint8), keys)
        launch(
            tree.tree_mask,
            (batch * nodes, -(-keys // block)),
            {"N": nodes, "NP": power(nodes), "BLOCK": block, "WINDOW": call.window},
            (*args, *parents.stride(), lengths.stride(0)),
        )
    return mask
