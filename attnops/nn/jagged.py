"""Nested tensors as packed rows, and back."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput, fail
from attnops.core.record import need
from attnops.nn import arguments as check
from attnops.ops import token_rows

TO_JAGGED = (
    "layout=torch.jagged, as torch.nested.as_nested_tensor(list(x.unbind()), "
    "layout=torch.jagged) makes it of this one"
)


class Rows(NamedTuple):
    """The rows `[T, ...]` of a nested tensor `[B, j, ...]`, and where each request begins and
    ends."""

    values: Tensor
    offsets: Tensor
    """int `[B + 1]`, the tensor's own where it is jagged."""
    ragged: Any
    """Equal for tensors of equal lengths: the size of a jagged tensor's dim 1, or host ints of a
    strided one."""
    jagged: bool = True

    def cu(self) -> Tensor:
        """int32 `[B + 1]`, as `varlen_attention` takes it."""
        return self.offsets.to(torch.int32)

    def longest(self, given: int | None) -> int:
        """An upper bound on the lengths: `given`, or else the longest, for which the host waits
        where the offsets are on a GPU."""
        if given is not None:
            return given
        if not self.jagged:
            return max(self.ragged, default=0)
        return int(self.offsets.diff().max()) if self.offsets.shape[0] > 1 else 0

    def like(self, values: Tensor) -> Tensor:
        """`values` `[T, ...]` as a nested tensor with these offsets and of this layout."""
        if not self.jagged:
            return torch.nested.as_nested_tensor(list(values.split(self.ragged)))
        return torch.nested.nested_tensor_from_jagged(values, self.offsets)


def rows(field: str, x: Any, *, strided: bool = False) -> Rows:
    """The rows of the nested tensor `x`, the argument `field`; `strided`: may it have that layout?

    Raises InvalidInput: it is no nested tensor, has another layout, has holes, or is ragged in
    another dim than 1.
    """
    if not check.nested(x):
        fail(
            InvalidInput,
            field,
            "a plain tensor" if isinstance(x, Tensor) else type(x).__name__,
            "a nested tensor, as the others are",
        )
    if x.layout == torch.strided:
        need(strided, field, "a nested tensor of the strided layout", TO_JAGGED)
        parts = x.unbind()
        lengths = [part.shape[0] for part in parts]
        values = torch.cat(parts)
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=values.device)
        return Rows(values, ends, lengths, jagged=False)
    need(
        x.lengths() is None,
        field,
        "a jagged tensor with holes: its lengths() are not None",
        "one without, as x.contiguous() makes it",
    )
    values = x.values()
    # The size of a ragged dim is equal to no number.
    need(
        x.size(1) != values.size(0),
        field,
        "a jagged tensor that is not ragged in dim 1",
        "[B, j, ...]: transpose it back",
    )
    return Rows(values, x.offsets(), x.size(1))


def rows_of(
    query: Tensor, key: Tensor, value: Tensor, *, strided: bool = False
) -> tuple[Rows, Rows, Rows]:
    """As `rows`, of three tensors of one layout. Raises InvalidInput: value has other lengths than
    key, or query other requests."""
    q = rows("query", query, strided=strided)
    # One view of one tensor: two would alias each other where compiled code breaks its graph, and
    # torch refuses that beside nested tensors.
    k = q if key is query else rows("key", key, strided=strided)
    v = k if value is key else rows("value", value, strided=strided)
    layouts = [x.layout for x in (query, key, value)]
    need(
        q.jagged == k.jagged == v.jagged,
        "query, key, value",
        layouts,
        "nested tensors of one layout",
    )
    if k.ragged != v.ragged:
        fail(
            InvalidInput,
            "value",
            f"lengths {v.ragged}",
            f"{k.ragged}, the key's: nested tensors with the same offsets",
        )
    need(
        query.size(0) == key.size(0),
        "key",
        f"{key.size(0)} requests",
        f"{query.size(0)}, as the query",
    )
    return q, k, v


def padded(values: Tensor, cu_seqlens: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Rows `[T, ...]` as `[B, longest, ...]`, 0 behind a request's end, and bool `[B, longest]`."""
    starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    at = starts + torch.arange(longest, device=values.device)
    seen = at < ends
    with_zeros = torch.cat((values, values.new_zeros(1, *values.shape[1:])))
    return with_zeros[torch.where(seen, at, len(values))], seen


def unpadded(values: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """`[B, longest, ...]` as rows `[T, ...]` again; tokens: T."""
    owner = token_rows(cu_seqlens, tokens)
    at = torch.arange(tokens, device=values.device) - cu_seqlens[owner]
    return values[owner, at]
