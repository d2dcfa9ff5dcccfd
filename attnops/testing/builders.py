"""One function an op, or a family of ops: a `Call` of given lengths and features. Every length may be 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnops.core.record import changed
from attnops.core.tensors import compact, within
from attnops.ops import OPS
from attnops.ops.sparse.packed_format import GROUP, pack, packed_bytes
from attnops.testing.calls import filled
from attnops.testing.case import Call, Features, Source

WRITTEN = ("output", "lse")
BY_TOKEN, PAGES = ("query", "q_nope", "q_pe", "temperature"), ("k_pages", "v_pages", "latent_pages")
"""Arguments whose padding rows, or whose unused slots, are free."""


def attend(source: Source, op: str, f: Features, sizes: dict[str, Any], **given: Any) -> dict[str, Any]:
    """The arguments of a call: those given, and those of the others that `f` asks for. sizes: those that `f` does not know."""
    stored = OPS[op].spec.stored
    return filled(op, f.sizes() | sizes, given | f.statics(), lambda a, shape: source.argument(a, shape, f, stored), f.narrow())


def free_at(where: Tensor, arguments: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """`where`, of the first dims, for each of these arguments that is there."""
    return {n: where.reshape(*where.shape, *[1] * (arguments[n].dim() - where.dim())) for n in names if n in arguments}


def dense(
    source: Source, batch: int, queries: int, keys: int, f: Features, start: Sequence[int] | None = None, end: Sequence[int] | None = None,
    range_dtype: torch.dtype = torch.int32,
) -> Call:  # fmt: skip
    """`attention`. start, end: first key and end of the keys of each request; keys outside are free."""
    ranges = {n: source.ints(at, range_dtype) for n, at in (("kv_start", start), ("kv_end", end)) if at is not None}
    arguments = attend(source, "attention", f, {"B": batch, "S": queries, "K": keys}, **ranges)
    outside = ~within(torch.arange(keys, device=source.device)[None], ranges.get("kv_start"), ranges.get("kv_end"))
    return Call("attention", arguments, free_at(outside, arguments, ("key", "value")) if ranges else {})


def varlen(
    source: Source, q_lens: Sequence[int], k_lens: Sequence[int], f: Features, padding: tuple[int, int] | None = (2, 3), slack: int = 0
) -> Call:
    """`varlen_attention`. slack: how loose the maxima are.

    padding: query and key tokens past the last request, free. None is no padding, and the promise padded=False.
    """
    ends = sum(q_lens), sum(k_lens)
    tokens, keys = (end + more for end, more in zip(ends, padding or (0, 0), strict=True))
    given: dict[str, Any] = {"cu_seqlens_q": source.cumulative(q_lens), "cu_seqlens_k": source.cumulative(k_lens)}
    given |= {"max_seqlen_q": max(q_lens, default=0) + slack, "max_seqlen_k": max(k_lens, default=0) + slack}
    if (mask := source.mask((tokens, given["max_seqlen_k"] + 2), f)) is not None:  # wider than it need be
        given["mask"] = mask
    arguments = attend(source, "varlen_attention", f, {"T": tokens, "N": keys}, **given)
    free = free_at(source.past(ends[0], tokens), arguments, ("query",)) | free_at(source.past(ends[1], keys), arguments, ("key", "value"))
    return Call("varlen_attention", arguments | ({"padded": False} if padding is None else {}), free)


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


class Pages(NamedTuple):
    """The pages of a call that reads a cache.

    spare: pages of no request. wider: columns of the table past the longest request; entries past a request's end are -1 or a spare
    page. shared: the second request's first page is the first one's. interleaved: key and value pages are views of one buffer.
    """

    spare: int = 2
    wider: int = 1
    shared: bool = False
    interleaved: bool = False


def paged(
    source: Source, q_lens: Sequence[int], seq_lens: Sequence[int], page_size: int, f: Features, padding: int | None = 2, slack: int = 0,
    pages: Pages = Pages(), op: str = "paged_attention",  # noqa: B008, a tuple
) -> Call:  # fmt: skip
    """`paged_attention`, or `mla_attention` as `mla`, over pages in random order. slack: how loose max_seqlen_q is.

    padding: query tokens past the last request. None is no padding, and the promises padded=holes=False.
    """
    table, used = _page_table(source, seq_lens, page_size, pages)
    tokens = sum(q_lens) + (padding or 0)
    given: dict[str, Any] = {"page_table": table, "seq_lens": source.ints(seq_lens), "cu_seqlens_q": source.cumulative(q_lens)}
    given["max_seqlen_q"] = max(q_lens, default=0) + slack
    sizes = {"T": tokens, "P": used.shape[0], "page": page_size, "max_pages": table.shape[1]}
    arguments = attend(source, op, f, sizes, **given)
    if pages.interleaved and "k_pages" in arguments:
        arguments |= _interleaved(arguments)
    free = free_at(source.past(sum(q_lens), tokens), arguments, BY_TOKEN) | free_at(~used, arguments, PAGES)
    return Call(op, arguments | ({"padded": False, "holes": False} if padding is None else {}), free, WRITTEN)


mla = partial(paged, op="mla_attention")
"""`mla_attention`. Of `f.head_dim` numbers the first `f.v_dim` are the latent."""


class Angles(NamedTuple):
    """The turn of a decode step's query and key, and its rows.

    cos_sin: "whole", "half" (D / 2 wide) or "". wide: their dtype and that of norms, None for the query's. norms: are there any?
    skipped: rows without a slot.
    """

    cos_sin: str = "whole"
    norms: bool = False
    skipped: Sequence[int] = ()
    slot_dtype: torch.dtype = torch.int64
    wide: torch.dtype | None = None


def decode(
    source: Source, seq_lens: Sequence[int], page_size: int, f: Features, angles: Angles = Angles(), pages: Pages = Pages(),  # noqa: B008
    holes: Sequence[tuple[int, int]] | None = (),
) -> Call:  # fmt: skip
    """`decode_attention`. The slots of the new tokens are free, and so are the query, key and value of rows without one.

    holes: (row, column) of the table's entries that are no page. None is the promise holes=False.
    """
    table, used = _page_table(source, seq_lens, page_size, pages)
    rows, slots = len(seq_lens), []
    for b, length in enumerate(seq_lens):
        real = length > 0 and b not in angles.skipped
        slot = int(table[b, (length - 1) // page_size]) * page_size + (length - 1) % page_size if real else -1 - b
        slots.append(slot)
        if real:
            used[slot // page_size, slot % page_size] = False
    for b, column in holes or ():
        used[table[b, column]] = False
        table[b, column] = used.shape[0] + 7 if column % 2 else -1
    given: dict[str, Any] = {"page_table": table, "seq_lens": source.ints(seq_lens), "slots": source.ints(slots, angles.slot_dtype)}
    wide = angles.wide or f.dtype
    if angles.cos_sin:
        dim = f.head_dim // 2 if angles.cos_sin == "half" else f.head_dim
        turn = source.normal(rows, dim, dtype=torch.float64, spread=3.0)
        given |= {"cos": (1.2 * turn.cos()).to(wide), "sin": (1.2 * turn.sin()).to(wide)}
    if angles.norms:
        given |= {n: source.normal(f.head_dim, dtype=wide) for n in ("q_norm", "k_norm")}
        given["eps"] = 0.25
    arguments = attend(
        source, "decode_attention", f, {"B": rows, "P": used.shape[0], "page": page_size, "max_pages": table.shape[1]}, **given
    )
    arguments |= {"holes": False} if holes is None else {}
    skipped = source.ints(slots, torch.int64) < 0
    free = free_at(~used, arguments, ("k_pages", "v_pages")) | free_at(skipped, arguments, ("query", "key", "value"))
    return Call("decode_attention", arguments, free, ("output",))


def _page_table(source: Source, seq_lens: Sequence[int], page_size: int, pages: Pages) -> tuple[Tensor, Tensor]:
    """(int32 page table, bool `[P, page]` of the slots that hold keys)."""
    counts = [-(-n // page_size) for n in seq_lens]
    order = source.permutation(sum(counts) + pages.spare)
    width = max(counts, default=0) + pages.wider
    used = torch.zeros(len(order), page_size, dtype=torch.bool)
    rows: list[list[int]] = []
    for count, length in zip(counts, seq_lens, strict=True):
        own, order = order[:count], order[count:]
        if pages.shared and len(rows) == 1 and count and rows[0]:
            own[0] = rows[0][0]
        for at, page in enumerate(own):
            used[page, : min(page_size, length - at * page_size)] = True
        rows.append(own)
    rest = [order[-1] if order and column % 2 else -1 for column in range(width)]
    flat = [p for row in rows for p in row + rest[len(row) :]]
    return source.ints(flat).reshape(len(seq_lens), width), used.to(source.device)


def _interleaved(arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both kinds of pages as views of one buffer `[P, page, Hkv, D + Dv]`, the layout of several engines."""
    k_pages, v_pages = arguments["k_pages"], arguments["v_pages"]
    both = torch.cat([k_pages.view(torch.uint8), v_pages.view(torch.uint8)], -1).view(k_pages.dtype)
    return {"k_pages": both[..., : k_pages.shape[-1]], "v_pages": both[..., k_pages.shape[-1] :]}


def write(
    source: Source, slots: Sequence[int], pages: int, page_size: int, f: Features, slot_dtype: torch.dtype = torch.int64,
    interleaved: bool = False, quantised: bool = False, op: str = "write_kv",
) -> Call:  # fmt: skip
    """`write_kv`, or another write as `write_latent` and `write_packed`. slots: one a token, negative to skip it; its rows are free.

    interleaved: key and value pages are views of one buffer.
    quantised: the latents are of `f.kv_dtype` already, and views of one tensor.
    """
    at, tokens = source.ints(slots, slot_dtype), len(slots)
    sizes = {"T": tokens, "P": pages, "page": page_size, "bytes": packed_bytes(f.v_dim, f.rope_dim)}
    arguments = attend(source, op, f, sizes, slots=at)
    if interleaved:
        arguments |= _interleaved(arguments)
    if quantised:
        del arguments["kv_scale"]
        rows = source.stored(tokens, f.head_dim, dtype=f.kv_dtype or f.dtype)
        arguments["latent"], arguments["k_pe"] = _parts(rows, f, views=True)
    return Call(op, arguments, free_at(at < 0, arguments, ("key", "value", "latent", "k_pe")))


write_latent = partial(write, op="write_latent")


def write_packed(
    source: Source, slots: Sequence[int], pages: int, page_size: int, f: Features, slot_dtype: torch.dtype = torch.int64
) -> Call:
    """`write_latent_packed`, of groups of every size: zeros, far below the smallest scale, far above the range of float8."""
    call = write(source, slots, pages, page_size, f, slot_dtype, op="write_latent_packed")
    groups = call.arguments["latent"].unflatten(1, (-1, GROUP))
    sizes = torch.tensor([1.0, 0.0, 2.0**-16, 2000.0, 7.0], dtype=f.dtype, device=source.device)
    at = torch.arange(len(slots) * groups.shape[1], device=source.device).reshape(*groups.shape[:2], 1) % 5
    latent = (groups * sizes[at]).flatten(1)
    return call.with_(latent=latent.sign() * 448.0 if f.loud else latent)  # the top of float8: on the edge of the next scale


def _parts(x: Tensor, f: Features, views: bool) -> tuple[Tensor, ...]:
    """The latent part of `[..., head_dim]` and the rotated one; contiguous if they need not be views of `x`."""
    parts = x.split([f.v_dim, f.rope_dim], -1)
    return parts if views else tuple(map(compact, parts))


def merge(source: Source, shape: Sequence[int], dtype: torch.dtype, empty: float = 0.0, empty_b: float = 0.0, stale: bool = True) -> Call:
    """`merge_state` of two outputs of `shape` `[T, H, D]`, or `merge_states` of outputs `[T, N, H, D]`.

    empty, empty_b: the share of the entries without a key, empty_b the second output's; they are free, or 0 if not stale.
    """
    op = "merge_state" if len(shape) == 3 else "merge_states"
    pairs = [("output_a", "lse_a"), ("output_b", "lse_b")] if len(shape) == 3 else [("outputs", "lses")]
    arguments: dict[str, Any] = {}
    free = {}
    for (output, lse), share in zip(pairs, (empty, empty_b), strict=False):
        hidden = source.chance(*shape[:-1], p=share)
        arguments[output] = source.normal(*shape, dtype=dtype)
        arguments[lse] = source.normal(*shape[:-1], spread=4.0).masked_fill(hidden, float("-inf"))
        free[output] = hidden[..., None]
    call = Call(op, arguments, free)
    if stale:
        return call
    return replace(call.map(lambda n, t: t.masked_fill(free[n], 0.0) if n in free else t).with_(stale=False), free={})


def copy(
    source: Source, pairs: Sequence[tuple[int, int]], layers: int, pages: int, page_size: int, f: Features,
    index: torch.dtype = torch.int64, latents: bool = False,
) -> Call:  # fmt: skip
    """`copy_kv`. pairs: (source slot, target slot). latents: pages without heads, and no value pages."""
    shape, kv = (layers, pages, page_size, f.kv_heads)[: 3 if latents else 4], f.kv_dtype or f.dtype
    dims = {"k_pages": f.head_dim} if latents else {"k_pages": f.head_dim, "v_pages": f.v_dim}
    stored = {n: source.stored(*shape, dim, dtype=kv) for n, dim in dims.items()}
    slots = (source.ints([pair[i] for pair in pairs], index) for i in (0, 1))
    return Call("copy_kv", stored | dict(zip(("source", "target"), slots, strict=True)))


def rope_quantize(
    source: Source, positions: Sequence[int], f: Features, rows: int = 9, scales: tuple[float, float] = (0.25, 0.125),
    interleaved: bool = False, index: torch.dtype = torch.int64, spread: float = 8.0, fused: bool = False,
) -> Call:  # fmt: skip
    """`rope_quantize_latent`. Of `f.head_dim` numbers the first `f.v_dim` are the latent. rows: N of the table.

    fused: the parts are views of projections' results, as a model has them.
    """
    query = source.normal(len(positions), f.q_heads, f.head_dim, dtype=f.dtype, spread=spread)
    row = source.normal(len(positions), f.head_dim, dtype=f.dtype, spread=spread)
    pairs = torch.arange(f.rope_dim // 2, dtype=torch.float64)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * 10000.0 ** (-2.0 / f.rope_dim * pairs)
    arguments: dict[str, Any] = dict(
        zip(("q_nope", "q_pe", "latent", "k_pe"), (*_parts(query, f, fused), *_parts(row, f, fused)), strict=True)
    )
    arguments["cos_sin"] = torch.cat([angles.cos(), angles.sin()], -1).float().to(source.device)
    arguments |= {"positions": source.ints(positions, index), "q_scale": scales[0], "kv_scale": scales[1], "interleaved": interleaved}
    return Call("rope_quantize_latent", arguments)


PAST = 2**31 - 1
"""Fills a list of slots past its length."""


def sparse(
    source: Source, counts: Sequence[int], topk: int, pool: tuple[int, int], f: Features, lengths: bool = False, packed: bool = False,
    twice: bool = False, whole: bool = False, gap: int = 0,
) -> Call:  # fmt: skip
    """`sparse_mla_attention`. Of `f.head_dim` numbers the first `f.v_dim` are the latent.

    counts: how many of its topk entries each token uses; at any position, the others are -1.
    pool: (pages, page_size).
    lengths: the used entries are at the front, `topk_length` says how many they are, and the others are no slots at all.
    twice: slots may repeat.
    whole: the query's two parts are views of one tensor. gap: rows of NaN between pages.
    """
    tokens, (pages, page_size) = len(counts), pool
    query = source.query((tokens, f.q_heads, f.head_dim), f)
    given: dict[str, Any] = dict(zip(("q_nope", "q_pe"), _parts(query, f, whole), strict=True))
    if packed:
        rows = pack(*_parts(source.normal(pages * page_size, f.head_dim, dtype=f.dtype), f, views=True))
        given["latent_pages"] = rows.reshape(pages, page_size, rows.shape[1])
    lists, used = _lists(source, counts, topk, pages * page_size, lengths, twice)
    given["indices"] = source.ints(lists).reshape(tokens, topk)
    if lengths:
        given["topk_length"] = source.ints(counts)
    arguments = attend(source, "sparse_mla_attention", f, {"T": tokens, "P": pages, "page": page_size, "numbers": f.head_dim}, **given)
    if gap:
        arguments["latent_pages"] = _apart(arguments["latent_pages"], gap)
    unused = ~used.reshape(pages, page_size).to(source.device)
    return Call("sparse_mla_attention", arguments, free_at(unused, arguments, PAGES), WRITTEN)


def _apart(pages: Tensor, gap: int) -> Tensor:
    """The pages with `gap` rows of NaN between them, of any width of numbers."""
    count, page, width = pages.shape
    room = torch.full((count, page + gap, width * pages.itemsize), 0xFF, dtype=torch.uint8, device=pages.device)
    apart = room.view(pages.dtype)[:, :page]
    apart.copy_(pages)
    return apart


def _lists(source: Source, counts: Sequence[int], topk: int, total: int, lengths: bool, twice: bool) -> tuple[list[int], Tensor]:
    """(every token's list, end to end; bool `[total]`, the slots that are in one)."""
    used = torch.zeros(total, dtype=torch.bool)
    lists: list[int] = []
    # Some slots are in no list, so that reading them shows.
    pool = source.permutation(total)[: max(total - 2, 1)]
    for count in counts:
        order = source.permutation(len(pool))
        order = order[: max(count // 2, 1)] if twice else order
        picked = [pool[order[i % len(order)]] for i in range(count)]
        used[picked] = True
        row = picked + [PAST if lengths else -1] * (topk - count)
        lists += row if lengths else [row[i] for i in source.permutation(topk)]
    return lists, used


def slash_indexes(
    source: Source, q_lens: Sequence[int], k_lens: Sequence[int], heads: int, verticals: int, slashes: int, counted: bool = False,
    slack: int = 0,
) -> Call:  # fmt: skip
    """`vertical_slash_indexes`. No request has more queries than keys. counted: each head uses some of its entries only.

    The other entries of a head are columns and diagonals that it must not see.
    """

    def distinct(count: int, below: int) -> list[int]:
        """Ascending; below `below` while there are enough."""
        return sorted(source.permutation(max(below, count))[:count])

    v_counts, s_counts = ([1 + source.permutation(n)[0] if counted else n for _ in range(heads)] for n in (verticals, slashes))
    # Some are past the end: every request fills a table as long as the longest one.
    vertical = [[distinct(verticals, keys + 2) for _ in range(heads)] for keys in k_lens]
    ends = [[[n + 1 for n in distinct(s - 1, keys + 3)][::-1] for s in s_counts] for keys in k_lens]
    slash = [[row + [0] * (slashes - len(row)) for row in rows] for rows in ends]
    arguments: dict[str, Any] = {"q_lens": source.ints(q_lens), "k_lens": source.ints(k_lens)}
    arguments["vertical"] = source.ints(vertical).reshape(len(k_lens), heads, verticals)
    arguments["slash"] = source.ints(slash).reshape(len(k_lens), heads, slashes)
    if counted:
        arguments |= {"vertical_counts": source.ints(v_counts), "slash_counts": source.ints(s_counts)}
    return Call("vertical_slash_indexes", arguments | {"max_seqlen_q": max(q_lens, default=0) + slack})


def slash_attention(
    source: Source, q_lens: Sequence[int], k_lens: Sequence[int], f: Features, verticals: int = 12, slashes: int = 4,
    padding: tuple[int, int] | None = (2, 3), slack: int = 0,
) -> Call:  # fmt: skip
    """`vertical_slash_attention` over an index made by the reference. padding: as for `varlen`."""
    made = slash_indexes(source, q_lens, k_lens, f.q_heads, verticals, slashes, slack=slack)
    index = zip(("block_count", "block_offset", "column_count", "column_index"), OPS[made.op].reference(made.record), strict=True)
    like = varlen(source, q_lens, k_lens, f, padding, slack)
    given = {n: v for n, v in like.arguments.items() if n not in WRITTEN}
    arguments = attend(source, "vertical_slash_attention", f, {"T": given["query"].shape[0]}, **given | dict(index))
    return Call("vertical_slash_attention", arguments, like.free, WRITTEN)
