"""One function an op: a `Call` of given lengths and features. Every length may be 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnops.call import changed
from attnops.inputs import filled
from attnops.ops import OPS
from attnops.testing.inputs import Call, Features, Source


def attend(source: Source, op: str, f: Features, sizes: dict[str, Any], **given: Any) -> dict[str, Any]:
    """The arguments of a call of an attention op: those given, and those of the others that `f` asks for.

    sizes: those of the record's layouts that `f` does not know.
    """
    more = {"return_lse": True} if f.lse and "return_lse" in OPS[op].spec.names else {}
    narrow = [size for letter, size in (("b", "B"), ("h", "Hq"), ("q", "S")) if letter not in f.mask_shape]
    return filled(op, f.sizes() | sizes, given | f.statics() | more, lambda a, shape: source.argument(a.name, shape, f), narrow)


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
    ranges = {n: source.ints(at, range_dtype) for n, at in (("kv_start", start), ("kv_end", end)) if at is not None}
    outside = torch.zeros(batch, keys, dtype=torch.bool, device=source.device)
    j = torch.arange(keys, device=source.device)[None]
    for name, at in ranges.items():
        outside = outside | (j < at[:, None] if name == "kv_start" else j >= at[:, None])
    arguments = attend(source, "attention", f, {"B": batch, "S": queries, "K": keys}, **ranges)
    return Call("attention", arguments, dict.fromkeys(("key", "value"), outside[..., None, None]) if ranges else {})


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
    given: dict[str, Any] = {"cu_seqlens_q": source.cumulative(q_lens), "cu_seqlens_k": source.cumulative(k_lens)}
    given |= {"max_seqlen_q": max(q_lens, default=0) + slack, "max_seqlen_k": max(k_lens, default=0) + slack}
    if (mask := source.mask((tokens, given["max_seqlen_k"] + 2), f)) is not None:  # wider than it need be
        given["mask"] = mask
    arguments = attend(source, "varlen_attention", f, {"T": tokens, "N": keys}, **given)
    if promise:
        arguments["padded"] = False
    free = {n: past(source, sum(lens), t, 3) for n, lens, t in (("query", q_lens, tokens), ("key", k_lens, keys), ("value", k_lens, keys))}
    return Call("varlen_attention", arguments, free)


def past(source: Source, end: int, total: int, dims: int) -> Tensor:
    """bool, `total` long in the first of `dims` dims: True from `end` on."""
    return (torch.arange(total, device=source.device) >= end).reshape(-1, *[1] * (dims - 1))


def backward(source: Source, forward: Call, mask_grad: bool = False, lse_grad: bool = False) -> Call:
    """`<op>_backward` of a forward call: its output and lse as the reference gives them, and random gradients."""
    op, free = OPS[forward.op], dict(forward.free)
    exact = forward.map(lambda _, t: t.double() if t.is_floating_point() else t)
    exact = exact.map(lambda n, t: torch.where(free[n], 0.0, t) if n in free else t)
    output, lse = op.reference(changed(exact.record, return_lse=True))
    dtype = forward.arguments["query"].dtype
    arguments = {n: v for n, v in forward.arguments.items() if n != "return_lse"}
    arguments |= {"output": output.to(dtype), "lse": lse, "grad_output": source.normal(*output.shape, dtype=dtype)}
    if lse_grad:
        arguments["grad_lse"] = source.normal(*lse.shape)
    if mask_grad:
        arguments["mask_grad"] = True
    if "query" in free:
        free["grad_output"] = free["query"]
    return Call(f"{forward.op}_backward", arguments, free)


WRITTEN = ("output", "lse")


class Pages(NamedTuple):
    """The pages of a call that reads a cache.

    spare: pages of no request. wider: columns of the table past the longest request; entries past a request's end are -1 or a spare
    page. shared: the second request's first page is the first one's. interleaved: key and value pages are views of one buffer.
    """

    spare: int = 2
    wider: int = 1
    shared: bool = False
    interleaved: bool = False


class Batch(NamedTuple):
    """The lengths of a call that reads a cache. padding: query tokens past the last request. slack: how loose max_seqlen_q is."""

    q_lens: Sequence[int]
    seq_lens: Sequence[int]
    page_size: int
    padding: int
    slack: int
    pages: Pages

    def call(self, source: Source, op: str, f: Features) -> Call:
        """A call of `paged_attention` or `mla_attention`. Pages are in random order."""
        table, used = self._layout(source)
        tokens = sum(self.q_lens) + self.padding
        arguments = attend(
            source,
            op,
            f,
            {"T": tokens, "P": used.shape[0], "page": self.page_size, "max_pages": table.shape[1]},
            page_table=table,
            seq_lens=source.ints(self.seq_lens),
            cu_seqlens_q=source.cumulative(self.q_lens),
            max_seqlen_q=max(self.q_lens, default=0) + self.slack,
        )
        free = {n: past(source, sum(self.q_lens), tokens, arguments[n].dim()) for n in BY_TOKEN if n in arguments}
        unused = ~used[..., None]
        free |= {n: unused[..., None] if n != "latent_pages" else unused for n in PAGES if n in arguments}
        return Call(op, arguments, free, WRITTEN)

    def _layout(self, source: Source) -> tuple[Tensor, Tensor]:
        """(int32 page table, bool `[P, page]` of the slots that hold keys)."""
        page_size = self.page_size
        counts = [-(-n // page_size) for n in self.seq_lens]
        order = source.permutation(sum(counts) + self.pages.spare)
        width = max(counts, default=0) + self.pages.wider
        used = torch.zeros(len(order), page_size, dtype=torch.bool)
        rows: list[list[int]] = []
        for count, length in zip(counts, self.seq_lens, strict=True):
            own, order = order[:count], order[count:]
            if self.pages.shared and len(rows) == 1 and count and rows[0]:
                own[0] = rows[0][0]
            for at, page in enumerate(own):
                used[page, : min(page_size, length - at * page_size)] = True
            rows.append(own)
        rest = [order[-1] if order and column % 2 else -1 for column in range(width)]
        flat = [p for row in rows for p in row + rest[len(row) :]]
        return source.ints(flat).reshape(len(self.seq_lens), width), used.to(source.device)


BY_TOKEN, PAGES = ("query", "q_nope", "q_pe", "temperature"), ("k_pages", "v_pages", "latent_pages")
"""Arguments whose padding rows, or whose unused slots, are free."""


def paged(
    source: Source,
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_size: int,
    f: Features,
    padding: int = 2,
    slack: int = 0,
    promise: bool = False,
    pages: Pages = Pages(),  # noqa: B008, a tuple
) -> Call:
    """`paged_attention` of a `Batch`. promise: pass padded=holes=False."""
    call = Batch(q_lens, seq_lens, page_size, padding, slack, pages).call(source, "paged_attention", f)
    if pages.interleaved:
        k_pages, v_pages = _interleave(call.arguments["k_pages"], call.arguments["v_pages"])
        call = call.with_(k_pages=k_pages, v_pages=v_pages)
    return call.with_(padded=False, holes=False) if promise else call


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
