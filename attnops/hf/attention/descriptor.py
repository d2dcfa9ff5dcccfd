"""A mask in four numbers a request, where the pattern allows it: no `[S, T]` tensor is built or
read.

transformers passes any 4-D tensor from the mask function to the attention function untouched, so
the descriptor is one:

    int64 [B, kind, 1 + window, 4]    kind 1: causal, 2: bidirectional; window 0: unbounded
    fields: kv_start, kv_end (indices into the keys at hand), q_offset, kv_offset (positions, as
        transformers gave them)

The shape holds the facts that select a kernel; the data may change from step to step. The two inner
dims are expanded, so the memory is that of `[B, 4]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import capturing, count_dispatch_modes

FIELDS = 4
DTYPE = torch.int64
Number = int | Tensor

# attribute of a mask that was made eagerly: None, or its version and range when it was read
_RANGE = "_attnops_range"


class Pattern(NamedTuple):
    """The keys a query may see, apart from padding. window: keys a causal query sees, its own
    included; 0 is unbounded."""

    causal: bool
    window: int


class Range(NamedTuple):
    """A descriptor as `attnops.attention` takes it. window_left: keys left of the query's own, -1
    unbounded. start, end: int `[B]`."""

    causal: bool
    window_left: int
    start: Tensor
    end: Tensor


def build(
    pattern: Pattern,
    batch: int,
    start: Number,
    end: Number,
    q_offset: Number,
    kv_offset: Number,
    device: torch.device,
) -> Tensor:
    """The descriptor of `batch` requests. Each number is an int, a 0-dim tensor or `[batch]`."""
    # Field by field in memory: a kernel that wants contiguous lengths gets them without a copy.
    rows = [
        x if isinstance(x, Tensor) else torch.full((), x, dtype=DTYPE, device=device)
        for x in (start, end, q_offset, kv_offset)
    ]
    fields = torch.stack([row.to(device=device, dtype=DTYPE).expand(batch) for row in rows])
    mask = fields.t()[:, None, None, :].expand(
        batch, 1 if pattern.causal else 2, 1 + pattern.window, FIELDS
    )
    if not (
        torch.compiler.is_compiling()
        or count_dispatch_modes()
        or mask.is_inference()
        or capturing(mask)
    ):
        setattr(mask, _RANGE, None)
    return mask


def read(mask: Tensor, batch: int) -> Range:
    """The inverse of `build`. Raises InvalidInput when `mask` is an int64 tensor of another shape:
    no mask transformers or attnops made."""
    if (
        mask.dim() != 4
        or mask.shape[3] != FIELDS
        or mask.shape[1] not in (1, 2)
        or mask.shape[0] != batch
    ):
        want = (
            f"bool or float [B, H, S, T], or attnops' descriptor [{batch}, 1 or 2, 1 + "
            f"window, {FIELDS}]. A model that edits its "
        )
        fail(
            InvalidInput,
            "attention_mask",
            f"int64 {list(mask.shape)}",
            want + 'masks needs attnops.patch(model, mask="dense")',
        )
    fields = mask[:, 0, 0]
    return Range(mask.shape[1] == 1, mask.shape[2] - 2, fields[:, 0], fields[:, 1])


def read_once(mask: Tensor, batch: int) -> Range:
    """As `read`, for all layers of a step: an eager mask keeps the range that the first layer
    reads, in int32, which kernels take.

    Not so a graph's mask, which is the same tensor at every replay: a replay does not change its
    version.
    """
    if torch.compiler.is_compiling() or not hasattr(mask, _RANGE) or capturing(mask):
        return read(mask, batch)
    kept: tuple[int, Range] | None = getattr(mask, _RANGE)
    if kept is None or kept[0] != mask._version or mask.shape[0] != batch:
        causal, left, start, end = read(mask, batch)
        kept = mask._version, Range(causal, left, start.to(torch.int32), end.to(torch.int32))
        setattr(mask, _RANGE, kept)
    return kept[1]
