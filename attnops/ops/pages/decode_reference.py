"""Reference of a decode step's attention: one new token a request, normed, rotated, stored in its
slot, then attended from.

    x = x / sqrt(mean(x^2) + eps) * weight                         of query and key, each head by
    itself, where there is a weight x = x cos + (-x_2, x_1) sin
    of query and key, x = (x_1, x_2) by halves, where there are angles

then the write of key and value, and attention over pages as in `attnops.ops.attention.reference`.
Nothing is rounded between norm and rotation. A token sees its own key and value, also where the
page table has a hole in their place. RMS norm: https://arxiv.org/abs/1910.07467, equation 4.
Rotation: https://arxiv.org/abs/2104.09864, 3.2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.tensors import Rules, gather_pages, in_range, store, visible, wide
from attnops.ops.attention.reference import attend

if TYPE_CHECKING:
    from attnops.ops.pages.decode import DecodeAttention
    from attnops.ops.pages.rotate import RotateAndWriteKV


def decode_attention(call: DecodeAttention) -> None:
    """The reference of `attnops.ops.decode_attention`."""
    k_pages, v_pages, table, slots = call.k_pages, call.v_pages, call.page_table, call.slots
    pages, page = k_pages.shape[:2]
    query, key = turned(call)
    real = (slots >= 0) & (slots < pages * page) & (call.seq_lens > 0)
    slots = torch.where(real, slots, -1)
    store(k_pages, key.to(k_pages.dtype), slots)
    store(v_pages, call.value, slots)
    ends, rules, keys = (
        torch.where(real, call.seq_lens, 0).long(),
        Rules.of(call),
        table.shape[1] * page,
    )
    see, named = visible(1, keys, ends - 1, None, ends, rules), (table >= 0) & (table < pages)
    held = [wide(gather_pages(x, torch.where(named, table, -1))) for x in (k_pages, v_pages)]
    if call.holes:
        # A hole reads a page of another request, which may hold NaN. The new token sees itself,
        # even there.
        own, named = (
            torch.arange(keys, device=table.device) == ends[:, None] - 1,
            named.repeat_interleave(page, 1),
        )
        see = (named | own)[:, None] if see is None else see & (named | own)[:, None]
        new = (wide(x.to(k_pages.dtype))[:, None] for x in (key, call.value))
        held = [
            torch.where(own[..., None, None], x, torch.where(named[..., None, None], y, 0.0))
            for x, y in zip(new, held, strict=True)
        ]
    keys_held, values = (in_range(x, None, ends) for x in held)
    output, _ = attend(query[:, None], keys_held, values, see, None, call.sinks, rules)
    call.output.copy_(output[:, 0])


def rotate_and_write_kv(call: RotateAndWriteKV) -> None:
    """The reference of `attnops.ops.rotate_and_write_kv`."""
    query, key = turned(call)
    call.turned_query.copy_(query)
    call.turned_key.copy_(key)
    store(call.k_pages, call.turned_key, call.slots)
    store(call.v_pages, call.value, call.slots)


def turned(call: DecodeAttention | RotateAndWriteKV) -> tuple[Tensor, Tensor]:
    """(query, key), normed and rotated, in float32, or float64 for float64."""
    query, key = (
        _normed(wide(x), weight, call.eps)
        for x, weight in ((call.query, call.q_norm), (call.key, call.k_norm))
    )
    if call.cos is None or call.sin is None:
        return query, key
    cos, sin = (x.to(query.dtype) for x in (call.cos, call.sin))
    if cos.shape[1] != query.shape[2]:
        cos, sin = torch.cat([cos] * 2, -1), torch.cat([sin] * 2, -1)
    query, key = (x * cos[:, None] + _other(x) * sin[:, None] for x in (query, key))
    return query, key


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return (
        x
        if weight is None
        else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)
    )


def _other(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
