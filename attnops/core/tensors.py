"""The parts that references and kernels of plain torch share: which key a query sees, rows of
packed requests, pages and their holes.

Page tables with holes have entries within a request's length that are no page of the pool.

A faint row is one whose logits are all finite and below `FAINT`: as a mask of finfo.min or -1e9
hides every key. There float32 cannot tell one logit from another, nor a logit from the log-sum-exp.
Results of faint rows are finite and otherwise unspecified, and they change no other row's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import count_dispatch_modes

if TYPE_CHECKING:
    from attnops.ops.latent.record import MlaAttention
    from attnops.ops.metadata.record import NamedPages
    from attnops.ops.pages.record import PagedAttention, WriteKV


def surely(condition: Any) -> bool:
    """Is it known to be true, for all sizes? No guard is installed."""
    if isinstance(condition, bool):
        return condition
    if isinstance(condition, Tensor):
        return bool(condition)  # sizes are tensors under torch.jit.trace
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


class Rules(NamedTuple):
    """The scale of a call's logits, and the rules that say which keys a query sees. A rule at its
    default is off."""

    scale: float
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    chunk: int = 0

    @classmethod
    def of(cls, call: Any) -> Rules:
        """The rules of a call, of any op. A rule that the record has no argument for is off."""
        window = getattr(call, "window_left", -1), getattr(call, "window_right", -1)
        softcap, chunk = getattr(call, "softcap", 0.0), getattr(call, "attention_chunk", 0)
        return cls(call.scale, getattr(call, "causal", False), *window, softcap, chunk)


FAINT = -1e6
"""The logit that all logits of a faint row are below."""

LEAST = 2 * FAINT
"""Kernels that add a mask may take finite logits below this for it: beside a row's largest, unless
that is faint, both have weight 0."""


def without_faint(lse: Tensor) -> Tensor:
    """`lse`, contiguous, for the backward of a vendor: +inf for rows without a key and for faint
    ones, whose weights are 0 then.

    Such a kernel takes exp(logit - lse) for the weight, which a rounded lse of a faint row makes
    infinite.
    """
    least = FAINT * (
        1 + 2.0**-13
    )  # a row of logits of FAINT and more may have an lse that is rounded to less
    return torch.threshold(lse, least, float("inf"), out=lse.new_empty(lse.shape))


def wide(x: Tensor) -> Tensor:
    """float32, or float64 kept."""
    return x if x.dtype == torch.float64 else x.float()


def compact(x: Tensor) -> Tensor:
    """Contiguous with the strides of a new tensor; `contiguous()` alone leaves odd ones where a
    size is 0 or 1."""
    if type(x) is Tensor:
        wanted = 1
        for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
            if stride != wanted:
                break
            wanted *= max(size, 1)
        else:
            return x  # the three calls below take longer than this loop
    return x.contiguous().flatten().view(x.shape)


def dequantise(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x` `[..., Hkv, D]` times its scale `[1]` or `[Hkv]`, in the accumulation dtype of
    `dtype`."""
    out = x.double() if dtype == torch.float64 else x.float()
    return out if scale is None else out * scale.to(out.dtype).reshape(-1, 1)


def visible(
    queries: int, keys: int, offset: Tensor, start: Tensor | None, end: Tensor | None, rules: Rules
) -> Tensor | None:
    """Does a query see a key? bool `[B or 1, S, K]`, or None when every query sees every key.

    offset, start, end: `[B or 1]`.
    """
    if not (
        rules.causal
        or rules.left >= 0
        or rules.right >= 0
        or rules.chunk
        or start is not None
        or end is not None
    ):
        return None
    j = torch.arange(keys, device=offset.device)
    position = torch.arange(queries, device=offset.device)[None, :, None] + offset[:, None, None]
    return near(within(j[None], start, end)[:, None].expand(-1, queries, -1), position, j, rules)


def within(j: Tensor, start: Tensor | None, end: Tensor | None) -> Tensor:
    """bool `[B or 1, K]`: start <= j < end, of each request. j: `[1, K]`; start, end:
    `[B or 1]`."""
    see = torch.ones_like(j, dtype=torch.bool)
    if start is not None:
        see = see & (j >= start[:, None])
    return see if end is None else see & (j < end[:, None])


def near(see: Tensor, position: Tensor, j: Tensor, rules: Rules) -> Tensor:
    """`see`, restricted to the keys j that causality, window and chunk let a query at `position`
    see."""
    if rules.causal:
        see = see & (j <= position)
    if rules.left >= 0:
        see = see & (j >= position - rules.left)
    if rules.right >= 0:
        see = see & (j <= position + rules.right)
    if rules.chunk:
        # The chunk of a query before the first key holds no key.
        first = torch.div(position, rules.chunk, rounding_mode="floor") * rules.chunk
        see = see & (j >= first) & (j < first + rules.chunk)
    return see


def dense_visible(
    query: Tensor, key: Tensor, kv_start: Tensor | None, kv_end: Tensor | None, rules: Rules
) -> Tensor | None:
    """`visible` for a dense call: the last query has the position of the last visible key."""
    queries, keys = query.shape[1], key.shape[1]
    end = torch.full((1,), keys, device=query.device) if kv_end is None else kv_end
    return visible(queries, keys, end - queries, kv_start, kv_end, rules)


def in_range(rows: Tensor, start: Tensor | None, end: Tensor | None) -> Tensor:
    """`rows` `[B, K, Hkv, D]`, 0 outside of each request's keys `[start, end)`: they may hold NaN
    there, and 0 * NaN is NaN."""
    if start is None and end is None:
        return rows
    inside = within(torch.arange(rows.shape[1], device=rows.device)[None], start, end)
    return torch.where(inside[..., None, None], rows, 0.0)


def result_dtype(query: Tensor, q_scale: Tensor | None) -> torch.dtype:
    """The query's dtype; bfloat16 for a quantised one."""
    if q_scale is None:
        return query.dtype
    # The op takes float32; a float64 scale comes from a caller that computes the exact result.
    return torch.float64 if q_scale.dtype == torch.float64 else torch.bfloat16


def wide_query(query: Tensor, q_scale: Tensor | None) -> Tensor:
    """The query `[..., Hq, D]` in the accumulation dtype, times its scale.

    q_scale: `[1]`, or `[Hkv]` with one number for each group of query heads.
    """
    if q_scale is None:
        return wide(query)
    return dequantise(
        query,
        q_scale.repeat_interleave(query.shape[-2] // q_scale.shape[0]),
        result_dtype(query, q_scale),
    )


def no_lse(query: Tensor) -> Tensor:
    """The `[0]` float32 tensor returned where a call asks for no lse."""
    return query.new_empty(0, dtype=torch.float32)


def lengths_of(cu_seqlens: Tensor) -> Tensor:
    """`[B]` int64 lengths of `[B + 1]` cumulative lengths."""
    return cu_seqlens[1:].long() - cu_seqlens[:-1].long()


def rows_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """`[T]` int64: the request of each token; tokens past the last request get B."""
    at = torch.arange(tokens, device=cu_seqlens.device)
    if cu_seqlens.shape[0] == 1:
        return at * 0  # Triton does not compile a search in an empty tensor
    # `- 1` makes a new tensor of the ends, because Inductor of torch 2.11 ignores the offset of a
    # view.
    return torch.searchsorted(cu_seqlens[1:].long() - 1, at)


def pad(x: Tensor, cu_seqlens: Tensor, width: int) -> Tensor:
    """`[T, ...]` -> `[B, width, ...]`, zero past the end of each request, where `x` may hold
    NaN."""
    start = cu_seqlens[:-1].long()
    lengths = cu_seqlens[1:].long() - start
    j = torch.arange(width, device=x.device)[None]
    inside = j < lengths[:, None]
    _fits(lengths, width)
    if x.shape[0] == 0:
        return x.new_zeros((lengths.shape[0], width, *x.shape[1:]))
    index = torch.where(inside, start[:, None] + j, 0)
    padded = x[index]
    return torch.where(
        inside.reshape(*inside.shape, *[1] * (x.dim() - 1)),
        padded,
        torch.zeros((), dtype=x.dtype, device=x.device),
    )


def _fits(lengths: Tensor, width: int) -> None:
    # Rows past the width would be lost. Only the host's own numbers are looked at: a device would
    # have to be waited for.
    host = (
        lengths.device.type == "cpu"
        and type(lengths) is Tensor
        and not torch.compiler.is_compiling()
        and lengths.numel() > 0
    )
    if host and not count_dispatch_modes() and (longest := int(lengths.max())) > width:
        raise InvalidInput("max_seqlen", width, f">= {longest}, the longest request by cu_seqlens")


def unpad(x: Tensor, cu_seqlens: Tensor, tokens: int, fill: float = 0.0) -> Tensor:
    """`[B, width, ...]` -> `[T, ...]`; tokens past the last request get `fill`."""
    rows = rows_of(cu_seqlens, tokens)
    batch, width = x.shape[0], x.shape[1]
    if batch == 0 or width == 0:
        return x.new_full((tokens, *x.shape[2:]), fill)
    real = rows < batch
    row = torch.where(real, rows, 0)
    column = torch.arange(tokens, device=x.device) - cu_seqlens.long()[row]
    out = x[row, column.clamp(0, width - 1)]
    return torch.where(
        real.reshape(-1, *[1] * (x.dim() - 2)),
        out,
        torch.full((), fill, dtype=x.dtype, device=x.device),
    )


def padded_mask(mask: Tensor | None, cu_seqlens_q: Tensor, width: int, keys: int) -> Tensor | None:
    """`[T, K]` -> `[B, 1, width, keys]`."""
    return None if mask is None else pad(mask[:, :keys], cu_seqlens_q, width)[:, None]


def gather_pages(pages: Tensor, page_table: Tensor) -> Tensor:
    """`[P, page, H, D]` through `[B, M]` -> `[B, M * page, H, D]`. Negative entries, past the end,
    read page 0."""
    if pages.shape[0] == 0:
        return pages.new_zeros(
            (page_table.shape[0], page_table.shape[1] * pages.shape[1], *pages.shape[2:])
        )
    picked = pages[page_table.long().clamp(min=0)]
    return picked.reshape(
        page_table.shape[0], page_table.shape[1] * pages.shape[1], *pages.shape[2:]
    )


def write_results(call: Any, output: Tensor, lse: Tensor | None) -> None:
    """Write `[T, Hq, Dv]` and `[T, Hq]` where the call wants them."""
    call.output.copy_(output)
    if call.lse is not None and lse is not None:
        call.lse.copy_(lse)


PagesT = TypeVar("PagesT", "PagedAttention", "MlaAttention")


def refuse_plan_of_holes(call: Any) -> None:
    """Raise InvalidInput for a plan on the device, which is of the table as it was, with a table
    that may have holes."""
    if call.holes and call.plan is not None and call.plan.dtype == torch.int32:
        want = (
            "False, because a device plan is given: make it of the table that named_pages "
            "gives, and give both"
        )
        fail(InvalidInput, "holes", call.holes, want)


def without_holes(call: PagesT, pages: Tensor) -> PagesT:
    """The call with the table and the lengths that `named_pages` gives, unless it promises that
    there are no holes."""
    if not call.holes:
        return call
    refuse_plan_of_holes(call)
    table, lengths = named(call, pages.shape[0], pages.shape[1], **how(Rules.of(call), call.mask))
    # Not `attnops.core.record.changed`: every eager call would enter one more file.
    return cast(PagesT, cast(Any, call)._replace(page_table=table, seq_lens=lengths, holes=False))


def named(
    call: NamedPages | PagedAttention | MlaAttention,
    num_pages: int,
    page_size: int,
    squeeze: bool,
    window_left: int,
) -> tuple[Tensor, Tensor]:
    page_table, seq_lens, cu_seqlens_q = call.page_table, call.seq_lens, call.cu_seqlens_q
    if page_table.numel() == 0:
        return page_table.clone(memory_format=torch.contiguous_format), seq_lens.clone(
            memory_format=torch.contiguous_format
        )
    column = torch.arange(page_table.shape[1], dtype=torch.int32, device=page_table.device)
    lens, new = seq_lens[:, None], (cu_seqlens_q[1:] - cu_seqlens_q[:-1])[:, None]
    first = column * page_size
    used, is_page = first < lens, (page_table >= 0) & (page_table < num_pages)
    kept, hole = used & is_page, used & ~is_page
    own = torch.where(
        kept.any(1, keepdim=True), page_table.gather(1, kept.int().argmax(1, keepdim=True)), 0
    )
    if squeeze:
        # Pages before the new tokens move with them; a single new token sees all keys, in any
        # order.
        harm = hole & (first + page_size > lens - new) & (new > 1)
        moved = page_table.gather(1, torch.sort((~kept).to(torch.int8), dim=1, stable=True).indices)
        table = torch.where(column < kept.sum(1, keepdim=True), moved, own)
        lengths = seq_lens - torch.where(hole, (lens - first).clamp(max=page_size), 0).sum(1)
    else:
        harm = hole & (first + page_size > lens - new - window_left) if window_left >= 0 else hole
        table, lengths = torch.where(kept, page_table, own), seq_lens
    lengths = torch.where(harm.any(1), 0, lengths)
    # A length past the table stays as it is.
    beyond = seq_lens > page_table.shape[1] * page_size
    return table.to(torch.int32).contiguous(), torch.where(beyond, seq_lens, lengths).to(
        torch.int32
    )


def how(rules: Rules, mask: Tensor | None) -> dict[str, Any]:
    """`squeeze` and `window_left` of a call with these rules: keys may move only where their order
    alone counts."""
    ruled = (
        rules.left >= 0
        or (rules.right >= 0 and not rules.causal)
        or rules.chunk > 0
        or mask is not None
    )
    return {"squeeze": not ruled, "window_left": rules.left}


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`x` `[..., D]` turned in place of its pairs by cosines and sines `[..., D / 2]`, which may
    broadcast."""
    pair = -1 if interleaved else -2
    pairs = x.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    # Reading the other number of each pair from its place spares a compiler an intermediate tensor.
    other = pairs.flip(pair)
    first = (torch.arange(2, device=x.device) == 0).unflatten(0, (1, 2) if interleaved else (2, 1))
    turned: Tensor = pairs * cos.unsqueeze(pair) + torch.where(
        first, -other, other
    ) * sin.unsqueeze(pair)
    return turned.flatten(-2)


INT8_MAX = 127.0


def quantise(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x` `[T, Hkv, D]` (or `[T, D]`, one scale) divided by its scale `[1]` or `[Hkv]`, saturated
    and rounded to `dtype`."""
    if x.dtype == dtype and scale is None:
        return x
    wide = x.double() if x.dtype == torch.float64 else x.float()
    scaled = wide if scale is None else wide / scale.to(wide.dtype).reshape(-1, 1)
    if dtype == torch.int8:
        return scaled.round().clamp(-INT8_MAX, INT8_MAX).to(dtype)
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return scaled.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    return scaled.to(dtype)


def store(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Row t of `rows` `[T, ...]` into slot `slots[t]` of `pages` `[P, page, ...]`, in place; a slot
    outside the pages is skipped.

    Without a data-dependent shape, a skipped token must write something somewhere: it rewrites the
    last real token's slot with that token's own row, and when no token is real, slot 0 with its own
    contents.
    """
    total, page = pages.shape[0] * pages.shape[1], pages.shape[1]
    if slots.shape[0] == 0 or total == 0:
        return
    if (
        pages.dtype.itemsize == 1 and pages.dtype.is_floating_point
    ):  # index_put has no float8 kernel
        pages, rows = pages.view(torch.uint8), rows.view(torch.uint8)
    real = (slots >= 0) & (slots < total)
    at = torch.arange(slots.shape[0], device=slots.device)
    source = torch.where(real, at, torch.where(real, at, -1).amax())
    has = source >= 0
    slot = torch.where(has, slots[source.clamp(min=0)].long(), 0)
    kept = pages[slot // page, slot % page]
    new = torch.where(has.reshape(-1, *[1] * (rows.dim() - 1)), rows[source.clamp(min=0)], kept)
    pages.index_put_((slot // page, slot % page), new)


def write_kv(call: WriteKV) -> None:
    """The reference of `attnops.write_kv`, which eager steps over pages call in every layer."""
    store(call.k_pages, quantise(call.key, call.k_scale, call.k_pages.dtype), call.slots)
    store(call.v_pages, quantise(call.value, call.v_scale, call.v_pages.dtype), call.slots)
