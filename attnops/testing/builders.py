"""One function an op: a `Call` of given lengths and features. Every length may be 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnops.ops import OPS
from attnops.testing.inputs import Call, Features, Source


def dense(
    source: Source,
    batch: int,
    queries: int,
    keys: int,
    f: Features,
    start: Sequence[int] | None = None,
    end: Sequence[int] | None = None,
    range_dtype: torch.dtype = torch.int32,
) -> Call:
    """`attention`. start, end: first key and end of the keys of each request; keys outside are free."""
    arguments = source.qkv((batch, queries), (batch, keys), f) | f.statics()
    sizes = {"b": batch, "h": f.q_heads, "q": queries}
    if (mask := source.mask((*(n if d in f.mask_shape else 1 for d, n in sizes.items()), keys), f)) is not None:
        arguments["mask"] = mask
    outside = torch.zeros(batch, keys, dtype=torch.bool, device=source.device)
    j = torch.arange(keys, device=source.device)[None]
    if start is not None:
        arguments["kv_start"] = source.ints(start, range_dtype)
        outside = outside | (j < arguments["kv_start"][:, None])
    if end is not None:
        arguments["kv_end"] = source.ints(end, range_dtype)
        outside = outside | (j >= arguments["kv_end"][:, None])
    if f.lse:
        arguments["return_lse"] = True
    free = {"key": outside[..., None, None], "value": outside[..., None, None]} if start is not None or end is not None else {}
    return Call("attention", arguments, free)


def varlen(
    source: Source,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    f: Features,
    padding: tuple[int, int] = (2, 3),
    slack: int = 0,
    promise: bool = False,
) -> Call:
    """`varlen_attention`. padding: query and key tokens past the last request, free. slack: how loose the maxima are.

    promise: pass padded=False.
    """
    tokens, keys = sum(q_lens) + padding[0], sum(k_lens) + padding[1]
    most = max(k_lens, default=0) + slack
    arguments = source.qkv((tokens,), (keys,), f) | f.statics()
    arguments |= {"cu_seqlens_q": source.cumulative(q_lens), "cu_seqlens_k": source.cumulative(k_lens)}
    arguments |= {"max_seqlen_q": max(q_lens, default=0) + slack, "max_seqlen_k": most}
    if (mask := source.mask((tokens, most + 2), f)) is not None:
        arguments["mask"] = mask
    if f.lse:
        arguments["return_lse"] = True
    if promise:
        arguments["padded"] = False
    free = {n: past(source, sum(lens), t, 3) for n, lens, t in (("query", q_lens, tokens), ("key", k_lens, keys), ("value", k_lens, keys))}
    return Call("varlen_attention", arguments, free)


def past(source: Source, end: int, total: int, dims: int) -> Tensor:
    """bool, `total` long in the first of `dims` dims: True from `end` on."""
    return (torch.arange(total, device=source.device) >= end).reshape(-1, *[1] * (dims - 1))


def backward(source: Source, forward: Call, mask_grad: bool = False, lse_grad: bool = False) -> Call:
    """`<op>_backward` of a forward call: its output and lse as the reference gives them, and random gradients."""
    given = dict(forward.arguments)
    exact = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in given.items()}
    statics = {a.name for a in OPS[forward.op].packet.default._schema.arguments if a.kwarg_only}
    silent = {n: torch.where(forward.free[n], 0.0, v) if n in forward.free else v for n, v in exact.items()}
    output, lse = OPS[forward.op].reference(OPS[forward.op].call(**silent | {"return_lse": True}))
    query = given["query"]
    arguments = {n: v for n, v in given.items() if n not in statics} | {n: given[n] for n in statics & given.keys() - {"return_lse"}}
    arguments |= {"output": output.to(query.dtype), "lse": lse, "grad_output": source.normal(*output.shape, dtype=query.dtype)}
    if lse_grad:
        arguments["grad_lse"] = source.normal(*lse.shape)
    if mask_grad:
        arguments["mask_grad"] = True
    free = dict(forward.free)
    if "query" in free:
        free["grad_output"] = free["query"]
    return Call(f"{forward.op}_backward", arguments, free)


def paged(
    source: Source,
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_size: int,
    f: Features,
    padding: int = 2,
    slack: int = 0,
    spare: int = 2,
    wider: int = 1,
    shared: bool = False,
    interleaved: bool = False,
    promise: bool = False,
) -> Call:
    """`paged_attention`. Pages are in random order.

    padding: query tokens past the last request. spare: pages of no request. wider: columns of the table past the longest request;
    entries past a request's end are -1 or a spare page. shared: the second request's first page is the first one's.
    interleaved: key and value pages are views of one buffer. promise: pass padded=False.
    """
    table, used = page_layout(source, seq_lens, page_size, spare, wider, shared)
    total, width = used.shape[0], table.shape[1]
    tokens = sum(q_lens) + padding
    made = source.qkv((tokens,), (total, page_size), f)
    k_pages, v_pages = made.pop("key"), made.pop("value")
    if interleaved:
        k_pages, v_pages = _interleave(k_pages, v_pages)
    arguments = made | f.statics() | {"k_pages": k_pages, "v_pages": v_pages}
    arguments |= {"page_table": table, "seq_lens": source.ints(seq_lens), "cu_seqlens_q": source.cumulative(q_lens)}
    arguments |= {"max_seqlen_q": max(q_lens, default=0) + slack, "output": source.empty(tokens, f.q_heads, f.v_dim, dtype=f.dtype)}
    if f.lse:
        arguments["lse"] = source.empty(tokens, f.q_heads, dtype=torch.float32)
    if (mask := source.mask((tokens, width * page_size), f)) is not None:
        arguments["mask"] = mask
    free = {"query": past(source, sum(q_lens), tokens, 3)}
    if f.temperature:
        arguments["temperature"] = source.normal(tokens).exp()
        free["temperature"] = past(source, sum(q_lens), tokens, 1)
    unused = ~used[..., None, None]
    if promise:
        arguments["padded"] = arguments["holes"] = False
    return Call("paged_attention", arguments, free | {"k_pages": unused, "v_pages": unused}, writes=("output", "lse"))


def page_layout(
    source: Source, seq_lens: Sequence[int], page_size: int, spare: int, wider: int, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """(int32 page table, bool `[P, page]` of the slots that hold keys); see `paged`."""
    counts = [-(-n // page_size) for n in seq_lens]
    total = sum(counts) + spare
    order = source.permutation(total)
    width = max(counts, default=0) + wider
    used = torch.zeros(total, page_size, dtype=torch.bool)
    rows: list[list[int]] = []
    for count, length in zip(counts, seq_lens, strict=True):
        own, order = order[:count], order[count:]
        if shared and len(rows) == 1 and count and rows[0]:
            own[0] = rows[0][0]
        for at, page in enumerate(own):
            used[page, : min(page_size, length - at * page_size)] = True
        rows.append(own)
    rest = [order[-1] if order and column % 2 else -1 for column in range(width)]
    table = [row + rest[len(row) :] for row in rows]
    flat = source.ints([p for row in table for p in row]).reshape(len(seq_lens), width)
    return flat, used.to(source.device)


def _interleave(k_pages: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor]:
    """Both as views of one buffer `[P, page, Hkv, D + Dv]`, the layout of several engines."""
    both = torch.cat([k_pages.view(torch.uint8), v_pages.view(torch.uint8)], -1).view(k_pages.dtype)
    return both[..., : k_pages.shape[-1]], both[..., k_pages.shape[-1] :]


def write(
    source: Source,
    slots: Sequence[int],
    pages: int,
    page_size: int,
    f: Features,
    slot_dtype: torch.dtype = torch.int64,
    interleaved: bool = False,
) -> Call:
    """`write_kv`. slots: one a token, negative to skip it; the keys of a skipped token are free."""
    kv = f.kv_dtype or f.dtype
    # Some values exceed the range of a quantised dtype by far.
    spread = {torch.int8: 3.0, torch.float8_e4m3fn: 60.0, torch.float8_e5m2: 9000.0}.get(kv, 1.0)
    k_pages = source.stored(pages, page_size, f.kv_heads, f.head_dim, dtype=kv)
    v_pages = source.stored(pages, page_size, f.kv_heads, f.v_dim, dtype=kv)
    if interleaved:
        k_pages, v_pages = _interleave(k_pages, v_pages)
    at = source.ints(slots, slot_dtype)
    arguments: dict[str, Any] = {
        "key": source.normal(len(slots), f.kv_heads, f.head_dim, dtype=f.dtype, spread=spread),
        "value": source.normal(len(slots), f.kv_heads, f.v_dim, dtype=f.dtype, spread=spread),
        "k_pages": k_pages,
        "v_pages": v_pages,
        "slots": at,
    }
    if f.kv_dtype is not None:
        heads = f.kv_heads if f.scale_per_head else 1
        arguments |= {"k_scale": source.scales(heads, kv), "v_scale": source.scales(heads, kv)}
    skipped = (at < 0)[:, None, None]
    return Call("write_kv", arguments, {"key": skipped, "value": skipped})


def merge(
    source: Source, tokens: int, heads: int, dim: int, dtype: torch.dtype, empty_a: float = 0.0, empty_b: float = 0.0, stale: bool = True
) -> Call:
    """`merge_state`. empty_a, empty_b: the share of a side's entries without a key; their outputs are free, or 0 if not stale."""
    arguments: dict[str, Any] = {}
    free = {}
    for side, share in (("a", empty_a), ("b", empty_b)):
        empty = source.chance(tokens, heads, p=share)
        arguments[f"output_{side}"] = source.normal(tokens, heads, dim, dtype=dtype)
        arguments[f"lse_{side}"] = source.normal(tokens, heads, spread=4.0).masked_fill(empty, float("-inf"))
        free[f"output_{side}"] = empty[..., None]
    return _fresh("merge_state", arguments, free, stale)


def _fresh(op: str, arguments: dict[str, Any], free: dict[str, Tensor], stale: bool) -> Call:
    if stale:
        return Call(op, arguments, free)
    return Call(op, arguments | {n: arguments[n].masked_fill(empty, 0.0) for n, empty in free.items()} | {"stale": False})


def merge_states(
    source: Source, tokens: int, parts: int, heads: int, dim: int, dtype: torch.dtype, empty: float = 0.0, stale: bool = True
) -> Call:
    """`merge_states`. empty: the share of entries without a key; their outputs are free, or 0 if not stale."""
    hidden = source.chance(tokens, parts, heads, p=empty)
    arguments = {
        "outputs": source.normal(tokens, parts, heads, dim, dtype=dtype),
        "lses": source.normal(tokens, parts, heads, spread=4.0).masked_fill(hidden, float("-inf")),
    }
    return _fresh("merge_states", arguments, {"outputs": hidden[..., None]}, stale)
