"""A causal mask over packed requests as their cumulative lengths, in place of the `[S, S]` pairs of
tokens.

The `B` rows of a step without a cache follow one another as `B * S` tokens. Each token belongs to
one request, which begins and ends within a row: a document of a packed row, or the padding or the
text of a padded one. Like the descriptor of ranges, the mask is a 4-D tensor that transformers
passes on untouched:

    int32 [1 + padded, parts, 1 + window, N + 1]    the first token of each of N requests, then B *
    S; window 0: unbounded

`parts` says how long the longest request may be, in 32nds of a row. Kernels launch programs for a
request of that length, so a little more costs little. `padded` is 1 where the requests are the
padding and the text of rows: cumulative lengths beside the mask then restrict it further, and else
replace it. All dims but the last are expanded, and few, because a copy to another device writes
them out.

In a compiled graph N is a size that the data decide: `attnops.ops.request_starts` counts the
requests when the graph runs, once a forward and kind of layer. The row's length is then the bound
on the longest. Where they are not counted, `N = B * S`, and those past the last document are empty.
The layers write such a mask out, because kernels launch programs for empty requests, too.
Cumulative lengths that the caller passes leave this tensor unused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attnops.core.errors import InvalidInput, fail
from attnops.ops import request_starts

DTYPE = torch.int32
PARTS = 32
# Padding of a row is cut at multiples of this part of it, and of so many tokens at least: a request
# takes as many programs as the longest.
PIECES, LEAST_PIECE = 16, 128


class Packed(NamedTuple):
    """A mask as `attnops.varlen_attention` takes it. starts: int32 `[N + 1]`. longest: upper bound
    in tokens. window_left: -1 unbounded.

    padded: are some of the requests padding?
    """

    starts: Tensor
    longest: int
    window_left: int
    padded: bool


def documents(rule: Callable[..., Tensor], batch: int, length: int, device: torch.device) -> Tensor:
    """bool `[B, S]`: does a request begin here? rule: of transformers' masks, causal and by
    document. A token that does not see the one before it begins a document."""
    rows = torch.arange(batch, device=device)[:, None]
    columns = torch.arange(length, device=device)[None]
    begins = ~rule(rows, rows * 0, columns, columns - 1)
    return begins.expand(batch, length) | (columns == 0)


def runs(text: Tensor) -> Tensor:
    """bool `[B, S]`: does a request begin here? text: bool `[B, S]`, one run of ones a row. Padding
    is cut in short requests, which cost
    little: as one request it would cost what a text of its length costs."""
    length = text.shape[1]
    piece = max(LEAST_PIECE, -(-length // PIECES))
    ends = torch.cat([torch.ones_like(text[:, :1]), text[:, 1:] != text[:, :-1]], 1)
    return ends | (~text & (torch.arange(length, device=text.device) % piece == 0))


def build(
    begins: Tensor, window: int, traced: bool, padded: bool = False, counted: bool = True
) -> Tensor:
    """The mask of these requests. The host waits for the device, unless they are not `counted`; a
    graph, when it runs."""
    if counted:
        starts = request_starts(begins)
    else:
        flat, tokens = begins.flatten(), begins.numel()
        places = (
            torch.where(flat, torch.arange(tokens, device=flat.device), tokens).sort().values
        )  # what is no start goes to the end
        starts = torch.cat([places, places.new_full((1,), tokens)]).to(DTYPE)
    parts = PARTS if traced else -(-PARTS * int(starts.diff().max()) // begins.shape[1])
    return starts.expand(1 + padded, parts, 1 + window, -1)


def whole(batch: int, length: int, window: int, device: torch.device) -> Tensor:
    """The mask of rows that are one request each."""
    starts = torch.arange(batch + 1, device=device, dtype=DTYPE) * length
    # As in `request_starts`, an empty request more where a mask of ints would have that shape.
    starts = torch.cat([starts, starts[-1:]]) if starts.shape[0] == length else starts
    return starts.expand(1, PARTS, 1 + window, -1)


def read(mask: Tensor, batch: int, length: int, keys: int) -> Packed:
    """The inverse of `build`. Raises InvalidInput: an int32 tensor that is no such mask of these
    `[B, S]` queries and `[B, T]` keys."""
    made = (
        mask.dim() == 4 and mask.numel() > 0 and mask.shape[0] in (1, 2) and mask.shape[1] <= PARTS
    )
    count = mask.shape[-1]
    odd = [count <= batch, count > batch * length + 1, count == keys]
    if not made or length != keys or any(map(statically_known_true, odd)):
        want = (
            "bool or float [B, H, S, T], or attnops' descriptor of a step in which the keys "
            "are those of the queries"
        )
        fail(
            InvalidInput,
            "attention_mask",
            f"int32 {list(mask.shape)} for {length} queries and {keys} keys",
            want,
        )
    return Packed(
        mask[0, 0, 0], -(-length * mask.shape[1] // PARTS), mask.shape[2] - 2, mask.shape[0] == 2
    )


def written_out(packed: Packed, batch: int, length: int) -> Tensor:
    """bool `[B, 1, S, S]`: which key each query sees."""
    device = packed.starts.device
    tokens = torch.arange(batch * length, device=device, dtype=DTYPE)
    places = torch.arange(length, device=device)
    # `+ 0` makes a new tensor of the ends, because Inductor of torch 2.11 ignores the offset of a
    # view.
    request = torch.searchsorted(packed.starts[1:] + 0, tokens, right=True).view(batch, length)
    distance = places[:, None] - places
    near = (
        distance >= 0
        if packed.window_left < 0
        else (distance >= 0) & (distance <= packed.window_left)
    )
    return ((request[:, :, None] == request[:, None, :]) & near)[:, None]


def of_rule(rule: Any) -> Any:
    """The pattern that transformers joins with packed documents in this rule; None: another
    rule."""
    parts = cells(rule).get("mask_functions", ())
    if len(parts) != 2 or not parts[1].__qualname__.startswith("packed_sequence_mask_function."):
        return None
    pattern = parts[0]
    # From 5.24 on the pattern is asked for positions within the document. Two tokens of one
    # document are as far apart by these.
    if getattr(pattern, "__qualname__", "").startswith("remap_positions_for_packed_sequence."):
        return cells(pattern).get("mask_function")
    return pattern


def cells(function: Any) -> dict[str, Any]:
    """The variables that a function has from around it, by name."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return (
        dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
        if names
        else {}
    )
