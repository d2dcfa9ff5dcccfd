"""Which keys a request's queries see: one frozen value, of whatever mask transformers passes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnops.core.errors import InvalidInput, fail
from attnops.hf.attention import descriptor, packed as requests
from attnops.hf.attention.request import Lengths, Request


class Visible(NamedTuple):
    """Which keys queries see.

    mask: bool or float with four dims; it alone decides, unless one of the rules below narrows it.
    causal: query i sees the keys up to its own, bottom right. left: keys left of the query's own,
    -1 unbounded. start, end: int `[B]`, the range of keys.
    packed: the requests of a row see themselves alone. keys: how many there are; those that come
    after are cut off.
    """

    mask: Tensor | None = None
    causal: bool = False
    left: int = -1
    start: Tensor | None = None
    end: Tensor | None = None
    packed: Lengths | None = None
    keys: int | None = None


def visible_of(request: Request, causal: bool, packs: bool) -> Visible:
    """What the mask of a request, its bias and its lengths say together.

    causal: is a request without a mask? packs: may packed requests go to
    `attnops.varlen_attention`? Raises InvalidInput: a mask of a wrong shape or dtype, or lengths
    that do not fit it.
    """
    mask, lengths = request.mask, request.lengths
    if mask is None:
        return _with_mask(request, _without_mask(request, causal), None)
    if mask.dtype == requests.DTYPE:
        return _of_documents(request, mask, packs)
    if mask.dtype == descriptor.DTYPE:
        of_range = descriptor.read_once(mask, request.query.shape[0])
        return _with_mask(
            request,
            Visible(None, of_range.causal, of_range.window_left, of_range.start, of_range.end),
            lengths,
        )
    return _with_mask(request, Visible(mask), lengths)


def _without_mask(request: Request, causal: bool) -> Visible:
    window = request.window
    if request.lengths is not None:
        return Visible(causal=causal, left=window - 1 if window else -1, packed=request.lengths)
    if not causal:
        return Visible()
    queries, keys = request.query.shape[2], request.key.shape[2]
    left = window - 1 if window is not None and 0 < window < keys else -1
    return Visible(
        causal=True, left=left, keys=queries if queries != 1 and keys > queries else None
    )


def _of_documents(request: Request, mask: Tensor, packs: bool) -> Visible:
    """Of a mask that tells packed requests (`attnops.hf.attention.packed`)."""
    batch, length, lengths = request.query.shape[0], request.query.shape[2], request.lengths
    found = requests.read(mask, batch, length, request.key.shape[2])
    rule = Visible(causal=True, left=found.window_left)
    # No kernel of packed requests serves these.
    in_pairs = request.dropout > 0.0 or request.weights or request.bias is not None or not packs
    if lengths is not None and not (in_pairs or found.padded):
        return Visible(causal=True, left=found.window_left, packed=lengths)
    count = found.starts.shape[0] - 1
    if statically_known_true(count == batch):
        return _with_mask(request, rule, lengths)  # each row is one request
    if in_pairs or lengths is not None or statically_known_true(count == batch * length):
        return _with_mask(request, Visible(requests.written_out(found, batch, length)), lengths)
    own = Lengths(found.starts, found.starts, found.longest, found.longest, padded=False)
    return Visible(causal=True, left=found.window_left, packed=own)


def _with_mask(request: Request, visible: Visible, lengths: Lengths | None) -> Visible:
    """The same with the bias in its mask, and with the requests of `lengths` kept apart in it; the
    mask has four dims."""
    mask, bias = visible.mask, request.bias
    if bias is not None:
        mask = join(bias if visible.keys is None else bias[..., : visible.keys], mask)
    if lengths is not None:
        mask = apart(request.query, request.key, mask, lengths)
    if mask is not None and mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    return Visible(mask, *visible[1:])


def join(bias: Tensor, mask: Tensor | None) -> Tensor:
    """One additive mask of a position bias and a bool or float mask that broadcast with each
    other."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask


def apart(query: Tensor, key: Tensor, mask: Tensor | None, lengths: Lengths) -> Tensor:
    """The mask (or None), restricted to pairs of tokens of one packed request.

    Raises InvalidInput: several rows, or other keys than queries, whose positions a mask does not
    know.
    """
    batch, _, count, _ = query.shape
    same = lengths.starts_k is None or lengths.starts_k.shape == lengths.starts_q.shape
    if batch != 1 or count != key.shape[2] or not same:
        got = f"a batch of {batch}, {count} queries and {key.shape[2]} keys beside a mask"
        fail(InvalidInput, "cu_seq_lens_q", got, "one row of as many keys as queries, or no mask")
    tokens = torch.arange(count, device=query.device)
    request = torch.searchsorted(lengths.starts_q.to(tokens), tokens, right=True)
    together = (request[:, None] == request)[None, None]
    if mask is None:
        return together
    return (
        mask & together if mask.dtype == torch.bool else mask.masked_fill(~together, float("-inf"))
    )
