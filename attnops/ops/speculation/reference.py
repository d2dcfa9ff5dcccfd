"""References of a round of speculation: plain, capturable torch ops."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from attnops.ops.speculation.record import Accept, LookupDrafts
    from attnops.ops.speculation.rows import AdvanceRows, NextInputs
    from attnops.ops.speculation.sampled import AcceptSampled
    from attnops.ops.speculation.tree import BuildTree, TreeMask


def lookup_drafts(call: LookupDrafts) -> tuple[Tensor, Tensor]:
    """The reference of `attnops.ops.lookup_drafts`."""
    tokens, most = call.tokens, call.tokens.shape[1]
    length = call.seq_lens.long().clamp(0, most)[:, None]
    end = torch.arange(most, device=tokens.device)
    matches = end < length - 1
    matched = torch.zeros_like(tokens)
    for n in range(call.max_ngram):
        last = tokens.gather(1, (length - 1 - n).clamp(min=0))
        matches = matches & (end >= n) & (tokens.roll(n, 1) == last)
        matched = matched + matches
    best = torch.where(matched > 0, matched * most + end, -1).amax(1, keepdim=True)
    place = best % most + 1 + torch.arange(call.num_drafts, device=tokens.device)
    there = (best >= 0) & (place < length)
    drafts = torch.where(there, tokens.gather(1, place.clamp(max=most - 1)), -1)
    return drafts, there.sum(1, dtype=torch.int32)


def accept(call: Accept) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of `attnops.ops.accept`."""
    return _way(call.tokens, call.target, call.parents)


def _way(tokens: Tensor, target: Tensor, parents: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """See `attnops.ops.accept`. Children come after their parents, so that one pass over the nodes
    follows the whole way."""
    batch, nodes = tokens.shape
    node = tokens.new_zeros(batch, dtype=torch.int32)
    accepted, following = torch.zeros_like(node), target[:, 0]
    path = node.new_full((batch, nodes), -1)
    path[:, 0] = 0
    for child in range(1, nodes):
        parent = child - 1 if parents is None else parents[:, child]
        token = tokens[:, child]
        goes = (parent == node) & (token == following) & (token >= 0)
        node = torch.where(goes, child, node)
        following = torch.where(goes, target[:, child], following)
        accepted = accepted + goes
        path.scatter_(1, accepted[:, None].long(), node[:, None])
    return path, accepted, following.clone()


def advance_rows(call: AdvanceRows) -> None:
    """The reference of `attnops.ops.advance_rows`."""
    path, accepted, _ = _way(call.drafts, call.target, call.parents)
    nodes, width = path.shape[1], call.tokens.shape[1]
    columns = torch.arange(nodes, device=path.device)
    chosen = call.target.gather(1, path.clamp(min=0).long())
    ends = (chosen[..., None] == call.eos).any(-1)
    first = torch.where(ends, columns + 1, nodes + 1).amin(1)
    most = call.most.clamp(max=width)
    room = (most - call.seq_lens).clamp(min=0)
    counts = torch.minimum(torch.minimum(accepted + 1, room), first)
    counts = torch.where(call.unfinished == 0, 0, counts)
    kept = columns < counts[:, None]
    place = torch.arange(width, device=path.device) - call.seq_lens[:, None]
    appended = chosen.gather(1, place.clamp(0, nodes - 1))
    new = (place >= 0) & (place < counts[:, None])
    call.tokens.copy_(torch.where(new, appended, call.tokens))
    ended = (call.seq_lens + counts >= most) | (first <= counts)
    call.unfinished.masked_fill_(ended, 0)
    for each in (call.seq_lens, call.stored, call.position):
        each.add_(counts)
    call.accepted.copy_(torch.where(kept, path, -1))
    call.news[:, 0] = counts
    call.news[:, 1:] = torch.where(kept, chosen, -1)


def next_inputs(call: NextInputs) -> None:
    """The reference of `attnops.ops.next_inputs`."""
    nodes, width = call.drafts.shape[1], call.tokens.shape[1]
    last = (call.seq_lens.long() - 1).clamp(0, width - 1)[:, None]
    found = F.pad(call.found, (0, nodes), value=-1)[:, : nodes - 1]
    call.drafts.copy_(torch.cat([call.tokens.gather(1, last), found], 1))
    call.next_ids.copy_(call.drafts.clamp(0, call.words - 1))
    at = call.position[:, None] + torch.arange(nodes, device=found.device)
    call.positions.copy_(torch.minimum(at, call.last_position[:, None]))
    call.offered.copy_((found >= 0).sum(1))


def accept_sampled(call: AcceptSampled) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of `attnops.ops.accept_sampled`. Where rounding leaves nothing of a node's
    distribution, the distribution counts anew."""
    tokens, noise = call.tokens, call.noise
    batch, nodes = tokens.shape
    words = call.target_probs.shape[2]
    node = tokens.new_zeros(batch, dtype=torch.int32)
    accepted = torch.zeros_like(node)
    path = node.new_full((batch, nodes), -1)
    path[:, 0] = 0
    own = rest = call.target_probs[:, 0]
    total = torch.ones_like(noise[:, 0])
    for child in range(1, nodes):
        parent = child - 1 if call.parents is None else call.parents[:, child]
        token, draft = tokens[:, child], call.draft_probs[:, child]
        tried = (parent == node) & (token >= 0) & (token < words)
        at = token.clamp(0, words - 1)[:, None]
        p, q = rest.gather(1, at)[:, 0], draft.gather(1, at)[:, 0]
        goes = tried & (noise[:, child] * q * total < p)
        node = torch.where(goes, child, node)
        accepted = accepted + goes
        path.scatter_(1, accepted[:, None].long(), node[:, None])
        own = torch.where(goes[:, None], call.target_probs[:, child], own)
        left = _positive(rest / total[:, None] - draft)
        sums = torch.where(goes, 0.0, left.sum(1))
        rest = torch.where(tried[:, None], torch.where(sums[:, None] > 0, left, own), rest)
        total = torch.where(tried, torch.where(sums > 0, sums, 1.0), total)
    rest = _positive(rest)
    place = torch.arange(words, device=rest.device)
    reached = (rest > 0) & (rest.cumsum(1) > (noise[:, -1] * total)[:, None])
    first = torch.where(reached, place, words).amin(1)
    last = torch.where(rest > 0, place, 0).amax(1)
    return path, accepted, torch.where(first < words, first, last)


def _positive(x: Tensor) -> Tensor:
    """0 in place of what is below, and of NaN."""
    return torch.where(x > 0, x, 0.0)


def build_tree(call: BuildTree) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference of `attnops.ops.build_tree`."""
    tokens, parents, nodes = call.tokens, call.parents, call.num_nodes
    batch, most = tokens.shape
    place = torch.arange(most, device=tokens.device)
    usable = (tokens >= 0) & (parents >= -1) & (parents < place) & (call.scores > -inf)
    scores = torch.where(usable, call.scores, -inf)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1]
    # `most` is what no node is. It comes last.
    best = torch.where(usable.gather(1, best), best, most).sort(1).values
    best = F.pad(best, (1, nodes - 1 - best.shape[1]), value=most)
    there = best < most
    row = torch.arange(nodes, device=tokens.device).expand(batch, nodes)
    node_of = place.new_full((batch, most + 1), -1).scatter(1, best, row)
    safe = best.clamp(max=most - 1)
    parent = parents.gather(1, safe).long()
    parent = torch.where(parent < 0, 0, node_of.gather(1, parent.clamp(0, most)))
    parent = torch.where(there, parent, -1)
    found = torch.where(there, tokens.gather(1, safe), -1)
    found[:, 0] = call.root
    depths = torch.zeros_like(parent)
    for node in range(1, nodes):
        before = parent[:, node : node + 1]
        deeper = depths.gather(1, before.clamp(min=0))[:, 0] + 1
        depths[:, node] = torch.where(before[:, 0] >= 0, deeper, 0)
    candidates = torch.where(there, best, -1).to(torch.int32)
    return found, parent.to(torch.int32), depths.to(torch.int32), candidates


def tree_mask(call: TreeMask) -> Tensor:
    """The reference of `attnops.ops.tree_mask`."""
    parents, keys = call.parents, call.num_keys
    batch, nodes = parents.shape
    # seen[b, i, j]: does node i see node j?
    seen = parents.new_zeros((batch, nodes, nodes), dtype=torch.bool)
    for node in range(nodes):
        parent = parents[:, node].long()
        real = (parent >= 0) & (parent < node)
        at = torch.where(real, parent, 0)[:, None, None].expand(batch, 1, nodes)
        seen[:, node] = seen.gather(1, at)[:, 0] & real[:, None]
        seen[:, node, node] = True
    first = call.seq_lens.long() - nodes
    of_tree = torch.arange(keys, device=parents.device) - first[:, None]
    at = of_tree.clamp(0, nodes - 1)[:, None].expand(batch, nodes, keys)
    mask = (seen.gather(2, at) & (of_tree < nodes)[:, None]) | (of_tree < 0)[:, None]
    if call.window:
        depth = seen.sum(2) - 1
        # The root is at 0, and the keys before the tree at negative numbers.
        place = torch.where(of_tree < 0, of_tree, depth.gather(1, of_tree.clamp(0, nodes - 1)))
        mask = mask & (depth[:, :, None] - place[:, None] < call.window)
    return mask.flatten(0, 1)
